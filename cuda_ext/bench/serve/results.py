"""The result file: what was measured, where it comes from, and ratios where the gate is green.

It is written whole after every step, so that a run that is killed keeps what it has. Two results of
one arm each become one where machine, versions, flags and session are the same.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuda_ext.bench.serve.checks import (
    Check,
    bf16_distances,
    gate_checks,
    graph_notes,
    is_green,
    server_notes,
)
from cuda_ext.bench.serve.config import ARMS, BenchConfig
from cuda_ext.bench.serve.load import Point, points
from cuda_ext.bench.serve.measure import Run, figures
from vllm_gaudi_ext.problems import numbered

RATIOS = {
    # figure: whether ReplaySSM's stands above the line.
    "output_tok_s": True,
    "ttft_p50_s": False,
    "ttft_p99_s": False,
    "tpot_p50_ms": False,
    "e2e_p50_s": False,
}
_MUST_AGREE = ("machine", "versions", "session", "mode")
_PLACE = ("concurrency", "request_rate", "output_tokens")
_ASKED = ("points", "concurrency", "request_rates", "open_requests", "waves", "output_tokens")
"""Keys of `load` that say which points a session was asked for."""
_OF_A_SESSION = ("session", "machine", "interleave", "config_digest")
"""What of a result is true of its session alone."""
_WITHOUT = re.compile(r"(.+):([1-9]\d*)x([1-9]\d*)")
FIT_MAY_DIFFER = 0.02
"""Between starts with the same flags; free memory is measured, and not the same each time."""


class MergeRefused(ValueError):
    """Results that are not two arms of one run; lists every difference."""


@dataclass
class Results:
    """All that a run has found so far.

    Args:
        config: of the benchmark.
        origin: provenance, `session` and `mode`.
        facts, gates: of each arm.
        runs: in the order in which they were made.
        profiles: of each arm, as `ArmEngine.profile` gives them.
        left_out: what the budget did not allow, in words.
        extra: checks made elsewhere.
        failure: why the run ended early.
    """

    config: BenchConfig
    origin: dict[str, Any]
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    gates: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    profiles: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    extra: list[Check] = field(default_factory=list)
    failure: str | None = None

    def checks(self) -> list[Check]:
        """The gate, over what there is."""
        return gate_checks(self.config, self.facts, self.gates, self.runs, self.extra)

    def summary(self) -> dict[str, Any]:
        """The content of the result file."""
        checks = self.checks()
        green = is_green(checks)
        lines = self.lines("green" if green else "red")
        found: dict[str, Any] = {
            "gate": "green" if green else "red",
            "checks": [check.as_json() for check in checks],
            **self.origin,
            "config_digest": self.config.digest(),
            "config": self.config.model_dump(),
            "fit_8k": {arm: self.facts[arm].get("fit_8k") for arm in ARMS if arm in self.facts},
            "arms": self.facts,
            "points": lines,
        }
        if distances := bf16_distances(self.gates):
            found["bf16"] = distances
        if self.profiles:
            found["profile"] = self.profile_lines()
        if green:
            found["ratios"] = ratios(self.facts, lines)
        notes = [*graph_notes(self.facts, self.runs), *_unequal(lines)]
        if self.origin.get("mode") == "server":
            notes += server_notes(self.config)
        if notes:
            found["notes"] = notes
        if self.left_out:
            found["left_out"] = self.left_out
        if self.failure:
            found["failure"] = self.failure
        return found

    def profile_lines(self) -> list[dict[str, Any]]:
        """One entry an arm, kind and concurrency."""
        session = self.origin.get("session")
        return [
            {"arm": arm, **line, "session": session}
            for arm in ARMS
            for line in self.profiles.get(arm, ())
        ]

    def lines(self, gate: str) -> list[dict[str, Any]]:
        """One entry an arm and point, in the order of the config, with where it comes from.

        Args:
            gate: of this run.
        """
        found = []
        origin = {name: self.origin.get(name) for name in ("session", "commit", "date")}
        for point in points(self.config.load):
            for arm in ARMS:
                runs = [r for r in self.runs if r.arm == arm and r.label == point.label]
                if runs:
                    found.append({**_line(arm, point, runs), **origin, "gate": gate})
        return found

    def save(self, folder: Path) -> Path:
        """Write `<name>.json`, and beside it `<name>.runs.json` with every request.

        The second is what `merge` reads.
        """
        path = write_summary(self.summary(), folder)
        whole = {
            "config": self.config.model_dump(),
            "origin": self.origin,
            "facts": self.facts,
            "gates": self.gates,
            "runs": [run.as_json() for run in self.runs],
            "profiles": self.profiles,
            "left_out": self.left_out,
            "extra": [check.as_json() for check in self.extra],
            "failure": self.failure,
        }
        _replace(runs_file(path), json.dumps(whole) + "\n")
        return path


def runs_file(result: Path) -> Path:
    """The file with every request of a result."""
    return result.with_name(result.name.removesuffix(".json") + ".runs.json")


def _replace(path: Path, text: str) -> None:
    making = path.with_name(f".{path.name}.{os.getpid()}")
    making.write_text(text)
    making.replace(path)


def write_summary(summary: Mapping[str, Any], folder: Path) -> Path:
    """Write a summary alone, under its config's name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{summary['config']['name']}.json"
    _replace(path, json.dumps(summary, indent=1) + "\n")
    return path


