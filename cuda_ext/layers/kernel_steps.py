"""Steps by the kernels of cuda_ext/ops, and by vLLM's chunk kernels for prompts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from cuda_ext.activation import torch_dtypes
from cuda_ext.backend.chunk_plan import chunks_at_once, plan_chunks
from cuda_ext.backend.chunk_rows import chunk_rows
from cuda_ext.backend.replay_attn import ReplayMetadata
from cuda_ext.layers.steps import layer_pages
from cuda_ext.ops.chunk import portable_rule, replay_chunks, vllm_rule
from cuda_ext.ops.reference import Pages, StepRows, Weights
from cuda_ext.ops.replay import replay_decode
from cuda_ext.ring import GdnHeads, PageLayout


class KernelSteps:
    """Two launches for rows that can be taken back; a handful for prefill chunks.

    Args:
        heads: of this rank.
        chunk_op: the layer's `chunk_gated_delta_rule`, with the kernels that vLLM chose for it.
        chunk_kernels: that compute the chunks, as `activation.chunk_kernels` names them.
    """

    def __init__(self, heads: GdnHeads, chunk_op: Any, chunk_kernels: str) -> None:
        self._chunk_kernels, self._at_once = chunk_kernels, chunks_at_once(heads)
        if chunk_kernels == "portable":
            self._rule = portable_rule(heads)
        else:
            self._rule = vllm_rule(heads, chunk_op)

    def run(
        self,
        pages: Pages,
        weights: Weights,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        metadata: ReplayMetadata,
        out: Tensor,
    ) -> None:
        """See `Steps`."""
        rows, max_rows, step_rows = metadata.rows, metadata.max_rows, metadata.step_rows
        if step_rows:
            replay_decode(pages, weights, qkv, a, b, rows, max_rows, out, step_rows=step_rows)
        for chunks in metadata.chunks:
            replay_chunks(pages, weights, qkv, a, b, chunks, max_rows, out, self._rule)

    def rehearse(
        self,
        layout: PageLayout,
        weights: Weights,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        max_rows: int,
        requests: int,
    ) -> None:
        """See `Steps`."""
        tokens, device = len(qkv), qkv.device
        pages = _spare_pages(layout, device)
        # Each length of a step and each size of a batch may have a launch of its own. Requests
        # without rows take it and do nothing.
        for count in sorted({1, requests}):
            idle = torch.zeros(count + 1, dtype=torch.int32, device=device)
            rows = StepRows(idle[:-1], idle[:-1], idle[:-1], idle)
            for step_rows in range(1, max_rows + 1):
                replay_decode(pages, weights, qkv, a, b, rows, max_rows, out, step_rows=step_rows)
        # As many chunks as a call may have, for each takes a state before and one after.
        count = min(requests, tokens // (max_rows + 1), self._at_once)
        if count == 0:
            return
        row_start = [tokens * i // count for i in range(count + 1)]
        (plan,) = plan_chunks(row_start, max_rows, count)
        new = torch.zeros(count, dtype=torch.int32, device=device)
        starts = async_tensor_h2d(row_start, device=device, dtype=torch.int32)
        rows = StepRows(torch.ones_like(new), new, new, starts)
        chunks = chunk_rows(plan, rows, self._chunk_kernels)
        replay_chunks(pages, weights, qkv, a, b, chunks, max_rows, out, self._rule)
        out.zero_()


def _spare_pages(layout: PageLayout, device: torch.device) -> Pages:
    """The null page and one more, outside of vLLM's pool."""
    return layer_pages(
        [
            torch.zeros(2, *state.shape, dtype=dtype, device=device)
            for state, dtype in zip(layout.states, torch_dtypes(layout), strict=True)
        ]
    )
