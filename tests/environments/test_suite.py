"""The tests' driver: which part runs what, what the whole's exit code is; and wheels of others."""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
IGNORE = ["--ignore=tests/replay", "--ignore=tests/kernels"]
REPLAY, KERNELS = "tests/replay", "tests/kernels"


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("suite")


@pytest.fixture
def wheels(suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """wheels.py, with a folder of its own."""
    module = importlib.import_module("wheels")
    monkeypatch.setattr(module, "WHEELS", tmp_path / "wheels")
    return module


def everything(*options: str, path: str = "tests") -> dict[str, list[str]]:
    return {
        "tests": [*options, *IGNORE, path],
        REPLAY: [*options, REPLAY],
        KERNELS: [*options, KERNELS],
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], everything()),
        (["-x"], everything("-x")),
        (["tests"], everything()),
        (["."], everything(path=".")),
        (["tests", "tests/replay", "tests/kernels"], everything()),
        (["tests/gdn"], {"tests": [*IGNORE, "tests/gdn"]}),
        (
            ["tests/gdn/test_plan.py::test_a", "-k", "b"],
            {"tests": ["-k", "b", *IGNORE, "tests/gdn/test_plan.py::test_a"]},
        ),
        (["tests/replay"], {REPLAY: [REPLAY]}),
        (["tests/kernels", "-x"], {KERNELS: ["-x", KERNELS]}),
        (
            ["tests/replay/test_cursor.py", "tests/gdn"],
            {"tests": [*IGNORE, "tests/gdn"], REPLAY: ["tests/replay/test_cursor.py"]},
        ),
        # A value that is a folder's name is no path.
        (["-k", "tests"], everything("-k", "tests")),
        # Nor is a path that does not exist: pytest will say so.
        (["nowhere"], everything("nowhere")),
    ],
    ids=str,
)
def test_paths_choose_the_parts_and_no_file_runs_twice(
    suite: ModuleType, arguments: list[str], expected: dict[str, list[str]]
) -> None:
    parts = suite.parts(arguments)
    assert {part.name: list(part.arguments) for part in parts} == expected
    assert [part.name for part in parts] == list(expected)


def test_each_part_has_the_environment_of_its_engine(suite: ModuleType) -> None:
    environments = {part.name: part.environment for part in suite.parts([])}
    assert environments == {"tests": "gaudi-or-dev", REPLAY: "cpu-or-dev", KERNELS: "cpu-or-dev"}


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([0, 0], 0), ([0, 1], 1), ([1, 0], 1), ([5, 0], 0), ([0, 5], 0), ([5, 5], 5), ([5, 1], 1),
     ([4, 1], 4), ([2], 2), ([-9, 0], -9)],
)  # fmt: skip
def test_a_failed_part_fails_the_whole(suite: ModuleType, codes: list[int], expected: int) -> None:
    assert suite.verdict(codes) == expected


@pytest.mark.parametrize("code", [0, 1])
def test_all_parts_run_and_hear_why_wheels_are_missing(
    suite: ModuleType, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    calls: list[tuple[list[str], dict[str, str]]] = []

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        calls.append((command, options["env"]))
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(suite.subprocess, "run", run)
    made: list[str] = []
    monkeypatch.setattr(suite, "_make_environments", made.extend)
    monkeypatch.setattr(suite, "_provide_wheels", lambda: {suite.WHEELS_MISSING: "no net"})
    assert suite.main(["-q"]) == code
    assert made == ["gaudi-or-dev", "cpu-or-dev"]
    assert [command[2] for command, _ in calls] == ["gaudi-or-dev", "cpu-or-dev", "cpu-or-dev"]
    for command, variables in calls:
        assert command[command.index("-m", 6) + 1] == "not slow"
        assert variables[suite.WHEELS_MISSING] == "no net"
    calls.clear()
    assert suite.main(["--full", "tests/gdn"]) == code
    ((command, _),) = calls
    assert "not slow" not in command


def test_environments_are_made_at_once(suite: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str]] = []

    def popen(command: list[str]) -> SimpleNamespace:
        name, *rest = command[2:]
        assert rest == ["--"]
        events.append(("starts", name))
        return SimpleNamespace(wait=lambda: events.append(("is waited for", name)))

    monkeypatch.setattr(suite.subprocess, "Popen", popen)
    suite._make_environments(["a", "b"])
    assert [event for event, _ in events] == ["starts"] * 2 + ["is waited for"] * 2
    assert {name for _, name in events} == {"a", "b"}


def test_wheels_are_fetched_once_and_a_failure_is_handed_on(
    suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    codes = iter([0, 1, 1, 0, 0])

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command[command.index("--") + 1 :])
        return SimpleNamespace(returncode=next(codes), stderr="vllm 0.33.0: no\n net")

    monkeypatch.setattr(suite.subprocess, "run", run)
    monkeypatch.setattr(suite, "folder", lambda version: tmp_path / version)
    (tmp_path / "0.26.0").mkdir()
    assert suite._provide_wheels() == {suite.WHEELS_MISSING: "vllm 0.33.0: no net"}
    assert commands[0] == ["true"]
    assert commands[1][2:] == ["0.31.0", "0.33.0"]
    # No environment, nothing to fetch with.
    assert "could not be made" in suite._provide_wheels()[suite.WHEELS_MISSING]
    assert suite._provide_wheels() == {}
    for version in ("0.31.0", "0.33.0"):
        (tmp_path / version).mkdir()
    monkeypatch.setattr(suite.subprocess, "run", None)
    assert suite._provide_wheels() == {}


def _wheel(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "x = 1\n")
    return path


def test_only_python_files_of_a_wheel_are_unpacked_and_only_once(
    wheels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def pip(command: list[str], **_: Any) -> Any:
        asked.append(command)
        into = Path(command[command.index("-d") + 1])
        _wheel(into / "vllm-0.33.0.whl", "vllm/__init__.py", "vllm/a/b.py", "vllm/_C.abi3.so")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(wheels.subprocess, "run", pip)
    folder = wheels.provide("0.33.0")
    assert folder == wheels.folder("0.33.0") == wheels.provide("0.33.0")
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == [
        "vllm/__init__.py",
        "vllm/a/b.py",
    ]
    (command,) = asked
    assert "vllm==0.33.0" in command
    assert "--no-deps" in command
    # Neither the wheel nor anything half unpacked stays.
    assert [p.name for p in wheels.WHEELS.iterdir() if p.is_dir()] == ["vllm-0.33.0"]


@pytest.mark.parametrize("names", [(), ("other/__init__.py",)], ids=["no wheel", "a stranger"])
def test_a_wheel_that_cannot_be_had_is_told_and_leaves_nothing(
    wheels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    names: tuple[str, ...],
) -> None:
    def pip(command: list[str], **_: Any) -> Any:
        if names:
            _wheel(Path(command[command.index("-d") + 1]) / "vllm.whl", *names)
            return SimpleNamespace(returncode=0, stderr="")
        return SimpleNamespace(returncode=1, stderr="noise\nERROR: No matching distribution\n")

    monkeypatch.setattr(wheels.subprocess, "run", pip)
    assert wheels.main(["0.33.0"]) == 1
    said = capsys.readouterr().err
    assert ("holds no vllm" if names else "ERROR: No matching distribution") in said
    assert not wheels.folder("0.33.0").exists()


def test_the_driver_needs_only_the_standard_library() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import suite, environment, wheels"],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
