"""The cursor of every slot of one KV group, and the plan of a step in static buffers.

The same definition as `cuda_ext/cursor.py`, for all rows of a batch at once and without reading
anything back to the host: in torch here, on a GPU by one small kernel (cuda_ext/ops/cursor.py). The
buffers keep their addresses, so that a captured graph reads each step's plan from them; planning
itself runs outside the graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cuda_ext.cursor import LOST, NULL_SLOT
from cuda_ext.ops.reference import StepRows


def plan_step_torch(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    row_start: torch.Tensor,
    cursor: torch.Tensor,
    max_rows: int,
    slot: torch.Tensor,
    base: torch.Tensor,
    start: torch.Tensor,
    out_row_start: torch.Tensor,
    *,
    inert: bool = False,
) -> None:
    """`plan_step` of cuda_ext/ops/cursor.py in plain torch, for devices without Triton.

    The arguments are the same.
    """
    pages = block_table if block_table.dim() == 1 else block_table[:, 0]
    count = pages.shape[0]
    out_row_start[: count + 1].copy_(row_start[: count + 1])
    if inert:
        for buffer in (slot, base, start):
            buffer[:count].zero_()
        return
    lens = row_start[1 : count + 1] - row_start[:count]
    works = (pages != NULL_SLOT) & (lens > 0)
    chosen = torch.where(works, pages, NULL_SLOT).long()
    first = torch.where(works, seq_lens[:count] - lens, 0)
    kept = cursor[NULL_SLOT].clone()
    known = torch.where(first > 0, cursor[chosen], 0)
    pending = first - known
    right = (known >= 0) & (pending >= 0) & (pending <= max_rows)
    covered = torch.where(lens > max_rows, first + lens, first)
    slot[:count].copy_(chosen)
    base[:count].copy_(torch.where(right, known, LOST))
    start[:count].copy_(first)
    # Requests that do nothing all write the null slot, whose cursor is then put back: so no index
    # has a length that the host would have to know.
    cursor[chosen] = torch.where(right, covered, LOST).to(torch.int32)
    cursor[NULL_SLOT] = kept


class StepPlanner:
    """Cursors of the slots of one KV group.

    Args:
        slots: pages of the pool.
        max_requests: N at most, padding of graphs counted in.
        max_rows: T_max.
        device: of the buffers.
        plan_step: what plans a step, `plan_step_torch` or `plan_step` of cuda_ext/ops/cursor.py.
    """

    def __init__(
        self,
        slots: int,
        max_requests: int,
        max_rows: int,
        device: torch.device,
        plan_step: Callable[..., None] = plan_step_torch,
    ) -> None:
        self.max_rows = max_rows
        self._plan_step = plan_step
        # A slot that no request has used yet must not pass for one that covers something.
        self.cursor = torch.full((slots,), LOST, dtype=torch.int32, device=device)
        self.cursor[NULL_SLOT] = 0
        self._slot = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self._base = torch.zeros_like(self._slot)
        self._start = torch.zeros_like(self._slot)
        self._row_start = torch.zeros(max_requests + 1, dtype=torch.int32, device=device)
        # Compiled here, not at the first request. The null page is nobody's.
        nobody = torch.zeros(2, dtype=torch.int32, device=device)
        for inert in (False, True):
            self._plan(nobody[:1], nobody[:1], nobody, inert=inert)

    def plan(
        self, slots: torch.Tensor, seq_lens: torch.Tensor, row_start: torch.Tensor
    ) -> StepRows:
        """Plan a step and advance the cursors; not twice for one step.

        Args:
            slots: [N] int, page of each request, 0 for padding.
            seq_lens: [N] int, tokens of each request once the step is done, drafts counted in.
            row_start: [N + 1] int.
        """
        self._plan(slots, seq_lens, row_start)
        return self._rows(slots.shape[0])

    def idle(self, count: int, row_start: torch.Tensor) -> StepRows:
        """A plan in which no request does anything, for dummy and capture runs: no cursor moves.

        Args:
            count: N.
            row_start: [N + 1] int.
        """
        self._plan(self._slot[:count], self._start[:count], row_start, inert=True)
        return self._rows(count)

    def _plan(
        self,
        slots: torch.Tensor,
        seq_lens: torch.Tensor,
        row_start: torch.Tensor,
        *,
        inert: bool = False,
    ) -> None:
        self._plan_step(
            slots,
            seq_lens,
            row_start,
            self.cursor,
            self.max_rows,
            self._slot,
            self._base,
            self._start,
            self._row_start,
            inert=inert,
        )

    def _rows(self, count: int) -> StepRows:
        assert count <= len(self._slot), (count, len(self._slot))
        return StepRows(
            self._slot[:count],
            self._base[:count],
            self._start[:count],
            self._row_start[: count + 1],
        )
