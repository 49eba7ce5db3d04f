"""The ReplaySSM page: its bytes, its offsets, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda_ext.ring import (
    ALIGNMENT,
    GdnHeads,
    native_layout,
    replay_layout,
    ring_rows,
)

KIB = 1024
QWEN_4B = GdnHeads(16, 32, 128, 128, 4)


def test_a_token_of_the_4b_takes_12_1_kib() -> None:
    page = replay_layout(QWEN_4B, 15)
    assert page.token_bytes == 12416
    assert round(page.token_bytes / KIB, 1) == 12.1


def test_the_page_of_15_drafts_takes_2724_kib() -> None:
    page = replay_layout(QWEN_4B, 15)
    assert page.ring_rows == 32
    assert page["ssm"].nbytes == 2048 * KIB
    assert page["conv"].nbytes == 288 * KIB
    assert page.ring_bytes == 388 * KIB
    assert page.nbytes == 2724 * KIB


def test_vllms_own_page_of_15_drafts_takes_2_28_mib() -> None:
    page = native_layout(QWEN_4B, 15)
    assert page.nbytes == 2336 * KIB
    assert round(page.nbytes / KIB**2, 2) == 2.28
    assert page.ring_bytes == page.token_bytes == 0


def test_states_lie_back_to_back_in_kernel_order() -> None:
    page = replay_layout(QWEN_4B, 15)
    assert [state.name for state in page.states] == ["conv", "ssm", "k", "v", "a", "b"]
    assert page.shapes == (
        (18, 8192),
        (32, 128, 128),
        (32, 16, 128),
        (32, 32, 128),
        (32, 32),
        (32, 32),
    )
    assert page.dtypes == ("bfloat16", "float32", *["bfloat16"] * 4)
    end = 0
    for state in page.states:
        assert state.offset == end
        end += state.nbytes
    assert page.nbytes == end


@pytest.mark.parametrize(
    ("drafts", "rows"),
    [(0, 32), (7, 32), (15, 32), (16, 48), (17, 48), (23, 48), (24, 64), (31, 64), (32, 80)],
)
def test_ring_holds_two_steps_in_blocks_of_16(drafts: int, rows: int) -> None:
    assert ring_rows(drafts) == rows


@given(st.integers(0, 200))
def test_pending_and_new_rows_never_share_a_ring_row(drafts: int) -> None:
    rows = ring_rows(drafts)
    assert rows >= 2 * (drafts + 1)
    assert rows % 16 == 0
    assert rows < max(33, 2 * (drafts + 1) + 16)


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("drafts", [0, 1, 7, 15, 16, 24, 31])
@pytest.mark.parametrize("value_heads", [16, 32, 48, 64])
def test_every_offset_is_aligned_on_real_heads(tp: int, drafts: int, value_heads: int) -> None:
    heads = GdnHeads(16, value_heads, 128, 128, 4).shard(tp)
    for state in replay_layout(heads, drafts).states:
        assert state.offset % ALIGNMENT == 0, state


def test_sharding_splits_every_head_bound_state() -> None:
    whole, half = replay_layout(QWEN_4B, 15), replay_layout(QWEN_4B.shard(2), 15)
    assert half.nbytes * 2 == whole.nbytes


def test_conv_window_order_does_not_change_the_bytes() -> None:
    turned = replay_layout(QWEN_4B, 15, conv_dim_first=True)
    assert turned["conv"].shape == (8192, 18)
    assert turned.nbytes == replay_layout(QWEN_4B, 15).nbytes


def test_an_offset_that_cannot_be_aligned_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'ssm' would start at byte 60.*multiple of 16"):
        replay_layout(GdnHeads(1, 2, 2, 3, 4), 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GdnHeads(16, 32, 128, 0, 4), "value_dim must be at least 1, got 0"),
        (lambda: GdnHeads(16, 40, 128, 128, 4), "40 value heads are not a multiple of 16"),
        (lambda: QWEN_4B.shard(3), "3 does not divide 16 linear key heads"),
        (lambda: QWEN_4B.shard(0), "at least 1, got 0"),
        (lambda: ring_rows(-1), "must not be negative, got -1"),
        (lambda: replay_layout(QWEN_4B, 15, ssm_dtype="fp8"), "'fp8' is not one of"),
    ],
)
def test_refusals_echo_the_value(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()
