"""Which requests of a step are prefill chunks, and where their rows go."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda_ext.activation import Active
from cuda_ext.backend.chunk_plan import SCRATCH_BYTES, ChunkPlan, chunks_at_once, plan_chunks
from cuda_ext.refusals import replay_layout
from cuda_ext.ring import GdnHeads

from .test_replay_refusals import GOOD

ALL = 1000
"""More chunks than any of these steps has."""


def starts(lengths: list[int]) -> list[int]:
    found = [0]
    for rows in lengths:
        found.append(found[-1] + rows)
    return found


def only(lengths: list[int]) -> ChunkPlan:
    (plan,) = plan_chunks(starts(lengths), 4, ALL)
    return plan


@pytest.mark.parametrize("lengths", [[], [0], [1], [4], [4, 0, 1], [1, 2, 3, 4]])
def test_rows_that_can_be_taken_back_are_no_chunks(lengths: list[int]) -> None:
    assert plan_chunks(starts(lengths), 4, ALL) == []


def test_a_row_more_makes_a_chunk() -> None:
    plan = only([4, 5, 0, 6])
    assert plan.requests == (1, 3)
    assert plan.first == (4, 9)
    assert plan.packed == (0, 5, 11)
    assert plan.longest == 6


def test_chunks_behind_one_another_are_one_slice() -> None:
    plan = only([1, 4, 9, 7])
    assert plan.offset == 5
    # A request without rows in between changes nothing.
    plan = only([4, 9, 0, 7])
    assert plan.offset == 4


def test_chunks_with_rows_between_them_are_none() -> None:
    plan = only([9, 4, 7])
    assert plan.offset is None
    assert plan.token_index == [*range(9), *range(13, 20)]


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 32), st.integers(1, 5))
def test_every_row_of_a_chunk_is_packed_once_and_in_order(
    lengths: list[int], max_rows: int, at_once: int
) -> None:
    row_start = starts(lengths)
    plans = plan_chunks(row_start, max_rows, at_once)
    chunks = [i for i, rows in enumerate(lengths) if rows > max_rows]
    assert [i for plan in plans for i in plan.requests] == chunks
    assert all(len(plan.requests) == at_once for plan in plans[:-1])
    for plan in plans:
        assert 0 < len(plan.requests) <= at_once
        expected = [row for i in plan.requests for row in range(row_start[i], row_start[i + 1])]
        assert plan.token_index == expected
        assert plan.tokens == len(expected)
        assert plan.longest == max(lengths[i] for i in plan.requests)
        contiguous = expected == list(range(expected[0], expected[0] + len(expected)))
        assert (plan.offset is not None) == contiguous
        if contiguous:
            assert plan.offset == expected[0]


@pytest.mark.parametrize("value_heads", [1, 8, 32, 64, 4096])
def test_states_of_a_call_fit_the_scratch(value_heads: int) -> None:
    count = chunks_at_once(GdnHeads(1, value_heads, 128, 128, 4))
    state = value_heads * 128 * 128 * 4
    assert count >= 1
    assert count == 1 or 2 * count * state <= SCRATCH_BYTES
    assert 2 * (count + 1) * state > SCRATCH_BYTES


@pytest.mark.parametrize("chosen", ["triton", "flashinfer", "cutedsl"])
def test_kernels_that_vllm_chose_compute_chunks_unless_rows_are_float32(chosen: str) -> None:
    for dtype, kernels in (("bfloat16", chosen), ("float16", chosen), ("float32", "portable")):
        facts = replace(GOOD, dtype=dtype, conv_dtype=dtype)
        assert Active(facts, replay_layout(facts)).chunk_kernels(chosen) == kernels
