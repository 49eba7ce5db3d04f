"""Sizes of the launches, from tables by batch size: nothing is tuned while a graph is captured.

Figures behind the tables: cuda_ext/bench/NOTES.md. Pure integers: imports neither torch nor Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_ROWS = 16
"""Rows of a block of the triangular solve; smaller ones are padded to it."""


def ceil_div(count: int, size: int) -> int:
    """Blocks of `size` that hold `count`."""
    return -(-count // size)


@dataclass(frozen=True)
class CudaLaunch:
    """How the CUDA kernel is compiled and launched.

    Args:
        row_blocks: NB, blocks of pending and new rows of a request at most.
        new_blocks: NQ, blocks of new rows at most.
        warps: of a thread block; each serves 16 value rows.
        blocks_per_sm: thread blocks that a multiprocessor should hold, which bounds registers.
        ahead: of the 16 loads of a thread's share of the state, those made a tile ahead and
            then held in registers.
    """

    row_blocks: int
    new_blocks: int
    warps: int
    blocks_per_sm: int
    ahead: int = 12

    def shared_bytes(self, state_bytes: int = 4) -> int:
        """Shared memory of a thread block; the kernel asserts that it counts the same.

        Args:
            state_bytes: of an element of the state.
        """
        rows, new, columns = self.row_blocks * 16, self.new_blocks * 16, self.warps * 16 + 8
        pairs = self.row_blocks * (self.row_blocks - 1) // 2
        tiles = self.row_blocks + pairs + self.new_blocks * self.row_blocks
        share = 16 * self.warps * 32 * 4 * state_bytes + 2 * 32
        staged = 2 * (136 * (rows + new) + columns * rows)
        vectors = rows * (8 + 4 * 4) + new * 2 * 4
        return share + staged + tiles * 3 * 512 + rows * 20 * 4 + vectors


FEW_TILES = 64
"""Value heads of a batch up to which smaller thread blocks reach more multiprocessors."""

# By blocks of rows and of new rows: warps, thread blocks a multiprocessor, loads made ahead. Two
# blocks of 8 warps with 128 registers a thread, or one with 255 where more rows meet the state.
# More loads ahead would have to be held in registers.
_CUDA = {
    (1, 1): (8, 2, 8),
    (2, 1): (8, 2, 6),
    (2, 2): (8, 2, 6),
    (3, 1): (8, 1, 16),
    (3, 2): (8, 1, 12),
    (4, 2): (8, 1, 16),
}


def cuda_launch(requests: int, value_heads: int, rows: int, max_pending: int) -> CudaLaunch | None:
    """The launch for a batch, or None when the kernel has no room for its rows.

    Args:
        requests: N, padding counted in.
        value_heads: HV.
        rows: T of the longest request that the launch serves.
        max_pending: P at most.
    """
    row_blocks = ceil_div(rows + max_pending, BLOCK_ROWS)
    new_blocks = ceil_div(rows, BLOCK_ROWS)
    if (row_blocks, new_blocks) not in _CUDA:
        return None
    if requests * value_heads <= FEW_TILES and row_blocks <= 2:
        return CudaLaunch(row_blocks, new_blocks, warps=4, blocks_per_sm=3, ahead=12)
    warps, blocks_per_sm, ahead = _CUDA[row_blocks, new_blocks]
    return CudaLaunch(row_blocks, new_blocks, warps, blocks_per_sm, ahead)


@dataclass(frozen=True)
class TritonLaunch:
    """Sizes of a Triton launch.

    Args:
        value_rows: BV, value rows of a program.
        warps: of a program.
    """

    value_rows: int
    warps: int


def block_launch(value_dim: int) -> TritonLaunch:
    """Of the portable block kernel."""
    return TritonLaunch(min(32, max(16, value_dim)), 4)


RECURRENT_LAUNCH = TritonLaunch(value_rows=16, warps=1)
"""Of the kernel that goes row by row. One warp needs no other for its sums: 24.7 us at 16 requests
of one row on an H200, where 4 warps of 32 value rows take 30.6."""


def conv_channels(*regions: int) -> int:
    """Channels of a program of the convolution: the largest power of two up to 128 that divides
    every region, so that no program meets two of q, k and v."""
    size = 128
    while any(region % size for region in regions):
        size //= 2
    return size
