"""The cursor of every slot of one KV group, and the plan of a step in static buffers; in torch.

The same definition as `cuda_ext/cursor.py`, for all rows of a batch at once and without reading
anything back to the host. The buffers keep their addresses, so that a captured graph reads each
step's plan from them; planning itself runs outside the graph.
"""

from __future__ import annotations

import torch

from cuda_ext.cursor import NULL_SLOT
from cuda_ext.ops.reference import StepRows


class StepPlanner:
    """Cursors of the slots of one KV group.

    Args:
        slots: pages of the pool.
        max_requests: N at most, padding of graphs counted in.
        max_rows: T_max.
        device: of the buffers.
    """

    def __init__(self, slots: int, max_requests: int, max_rows: int, device: torch.device) -> None:
        self.max_rows = max_rows
        # A slot that no request has used yet must not pass for one that covers something.
        self.cursor = torch.full((slots,), -1, dtype=torch.int32, device=device)
        self._slot = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self._base = torch.zeros_like(self._slot)
        self._start = torch.zeros_like(self._slot)
        self._row_start = torch.zeros(max_requests + 1, dtype=torch.int32, device=device)

    def plan(
        self, slots: torch.Tensor, seq_lens: torch.Tensor, row_start: torch.Tensor
    ) -> StepRows:
        """Plan a step and advance the cursors; not twice for one step.

        Args:
            slots: [N] int, page of each request, 0 for padding.
            seq_lens: [N] int, tokens of each request once the step is done, drafts counted in.
            row_start: [N + 1] int.
        """
        count = slots.shape[0]
        lens = row_start[1:] - row_start[:-1]
        works = (slots != NULL_SLOT) & (lens > 0)
        slot = torch.where(works, slots, NULL_SLOT)
        start = torch.where(works, seq_lens - lens, 0)
        base = torch.where(start == 0, 0, self.cursor[slot.long()])
        covered = torch.where(lens > self.max_rows, start + lens, start)
        # Every row writes, those that do nothing to the null slot: no index of unknown length.
        self.cursor[slot.long()] = covered.to(torch.int32)
        self.cursor[NULL_SLOT] = 0
        self._slot[:count].copy_(slot)
        self._base[:count].copy_(base)
        self._start[:count].copy_(start)
        self._row_start[: count + 1].copy_(row_start)
        return self._rows(count)

    def idle(self, count: int, row_start: torch.Tensor) -> StepRows:
        """A plan in which no request does anything, for dummy and capture runs: no cursor moves.

        Args:
            count: N.
            row_start: [N + 1] int.
        """
        self._slot[:count].fill_(NULL_SLOT)
        self._base[:count].zero_()
        self._start[:count].zero_()
        self._row_start[: count + 1].copy_(row_start)
        return self._rows(count)

    def _rows(self, count: int) -> StepRows:
        return StepRows(
            self._slot[:count],
            self._base[:count],
            self._start[:count],
            self._row_start[: count + 1],
        )
