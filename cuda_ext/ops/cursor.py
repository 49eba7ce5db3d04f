# mypy: disable-error-code="no-untyped-def, import-not-found"
# Triton gives the arguments of its kernels types of its own, and is absent where the linter runs.
"""The plan of a step for one KV group, as one small kernel.

The same definition as `cuda_ext/cursor.py` and, in torch, `plan_step_torch` of
`cuda_ext/backend/step_plan.py`, whose dozen operators a step this replaces by one launch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cuda_ext import cursor as cursors

LOST = tl.constexpr(cursors.LOST)


# Else Triton would compile it anew for one request, for a multiple of 16, and for others.
@triton.jit(do_not_specialize=["N"])
def _plan_kernel(
    pages,
    seq_lens,
    row_start,
    cursor,
    out_slot,
    out_base,
    out_start,
    out_row_start,
    pages_stride,
    N,
    max_rows,
    INERT: tl.constexpr,
    BN: tl.constexpr,
):
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    mask = i < N
    first = tl.load(row_start + i, mask=mask, other=0).to(tl.int32)
    end = tl.load(row_start + i + 1, mask=mask, other=0).to(tl.int32)
    slot = tl.zeros([BN], tl.int32)
    base = tl.zeros([BN], tl.int32)
    start = tl.zeros([BN], tl.int32)
    if not INERT:
        rows = end - first
        slot = tl.load(pages + i.to(tl.int64) * pages_stride, mask=mask, other=0).to(tl.int32)
        works = (slot != 0) & (rows > 0) & mask
        slot = tl.where(works, slot, 0)
        start = tl.load(seq_lens + i, mask=works, other=0).to(tl.int32) - tl.where(works, rows, 0)
        p_cursor = cursor + slot.to(tl.int64)
        base = tl.load(p_cursor, mask=works & (start > 0), other=0)
        right = (base >= 0) & (base <= start) & (start - base <= max_rows)
        base = tl.where(right, base, LOST)
        covered = start + tl.where(rows > max_rows, rows, 0)
        tl.store(p_cursor, tl.where(right, covered, LOST), mask=works)
    tl.store(out_slot + i, slot, mask=mask)
    tl.store(out_base + i, base, mask=mask)
    tl.store(out_start + i, start, mask=mask)
    tl.store(out_row_start + i, first, mask=mask)
    tl.store(out_row_start + i + 1, end, mask=mask & (i == N - 1))


def plan_step(
    block_table: Tensor,
    seq_lens: Tensor,
    row_start: Tensor,
    cursor: Tensor,
    max_rows: int,
    slot: Tensor,
    base: Tensor,
    start: Tensor,
    out_row_start: Tensor,
    *,
    inert: bool = False,
) -> None:
    """Plan a step into static buffers and advance the cursors; not twice for one step.

    Args:
        block_table: [N, columns] or [N], int; the (first) column is the page of each request, 0
            for padding.
        seq_lens: [N] int, tokens of each request once the step is done, drafts counted in.
        row_start: [N + 1] int, first row of each request in the batch.
        cursor: [slots] int32, tokens that the state of each slot covers; advanced to the new rows'
            start, or past them for more than `max_rows`. The null slot's is never touched.
        max_rows: T_max.
        slot, base, start: [>= N] int32, written.
        out_row_start: [>= N + 1] int32, written.
        inert: for capture, dummy and profiling runs: no request does anything and no cursor moves.
    """
    pages = block_table if block_table.dim() == 1 else block_table[:, 0]
    requests = pages.shape[0]
    if requests == 0:
        out_row_start[:1].copy_(row_start[:1])
        return
    size = 128
    _plan_kernel[(triton.cdiv(requests, size),)](
        pages,
        seq_lens,
        row_start,
        cursor,
        slot,
        base,
        start,
        out_row_start,
        pages.stride(0),
        requests,
        max_rows,
        INERT=inert,
        BN=size,
        num_warps=4,
    )
