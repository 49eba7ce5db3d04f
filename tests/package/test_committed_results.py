"""Every committed result says where it comes from; none is of a run whose gate was not green."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cuda_ext.bench.copy_task import score
from cuda_ext.bench.soak import checks

HOUSE = Path(__file__).parents[2]
RESULTS = HOUSE / "cuda_ext/bench/results"
FILES = sorted(RESULTS.glob("*.json"))
SERVED = [path for path in FILES if path.stem.startswith("serve-")]
DOCS = [HOUSE / "README.md", HOUSE / "cuda_ext/bench/NOTES.md", *HOUSE.glob("recipes/*/*.yaml")]

COMMIT = "[0-9a-f]{7,40}"
MACHINE_PATH = re.compile(r"(?:^|[\"'\s=,:(])/(?:tmp|work|root|home|data|mnt|var|opt)(?:/|\b)")
DEVICE_IN_NAME = re.compile(r"-([a-z]\d{2,3})\b")
FILE_IN_TEXT = re.compile(
    r"(?<![\w./-])(?:cuda_ext|vllm_gaudi_ext|tests|recipes|results)/[\w./-]*\w"
)
RESULT_IN_TEXT = re.compile(r"(?<![\w.])[a-z]+-[a-z]\d{2,3}\b[\w-]*\.(?:json|png)\b")

GREEN = {
    "gate": "green",
    "green": True,
    "ok": True,
    "problems": [],
    "ended_early": [],
    "failed": 0,
    "started": True,
    "complete": True,
}
"""What stands wherever one of these names does. The `gate` of a config is a mapping, none of it."""
FIGURES = {
    "concurrency",
    "output_tok_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "tpot_p50_ms",
    "running_max",
    "preemptions",
    "acceptance_length",
}
"""Of a point, besides its arm."""
HIGHER_IS_BETTER = {
    "output_tok_s": True,
    "ttft_p50_s": False,
    "ttft_p99_s": False,
    "tpot_p50_ms": False,
    "e2e_p50_s": False,
}
"""Figures that have a ratio."""
ROUNDING = 0.00051

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
each_served = pytest.mark.parametrize("path", SERVED, ids=lambda path: path.stem)


def entries(found: Any) -> Iterator[tuple[str, Any]]:
    """Every name and value, however deep."""
    for name, value in found.items() if isinstance(found, dict) else ():
        yield name, value
    for value in found.values() if isinstance(found, dict) else found:
        if isinstance(value, dict | list):
            yield from entries(value)


def texts(found: Any) -> Iterator[str]:
    """Every text, names among them."""
    if isinstance(found, str):
        yield found
    elif isinstance(found, dict):
        yield from found
        yield from texts(list(found.values()))
    elif isinstance(found, list):
        for value in found:
            yield from texts(value)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def place(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["concurrency"], line["request_rate"], line["output_tokens"]


def sides(found: dict[str, Any]) -> dict[tuple[Any, ...], dict[str, dict[str, Any]]]:
    """The points of each session and place, by arm; a place that is there twice fails."""
    grouped: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for point in found["points"]:
        arms = grouped.setdefault((point["session"], *place(point)), {})
        assert point["arm"] not in arms, f"twice: {point['arm']} at {place(point)}"
        arms[point["arm"]] = point
    return grouped


def sessions(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that a file was collected from; its own where it is of one."""
    return found.get("sessions") or [found]


def test_there_are_results() -> None:
    stems = {path.stem for path in FILES}
    assert stems >= {"serve-h200-4b", "serve-h200-35b", "kernel-h200", "copy-h200", "soak-h200"}


@each_file
def test_a_result_says_where_it_comes_from(path: Path) -> None:
    found = read(path)
    assert found["command"]
    assert re.fullmatch(f"{COMMIT}(, {COMMIT})*", found["commit"]), found["commit"]
    for date in found["date"].split(", "):
        datetime.fromisoformat(date)
    versions = found["versions"]
    assert {"vllm", "torch", "triton"} <= set(versions)
    for name, version in versions.items():
        assert re.match(r"\d+(\.\d+)+", version), f"{name}: {version}"
    torch, pinned = versions["torch"], versions.get("torch_pinned_by_vllm", versions["torch"])
    if torch.split("+")[0] != pinned.split("+")[0]:
        assert f"run with torch {torch}; this vLLM pins torch " in found["torch_note"]


@each_file
def test_a_result_is_of_the_device_that_its_name_says(path: Path) -> None:
    named = DEVICE_IN_NAME.search(path.stem)
    assert named, "a result's name says which device it is of"
    devices = [value for name, value in entries(read(path)) if name == "device"]
    assert devices
    assert [device for device in devices if named[1].upper() not in device.split()] == []


@each_file
def test_a_result_has_no_path_of_the_machine_it_ran_on(path: Path) -> None:
    assert [text for text in texts(read(path)) if MACHINE_PATH.search(text)] == []


