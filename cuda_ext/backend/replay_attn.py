"""Backend, metadata and metadata builder of ReplaySSM layers.

Stands in for `GDNAttentionBackend` (vllm/v1/attention/backends/gdn_attn.py). vLLM makes one builder
for a KV group and calls it once a step, outside the graphs; the plan that it makes there serves all
layers of the group, so no layer reads a cursor that another one has moved.

vLLM's own `build` is not called: it sorts a batch into rows with drafts, without, and prefills, and
gathers a state index for each draft, none of which a position-keyed ring needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)

from cuda_ext.backend.chunk_plan import plan_chunks
from cuda_ext.backend.step_plan import StepPlanner, plan_step_torch
from cuda_ext.ops.reference import StepRows

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import KVCacheLayout, MambaSpec

    from cuda_ext.ops.chunk import ChunkRows


@dataclass
class ReplayMetadata(GDNAttentionMetadata):
    """vLLM's counts of the batch, and the plan of its rows.

    Args:
        rows: the plan, in static buffers.
        max_rows: T_max; a request with more rows is in a prefill chunk.
        step_rows: T of the longest request that is in none; 0 where all are.
        chunks: the prefill chunks by themselves, a call of the kernels each; the reference takes
            none.
    """

    rows: StepRows = None  # type: ignore[assignment]
    max_rows: int = 0
    step_rows: int = 0
    chunks: Sequence[ChunkRows] = ()


class ReplayMetadataBuilder(GDNAttentionMetadataBuilder):
    """Plans the steps of one KV group.

    Derives from vLLM's builder, whose class both model runners look for.
    """

    def __init__(
        self,
        kv_cache_spec: MambaSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.max_rows = self.num_spec + 1
        # vLLM 0.26.0 keeps neither: its builder does not call its base's constructor.
        self.layer_names = layer_names
        self.device = device
        # vLLM would reuse another group's metadata with this group's block table.
        self.supports_update_block_table = False
        self._planner: StepPlanner | None = None
        self._plan_step: Callable[..., None] = plan_step_torch
        self._chunk_rows: Callable[..., ChunkRows] | None = None
        layer = self.compilation_config.static_forward_context[layer_names[0]]
        self._chunk_kernels, self._at_once = layer.chunk_kernels, layer.chunks_at_once
        if layer.replay_backend == "kernels":
            # Both need Triton, which a CPU has no use for.
            from cuda_ext.backend.chunk_rows import chunk_rows
            from cuda_ext.ops.cursor import plan_step

            self._plan_step, self._chunk_rows = plan_step, chunk_rows

    @property
    def planner(self) -> StepPlanner:
        """The group's cursors.

        Made when first asked for, since the cache is bound after the builder is made; and again
        where it was bound anew, as after vLLM's profiling of graphs with a small one.
        """
        layers = self.compilation_config.static_forward_context
        slots = layers[self.layer_names[0]].kv_cache[1].shape[0]
        if self._planner is None or self._planner.cursor.shape[0] != slots:
            requests = max(
                self.decode_cudagraph_max_bs, self.vllm_config.scheduler_config.max_num_seqs
            )
            self._planner = StepPlanner(
                slots, requests, self.max_rows, torch.device(self.device), self._plan_step
            )
        return self._planner

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        fast_build: bool = False,
        **kwargs: Any,
    ) -> ReplayMetadata:
        """Plan a step and move the cursors of its slots.

        Args:
            common_prefix_len: of no meaning here.
            common_attn_metadata: the batch; column 0 of its block table holds the slots.
            num_accepted_tokens: not needed, see the cursor.
            num_decode_draft_tokens_cpu: [N], drafts of each request, -1 for none; on the host.
            fast_build: of no meaning here.
            kwargs: what a later version passes besides; not needed.

        Raises:
            RuntimeError: a request has drafts behind more than one token of its own.
        """
        common = common_attn_metadata
        if num_decode_draft_tokens_cpu is not None:
            self._check_drafts(common, num_decode_draft_tokens_cpu)
        rows = self.planner.plan(
            common.block_table_tensor[:, 0], common.seq_lens, common.query_start_loc
        )
        return self._metadata(common, rows)

    def _check_drafts(self, common: CommonAttentionMetadata, drafts: torch.Tensor) -> None:
        """vLLM's schedulers put drafts behind one token only, so a longer row holds none.

        It would be a chunk here, whose rows go into the state at once, rejected ones too. Both
        runners tell of drafts of requests that are past their prompt only, so this finds a drafter
        that gives more than it may.
        """
        rows = common.query_start_loc_cpu.diff()
        wrong = (drafts[: rows.shape[0]] > 0) & (rows > self.max_rows)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise RuntimeError(
                f"request {row} of the batch has {int(rows[row])} rows with {int(drafts[row])} "
                f"drafts among them; at most {self.max_rows} rows can be taken back"
            )

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> ReplayMetadata:
        """A plan that touches no slot and no cursor."""
        common = common_attn_metadata
        return self._metadata(common, self.planner.idle(common.num_reqs, common.query_start_loc))

    def _metadata(self, common: CommonAttentionMetadata, rows: StepRows) -> ReplayMetadata:
        row_start = common.query_start_loc_cpu
        lens = row_start.diff()
        plans = []
        if bool((lens > self.max_rows).any()):
            plans = plan_chunks(row_start.tolist(), self.max_rows, self._at_once)
        num_chunks = sum(len(plan.requests) for plan in plans)
        chunk_tokens = sum(plan.tokens for plan in plans)
        chunks: Sequence[ChunkRows] = ()
        if self._chunk_rows is not None:
            chunks = [self._chunk_rows(plan, rows, self._chunk_kernels) for plan in plans]
        return ReplayMetadata(
            num_prefills=num_chunks,
            num_prefill_tokens=chunk_tokens,
            num_decodes=0,
            num_decode_tokens=0,
            num_spec_decodes=common.num_reqs - num_chunks,
            num_spec_decode_tokens=int(lens.sum()) - chunk_tokens,
            num_actual_tokens=common.num_actual_tokens,
            rows=rows,
            max_rows=self.max_rows,
            step_rows=int(lens.where(lens <= self.max_rows, 0).max()),
            chunks=chunks,
        )


class ReplayBackend(GDNAttentionBackend):
    """vLLM's GDN backend with our builder."""

    @staticmethod
    def get_builder_cls() -> type[ReplayMetadataBuilder]:
        return ReplayMetadataBuilder


class PackedReplayBackend(ReplayBackend):
    """The same, for pages that lie in blocks of all layers (cuda_ext/packing.py).

    Our kernels take any layout. vLLM takes the first one that every backend of the model can read,
    so naming the block-outermost ones first asks for its packed grouping, and the others after
    them leave a backend that can't read those its own.
    """

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Every layout, block-outermost ones first; heads inside a token before the other way."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        first = (KVCacheLayout.BLNHC, KVCacheLayout.BLHNC)
        return (*first, *(layout for layout in KVCacheLayout if layout not in first))
