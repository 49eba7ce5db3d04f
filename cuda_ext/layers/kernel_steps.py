"""Steps by the kernels of cuda_ext/ops, and by vLLM's chunk kernels for prompts."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from cuda_ext.activation import torch_dtypes
from cuda_ext.backend.chunk_plan import chunks_at_once, plan_chunks
from cuda_ext.backend.chunk_rows import chunk_rows
from cuda_ext.backend.replay_attn import ReplayMetadata
from cuda_ext.layers.steps import Inputs, layer_pages
from cuda_ext.ops.chunk import portable_rule, replay_chunks, vllm_rule
from cuda_ext.ops.reference import Pages, StepRows, Weights
from cuda_ext.ops.replay import replay_decode
from cuda_ext.ring import GdnHeads, PageLayout

FIRST_CHUNK = 80
"""Rows of the first chunk of a rehearsal."""
CHUNK_BLOCK = 64
"""Rows of a block of vLLM's chunk kernels (`FLA_CHUNK_SIZE`)."""


class KernelSteps:
    """Two launches for rows that can be taken back; a handful for prefill chunks.

    Args:
        heads: of this rank.
        chunk_op: the layer's `chunk_gated_delta_rule`, with the kernels that vLLM chose for it.
        chunk_kernels: that compute the chunks, as `Active.chunk_kernels` names them.
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
        inputs: Inputs,
        metadata: ReplayMetadata,
        out: Tensor,
    ) -> None:
        """See `Steps`."""
        qkv, a, b = inputs.qkv, inputs.a, inputs.b
        rows, max_rows, step_rows = metadata.rows, metadata.max_rows, metadata.step_rows
        if step_rows:
            replay_decode(pages, weights, qkv, a, b, rows, max_rows, out, step_rows=step_rows)
        for chunks in metadata.chunks:
            replay_chunks(pages, weights, qkv, a, b, chunks, max_rows, out, self._rule)

    def rehearse(
        self,
        layout: PageLayout,
        weights: Weights,
        inputs: Inputs,
        out: Tensor,
        max_rows: int,
        requests: int,
    ) -> None:
        """See `Steps`."""
        qkv, a, b = inputs.qkv, inputs.a, inputs.b
        tokens, device = len(qkv), qkv.device
        pages = _spare_pages(layout, device)
        # Each length of a step and each size of a batch may have a launch of its own. Requests
        # without rows take it and do nothing.
        for count in sorted({1, requests}):
            idle = torch.zeros(count + 1, dtype=torch.int32, device=device)
            rows = StepRows(idle[:-1], idle[:-1], idle[:-1], idle)
            for step_rows in range(1, max_rows + 1):
                replay_decode(pages, weights, qkv, a, b, rows, max_rows, out, step_rows=step_rows)
        # The first chunk is a small one: while Triton tunes vLLM's kernels it takes scratch of its
        # own, which would be counted on top of the largest step's.
        small = -(-max(FIRST_CHUNK, max_rows + 1) // 16) * 16
        for lengths in ([small], largest_step(tokens, max_rows, min(requests, self._at_once))):
            if not lengths or sum(lengths) > tokens:
                continue
            row_start = [0, *accumulate(lengths)]
            (plan,) = plan_chunks(row_start, max_rows, len(lengths))
            new = torch.zeros(len(lengths), dtype=torch.int32, device=device)
            starts = async_tensor_h2d(row_start, device=device, dtype=torch.int32)
            rows = StepRows(torch.ones_like(new), new, new, starts)
            chunks = chunk_rows(plan, rows, self._chunk_kernels)
            replay_chunks(pages, weights, qkv, a, b, chunks, max_rows, out, self._rule)
        out.zero_()


def largest_step(tokens: int, max_rows: int, chunks: int) -> list[int]:
    """Lengths of the chunks that take most scratch; empty where no chunk fits.

    Each chunk takes a state before and one after, and vLLM's kernels one for each block of
    `CHUNK_BLOCK` rows begun, so that a row more than whole blocks costs most.

    Args:
        tokens: rows of the step at most.
        max_rows: T_max.
        chunks: at most.
    """
    shortest, two_blocks = max_rows + 1, CHUNK_BLOCK + 1
    count = min(chunks, tokens // shortest)
    if count == 0:
        return []
    spare = tokens - shortest * count
    # A second block costs a chunk less than any further one.
    longer = min(count, spare // (two_blocks - shortest))
    spare -= longer * (two_blocks - shortest)
    lengths = [shortest] * (count - longer) + [two_blocks] * longer
    if longer == count:
        lengths[-1] += spare // CHUNK_BLOCK * CHUNK_BLOCK
    return lengths


def _spare_pages(layout: PageLayout, device: torch.device) -> Pages:
    """The null page and one more, outside of vLLM's pool."""
    return layer_pages(
        [
            torch.zeros(2, *state.shape, dtype=dtype, device=device)
            for state, dtype in zip(layout.states, torch_dtypes(layout), strict=True)
        ]
    )