def _line(arm: str, point: Point, runs: Sequence[Run]) -> dict[str, Any]:
    found = {
        "arm": arm,
        "loop": "closed" if point.rate is None else "open",
        "concurrency": point.concurrency,
        "request_rate": point.rate,
        "output_tokens": point.output_tokens,
        "waves": point.requests / point.concurrency if point.concurrency else None,
        "runs": len(runs),
        **figures(runs, point.concurrency),
    }
    if len(runs) > 1:
        found["output_tok_s_of_runs"] = [figures([run])["output_tok_s"] for run in runs]
    return found


def ratios(
    facts: Mapping[str, Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """How much better ReplaySSM is; above 1 is better, for latencies too.

    A point has one where both arms did it equally often. Only for a green gate: whoever calls this
    has asked.
    """
    found: dict[str, Any] = {"points": []}
    stock, replay = (facts.get(arm, {}).get("fit_8k") for arm in ARMS)
    if stock and replay:
        found["fit_8k"] = round(replay / stock, 3)
    for (concurrency, rate, tokens), sides in _places(lines).items():
        if set(sides) != set(ARMS) or len({line["runs"] for line in sides.values()}) > 1:
            continue
        one: dict[str, Any] = {
            "concurrency": concurrency,
            "request_rate": rate,
            "output_tokens": tokens,
        }
        for name, higher_is_better in RATIOS.items():
            theirs, ours = (sides[arm][name] for arm in ARMS)
            if theirs and ours:
                one[name] = round(ours / theirs if higher_is_better else theirs / ours, 3)
        found["points"].append(one)
    return found


def _places(
    lines: Iterable[Mapping[str, Any]],
) -> dict[tuple[Any, ...], dict[str, Mapping[str, Any]]]:
    found: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for line in lines:
        found.setdefault(tuple(line[name] for name in _PLACE), {})[line["arm"]] = line
    return found


def _unequal(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    found = []
    for place, sides in _places(lines).items():
        counts = [f"{line['runs']} of {arm}" for arm, line in sides.items()]
        if len({line["runs"] for line in sides.values()}) > 1:
            named = ", ".join(f"{k} {v}" for k, v in zip(_PLACE, place, strict=True) if v)
            found.append(f"no ratio at {named}: runs are {' and '.join(counts)}")
    return found


def load_results(path: Path) -> Results:
    """What a run saved.

    Args:
        path: of the result file, or of the `.runs.json` beside it.

    Raises:
        MergeRefused: there is no such file, or it is not one of ours.
    """
    source = path if path.name.endswith(".runs.json") else runs_file(path)
    try:
        found = json.loads(source.read_text())
        return Results(
            config=BenchConfig.model_validate(found["config"]),
            origin=found["origin"],
            facts=found["facts"],
            gates=found["gates"],
            runs=[Run.from_json(run) for run in found["runs"]],
            profiles=found["profiles"],
            left_out=found["left_out"],
            extra=[Check(**check) for check in found["extra"]],
            failure=found["failure"],
        )
    except OSError as error:
        raise MergeRefused(f"{source}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise MergeRefused(
            f"{source}: not the runs of a serving benchmark ({type(error).__name__}: {error})"
        ) from None


def read_checks(path: Path) -> list[Check]:
    """Checks of the gate that were made elsewhere, as of tokens in fp32.

    Args:
        path: of a JSON list of mappings: `name` and `ok`, and `value`, `limit`, `note` at will.

    Raises:
        MergeRefused: it is something else.
    """
    try:
        found = [Check(**one) for one in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError) as error:
        raise MergeRefused(f"{path}: not a list of checks ({error})") from None
    if not all(isinstance(check.ok, bool) and check.name for check in found):
        raise MergeRefused(f"{path}: a check has a name, and ok true or false")
    return found


def load_summary(path: Path) -> dict[str, Any]:
    """The content of a result file.

    Raises:
        MergeRefused: there is none, or it is not one of ours.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise MergeRefused(f"{path}: {error}") from None
    needed = ("gate", "commit", "versions", "device", "mode", "config", "points")
    if (
        not isinstance(found, dict)
        or any(name not in found for name in needed)
        or not (found.get("session") or found.get("sessions"))
    ):
        raise MergeRefused(f"{path}: not the result of a serving benchmark")
    return found


def merge(given: Sequence[Results]) -> Results:
    """One result of several that were made in one session on one machine.

    Raises:
        MergeRefused: they differ in machine, versions, session, mode or flags, or measured the
            same thing twice; every difference is listed.
    """
    first = given[0]
    found = []
    for other in given[1:]:
        found += [
            f"{name}: {first.origin.get(name)!r} and {other.origin.get(name)!r}"
            for name in _MUST_AGREE
            if first.origin.get(name) != other.origin.get(name)
        ]
        if first.config.digest() != other.config.digest():
            found.append(f"flags or load: {_differences(first.config, other.config)}")
    seen: set[tuple[str, str, int]] = set()
    for run in (run for results in given for run in results.runs):
        key = (run.arm, run.label, run.run)
        if key in seen:
            found.append(f"measured twice: {run.arm} at {run.label}, run {run.run}")
        seen.add(key)
    if found:
        raise MergeRefused(f"these are not arms of one run:{numbered(dict.fromkeys(found))}")
    commands = " && ".join(str(results.origin.get("command")) for results in given)
    failures = [results.failure for results in given if results.failure]
    return Results(
        config=first.config,
        origin={**first.origin, "command": commands},
        facts=_union(results.facts for results in given),
        gates=_union(results.gates for results in given),
        runs=[run for results in given for run in results.runs],
        profiles={k: v for results in given for k, v in results.profiles.items()},
        left_out=[text for results in given for text in results.left_out],
        extra=[check for results in given for check in results.extra],
        failure="; ".join(failures) or None,
    )


def collect(given: Sequence[Mapping[str, Any]], without: Sequence[str] = ()) -> dict[str, Any]:
    """One result of several that each have both arms: a long matrix spread over several leases.

    Every ratio is still of one session. Points, ratios and profiles carry their session, points its
    commit, date and gate, and `sessions` says where each was run and what it was asked for. Commits
    may differ; `commit` and `date` list them all. `arms`, `fit_8k` and `bf16` are the first
    session's. A session that ended early is taken with what it has, and its `failure` is kept.

    Args:
        given: contents of result files, also of collected ones.
        without: what to leave out, as `SESSION:CONCURRENCYxOUTPUT`: both arms of that point of that
            session, their ratio, and the session's profiles at that concurrency. `left_out` has
            their figures.

    Raises:
        MergeRefused: one is red, a point lacks an arm or is there twice, nothing is there to be
            left out, or they differ in versions, device, mode, flags, weights, gate, in prompt
            lengths or token ids, or by more than `FIT_MAY_DIFFER` in how many requests fit.
    """
    given, found = _leave_out(given, without)
    first = given[0]
    for one in given:
        name_of = _sessions(one)
        if one["gate"] != "green":
            found.append(f"session {name_of}: the gate is {one['gate']}")
        found += [
            f"{name}: {first[name]!r} and {one[name]!r}"
            for name in ("versions", "device", "mode")
            if first[name] != one[name]
        ]
        if first["config"]["gate"] != one["config"]["gate"]:
            found.append(f"gates of {_sessions(first)} and {name_of} differ")
        found += [
            f"load.{name}: {first['config']['load'][name]!r} and {one['config']['load'][name]!r}"
            for name in ("prompt_tokens", "token_ids")
            if first["config"]["load"][name] != one["config"]["load"][name]
        ]
        found += [
            f"session {name_of}: {', '.join(sides)} alone at {place}"
            for place, sides in _places(one["points"]).items()
            if set(sides) != set(ARMS)
        ]
        if any(
            first["config"].get(name) != one["config"].get(name)
            for name in ("shape", "serve", "acceptance_length", "dummy_weights", "environment")
        ):
            found.append(f"flags of {_sessions(first)} and {name_of} differ")
        found += [
            f"fit_8k of {arm}: {fits[0]} and {fits[1]}"
            for arm in ARMS
            for fits in [[side["fit_8k"].get(arm) or 0.0 for side in (first, one)]]
            if not math.isclose(*fits, rel_tol=FIT_MAY_DIFFER)
        ]
    places: dict[tuple[Any, ...], list[str]] = {}
    for point in (point for one in given for point in one["points"]):
        place = (point["arm"], *(point[name] for name in _PLACE))
        places.setdefault(place, []).append(str(point["session"]))
    found += [
        f"measured twice: {place} in {' and '.join(names)}; --without leaves one out"
        for place, names in places.items()
        if len(names) > 1
    ]
    if found:
        raise MergeRefused(f"these can't be collected:{numbered(dict.fromkeys(found))}")
    own = ("left_out", "failure", "checks", "notes", "profile", *_OF_A_SESSION)
    whole = {name: value for name, value in first.items() if name not in own}
    for name in ("left_out", "notes"):
        if texts := [text for one in given for text in one.get(name, ())]:
            whole[name] = list(dict.fromkeys(texts)) if name == "notes" else texts
    profile = [line for one in given for line in one.get("profile", ())]
    failures = [
        # One that was collected already names them.
        one["failure"] if "sessions" in one else f"{one['session']}: {one['failure']}"
        for one in given
        if one.get("failure")
    ]
    if failures:
        whole["failure"] = "; ".join(failures)
    return whole | {
        "command": " && ".join(dict.fromkeys(one["command"] for one in given)),
        "commit": _listed(one["commit"] for one in given),
        "date": _listed(one["date"] for one in given),
        "config": _shared_config(given),
        "sessions": [entry for one in given for entry in _session_entries(one)],
        "checks": [check for one in given for check in one["checks"]],
        **_bf16(given),
        "points": [point for one in given for point in one["points"]],
        "ratios": first["ratios"]
        | {
            "points": [
                {"session": one.get("session"), **line}
                for one in given
                for line in one["ratios"]["points"]
            ]
        },
        **({"profile": profile} if profile else {}),
    }


def _listed(given: Iterable[str]) -> str:
    """Each once; those of one that was collected already are a list of their own."""
    return ", ".join(dict.fromkeys(part for text in given for part in text.split(", ")))


def _sessions(one: Mapping[str, Any]) -> str:
    """A result's session, or those that it was collected from."""
    entries = one.get("sessions") or [one]
    return ", ".join(str(entry["session"]) for entry in entries)


def _session_entries(one: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if one.get("sessions"):
        return list(one["sessions"])
    kept = (
        *("session", "machine", "date", "command", "commit", "gate", "failure", "interleave"),
        *("config_digest", "fit_8k", "arms", "bf16", "checks"),
    )
    asked = {name: one["config"].get(name) for name in ("interleave", "load", "profile")}
    return [{**{name: one[name] for name in kept if name in one}, "config": asked}]


def _shared_config(given: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The first one's, without what it was asked for, and of `load` what all of them have."""
    loads = [one["config"]["load"] for one in given]
    load = {
        name: value
        for name, value in loads[0].items()
        if name not in _ASKED and all(name in other and other[name] == value for other in loads)
    }
    kept = {k: v for k, v in given[0]["config"].items() if k not in ("interleave", "profile")}
    return {**kept, "load": load}


def _leave_out(
    given: Sequence[Mapping[str, Any]], without: Sequence[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Results without some of their points, and what of `without` can't be done."""
    kept, wrong = [dict(one) for one in given], []
    for text in dict.fromkeys(without):
        asked = _WITHOUT.fullmatch(text)
        if asked is None:
            wrong.append(f"--without {text}: write SESSION:CONCURRENCYxOUTPUT, as in a1b2:4x512")
            continue
        place = (asked[1], int(asked[2]), int(asked[3]))
        holders = [
            one
            for one in kept
            if any(_session_place(one, point) == place for point in one["points"])
        ]
        if not holders:
            there = sorted(
                {
                    "{}:{}x{}".format(*_session_place(one, point))
                    for one in kept
                    for point in one["points"]
                    if point["concurrency"]
                }
            )
            wrong.append(f"--without {text}: no such point; there are {', '.join(there)}")
        for one in holders:
            told = _take_away(one, place)
            one["left_out"] = [*one.get("left_out", ()), f"by --without {text}: {told}"]
    return kept, wrong


def _session_place(one: Mapping[str, Any], line: Mapping[str, Any]) -> tuple[str, Any, Any]:
    """A point or a ratio; the ratios of a single session do not name it."""
    return (
        str(line.get("session", one.get("session"))),
        line["concurrency"],
        line["output_tokens"],
    )


def _take_away(one: dict[str, Any], place: tuple[str, int, int]) -> str:
    """Takes a point from a result, and tells what it was."""
    gone = [point for point in one["points"] if _session_place(one, point) == place]
    one["points"] = [point for point in one["points"] if _session_place(one, point) != place]
    told = [
        f"{point['arm']} {point['output_tok_s']} tok/s, TTFT p50 {point['ttft_p50_s']} s, "
        f"TPOT p50 {point['tpot_p50_ms']} ms, {point['requests']} requests"
        for point in gone
    ]
    if "ratios" in one:
        lines = one["ratios"]["points"]
        left = [line for line in lines if _session_place(one, line) != place]
        one["ratios"] = {**one["ratios"], "points": left}
    session, concurrency, _ = place
    profiles = list(one.get("profile", ()))
    profiled = [
        line
        for line in profiles
        if (line.get("session"), line["concurrency"]) == (session, concurrency)
    ]
    if profiled:
        one["profile"] = [line for line in profiles if line not in profiled]
        arms = " and ".join(dict.fromkeys(line["arm"] for line in profiled))
        told.append(f"profiles of {arms} at {concurrency}")
    return "; ".join(told)


def _bf16(given: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The first session's distances; `holds` where every session's do (`sessions` has them)."""
    told = [one["bf16"] for one in given if one.get("bf16")]
    return {"bf16": {**told[0], "holds": all(one["holds"] for one in told)}} if told else {}


def _union(given: Iterable[Mapping[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for one in given:
        found |= one
    return found


def _differences(first: BenchConfig, second: BenchConfig) -> str:
    one, other = first.model_dump(), second.model_dump()
    names = [name for name in one if one[name] != other[name] and name not in ("about",)]
    return ", ".join(names)
