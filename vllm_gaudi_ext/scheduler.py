"""The scheduler seam: chunks end on B, and no hash is left without a checkpoint.

Stands in for vLLM's `Scheduler` and vllm-gaudi's `HPUAsyncScheduler`
(v1/core/sched/hpu_async_scheduler.py, 0.26.0). Active only for GDN hybrids with prefix caching.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus
from vllm_gaudi.v1.core.sched.hpu_async_scheduler import HPUAsyncScheduler

from vllm_gaudi_ext.log import logger_for

logger = logger_for(__name__)

_REMEMBERED_SESSIONS = 1024
# What vLLM 0.26.0 sends when a session's input ends (v1/engine/async_llm.py).
_CLOSING_PROMPT = [0]


class GdnPrefixCaching(Scheduler):
    """What both schedulers share."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        sizes = {g.kv_cache_spec.block_size for g in self.kv_cache_config.kv_cache_groups}
        if len(sizes) != 1 or self.hash_block_size not in sizes:
            raise RuntimeError(
                f"gaudi_ext: cache groups of {sorted(sizes)} tokens and prefix-cache keys of "
                f"{self.hash_block_size}; checkpoints need one size for all (remove "
                "--prefix-match-unit, --block-size and --mamba-block-size)"
            )
        self._block_tokens: int = sizes.pop()
        # A closed session's id is forgotten on its closing message, which a cancelled one never
        # sends; the bound keeps those from piling up.
        self._rejected_sessions: deque[str] = deque(maxlen=_REMEMBERED_SESSIONS)

    def _mamba_block_aligned_split(
        self, request: Request, num_new_tokens: int, *computed: int, **kwargs: Any
    ) -> int:
        """vLLM's own split, on B. vllm-gaudi's would cut at the 128 tokens of a Mamba chunk.

        A chunk that the encoder budget ends before an image, inside the block it starts in, keeps
        its end: vLLM 0.26.0 would cut it to nothing in every step, and whoever waits behind it
        would wait for good. The chunk after it stops at the block's end, where the checkpoint is.
        """
        if self.cache_config.block_size != self._block_tokens:
            raise RuntimeError(
                f"gaudi_ext: the live block size is {self.cache_config.block_size} tokens, but the "
                f"KV cache was built with B={self._block_tokens}: chunks would end where no "
                "checkpoint is made"
            )
        aligned = Scheduler._mamba_block_aligned_split(
            self, request, num_new_tokens, *computed, **kwargs
        )
        if aligned == 0 and num_new_tokens > 0:
            end = request.num_computed_tokens + sum((*computed, *kwargs.values())) + num_new_tokens
            if any(item.mm_position.offset == end for item in request.mm_features):
                return num_new_tokens
        return aligned

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        """Evicts the hashes of blocks that this step would have computed.

        Priority scheduling may withdraw a request that this very step had scheduled, when its full
        blocks were hashed already (vllm#57580). vLLM frees them with their hashes, and a later
        request would be hit on blocks that nobody computed. `num_computed_tokens` does not count
        the step being scheduled yet, so every hashed block behind it is such a block.
        """
        computed = request.num_computed_tokens // self._block_tokens
        groups = self.kv_cache_manager.get_blocks(request.request_id).blocks
        withdrawn = {
            block.block_id
            for blocks in groups
            for block in blocks[computed:]
            if block.block_hash is not None and not block.is_null
        }
        if withdrawn:
            self.kv_cache_manager.block_pool.evict_blocks(withdrawn)
        super()._preempt_request(request, timestamp)

    def add_request(self, request: Request) -> None:
        """Rejects, one by one, the requests that would get or give a wrong answer.

        A rejected request ends at once with an error of its own; the engine goes on.
        """
        request_id = request.request_id
        if request_id in self._rejected_sessions and request.resumable:
            return
        if request_id in self._rejected_sessions:
            self._rejected_sessions.remove(request_id)
            if request.prompt_token_ids == _CLOSING_PROMPT:
                # The session's closing message. Its request is gone; this would start a new one.
                return
        if request.resumable:
            self._rejected_sessions.append(request_id)
            self._reject(
                request,
                "streaming input can resume at any token, and prefix caching on GDN layers resumes "
                f"only on block boundaries (B={self._block_tokens}); serve it with "
                "--no-enable-prefix-caching",
            )
        elif why := self._why_not(request):
            self._reject(request, why)
        else:
            super().add_request(request)

    def _why_not(self, request: Request) -> str | None:
        """Why this request can't be served, None where it can."""
        return None

    def _reject(self, request: Request, why: str) -> None:
        logger.error("Request %s is rejected: %s.", request.request_id, why)
        request.resumable = False
        # Blocked until the step's end, where vLLM turns the ids in this set into error outputs.
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        request.structured_output_request = None
        super().add_request(request)
        self.grammar_compile_error_reqs.add(request.request_id)


class GdnScheduler(GdnPrefixCaching):
    """vLLM's synchronous scheduler for GDN hybrids with prefix caching."""

    def _why_not(self, request: Request) -> str | None:
        """Structured outputs: vllm-gaudi 0.26.0 would give its neighbours made-up tokens.

        Its runner samples a row for every prompt chunk in a step with a grammar, and without
        asynchronous scheduling nobody drops the rows of chunks that do not end their prompt.
        """
        if request.use_structured_output:
            return (
                "structured outputs without asynchronous scheduling put made-up tokens into the "
                "answers of prompts that are prefilled in chunks; remove --no-async-scheduling"
            )
        return None


class GdnAsyncScheduler(GdnPrefixCaching, HPUAsyncScheduler):
    """vllm-gaudi's asynchronous scheduler for GDN hybrids with prefix caching."""

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        """Drops tokens that no step asked for, under vLLM 0.26's name of the discard counter.

        vllm-gaudi 0.26.0 reads `request.discard_latest_async_tokens` here, which vLLM 0.26 renamed
        to `async_tokens_to_discard` and made a counter: a prefix-cache reset with tokens in flight
        would end in an AttributeError.
        """
        if new_token_ids and request.num_output_placeholders == 0:
            if request.async_tokens_to_discard > 0:
                request.async_tokens_to_discard -= 1
            return [], False
        return super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
