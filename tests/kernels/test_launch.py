"""The tables that choose launches, on plain ints."""

from __future__ import annotations

import pytest

from cuda_ext.ops import launch
from cuda_ext.ops.launch import BLOCK_ROWS, ceil_div, cuda_launch

SHARED_BYTES_OF_AN_SM = 227 << 10
REGISTERS_OF_AN_SM = 65536


@pytest.mark.parametrize("requests", [1, 16, 128])
def test_every_draft_length_up_to_31_has_a_launch_with_room(requests: int) -> None:
    for max_rows in range(1, 33):
        for rows in range(1, max_rows + 1):
            size = cuda_launch(requests, 32, rows, max_rows)
            assert size is not None, (rows, max_rows)
            assert size.row_blocks * BLOCK_ROWS >= rows + max_rows
            assert size.new_blocks * BLOCK_ROWS >= rows
            assert size.row_blocks >= size.new_blocks


def test_longer_steps_are_left_to_the_portable_kernel() -> None:
    assert cuda_launch(16, 32, 33, 33) is None
    assert cuda_launch(16, 32, 16, 80) is None


def test_as_many_thread_blocks_fit_a_multiprocessor_as_are_asked_for() -> None:
    for requests in (1, 16):
        for rows in range(1, 33):
            size = cuda_launch(requests, 32, rows, rows)
            assert size is not None
            for state_bytes in (2, 4):
                # The driver takes a KiB of each block for itself.
                used = size.blocks_per_sm * (size.shared_bytes(state_bytes) + 1024)
                assert used <= SHARED_BYTES_OF_AN_SM, (size, used)
            threads = size.blocks_per_sm * size.warps * 32
            assert REGISTERS_OF_AN_SM // threads >= 128, size


def test_a_program_of_the_convolution_meets_one_of_q_k_and_v() -> None:
    for regions in ((2048, 4096), (16, 32), (48, 240), (24, 40)):
        size = launch.conv_channels(*regions)
        assert size <= 128
        assert all(region % size == 0 for region in regions)
    assert launch.conv_channels(2048, 4096) == 128
    assert ceil_div(33, 16) == 3
