"""What one engine step adds to ReplaySSM's counters, from vLLM's statistics of it; on plain ints.

The place that reads the attribute names of `SchedulerStats`, `SpecDecodingStats` and
`IterationStats` (vllm/v1/metrics/stats.py, vllm/v1/spec_decode/metrics.py), which are the same in
0.26.0, 0.31.0 and 0.33.0 as far as they are read here.

The unit is the verification: one request in one step after its prompt, with one row for its last
token and one for each draft. It leaves 1 + accepted rows in the ring, and the request's next step
starts by folding them. vLLM gives the number of verifications with the tokens that it delivers (one
entry in `inter_token_latencies_iter` each), drafted and accepted ones with the scheduler's counts.
With several API servers the two may reach different ones, so nothing here subtracts one from the
other: each server's counters add up to the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class WaitingRows:
    """Rows that wait in the rings after a step, of the requests whose drafts it verified.

    Args:
        mean: over these requests.
        most: of one request.
    """

    mean: float
    most: int


NOTHING_WAITS = WaitingRows(0.0, 0)


@dataclass(frozen=True)
class Step:
    """What one report adds.

    Args:
        verifications: of all requests. A request that was preempted after its first token adds one
            too many when it is back, since its recomputed prompt ends in a token like any other.
        folds: verifications but for the last of each request that finished. Aborted and preempted
            requests finish nothing, so each adds one too many.
        rows_verified: rows of the verifications: one each, and their drafts but for those that a
            grammar had ruled out before.
        rows_accepted: rows of the verifications that stay: one each, and the accepted drafts.
        slots_in_use: requests that hold a slot after the step; None where this report has none.
        waiting: None where this report has none.
    """

    verifications: int = 0
    folds: int = 0
    rows_verified: int = 0
    rows_accepted: int = 0
    slots_in_use: int | None = None
    waiting: WaitingRows | None = None

    def after(self, earlier: Step) -> Step:
        """Both together; of what is not counted but measured, this one's."""
        return replace(
            self,
            verifications=earlier.verifications + self.verifications,
            folds=earlier.folds + self.folds,
            rows_verified=earlier.rows_verified + self.rows_verified,
            rows_accepted=earlier.rows_accepted + self.rows_accepted,
        )


def read_step(scheduler_stats: Any, iteration_stats: Any) -> Step:
    """What one report of vLLM adds.

    Args:
        scheduler_stats: vllm.v1.metrics.stats.SchedulerStats or None.
        iteration_stats: vllm.v1.metrics.stats.IterationStats or None.

    Raises:
        AttributeError: this vLLM reports other things.
    """
    verifications = last_ones = drafted = accepted = 0
    slots = waiting = None
    if iteration_stats is not None:
        verifications = len(iteration_stats.inter_token_latencies_iter)
        # A request that ends on its first token has verified nothing.
        last_ones = sum(r.num_generation_tokens > 1 for r in iteration_stats.finished_requests)
    if scheduler_stats is not None:
        slots = scheduler_stats.num_running_reqs
        drafts = scheduler_stats.spec_decoding_stats
        if drafts is not None:
            drafted, accepted = drafts.num_draft_tokens, drafts.num_accepted_tokens
            waiting = _waiting(drafts.num_drafts, accepted, drafts.num_accepted_tokens_per_pos)
        if slots == 0:
            waiting = NOTHING_WAITS
    return Step(
        verifications=verifications,
        folds=max(0, verifications - last_ones),
        rows_verified=verifications + drafted,
        rows_accepted=verifications + accepted,
        slots_in_use=slots,
        waiting=waiting,
    )


def _waiting(requests: int, accepted: int, by_position: Sequence[int]) -> WaitingRows | None:
    if requests == 0:
        return None
    longest = max((index + 1 for index, count in enumerate(by_position) if count), default=0)
    return WaitingRows(1 + accepted / requests, 1 + longest)
