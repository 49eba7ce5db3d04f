"""The cursor: which tokens a slot's state covers, and what one step does about it; on plain ints.

A slot's cursor is a token position, `base`: the state is that after the first `base` tokens of the
request. Rows from `base` to the step's `start` (the tokens computed before it) lie pending in the
ring, each at its position modulo R. vLLM gives `start` exactly in every runner, so a rejected draft
is simply a position that `start` did not reach, and no count of accepted tokens is needed.

A step of at most T_max rows folds the pending rows and never its own: which of them are accepted
shows in the next `start`. A longer one is part of a prompt, of which nothing is taken back; its
rows go into the state at once. A request's first step starts at 0, whatever an earlier owner of the
slot left there.

No more than T_max rows are ever pending. Where a step would start further on, or before what the
state covers, the state can't be had again: the slot is lost, its answers are NaN, and they stay so
until a request starts there at 0. (vLLM 0.31.0 and 0.33.0 can go back behind a fold where a session
with streamed input goes on after a stop token that was a draft, under asynchronous scheduling.)

This module is the definition that `cuda_ext/backend/step_plan.py` and the GPU kernel are tested
against. Pure integers: imports neither torch nor vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

NULL_SLOT = 0
"""vLLM's null block: padding rows point there, and nothing is read from or written to it."""
LOST = -1
"""Cursor and base of a slot whose state is not what the request needs."""


@dataclass(frozen=True)
class RowPlan:
    """What one request's rows do in one step.

    Args:
        slot: page of the request; `NULL_SLOT` for a row that does nothing.
        base: tokens that the state covers before the step. 0 means a zero state that is not read;
            `LOST` that there is none.
        start: position of the first new row.
        rows: T, new rows.
        chunk: the rows are a prefill chunk, which goes into the state at once.
    """

    slot: int
    base: int
    start: int
    rows: int
    chunk: bool

    @property
    def pending(self) -> int:
        """Rows of earlier steps that the step folds; of no meaning where the slot is lost."""
        return self.start - self.base

    @property
    def covered(self) -> int:
        """Tokens that the state covers after the step: the slot's next cursor."""
        if self.base == LOST:
            return LOST
        return self.start + self.rows if self.chunk else self.start


IDLE = RowPlan(NULL_SLOT, 0, 0, 0, False)


def plan_row(*, slot: int, seq_len: int, rows: int, cursor: int, max_rows: int) -> RowPlan:
    """The plan of one request.

    Args:
        slot: its page.
        seq_len: tokens of the request once the step is done, drafts counted in.
        rows: T, tokens of the request in the step.
        cursor: tokens that the slot's state covers; of no meaning in a request's first step.
        max_rows: T_max, one more than the draft tokens of a step.
    """
    if slot == NULL_SLOT or rows == 0:
        return IDLE
    start = seq_len - rows
    base = 0 if start == 0 else cursor
    if base < 0 or not 0 <= start - base <= max_rows:
        base = LOST
    return RowPlan(slot, base, start, rows, rows > max_rows)


def problem(plan: RowPlan, ring_rows: int) -> str | None:
    """Why the plan can't be right; None when it can.

    Args:
        plan: of one request.
        ring_rows: R.
    """
    if 0 <= plan.pending <= ring_rows and plan.base >= 0:
        return None
    return (
        f"slot {plan.slot} covers {plan.base} tokens, but the step starts at {plan.start} with "
        f"{plan.rows} rows and a ring of {ring_rows}"
    )
