"""Which requests of a step are prefill chunks, and where their rows go once packed; plain ints.

A request of more than T_max rows is a chunk: none of its rows can be taken back, and they go into
the state at once. vLLM's chunk kernels take such requests packed one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from cuda_ext.ring import GdnHeads

SCRATCH_BYTES = 256 << 20
"""Of the states that the chunks of a call start from and end in, in float32."""


@dataclass(frozen=True)
class ChunkPlan:
    """The chunks of a step.

    Args:
        requests: [C], index of each chunk's request in the batch, ascending.
        first: [C], its first row in the batch.
        packed: [C + 1], its first row once packed, and the end of the last.
    """

    requests: tuple[int, ...]
    first: tuple[int, ...]
    packed: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Rows of all chunks."""
        return self.packed[-1]

    @property
    def longest(self) -> int:
        """Rows of the longest chunk."""
        return max(end - start for start, end in pairwise(self.packed))

    @property
    def offset(self) -> int | None:
        """First row in the batch where the chunks lie behind one another there, as vLLM's runners
        order a batch; None where they don't."""
        begin = self.first[0]
        together = all(
            first - begin == start for first, start in zip(self.first, self.packed, strict=False)
        )
        return begin if together else None

    @property
    def token_index(self) -> list[int]:
        """[tokens], row in the batch of each packed row."""
        return [
            first + row
            for first, start, end in zip(self.first, self.packed, self.packed[1:], strict=False)
            for row in range(end - start)
        ]


def chunks_at_once(heads: GdnHeads) -> int:
    """Chunks that one call of the kernels takes, so that their states fit `SCRATCH_BYTES`.

    Args:
        heads: of one rank.
    """
    state = heads.value_heads * heads.value_dim * heads.key_dim * 4
    # One before the chunk, and one after it.
    return max(1, SCRATCH_BYTES // (2 * state))


def plan_chunks(row_start: Sequence[int], max_rows: int, at_once: int) -> list[ChunkPlan]:
    """The chunks of a step, in calls of at most `at_once`; empty where it has none.

    Args:
        row_start: [N + 1], first row of each request in the batch, and the end of the last.
        max_rows: T_max.
        at_once: chunks of a call at most.
    """
    chunks = [
        (request, first, end - first)
        for request, (first, end) in enumerate(pairwise(row_start))
        if end - first > max_rows
    ]
    plans = []
    for begin in range(0, len(chunks), at_once):
        requests, first, rows = zip(*chunks[begin : begin + at_once], strict=True)
        plans.append(ChunkPlan(requests, first, (0, *accumulate(rows))))
    return plans