@pytest.mark.parametrize("before", ["", '"', "'", " ", "\n", "=", ",", ":", "(", "--known="])
def test_a_path_of_a_machine_is_known_as_one(before: str) -> None:
    for root in ("tmp", "work", "root", "home", "data", "mnt", "var", "opt"):
        assert MACHINE_PATH.search(f"{before}/{root}/x")
        assert MACHINE_PATH.search(f"{before}/{root}")
        for other in (f"out/{root}/x", f"./{root}", f"https://{root}/x", f"{before}/{root}er"):
            assert not MACHINE_PATH.search(other), other


@each_file
def test_all_that_a_result_says_of_itself_is_green(path: Path) -> None:
    found = read(path)
    # A recipe's run compares nothing: it has no gate.
    assert path.stem.startswith("recipe-") or found["gate"] == "green"
    wrong = [
        (name, value)
        for name, value in entries(found)
        if name in GREEN and not isinstance(value, dict) and value != GREEN[name]
    ]
    assert wrong == []
    assert "failure" not in dict(entries(found))


@each_file
def test_a_reader_is_told_of_it(path: Path) -> None:
    shown = "".join(file.read_text() for file in DOCS)
    assert path.name in shown or path.with_suffix(".png").name in shown


@pytest.mark.parametrize("file", DOCS, ids=lambda file: str(file.relative_to(HOUSE)))
def test_what_a_reader_is_told_of_is_there(file: Path) -> None:
    text = file.read_text()
    missing = [
        name
        for name in FILE_IN_TEXT.findall(text)
        if not ((HOUSE / name).exists() or (file.parent / name).exists())
    ]
    missing += [name for name in RESULT_IN_TEXT.findall(text) if not (RESULTS / name).exists()]
    assert missing == []


def test_the_soak_is_green_by_its_own_gate() -> None:
    found = read(RESULTS / "soak-h200.json")
    tally = checks.Tally(**found["tally"])
    assert checks.problems(found, tally, found["allowed_word_error_rate"]) == []
    assert found["problems"] == []
    # More than the gate asks for: the README says that no word was wrong.
    assert (tally.wrong, tally.first_wrong, tally.word_errors) == (0, None, 0)
    assert found["finished"] + found["aborted"] == found["answers"] == tally.checked
    assert found["job"]["fault"] is None


def test_the_copy_task_is_green_by_its_own_gate() -> None:
    found = read(RESULTS / "copy-h200.json")
    assert score.verdict(found, found["engines"]) == ([], found["allowed_word_errors"])
    assert found["problems"] == []
    assert any(score.ARMS[arm].lost_row for arm in found["arms"])


@each_served
def test_every_session_and_point_was_served_behind_a_green_gate(path: Path) -> None:
    found = read(path)
    for one in (found, *sessions(found)):
        assert one["gate"] == "green"
        assert one["checks"]
        assert all(check["ok"] is True for check in one["checks"])
    known = {one["session"]: one for one in sessions(found)}
    for point in found["points"]:
        assert point["gate"] == "green"
        assert point["commit"] == known[point["session"]]["commit"]
    commits = [one["commit"] for one in known.values()]
    assert all(re.fullmatch(COMMIT, commit) for commit in commits), commits
    assert set(found["commit"].split(", ")) == set(commits)
    assert set(known) == {point["session"] for point in found["points"]}


@each_served
def test_a_point_has_the_figures_that_were_asked_for(path: Path) -> None:
    found = read(path)
    assert found["points"]
    for point in found["points"]:
        assert set(point) >= {"arm", *FIGURES}
        assert point["arm"] in ("stock", "replay")
        for name in FIGURES:
            assert isinstance(point[name], int | float), name
            assert point[name] >= 0 if name == "preemptions" else point[name] > 0, name
    for one in (found, *sessions(found)):
        assert set(one["fit_8k"]) == {"stock", "replay"}
        assert all(fit > 0 for fit in one["fit_8k"].values())


@each_served
def test_every_ratio_is_that_of_two_points_of_one_session(path: Path) -> None:
    found = read(path)
    points = sides(found)
    for where, arms in points.items():
        assert set(arms) == {"stock", "replay"}, where
    lines = {
        (line.get("session", found.get("session")), *place(line)): line
        for line in found["ratios"]["points"]
    }
    assert len(lines) == len(found["ratios"]["points"])
    assert set(lines) == set(points)
    for where, line in lines.items():
        assert set(line) - {"session", "concurrency", "request_rate", "output_tokens"} == set(
            HIGHER_IS_BETTER
        )
        for name, higher in HIGHER_IS_BETTER.items():
            stock, replay = (points[where][arm][name] for arm in ("stock", "replay"))
            better = replay / stock if higher else stock / replay
            assert line[name] == pytest.approx(better, abs=ROUNDING), (where, name)
    fit = found["fit_8k"]
    assert found["ratios"]["fit_8k"] == pytest.approx(fit["replay"] / fit["stock"], abs=ROUNDING)
