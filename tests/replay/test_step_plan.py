"""The plan of a whole batch in torch, against the cursor's definition row by row."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch", reason="plans are tensors: torch is not installed here")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from cuda_ext.backend.step_plan import StepPlanner  # noqa: E402
from cuda_ext.cursor import NULL_SLOT, RowPlan, plan_row  # noqa: E402
from cuda_ext.ops.reference import StepRows  # noqa: E402

from .schedules import Row, Schedule  # noqa: E402

SLOTS = 6
REQUESTS = 9
STALE = 7


def planner(max_rows: int = 4) -> StepPlanner:
    """A planner whose buffers hold what nobody should read."""
    made = StepPlanner(SLOTS, REQUESTS, max_rows, torch.device("cpu"))
    for buffer in buffers(made):
        buffer.fill_(STALE)
    return made


def buffers(made: StepPlanner) -> list[torch.Tensor]:
    rows = made.idle(REQUESTS, torch.zeros(REQUESTS + 1, dtype=torch.int32))
    return [rows.slot, rows.base, rows.start, rows.row_start]


def tensors(batch: list[tuple[int, int, int]], dtype: torch.dtype) -> list[torch.Tensor]:
    """slots, seq_lens and row_start of a batch of (slot, seq_len, rows)."""
    ends = [0]
    for _, _, rows in batch:
        ends.append(ends[-1] + rows)
    columns = ([slot for slot, _, _ in batch], [length for _, length, _ in batch], ends)
    return [torch.tensor(column, dtype=dtype) for column in columns]


def as_plans(rows: StepRows, max_rows: int) -> list[RowPlan]:
    """The tensors' rows; an idle one has no rows to speak of."""
    ends = rows.row_start.tolist()
    found = []
    for index, slot in enumerate(rows.slot.tolist()):
        count = ends[index + 1] - ends[index] if slot else 0
        base, start = rows.base[index].item(), rows.start[index].item()
        found.append(RowPlan(slot, int(base), int(start), count, count > max_rows))
    return found


def padded(rng: random.Random, batch: list[Row]) -> list[tuple[int, int, int]]:
    """A batch with padding as vLLM puts it at the end, null slots with rows of a capture among it,
    and a slot in use that has no rows in the step."""
    rows = [(row.slot, row.seq_len, len(row.tokens)) for row in batch]
    resting = sorted(set(range(1, SLOTS)) - {slot for slot, _, _ in rows})
    if resting and rng.random() < 0.3:
        rows.append((rng.choice(resting), rng.randint(0, 50), 0))
    for _ in range(rng.randint(0, REQUESTS - len(rows))):
        rows.append(rng.choice(((NULL_SLOT, 0, 0), (NULL_SLOT, 1, 1), (NULL_SLOT, 3, 2))))
    return rows


def check(rng: random.Random, max_rows: int, steps: int) -> int:
    """Run a random schedule through both, with runs that must change nothing in between."""
    made = planner(max_rows)
    cursors = dict.fromkeys(range(SLOTS), -1)
    schedule = Schedule(rng, max_rows, slots=SLOTS - 1)
    planned = 0
    for batch in schedule.steps(steps):
        rows = padded(rng, batch)
        slots, lens, row_start = tensors(rows, rng.choice((torch.int32, torch.int64)))
        if rng.random() < 0.3:
            before = made.cursor.clone()
            idle = made.idle(len(rows), row_start)
            assert as_plans(idle, max_rows) == [RowPlan(0, 0, 0, 0, False)] * len(rows)
            assert made.cursor.equal(before)
        given_to = [slots.clone(), lens.clone(), row_start.clone()]
        found = as_plans(made.plan(slots, lens, row_start), max_rows)
        for got, kept in zip((slots, lens, row_start), given_to, strict=True):
            assert got.equal(kept), "an input was written to"
        for got, (slot, seq_len, count) in zip(found, rows, strict=True):
            want = plan_row(
                slot=slot, seq_len=seq_len, rows=count, cursor=cursors[slot], max_rows=max_rows
            )
            assert got == want
            if slot and count:
                cursors[slot] = want.covered
                planned += 1
        cursors[NULL_SLOT] = 0
        if rows:
            assert made.cursor.tolist() == list(cursors.values())
    return planned


@pytest.mark.parametrize("max_rows", [1, 2, 4, 8, 16, 17, 32])
def test_every_row_of_every_batch_is_planned_by_the_definition(max_rows: int) -> None:
    assert check(random.Random(max_rows), max_rows, 120) > 100


@given(st.randoms(use_true_random=False), st.integers(1, 32))
@settings(deadline=None, max_examples=30)
def test_the_same_for_batches_that_hypothesis_chooses(rng: random.Random, max_rows: int) -> None:
    check(rng, max_rows, 20)


def test_buffers_keep_their_addresses_and_have_the_type_of_the_kernels() -> None:
    made = planner()
    whole = buffers(made)
    assert {buffer.dtype for buffer in whole} == {torch.int32} == {made.cursor.dtype}
    batch = tensors([(1, 3, 3), (2, 40, 1), (NULL_SLOT, 0, 0)], torch.int64)
    cursor = made.cursor.data_ptr()
    for rows in (made.plan(*batch), made.idle(3, batch[2])):
        parts = [rows.slot, rows.base, rows.start, rows.row_start]
        assert [p.data_ptr() for p in parts] == [w.data_ptr() for w in whole]
        assert [len(p) for p in parts] == [3, 3, 3, 4]
    assert made.cursor.data_ptr() == cursor


def test_what_lies_beyond_the_batch_is_left_alone() -> None:
    made = planner()
    whole = buffers(made)
    for buffer in whole:
        buffer.fill_(STALE)
    batch = tensors([(1, 3, 3), (2, 40, 1)], torch.int32)
    for rows in (made.plan(*batch), made.idle(2, batch[2])):
        assert rows.row_start.tolist() == [0, 3, 4]
        assert [set(buffer[2:].tolist()) for buffer in whole[:3]] == [{STALE}] * 3
        assert set(whole[3][3:].tolist()) == {STALE}


def test_a_slot_in_no_batch_keeps_its_cursor() -> None:
    made = planner()
    made.plan(*tensors([(1, 9, 9), (2, 9, 9)], torch.int32))
    made.plan(*tensors([(2, 10, 1)], torch.int32))
    made.plan(*tensors([(2, 12, 2), (NULL_SLOT, 5, 5)], torch.int32))
    assert made.cursor.tolist() == [0, 9, 10, -1, -1, -1]


def test_a_slot_that_nobody_used_does_not_pass_for_a_state() -> None:
    """A request that starts in the middle, as after a prefix-cache hit, has no state to go on."""
    rows = planner().plan(*tensors([(3, 40, 1)], torch.int32))
    assert rows.base.tolist() == [-1]


def test_the_null_slot_covers_nothing_whatever_padding_says() -> None:
    made = planner()
    rows = made.plan(*tensors([(NULL_SLOT, 99, 50), (1, 3, 3), (NULL_SLOT, 7, 2)], torch.int32))
    assert made.cursor[NULL_SLOT] == 0
    assert (rows.slot.tolist(), rows.base.tolist(), rows.start.tolist()) == ([0, 1, 0],) + (
        [0, 0, 0],
    ) * 2


def test_an_empty_batch_changes_nothing() -> None:
    made = planner()
    made.plan(*tensors([(1, 9, 9)], torch.int32))
    rows = made.plan(*tensors([], torch.int64))
    assert [len(rows.slot), len(rows.base), len(rows.start)] == [0, 0, 0]
    assert rows.row_start.tolist() == [0]
    assert made.cursor[1] == 9
