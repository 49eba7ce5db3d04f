"""Which requests of a step are prefill chunks, and where their rows go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda_ext.backend.chunk_plan import plan_chunks


def starts(lengths: list[int]) -> list[int]:
    found = [0]
    for rows in lengths:
        found.append(found[-1] + rows)
    return found


@pytest.mark.parametrize("lengths", [[], [0], [1], [4], [4, 0, 1], [1, 2, 3, 4]])
def test_rows_that_can_be_taken_back_are_no_chunks(lengths: list[int]) -> None:
    assert plan_chunks(starts(lengths), 4) is None


def test_a_row_more_makes_a_chunk() -> None:
    plan = plan_chunks(starts([4, 5, 0, 6]), 4)
    assert plan is not None
    assert plan.requests == (1, 3)
    assert plan.first == (4, 9)
    assert plan.packed == (0, 5, 11)
    assert plan.longest == 6


def test_chunks_behind_one_another_are_one_slice() -> None:
    plan = plan_chunks(starts([1, 4, 9, 7]), 4)
    assert plan is not None
    assert plan.offset == 5
    # A request without rows in between changes nothing.
    plan = plan_chunks(starts([4, 9, 0, 7]), 4)
    assert plan is not None
    assert plan.offset == 4


def test_chunks_with_rows_between_them_are_none() -> None:
    plan = plan_chunks(starts([9, 4, 7]), 4)
    assert plan is not None
    assert plan.offset is None
    assert plan.token_index == [*range(9), *range(13, 20)]


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 32))
def test_every_row_of_a_chunk_is_packed_once_and_in_order(
    lengths: list[int], max_rows: int
) -> None:
    row_start = starts(lengths)
    plan = plan_chunks(row_start, max_rows)
    chunks = [i for i, rows in enumerate(lengths) if rows > max_rows]
    if plan is None:
        assert not chunks
        return
    assert list(plan.requests) == chunks
    expected = [row for i in chunks for row in range(row_start[i], row_start[i + 1])]
    assert plan.token_index == expected
    assert plan.tokens == len(expected)
    assert plan.longest == max(lengths[i] for i in chunks)
    contiguous = expected == list(range(expected[0], expected[0] + len(expected)))
    assert (plan.offset is not None) == contiguous
    if contiguous:
        assert plan.offset == expected[0]
