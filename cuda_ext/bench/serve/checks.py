"""The correctness gate of a run: a list of checks, all of which must hold before a ratio is made.

Dummy weights in bf16 are chaotic, so tokens can't be compared between arms. What can be:

* every request got every token that it asked for, and both arms got the same requests;
* the layers that served were vLLM's own in one arm, and ReplaySSM's in the other;
* drafts were accepted as often as was asked for;
* log-probabilities of the same tokens. `prefill`: of the gate's prompts, stock against ReplaySSM.
  `decode`: of the tokens that ReplaySSM said, as they were decoded with drafts, against the same
  tokens read as the end of a prompt; they are given there, whatever the sampler accepted, so a
  fold that loses a row shows in every token after it. Each may be no larger than stock's own of
  the same kind, times the slack: for `prefill` of its prompts from the same ones in another batch,
  for `decode` of what it decoded from the same tokens read as a prompt.

Distances are root mean squares: for `decode` over all positions, for `prefill` over those where the
two differ. Another batch changes the order of stock's sums in few of its prompts, and all others
agree to the bit; over all positions its distance would say how seldom they change, and not by how
much. Between the arms they change in all prompts: their attention blocks differ in size (688
against 592 tokens for the shape of Qwen3.5-4B), and with them the order of sums, which no second
distance of stock can show, for an engine has one block size. In the first run on an H200, stock
differed from itself at 30 of 3,714 positions, by 1.5e-4, and ReplaySSM from it at 2,797, by 8.5e-5.

Where stock differs from itself at fewer than `FEW_POSITIONS` there is no such distance; `prefill`
is then held to `decode`'s, both over all positions, and its note says so. Where stock is as far
from itself as the values spread, the check says little, and its note says so too.

Whether decode batches lay within the captured CUDA graphs is listed (`graph_notes`) and turns
nothing red: on a small machine they need not.

`gate_checks` is the list; a check that is made elsewhere goes in by `extra` (`--checks`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cuda_ext.bench.serve.config import ARMS, BenchConfig
from cuda_ext.bench.serve.measure import EngineFigures, Run

FEW_POSITIONS = 10
"""Fewer positions at which stock differs from itself make no distance."""
SAYS_SOMETHING = 0.5
"""Largest distance of stock from itself, in parts of the spread, at which a check has force."""


@dataclass(frozen=True)
class Check:
    """One line of the gate.

    Args:
        name: which.
        ok: whether it holds.
        value, limit: what was found, and what is allowed.
        note: for a reader.
    """

    name: str
    ok: bool
    value: Any = None
    limit: Any = None
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """Without what is not said."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}


