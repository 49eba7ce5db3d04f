"""The sizes of graphs that cover every decode step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda_ext.capture_sizes import decode_sizes, uncaptured


@given(st.integers(1, 32), st.integers(1, 1024), st.integers(32, 20_000))
def test_every_decode_step_is_covered_with_little_padding(
    rows: int, max_num_seqs: int, max_tokens: int
) -> None:
    sizes = decode_sizes(rows, max_num_seqs, max_tokens)
    assert sizes == sorted(set(sizes))
    assert all(size % rows == 0 and size <= max_tokens for size in sizes)
    most = min(max_num_seqs, max_tokens // rows)
    assert sizes[-1] == rows * most
    for requests in range(1, most + 1):
        size = next(size for size in sizes if size >= rows * requests)
        # A quarter more than a captured size, and one of the small ones is at most half again.
        assert size // rows <= max(1.5 * requests, requests + 1)
    assert len(sizes) <= 40


def test_vllms_own_list_ends_at_32_requests_of_16_rows() -> None:
    own = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    assert uncaptured(own, 16, 32, 16384) is None
    sizes = uncaptured(own, 16, 33, 16384)
    assert sizes is not None
    assert sizes[-1] == 33 * 16


@pytest.mark.parametrize(("captured", "wanted"), [([4096], None), ([4095], 4096), ([], 4096)])
def test_the_largest_size_decides(captured: list[int], wanted: int | None) -> None:
    sizes = uncaptured(captured, 16, 256, 16384)
    assert (sizes and sizes[-1]) == wanted
