"""The cursor: its rule case by case, and that no schedule makes a page forget or repeat a token."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_ext.cursor import IDLE, LOST, NULL_SLOT, RowPlan, plan_row, problem
from cuda_ext.ring import GdnHeads, replay_layout, ring_rows

from .schedules import STALE, Page, Row, Schedule

T_MAX = 8
R = 32
WINDOW_TAPS = 4
KINDS = {
    "long chunk",
    "short chunk",
    "short end of a prompt",
    "no drafts",
    "all accepted",
    "some refused",
    "preempted",
    "aborted",
    "from 0",
}


def plan(seq_len: int, rows: int, cursor: int, slot: int = 3, max_rows: int = T_MAX) -> RowPlan:
    return plan_row(slot=slot, seq_len=seq_len, rows=rows, cursor=cursor, max_rows=max_rows)


# The rule


@pytest.mark.parametrize("rows", [1, T_MAX - 1, T_MAX, T_MAX + 1, 500])
@pytest.mark.parametrize("cursor", [-1, 0, 77])
def test_a_first_step_starts_from_nothing_whatever_the_slot_held(rows: int, cursor: int) -> None:
    first = plan(rows, rows, cursor)
    assert (first.base, first.start, first.pending) == (0, 0, 0)
    assert first.covered == (rows if rows > T_MAX else 0)


@pytest.mark.parametrize("rows", [1, T_MAX - 1, T_MAX])
def test_a_step_never_covers_its_own_rows_when_they_may_be_refused(rows: int) -> None:
    step = plan(100 + rows, rows, 96)
    assert step == RowPlan(3, 96, 100, rows, False)
    assert step.pending == 4
    assert step.covered == 100


def test_one_row_more_is_a_chunk_and_covers_all_of_it() -> None:
    step = plan(100 + T_MAX + 1, T_MAX + 1, 96)
    assert step == RowPlan(3, 96, 100, T_MAX + 1, True)
    assert step.covered == 100 + T_MAX + 1


def test_a_long_chunk_after_a_short_one_folds_the_short_one_first() -> None:
    short = plan(5, 5, -1)
    assert (short.chunk, short.covered) == (False, 0)
    long = plan(5 + 60, 60, short.covered)
    assert (long.base, long.pending, long.covered) == (0, 5, 65)


def test_a_single_token_tail_of_a_prompt_is_taken_back_by_nobody() -> None:
    chunk = plan(60, 60, -1)
    tail = plan(61, 1, chunk.covered)
    assert (tail.base, tail.pending, tail.covered) == (60, 0, 60)
    assert plan(62, 1, tail.covered).pending == 1


def test_three_of_five_drafts_then_none_then_drafts_again() -> None:
    """Case C5, and C23: a step without drafts keeps the offset of the one before."""
    step = plan(40 + 6, 6, 40)
    assert step.covered == 40
    # The sampled token and three of the drafts; then one row, then six.
    alone = plan(44 + 1, 1, step.covered)
    assert (alone.base, alone.pending, alone.covered) == (40, 4, 44)
    again = plan(45 + 6, 6, alone.covered)
    assert (again.base, again.pending, again.covered) == (44, 1, 45)


@pytest.mark.parametrize(
    ("slot", "seq_len", "rows"), [(NULL_SLOT, 9, 4), (NULL_SLOT, 0, 0), (3, 9, 0), (3, 0, 0)]
)
def test_rows_that_do_nothing(slot: int, seq_len: int, rows: int) -> None:
    assert plan(seq_len, rows, 5, slot) == IDLE
    assert (IDLE.pending, IDLE.covered) == (0, 0)


@pytest.mark.parametrize(
    ("base", "start", "wrong"),
    [(0, 0, False), (68, 100, False), (67, 100, True), (101, 100, True), (-1, 5, True)],
)
def test_a_plan_that_cannot_be_right_is_told_with_its_figures(
    base: int, start: int, wrong: bool
) -> None:
    found = problem(RowPlan(3, base, start, 4, False), R)
    assert (found is not None) == wrong
    if found:
        for figure in ("slot 3", f"covers {base} tokens", f"starts at {start}", "4 rows", "of 32"):
            assert figure in found


@pytest.mark.parametrize("cursor", [LOST, 39, 100 - T_MAX - 1, 101, 5000])
@pytest.mark.parametrize("rows", [1, T_MAX, T_MAX + 1, 60])
def test_a_slot_that_covers_something_else_is_lost_until_a_request_starts_there(
    cursor: int, rows: int
) -> None:
    """NaN for one step and then a plan that looks right would be a wrong answer."""
    step = plan(100 + rows, rows, cursor)
    assert step.base == LOST
    assert problem(step, R) is not None
    for start in (100, 101, 100 + rows):
        step = plan(start + 1, 1, step.covered)
        assert (step.base, step.covered) == (LOST, LOST)
    assert plan(7, 7, step.covered).base == 0


@pytest.mark.parametrize("pending", [0, 1, T_MAX])
def test_as_many_rows_as_a_step_has_may_be_pending(pending: int) -> None:
    assert plan(101, 1, 100 - pending).pending == pending


# Every schedule


def run(seed: random.Random, max_rows: int, steps: int) -> Schedule:
    """Plan and serve a random schedule; a page asserts what it reads and overwrites."""
    rows = ring_rows(max_rows - 1)
    columns = WINDOW_TAPS - 1 + max_rows - 1
    schedule = Schedule(seed, max_rows)
    pages = [Page(rows, columns) for _ in range(schedule.slots + 1)]
    # What an earlier life of the slot left: any number may stand there.
    cursors = [seed.randint(-1, 200) for _ in pages]
    for batch in schedule.steps(steps):
        for row in batch:
            made = plan_row(
                slot=row.slot,
                seq_len=row.seq_len,
                rows=len(row.tokens),
                cursor=cursors[row.slot],
                max_rows=max_rows,
            )
            assert problem(made, rows) is None
            assert 0 <= made.pending <= max_rows
            assert made.slot == row.slot
            pages[row.slot].step(row, made.base, made.start, made.chunk, WINDOW_TAPS - 1)
            cursors[row.slot] = made.covered
            if made.covered:
                assert pages[row.slot].state == [(row.uid, p) for p in range(made.covered)]
    assert pages[NULL_SLOT].state == [STALE]
    return schedule


@pytest.mark.parametrize("max_rows", range(1, 33))
def test_each_accepted_token_is_folded_once_and_in_order(max_rows: int) -> None:
    seen: set[str] = set()
    for seed in range(2):
        seen |= run(random.Random(f"{max_rows} {seed}"), max_rows, 150).seen
    # One row is no draft, and every chunk of a prompt is then a long one or ends it.
    missing = {"all accepted", "some refused", "short end of a prompt"} if max_rows == 1 else set()
    assert seen == KINDS - missing


@given(st.randoms(use_true_random=False), st.integers(1, 32), st.integers(1, 60))
@settings(deadline=None, max_examples=80)
def test_the_same_for_schedules_that_hypothesis_chooses(
    seed: random.Random, max_rows: int, steps: int
) -> None:
    run(seed, max_rows, steps)


@given(
    st.integers(1, 32),
    st.integers(0, 10_000),
    st.data(),
)
def test_rows_of_the_ring_suffice_for_the_worst_two_steps(
    max_rows: int, start: int, data: st.DataObject
) -> None:
    """All rows of a step accepted, then as many again: pending and new rows lie apart."""
    rows = ring_rows(max_rows - 1)
    kept = data.draw(st.integers(1, max_rows))
    step = plan(start + max_rows, max_rows, start, max_rows=max_rows)
    then = plan(start + kept + max_rows, max_rows, step.covered, max_rows=max_rows)
    if start:
        assert then.pending == kept
    places = {position % rows for position in range(then.base, then.start + then.rows)}
    assert len(places) == then.pending + then.rows


def test_the_window_of_the_page_has_the_columns_that_these_schedules_ran_with() -> None:
    for drafts in range(32):
        page = replay_layout(GdnHeads(16, 32, 128, 128, WINDOW_TAPS), drafts)
        assert page["conv"].shape[0] == WINDOW_TAPS - 1 + drafts
        assert page["k"].shape[0] == page.ring_rows == ring_rows(drafts)


# The page of the tests itself, which must be able to fail


def served(page: Page, row: Row, **changes: object) -> None:
    right = plan_row(
        slot=row.slot, seq_len=row.seq_len, rows=len(row.tokens), cursor=0, max_rows=T_MAX
    )
    made = replace(right, **changes)  # type: ignore[arg-type]
    page.step(row, made.base, made.start, made.chunk, WINDOW_TAPS - 1)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"base": 1}, "state of"),
        ({"start": 3}, "state of"),
        ({"base": 0, "start": 0}, "state of"),
    ],
)
def test_a_page_notices_a_wrong_plan(changes: dict[str, int], told: str) -> None:
    page = Page(R, WINDOW_TAPS - 1 + T_MAX - 1)
    served(page, Row(1, 3, 4, tuple((1, p) for p in range(4))))
    with pytest.raises(AssertionError, match=told):
        served(page, Row(1, 3, 6, ((1, 4), (1, 5))), **changes)


def test_a_page_notices_a_ring_and_a_window_that_are_too_short() -> None:
    first = Row(1, 3, T_MAX, tuple((1, p) for p in range(T_MAX)))
    then = Row(1, 3, 2 * T_MAX, tuple((1, p) for p in range(T_MAX, 2 * T_MAX)))
    page = Page(2 * T_MAX - 1, WINDOW_TAPS - 1 + T_MAX - 1)
    served(page, first)
    with pytest.raises(AssertionError, match="wait to be folded"):
        served(page, then)
    one_kept = Row(1, 3, 2, ((1, 1),))
    page = Page(R, WINDOW_TAPS - 1 + T_MAX - 1 - 3)
    served(page, Row(1, 3, T_MAX, ((1, 0), *(((1, p, "refused")) for p in range(1, T_MAX)))))
    with pytest.raises(AssertionError, match="conv inputs"):
        served(page, one_kept)