def rms_distance(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]
) -> float | None:
    """Root mean square of the differences, position by position; None where shapes differ.

    A value that is no number makes it infinite.
    """
    if [len(x) for x in first] != [len(x) for x in second] or not any(map(len, first)):
        return None
    squares = [
        (a - b) ** 2
        for one, other in zip(first, second, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    found = math.sqrt(sum(squares) / len(squares))
    return found if math.isfinite(found) else math.inf


def changed(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]
) -> tuple[list[float], list[float]] | None:
    """The values of those positions where the two differ; None where shapes differ."""
    if [len(x) for x in first] != [len(x) for x in second]:
        return None
    pairs = [
        (a, b)
        for one, other in zip(first, second, strict=True)
        for a, b in zip(one, other, strict=True)
        if a != b
    ]
    return [a for a, _ in pairs], [b for _, b in pairs]


def spread(values: Sequence[Sequence[float]]) -> float:
    """Standard deviation of all values."""
    flat = [value for one in values for value in one]
    if not flat:
        return 0.0
    mean = sum(flat) / len(flat)
    return math.sqrt(sum((value - mean) ** 2 for value in flat) / len(flat))


def gate_checks(
    config: BenchConfig,
    facts: Mapping[str, Mapping[str, Any]],
    gates: Mapping[str, Mapping[str, Any]],
    runs: Sequence[Run],
    extra: Iterable[Check] = (),
) -> list[Check]:
    """Every check of a run.

    Args:
        config: of the benchmark.
        facts: of each arm, as it said of itself.
        gates: of each arm, its log-probabilities.
        runs: of both arms.
        extra: checks made elsewhere.
    """
    measured = {run.arm for run in runs}
    found = [
        Check(
            "both arms",
            measured == set(ARMS),
            sorted(measured),
            sorted(ARMS),
            "a ratio needs both arms of one run",
        )
    ]
    found += [check for arm in ARMS if arm in facts for check in _layers(arm, facts[arm])]
    found.append(_complete(runs))
    found.append(_same_requests(runs))
    if config.acceptance_length is not None:
        found += [_acceptance(config, facts, arm, runs) for arm in ARMS if arm in measured]
    found += _distances(config, gates)
    return [*found, *extra]


def is_green(checks: Sequence[Check]) -> bool:
    """Whether ratios may be made."""
    return bool(checks) and all(check.ok for check in checks)


def graph_notes(facts: Mapping[str, Mapping[str, Any]], runs: Sequence[Run]) -> list[str]:
    """Of each arm that names its graphs, whether its decode batches fit into them.

    Args:
        facts: of each arm; `max_cudagraph_capture_size` in rows, `drafts` per request.
        runs: of both arms.
    """
    found = []
    for arm in ARMS:
        largest = facts.get(arm, {}).get("max_cudagraph_capture_size")
        if largest is None:
            continue
        rows = 1 + (facts[arm].get("drafts") or 0)
        most: dict[str, int] = {}
        for run in (run for run in runs if run.arm == arm):
            most[run.label] = max(most.get(run.label, 0), run.engine.running_max * rows)
        larger = [f"{label}: {count} rows" for label, count in most.items() if count > largest]
        what = f"not at {'; '.join(larger)}" if larger else "at every point"
        found.append(f"decode batches in graphs, {arm}: {what} (graphs of up to {largest} rows)")
    return found


def _layers(arm: str, facts: Mapping[str, Any]) -> list[Check]:
    count = facts.get("gdn_layers")
    served = facts.get("replay_layers")
    if served is None:
        return [
            Check(
                f"layers of {arm}",
                facts.get("replay_active") is (arm == "replay"),
                facts.get("replay_active"),
                arm == "replay",
                "by the server's log",
            )
        ]
    wanted = count if arm == "replay" else 0
    return [
        Check(
            f"layers of {arm}",
            bool(count) and served == wanted,
            served,
            wanted,
            f"GDN layers of {count} that ReplaySSM serves",
        )
    ]


def _complete(runs: Sequence[Run]) -> Check:
    records = [record for run in runs for record in run.records]
    bad = [record for record in records if not record.complete]
    reasons = sorted({record.error or f"{record.tokens} tokens" for record in bad})[:3]
    return Check(
        "requests complete",
        bool(records) and not bad,
        len(records) - len(bad),
        len(records),
        "; ".join(reasons),
    )


def _same_requests(runs: Sequence[Run]) -> Check:
    given: dict[tuple[str, int], set[str]] = {}
    for run in runs:
        given.setdefault((run.label, run.run), set()).add(run.prompts)
    differ = sorted(f"{label}, run {number}" for (label, number), d in given.items() if len(d) > 1)
    return Check("same requests", not differ, len(differ), 0, "; ".join(differ[:3]))


def _acceptance(
    config: BenchConfig, facts: Mapping[str, Mapping[str, Any]], arm: str, runs: Sequence[Run]
) -> Check:
    asked = config.acceptance_length
    assert asked is not None
    engines = [run.engine for run in runs if run.arm == arm]
    total = EngineFigures(
        drafts=sum(e.drafts for e in engines), accepted=sum(e.accepted for e in engines)
    )
    length = total.acceptance_length
    drafts = (
        facts.get(arm, {}).get("drafts")
        or config.flag("speculative-config")["num_speculative_tokens"]
    )
    # Accepted drafts lie in 0..D, so their deviation is at most D/2; four standard errors.
    chance = 4 * drafts / 2 / math.sqrt(total.drafts) if total.drafts else math.inf
    limit = max(config.gate.acceptance * asked, min(chance, asked))
    return Check(
        f"acceptance of {arm}",
        length is not None and abs(length - asked) <= limit,
        None if length is None else round(length, 3),
        [round(asked - limit, 3), round(asked + limit, 3)],
    )


def _distances(config: BenchConfig, gates: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    missing = [arm for arm in ARMS if arm not in gates]
    if missing:
        return [
            Check(
                "log-probabilities", False, None, None, f"not measured for {' and '.join(missing)}"
            )
        ]
    stock, replay = (gates[arm] for arm in ARMS)
    same = Check(
        "gate prompts", stock["prompts"] == replay["prompts"], replay["prompts"], stock["prompts"]
    )
    slack = config.gate.slack
    read = rms_distance(stock["decoded"], stock["rescored"])
    decode = _distance(
        "decode",
        slack,
        ("decoded and read", read),
        rms_distance(replay["decoded"], replay["rescored"]),
        replay["decoded"],
    )
    return [same, _prefill(slack, stock, replay, read), decode]


def _prefill(
    slack: float, stock: Mapping[str, Any], replay: Mapping[str, Any], read: float | None
) -> Check:
    itself = changed(stock["prompt"], stock["prompt_alone"])
    arms = changed(stock["prompt"], replay["prompt"])
    if itself is None or arms is None:
        return _distance("prefill", slack, ("in another batch", None), None, ())
    count = len(itself[0])
    if count < FEW_POSITIONS:
        way = f"{count} positions differ in another batch, so as decoded and read"
        ours = rms_distance(stock["prompt"], replay["prompt"])
        return _distance("prefill", slack, (way, read), ours, stock["prompt"])
    every = sum(map(len, stock["prompt"]))
    way = (
        f"where it differs in another batch (at {count} of {every} positions, "
        f"ReplaySSM at {len(arms[0])})"
    )
    ours = rms_distance([arms[0]], [arms[1]]) if arms[0] else 0.0
    theirs = rms_distance([itself[0]], [itself[1]])
    return _distance("prefill", slack, (way, theirs), ours, stock["prompt"])


def _distance(
    name: str,
    slack: float,
    own: tuple[str, float | None],
    ours: float | None,
    values: Sequence[Sequence[float]],
) -> Check:
    way, itself = own
    if itself is None or ours is None:
        return Check(f"log-probabilities, {name}", False, note="lengths differ")
    width, limit = spread(values), slack * itself
    weak = "" if itself < SAYS_SOMETHING * width else "; says little: as far as the values spread"
    return Check(
        f"log-probabilities, {name}",
        # No number compares as true.
        ours <= limit and math.isfinite(limit),
        float(f"{ours:.4g}"),
        float(f"{limit:.4g}"),
        f"stock from itself: {way} {itself:.4g}; spread {width:.4g}{weak}",
    )
