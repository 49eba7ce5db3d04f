"""The chunks of a step on the device, from their plan; without waiting for the device."""

from __future__ import annotations

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from cuda_ext.backend.chunk_plan import ChunkPlan
from cuda_ext.compat.chunk_metadata import chunk_metadata
from cuda_ext.ops.chunk import ChunkRows
from cuda_ext.ops.reference import StepRows


def chunk_rows(plan: ChunkPlan, rows: StepRows, kernels: str) -> ChunkRows:
    """Gather the plan of the chunks from that of the step.

    Args:
        plan: which requests they are.
        rows: the plan of all requests, on the device.
        kernels: that compute the chunks, as `Active.chunk_kernels` names them.
    """
    device = rows.slot.device
    count = len(plan.requests)
    # One copy for all. Triton compiles vLLM's kernels again for a `packed` that is not aligned, so
    # it comes first.
    together = [*plan.packed, *plan.requests, *plan.first]
    numbers = async_tensor_h2d(together, device=device, dtype=torch.int32)
    packed, requests, first = numbers.split((count + 1, count, count))
    indices, offsets = chunk_metadata(kernels, packed, torch.tensor(plan.packed, dtype=torch.int32))
    offset, index = plan.offset, None
    if offset is None:
        index = async_tensor_h2d(plan.token_index, device=device, dtype=torch.int64)
    return ChunkRows(
        slot=rows.slot.index_select(0, requests),
        base=rows.base.index_select(0, requests),
        start=rows.start.index_select(0, requests),
        first=first,
        packed=packed,
        tokens=plan.tokens,
        longest=plan.longest,
        offset=offset,
        token_index=index,
        chunk_indices=indices,
        chunk_offsets=offsets,
    )
