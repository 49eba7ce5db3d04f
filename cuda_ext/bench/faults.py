"""Faults planted on purpose: a check that does not see them says nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def lost_rows(every: int = 1) -> Iterator[Callable[[], int]]:
    """ReplaySSM's plans in this process lose rows while this lasts.

    Of the steps that start at a position divisible by `every`, the fold leaves out its first
    pending row. The plan lies in static buffers that are written outside the captured graphs, and
    is changed there, so a replayed graph loses the row too.

    Args:
        every: 1 for each fold but a request's first, which has no state yet.

    Yields:
        A function that gives the folds spoiled so far; it waits for the device.
    """
    import torch

    from cuda_ext.backend.step_plan import StepPlanner

    plan = StepPlanner.plan
    counts: dict[Any, Any] = {}

    def spoiled(self: Any, *args: Any) -> Any:
        rows = plan(self, *args)
        lost = (rows.start % every == 0) & (rows.start > rows.base) & (rows.base > 0)
        rows.base.add_(lost.to(rows.base.dtype))
        total = counts.setdefault(lost.device, lost.new_zeros((), dtype=torch.int64))
        total.add_(lost.sum())
        return rows

    setattr(StepPlanner, "plan", spoiled)  # noqa: B010 - mypy refuses the assignment
    try:
        yield lambda: sum(int(count) for count in counts.values())
    finally:
        setattr(StepPlanner, "plan", plan)  # noqa: B010
