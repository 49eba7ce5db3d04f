"""The correctness gate of a run: a list of checks, all of which must hold before a ratio is made.

Dummy weights in bf16 are chaotic, so tokens can't be compared between arms. What can be:

* every request got every token that it asked for, and both arms got the same requests;
* the layers that served were vLLM's own in one arm, and ReplaySSM's in the other, and dummy weights
  are the same in both;
* drafts were accepted as often as was asked for;
* log-probabilities of the same tokens, in several batch compositions (`engine.ArmEngine.gate`).
  `prefill`: of the gate's prompts, ReplaySSM from stock in the same composition, against stock from
  itself in another composition, the largest of each. `decode`: of the tokens that an arm said, as
  they were decoded with drafts, against the same tokens read as the end of a prompt; they are given
  there, whatever the sampler accepted, so a fold that loses a row shows in every token after it.
  ReplaySSM's distance against stock's, the largest of each. Both may be larger by the slack, since
  two samples of one noise differ; whether they are not larger at all is in the result too (`bf16`);
* a planted fault is seen: ReplaySSM decodes once more with a row lost in each fold, which must
  bring `decode` past its limit. A gate that does not see that is blind, and red. In a server no
  fault can be planted, so with servers there is no such check, and a note says so (`server_notes`).

Distances are root mean squares: for `decode` over all positions, for `prefill` over those where the
two differ. Another batch changes the order of stock's sums in few of its prompts, and all others
agree to the bit; over all positions its distance would say how seldom they change, and not by how
much. Between the arms they change in all prompts: their attention blocks differ in size (688
against 592 tokens for the shape of Qwen3.5-4B), and with them the order of sums, which no second
distance of stock can show, for an engine has one block size. In the first run on an H200, stock
differed from itself at 30 of 3,714 positions, by 1.5e-4, and ReplaySSM from it at 2,797, by 8.5e-5.

Where stock differs from itself at fewer than `FEW_POSITIONS` in each composition there is no such
distance; `prefill` is then held to `decode`'s, both over all positions, and its note says so. Where
stock is as far from itself as the values spread, the check says little, and its note says so too.

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
    found += _same_weights(facts)
    found += _distances(config, facts, gates)
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


def server_notes(config: BenchConfig) -> list[str]:
    """What the gate of a run with servers does not show."""
    found = [
        "no planted fault: in a server none can be planted, so that its gate would see a wrong "
        "state was not shown in this run"
    ]
    if config.flag("load-format") == "dummy":
        found.append(
            "weights are dummy ones as vLLM makes them, so log-probabilities say little of GDN"
        )
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


def _same_weights(facts: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    told = {arm: facts[arm].get("dummy_weights") for arm in ARMS if arm in facts}
    if set(told) != set(ARMS) or not any(told.values()):
        return []
    stock, replay = (_weights_told(told[arm]) for arm in ARMS)
    return [Check("dummy weights by one rule", stock == replay, replay, stock)]


def _weights_told(found: Mapping[str, Any] | None) -> str:
    models = (found or {}).get("models", ())
    digests = " ".join(model["digest"] for model in models)
    return f"{(found or {}).get('kind')} {digests}".strip()


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


def _distances(
    config: BenchConfig,
    facts: Mapping[str, Mapping[str, Any]],
    gates: Mapping[str, Mapping[str, Any]],
) -> list[Check]:
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
    slack, found = config.gate.slack, _Distances.of(stock, replay)
    decode = _distance(
        "decode",
        slack,
        ("decoded and read", found.stock_decode),
        found.replay_decode,
        _values(replay["decode"].values()),
    )
    return [same, _prefill(slack, stock, found), decode, *_fault(slack, facts, replay, found)]


@dataclass(frozen=True)
class _Distances:
    """The largest distances of each kind; None where shapes differ.

    Args:
        itself: of stock's prompts from themselves, by composition: RMS and positions that differ.
        arms: of ReplaySSM's prompts from stock's, by composition.
        whole: the largest of `arms` over all positions.
        stock_decode, replay_decode: of what an arm decoded from the same read.
    """

    itself: Mapping[str, tuple[float, int] | None]
    arms: Mapping[str, tuple[float, int] | None]
    whole: float | None
    stock_decode: float | None
    replay_decode: float | None

    @classmethod
    def of(cls, stock: Mapping[str, Any], replay: Mapping[str, Any]) -> _Distances:
        first, *others = stock["read"]
        pairs = [(stock["read"][name], replay["read"].get(name, ())) for name in stock["read"]]
        return cls(
            {name: _changed(stock["read"][first], stock["read"][name]) for name in others},
            {name: _changed(*pair) for name, pair in zip(stock["read"], pairs, strict=True)},
            _largest(rms_distance(*pair) for pair in pairs),
            _largest(rms_distance(one["said"], one["read"]) for one in stock["decode"].values()),
            _largest(rms_distance(one["said"], one["read"]) for one in replay["decode"].values()),
        )

    @property
    def own(self) -> tuple[str, float, int] | None:
        """Composition in which stock is furthest from itself, by how much, and where."""
        enough = [
            (name, *found)
            for name, found in self.itself.items()
            if found is not None and found[1] >= FEW_POSITIONS
        ]
        # A value that is no number is found by whoever compares with it.
        return max(enough, key=lambda one: one[1]) if enough else None


def bf16_distances(gates: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Distances in bf16, without slack; None where an arm is missing.

    Returns:
        `stock_to_itself` and `replay_to_stock` of the same prompts, by composition: `rms` over the
        positions that differ, and their count; `decode` of both arms; `holds`, whether the largest
        of ReplaySSM from stock is at most the largest of stock from itself.
    """
    if any(arm not in gates for arm in ARMS):
        return None
    found = _Distances.of(*(gates[arm] for arm in ARMS))

    def listed(given: Mapping[str, tuple[float, int] | None]) -> dict[str, Any]:
        return {
            name: {"rms": float(f"{one[0]:.4g}"), "positions": one[1]}
            for name, one in given.items()
            if one is not None
        }

    ours = _largest(one and one[0] for one in found.arms.values())
    return {
        "stock_to_itself": listed(found.itself),
        "replay_to_stock": listed(found.arms),
        "decode": {"stock": found.stock_decode, "replay": found.replay_decode},
        "holds": found.own is not None and ours is not None and ours <= found.own[1],
    }


