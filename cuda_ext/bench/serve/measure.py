"""From the times of single requests to the figures of a point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

QUANTILES = (50, 90, 99)


@dataclass(frozen=True)
class Record:
    """What became of one request.

    Args:
        prompt_tokens, asked_tokens, tokens: lengths; the last is what came.
        ttft_s, e2e_s: seconds from its arrival to its first token, and to its last.
        error: why it failed; None where it did not.
    """

    prompt_tokens: int
    asked_tokens: int
    tokens: int
    ttft_s: float
    e2e_s: float
    error: str | None = None

    @property
    def complete(self) -> bool:
        """Whether it has every token that was asked for."""
        return self.error is None and self.tokens == self.asked_tokens

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds a token after the first; None where there is no other."""
        if self.tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.tokens - 1) * 1e3

    def as_json(self) -> dict[str, Any]:
        """For the file of all requests."""
        return asdict(self)


@dataclass(frozen=True)
class EngineFigures:
    """What the engine says of itself during a point.

    Args:
        running_max, waiting_max: requests at once.
        kv_usage_max: part of the pool in use, 0 to 1.
        preemptions: in all.
        drafts, accepted: verification steps of single requests with drafts, and drafts accepted.
    """

    running_max: int = 0
    waiting_max: int = 0
    kv_usage_max: float = 0.0
    preemptions: int = 0
    drafts: int = 0
    accepted: int = 0

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a verification step brings; None without drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else None


@dataclass(frozen=True)
class Run:
    """One arm at one point, once.

    Args:
        arm, label, run: which arm, point and repetition.
        wall_s: from the first request to the last token.
        prompts: digest of the requests.
        records: one a request.
        engine: the engine's own figures.
    """

    arm: str
    label: str
    run: int
    wall_s: float
    prompts: str
    records: tuple[Record, ...]
    engine: EngineFigures

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Run:
        """The inverse of `as_json`."""
        return cls(
            **{name: found[name] for name in ("arm", "label", "run", "wall_s", "prompts")},
            records=tuple(Record(**record) for record in found["records"]),
            engine=EngineFigures(**found["engine"]),
        )

    def as_json(self) -> dict[str, Any]:
        """Everything, the single requests too."""
        return asdict(self)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear between the two nearest ranks, as numpy has it; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def figures(runs: Sequence[Run], first_wave: int | None = None) -> dict[str, Any]:
    """The figures of one arm at one point, over its repetitions.

    Latencies are of all requests together; throughput is of all tokens in all time.

    Args:
        runs: of one arm at one point.
        first_wave: requests that were sent at once, before any other ended; those after them give
            `ttft_later_p50_s` and its like, where there are any.
    """
    records = [record for run in runs for record in run.records]
    wall = sum(run.wall_s for run in runs)
    engines = [run.engine for run in runs]
    together = EngineFigures(
        drafts=sum(e.drafts for e in engines), accepted=sum(e.accepted for e in engines)
    )
    length = together.acceptance_length
    tokens = sum(record.tokens for record in records)
    found: dict[str, Any] = {
        "output_tok_s": round(tokens / wall, 1) if wall else None,
        "requests": len(records),
        "output_tokens_sum": tokens,
        "wall_s": round(wall, 3),
        "running_max": max((e.running_max for e in engines), default=0),
        "waiting_max": max((e.waiting_max for e in engines), default=0),
        "kv_usage_max": round(max((e.kv_usage_max for e in engines), default=0.0), 4),
        "preemptions": sum(e.preemptions for e in engines),
        "acceptance_length": None if length is None else round(length, 3),
    }
    # A request that gave nothing has no times.
    timed = [record for record in records if record.tokens]
    series = {
        "ttft_p{}_s": [record.ttft_s for record in timed],
        "tpot_p{}_ms": [t for record in timed if (t := record.tpot_ms) is not None],
        "e2e_p{}_s": [record.e2e_s for record in timed],
    }
    if first_wave is not None:
        later = [r.ttft_s for run in runs for r in run.records[first_wave:] if r.tokens]
        if later:
            series["ttft_later_p{}_s"] = later
    for name, values in series.items():
        for percent in QUANTILES:
            value = percentile(values, percent)
            found[name.format(percent)] = None if value is None else round(value, 4)
    return found
