"""The planted fault: which folds it spoils, that it counts them, and that it ends."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch, not installed here")

from cuda_ext.backend.step_plan import StepPlanner  # noqa: E402
from cuda_ext.bench.faults import lost_rows  # noqa: E402

ROWS = 4


def bases(planner: StepPlanner, lens: list[int]) -> list[int]:
    """Of one step of two requests of one row each that end at these lengths."""
    slots = torch.tensor([1, 2], dtype=torch.int32)
    ends = torch.tensor(lens, dtype=torch.int32)
    planned = planner.plan(slots, ends, torch.tensor([0, 1, 2], dtype=torch.int32))
    assert planned.start.tolist() == [end - 1 for end in lens]
    return list(planned.base.tolist())


def prefilled() -> StepPlanner:
    """Two requests of 8 and 9 tokens, each with a row that is not folded yet."""
    planner = StepPlanner(3, 2, ROWS, torch.device("cpu"))
    slots = torch.tensor([1, 2], dtype=torch.int32)
    lens = torch.tensor([7, 8], dtype=torch.int32)
    planner.plan(slots, lens, torch.tensor([0, 7, 15], dtype=torch.int32))
    assert bases(planner, [8, 9]) == [7, 8]
    return planner


def test_every_fold_loses_its_oldest_row_and_is_counted() -> None:
    planner = prefilled()
    with lost_rows() as folds:
        assert bases(planner, [9, 10]) == [8, 9]
        assert folds() == 2
        assert bases(planner, [10, 11]) == [9, 10]
        assert folds() == 4
    assert bases(planner, [11, 12]) == [9, 10]
    assert folds() == 4


def test_of_every_fourth_position_alone() -> None:
    planner = prefilled()
    with lost_rows(4) as folds:
        # Starts at 8 and 9: the first is divisible by four.
        assert bases(planner, [9, 10]) == [8, 8]
        assert bases(planner, [10, 11]) == [8, 9]
        assert folds() == 1


def test_nothing_is_lost_where_nothing_is_pending() -> None:
    planner = StepPlanner(3, 2, ROWS, torch.device("cpu"))
    slots, ends = torch.tensor([1, 2]).int(), torch.tensor([7, 8]).int()
    with lost_rows() as folds:
        planned = planner.plan(slots, ends, torch.tensor([0, 7, 15]).int())
        assert planned.base.tolist() == [0, 0]
        # What a prompt left is in the state, and no row of it in the ring.
        assert bases(planner, [8, 9]) == [7, 8]
        assert folds() == 0


def test_it_ends_where_what_it_is_planted_for_fails() -> None:
    plan = StepPlanner.plan

    def fail() -> None:
        with lost_rows():
            assert StepPlanner.plan is not plan
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert StepPlanner.plan is plan