def _largest(values: Iterable[float | None]) -> float | None:
    """None where one is missing."""
    given = list(values)
    if not given or any(value is None for value in given):
        return None
    # `max` would pass over a value that is no number.
    numbers = [value for value in given if value is not None]
    return max(value if math.isfinite(value) else math.inf for value in numbers)


def _changed(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]
) -> tuple[float, int] | None:
    """RMS over the positions that differ, and how many; None where shapes differ."""
    found = changed(first, second)
    if found is None:
        return None
    return (rms_distance([found[0]], [found[1]]) or 0.0, len(found[0]))


def _values(parts: Iterable[Mapping[str, Any]]) -> list[Sequence[float]]:
    return [values for part in parts for values in part["said"]]


def _prefill(slack: float, stock: Mapping[str, Any], found: _Distances) -> Check:
    values = next(iter(stock["read"].values()))
    ours = _largest(one and one[0] for one in found.arms.values())
    if found.own is None:
        if ours is None or not found.itself or None in found.itself.values():
            return _distance("prefill", slack, ("in another batch", None), None, ())
        most = max(one[1] for one in found.itself.values() if one is not None)
        way = f"{most} positions differ in another batch, so as decoded and read"
        return _distance("prefill", slack, (way, found.stock_decode), found.whole, values)
    name, theirs, count = found.own
    every = sum(map(len, values))
    theirs_at = [one[1] for one in found.arms.values() if one is not None]
    way = (
        f"where it differs in another batch ({name}, at {count} of {every} positions, "
        f"ReplaySSM at {max(theirs_at, default=0)})"
    )
    return _distance("prefill", slack, (way, theirs), ours, values)


def _fault(
    slack: float,
    facts: Mapping[str, Mapping[str, Any]],
    replay: Mapping[str, Any],
    found: _Distances,
) -> list[Check]:
    """Whether `decode` sees rows lost; nothing for a server, in which none can be planted."""
    name, given = "planted fault is seen", replay.get("faults") or []
    if not given:
        if facts.get("replay", {}).get("replay_layers") is None:
            return []
        return [Check(name, False, note="none was planted")]
    told = []
    for fault in given:
        distance = rms_distance(fault["said"], fault["read"])
        told.append((fault, math.inf if distance is None else distance))
    limit = math.inf if found.stock_decode is None else slack * found.stock_decode
    fault, distance = told[0]
    others = [
        f"of one fold in {one['every']} ({one['folds']} folds): {far:.4g}, "
        f"{'seen' if far > limit else 'not seen'}"
        for one, far in told[1:]
    ]
    seen = distance > limit and fault["folds"] > 0
    blind = "" if seen else "the gate is blind: a wrong state does not show"
    what = f"decode with the oldest row of each fold lost, {fault['folds']} folds"
    return [
        Check(
            name,
            seen,
            float(f"{distance:.4g}"),
            f"above {limit:.4g}",
            "; ".join(filter(None, [blind, what, *others])),
        )
    ]


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
