"""Whether the largest decode step lies within the captured CUDA graphs.

vLLM's own list ends at 512 tokens (1,024 on Blackwell), and a decode step has D + 1 of them for
each request: with 15 drafts more than 32 requests run without graphs, and the time between launches
then hides much of what ReplaySSM saves. Pure integers.
"""

from __future__ import annotations

from collections.abc import Sequence


def decode_sizes(rows: int, max_num_seqs: int, max_tokens: int) -> list[int]:
    """Sizes that cover every decode step, in tokens.

    From 16 requests on they lie 14 to 25 % apart, so that padding stays small beside their number,
    each of which costs time at start-up and some MiB.

    Args:
        rows: of a request in a decode step, D + 1.
        max_num_seqs: requests at most.
        max_tokens: tokens of a step at most.
    """
    most = min(max_num_seqs, max_tokens // rows)
    requests = [1, 2, 3, 4, 6, 8, 12, 16]
    while requests[-1] < most:
        requests += [requests[-1] + requests[-1] // 4 * i for i in (1, 2, 3, 4)]
    return [rows * n for n in requests if n < most] + [rows * most]


def uncaptured(
    captured: Sequence[int], rows: int, max_num_seqs: int, max_tokens: int
) -> list[int] | None:
    """Sizes that would cover every decode step; None where those that are captured do.

    Args:
        captured: sizes of vLLM's graphs, in tokens.
        rows, max_num_seqs, max_tokens: as for `decode_sizes`.
    """
    sizes = decode_sizes(rows, max_num_seqs, max_tokens)
    return None if max(captured, default=0) >= sizes[-1] else sizes
