"""The model-runner seam: calls plan and motion around vllm-gaudi's own steps, in order.

A step of vllm-gaudi 0.26.0 is `execute_model` (which only updates the batch, in `_update_states`)
and then `sample_tokens` (which runs every forward pass and samples). So blocks and slots are zeroed
and checkpoints restored behind `_update_states`, and checkpoints saved behind `sample_tokens`: on
one stream, outside the compiled graphs, and before the next step can restore them.
With prefix caching off, or for a model without GDN layers, every method is its parent's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import habana_frameworks.torch as htorch
import torch
from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm_gaudi.extension.runtime import get_config
from vllm_gaudi.v1.worker.hpu_model_runner import HPUModelRunner

from vllm_gaudi_ext import facts, pages
from vllm_gaudi_ext.compat.slot_warning import ReleasedSlots
from vllm_gaudi_ext.gdn import plan, refusals
from vllm_gaudi_ext.gdn.motion import CheckpointPages
from vllm_gaudi_ext.log import logger_for
from vllm_gaudi_ext.version import __version__

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

logger = logger_for(__name__)


class GaudiExtModelRunner(HPUModelRunner):
    """HPUModelRunner that keeps a GDN checkpoint in the attention pages of each cached block."""

    use_prefix_caching: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._caches_gdn = facts.caches_gdn_prefixes(self.vllm_config)
        self._checkpoints: CheckpointPages | None = None
        self._layout: pages.CacheLayout | None = None
        self._save_after_step: tuple[plan.SlotBlock, ...] = ()
        self._replays = plan.Replays()
        self._in_warm_up = False
        self._released = ReleasedSlots()
        if self._caches_gdn:
            self._released.attach()

    # Start-up.

    def refuse_specs(self, specs: dict[str, KVCacheSpec]) -> None:
        """Refuses what the layers' KV-cache specs already show, before memory is profiled.

        Raises:
            RuntimeError: every problem, each with the flag that mends it.
        """
        if not self._caches_gdn:
            return
        sizes = {s.block_size for s in specs.values() if isinstance(s, FullAttentionSpec)}
        block_tokens = sizes.pop() if len(sizes) == 1 else None
        refusals.refuse(refusals.config_problems(self._serving_facts(block_tokens)))

    def _serving_facts(
        self, block_tokens: int | None, *, compact_groups: bool = True
    ) -> refusals.ServingFacts:
        return facts.serving_facts(
            self.vllm_config,
            compact_gdn=self._compact_gdn_enabled and compact_groups,
            contiguous_pa=bool(self.use_contiguous_pa),
            defragmenter=bool(get_config().defrag),
            block_tokens=block_tokens,
            mamba_cache_mode=self.cache_config.mamba_cache_mode,
        )

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Builds the KV cache, then the views that checkpoints move through.

        Raises:
            RuntimeError: every reason why checkpoints can't be kept, with the flag for each.
        """
        self.drop_checkpoint_views()
        super().initialize_kv_cache(kv_cache_config)
        if not self._caches_gdn:
            return
        config = self.kv_cache_config
        self._send_padding_behind_pool(config)
        layers = self.vllm_config.compilation_config.static_forward_context
        layout_facts = pages.layout_facts(
            config,
            layers,
            kernel_block_tokens=self.attn_block_size,
            padding_block=self._PAD_BLOCK_ID,
            shared_layers=tuple(self.shared_kv_cache_layers),
        )
        sizes = set(layout_facts.group_block_tokens)
        block_tokens = sizes.pop() if len(sizes) == 1 else None
        self._layout = pages.cache_layout(config)
        # With VLLM_USE_HYBRID_CACHE=0 states lie in blocks, although compact slots are asked for.
        groups = {group.group_id for group in self._layout.gdn_groups}
        compact_groups = groups <= self._compact_gdn_group_ids
        refusals.refuse(
            refusals.config_problems(
                self._serving_facts(block_tokens, compact_groups=compact_groups)
            )
            + refusals.layout_problems(layout_facts)
        )
        self._checkpoints = pages.checkpoint_pages(
            config, layers, end_of_graph=htorch.core.mark_step
        )
        self._log_start()

    def _send_padding_behind_pool(self, config: KVCacheConfig) -> None:
        # vllm-gaudi 0.26.0 counts manager blocks here, but uses the number as a kernel block: with
        # several kernel blocks to a manager block, padding would be written into the pool.
        kernel_blocks = pages.pool_kernel_blocks(config, self.attn_block_size)
        if kernel_blocks:
            self._PAD_BLOCK_ID = kernel_blocks
            self._PAD_SLOT_ID = kernel_blocks * self.attn_block_size

    def _log_start(self) -> None:
        assert self._layout is not None
        assert self._checkpoints is not None
        columns = self._checkpoints.states[0].columns
        by_default = facts.cached_by_default(self.model_config)
        logger.info(
            "gaudi_ext %s: GDN prefix caching is active%s. %d GDN groups at %d layer positions, "
            "block B=%d tokens, %d blocks, slots for %d requests, state %d of %d page bytes "
            "(%.0f %%), checkpoint row %d int32 in K and %d in V, copies in batches of %s rows.",
            __version__,
            " (vLLM turns it on by default for this model; --no-enable-prefix-caching turns it off)"
            if by_default
            else "",
            len(self._layout.gdn_groups),
            len(self._checkpoints.states),
            self._layout.block_tokens,
            self.kv_cache_config.num_blocks,
            len(self._gdn_slot_free_list),
            columns.state_bytes,
            columns.page_bytes,
            100 * columns.state_bytes / columns.page_bytes,
            columns.k_columns,
            columns.state - columns.k_columns,
            "/".join(map(str, self._checkpoints.batches)),
        )

    def warmup_model(self) -> None:
        super().warmup_model()
        if self._checkpoints is not None and not self.skip_warmup:
            with torch.inference_mode():
                self._checkpoints.warm_up()

    def drop_checkpoint_views(self) -> None:
        """Lets go of the KV cache, so that sleep mode can free it."""
        self._checkpoints = None
        self._save_after_step = ()

    # A step.

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput, warmup_mode: bool = False) -> Any:
        # Warm-up sends made-up requests on the null block; they have no checkpoints.
        self._in_warm_up = warmup_mode
        return super().execute_model(scheduler_output, warmup_mode)

    def _update_states(self, scheduler_output: SchedulerOutput) -> bool:
        checkpoints = self._checkpoints
        if checkpoints is None or self._in_warm_up:
            return super()._update_states(scheduler_output)
        self._release_slots(scheduler_output)
        self._drop_rows_of_resumed(scheduler_output)
        changed = super()._update_states(scheduler_output)
        self._released.settle(
            [*scheduler_output.finished_req_ids, *scheduler_output.num_scheduled_tokens]
        )
        self._count_replays_as_prompt(scheduler_output)
        step = self._plan(scheduler_output)
        checkpoints.zero_padding()
        checkpoints.zero_blocks(step.zero_blocks)
        checkpoints.zero_slots(step.zero_slots)
        checkpoints.restore(step.restore)
        self._save_after_step = step.save
        return changed

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        output = super().sample_tokens(grammar_output)
        rows, self._save_after_step = self._save_after_step, ()
        if rows and self._checkpoints is not None:
            self._checkpoints.save(rows)
        return output

    def _plan(self, scheduler_output: SchedulerOutput) -> plan.StepPlan:
        layout = self._layout
        assert layout is not None
        starts = {r.req_id: r.num_computed_tokens for r in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request_id in cached.resumed_req_ids:
                starts[request_id] = computed
        ends = {}
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            computed = self.requests[request_id].num_computed_tokens
            if plan.ends_on_boundary(computed, scheduled, layout.block_tokens):
                ends[request_id] = computed + scheduled
        slots = self._slots_of({*starts, *ends})
        return plan.plan_step(
            layout.block_tokens,
            [self._position(r, n, slots) for r, n in starts.items()],
            [self._position(r, n, slots) for r, n in ends.items()],
            scheduler_output.new_block_ids_to_zero or (),
        )

    def _position(
        self, request_id: str, tokens: int, slots: dict[str, tuple[int, ...]]
    ) -> plan.Position:
        assert self._layout is not None
        block_ids = self.requests[request_id].block_ids
        blocks = [block_ids[group.group_id] for group in self._layout.gdn_groups]
        return plan.Position(request_id, tokens, slots[request_id], blocks)

    def _slots_of(self, request_ids: set[str]) -> dict[str, tuple[int, ...]]:
        """Each request's slot row in every GDN group, as the forward pass will address it."""
        if not request_ids:
            return {}
        assert self._layout is not None
        rows = sorted(self.input_batch.req_id_to_index[r] for r in request_ids)
        indices = self.prepare_mamba_state_idxs(rows, [0] * len(rows), len(rows))
        by_group = [indices[group.group_id].tolist() for group in self._layout.gdn_groups]
        names = [self.input_batch.req_ids[row] for row in rows]
        return {name: tuple(group[i] for group in by_group) for i, name in enumerate(names)}

    # Slots and batch rows around preemption.

    def _release_slots(self, scheduler_output: SchedulerOutput) -> None:
        preempted = plan.release_order(scheduler_output.preempted_req_ids or ())
        self._replays.forget([*preempted, *scheduler_output.finished_req_ids])
        for request_id in scheduler_output.finished_req_ids:
            if request_id not in self.requests:
                # Ended before it ever ran, so it never had a slot.
                self._released.release(request_id)
        for request_id in preempted:
            slot = self._gdn_req_to_base_slot.pop(request_id, None)
            if slot is not None:
                self._gdn_slot_free_list.append(slot)
                self._released.release(request_id)

    def _drop_rows_of_resumed(self, scheduler_output: SchedulerOutput) -> None:
        """Removes batch rows of requests that were preempted and resumed between two steps.

        vLLM's own runner drops them; vllm-gaudi 0.26.0 takes them for requests that simply went
        on, appends their new blocks to the old row and finds no slot for them.
        """
        rows = []
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            row = self.input_batch.remove_request(request_id)
            if row is not None:
                rows.append(row)
        if rows:
            self.input_batch.condense(sorted(rows, reverse=True))

    def _count_replays_as_prompt(self, scheduler_output: SchedulerOutput) -> None:
        """Lets a resumed request's old outputs count as prompt until it has caught up.

        vllm-gaudi 0.26.0 does so only for a resume at token 0 (InputBatch.add_request). On a hit it
        would ask for a logits row for each old output, or feed a stale token to the last one.
        """
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            request = self.requests[request_id]
            known = len(request.prompt_token_ids) + len(request.output_token_ids)
            self._replays.resume(request_id, known)
        if not len(self._replays):
            return
        batch = self.input_batch
        computed = {
            r: int(batch.num_computed_tokens_cpu[i]) for r, i in batch.req_id_to_index.items()
        }
        for request_id, tokens in self._replays.prompt_tokens(computed).items():
            batch.num_prompt_tokens[batch.req_id_to_index[request_id]] = tokens

    # Faults of vllm-gaudi 0.26.0 that prefix caching makes reachable.

    def _form_prefill_batch(self, contents: Any) -> Any:
        """Skips the prefill branch that stores Mamba2 states by block, and asserts on batches.

        GDN states lie in slots, so nothing of that branch applies to them.
        """
        caching = self.use_prefix_caching
        if self._checkpoints is not None:
            self.use_prefix_caching = False
        try:
            return super()._form_prefill_batch(contents)
        finally:
            self.use_prefix_caching = caching

    def _ensure_decodes_first(self, scheduler_output: SchedulerOutput) -> None:
        """Puts decodes first, as the parent does, and prompts in the order of their schedule."""
        batch = self.input_batch
        before = list(batch.req_ids)
        allowed = self._allowed_token_masks()
        super()._ensure_decodes_first(scheduler_output)
        if self._checkpoints is None or self._in_warm_up:
            return
        first = next(
            (i for i in range(batch.num_reqs) if self._is_prompt(i, scheduler_output)),
            batch.num_reqs,
        )
        swaps = plan.schedule_order(
            batch.req_ids, first, list(scheduler_output.num_scheduled_tokens)
        )
        for i in range(0, len(swaps), 2):
            batch.swap_states(swaps[i], swaps[i + 1])
        if batch.req_ids != before:
            for row, request_id in enumerate(batch.req_ids if allowed else ()):
                mask = batch.allowed_token_ids_mask_cpu_tensor[row]
                mask.copy_(allowed[request_id]) if request_id in allowed else mask.fill_(False)
            # Sampling parameters lie on the device in batch order. vllm-gaudi 0.26.0 copies them
            # only when requests come or go, so a prompt that turns into a decode before its
            # neighbour does would sample with the neighbour's.
            batch.refresh_sampling_metadata()

    def _run_sampling(
        self, batch_changed: bool, logits: torch.Tensor, request_ids: Any = None, *args: Any
    ) -> Any:
        """Samples a step with a grammar in the order of its logits, which is that of the batch.

        vllm-gaudi 0.26.0 stacks the logits of decodes before those of prompts, but names prompts
        before decodes here, so each would sample with the other's parameters.
        """
        if self._checkpoints is not None and self.use_structured_output and request_ids:
            rows = self.input_batch.req_id_to_index
            request_ids = sorted(request_ids, key=rows.__getitem__)
        return super()._run_sampling(batch_changed, logits, request_ids, *args)

    def _allowed_token_masks(self) -> dict[str, torch.Tensor]:
        """Copies of the rows that forbid tokens, by request; True in a row forbids.

        `InputBatch.swap_states` of vllm-gaudi 0.26.0 swaps these rows as views of one tensor, which
        leaves both requests with the same row.
        """
        batch = self.input_batch
        masks = batch.allowed_token_ids_mask_cpu_tensor
        if masks is None or self._checkpoints is None:
            return {}
        rows = batch.req_id_to_index
        return {r: masks[rows[r]].clone() for r in batch.has_allowed_token_ids if r in rows}

    def _align_and_pad_mrope_positions(
        self, req_ids: list[str], context_lens: Any, query_lens: Any, *args: Any
    ) -> Any:
        """Gives replayed outputs their own positions.

        A request's M-RoPE positions cover its prompt. For tokens behind it vllm-gaudi 0.26.0 counts
        on from the end of the prompt, also where the chunk starts later: a resume on a hit behind
        the prompt, or a later chunk of a replay, would run with positions of earlier tokens.
        """
        if self._checkpoints is not None:
            for request_id, context, query in zip(req_ids, context_lens, query_lens, strict=False):
                self._cover_positions(self.requests[request_id], int(context) + int(query))
        return super()._align_and_pad_mrope_positions(req_ids, context_lens, query_lens, *args)

    @staticmethod
    def _cover_positions(request: Any, tokens: int) -> None:
        positions = request.mrope_positions
        known = positions.shape[1]
        if tokens > known:
            behind = MRotaryEmbedding.get_next_input_positions(
                int(request.mrope_position_delta), context_len=known, seq_len=tokens
            )
            extra = torch.as_tensor(behind, dtype=positions.dtype, device=positions.device)
            request.mrope_positions = torch.cat((positions, extra), dim=1)

    def _prepare_input_ids(
        self, scheduler_output: SchedulerOutput, return_index: bool = False
    ) -> Any:
        """Uploads host token ids where a decode was not in the previous step.

        vllm-gaudi 0.26.0 fills the device's ids from the previous step's samples only, so a
        request that had skipped a step would be fed whatever lay in its row.
        """
        if self._checkpoints is not None:
            previous = self.input_batch.prev_req_id_to_index or {}
            if any(
                request_id not in previous and not self._is_prompt(row, scheduler_output)
                for row, request_id in enumerate(self.input_batch.req_ids)
            ):
                # Decodes come first and take a row each: one fixed shape holds them all.
                rows = min(self.max_num_reqs, self.input_ids_hpu.shape[0])
                # A copy of the host's ids: that buffer is written again in the next step.
                host = self.input_ids_cpu[:rows].clone()
                self.input_ids_hpu[:rows].copy_(host, non_blocking=True)
        return super()._prepare_input_ids(scheduler_output, return_index)
