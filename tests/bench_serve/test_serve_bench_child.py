"""The parent's side of an engine's process: its lines, its death, and a deadline."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bench_data
import pytest
import yaml

from cuda_ext.bench.serve.arms import ArmFailed, OutOfTime
from cuda_ext.bench.serve.child import EngineChild
from cuda_ext.bench.serve.config import arm_environment, arm_flags
from cuda_ext.bench.serve.load import Point

Make = Callable[..., EngineChild]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(EngineChild, "module", "stub_engine")
    here = str(Path(__file__).resolve().parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
    started: list[EngineChild] = []

    def give(how: str, seconds: float | None = None) -> EngineChild:
        config = bench_data.config(environment={"EXTRA": "1"})
        environment = arm_environment(config, "replay") | {"STUB": how}
        deadline = None if seconds is None else time.monotonic() + seconds
        flags = arm_flags(config, "replay")
        child = EngineChild("replay", config, flags, environment, tmp_path, deadline)
        started.append(child)
        return child

    yield give
    for child in started:
        child.stop()


def ignore(_: dict[str, Any]) -> None:
    pass


def test_flags_load_and_variables_reach_the_process(make: Make, tmp_path: Path) -> None:
    found = make("works").start(ignore)
    assert found["environment"] == {"VLLM_PLUGINS": "gaudi_ext", "EXTRA": "1"}
    assert found["job"]["load"]["concurrency"] == [4, 16]
    flags = yaml.safe_load(Path(found["job"]["flags"]).read_text())
    assert flags == arm_flags(bench_data.config(), "replay")


def test_progress_is_passed_on_and_the_run_comes_back(make: Make) -> None:
    child = make("works")
    child.start(ignore)
    seen: list[dict[str, Any]] = []
    run = child.point(Point(4, None, 4, 1), 3, seen.append)
    assert seen == [{"done": 1, "of": 2}]
    assert (run.arm, run.run, run.records[0].tokens) == ("replay", 3, 4)
    assert run.engine.acceptance_length == 2.5
    child.sleep()
    child.wake()
    child.stop()
    assert child._process.returncode == 0


def test_a_death_gives_the_code_and_the_end_of_the_log(make: Make) -> None:
    with pytest.raises(ArmFailed, match="replay: the engine's process ended with 7") as caught:
        make("dies").start(ignore)
    assert "the last words" in str(caught.value)


def test_a_failure_gives_its_words(make: Make) -> None:
    with pytest.raises(ArmFailed, match="replay: ValueError: no memory"):
        make("fails").start(ignore)


def test_at_the_deadline_the_wait_ends_and_the_process_is_killed(make: Make) -> None:
    child = make("hangs", 0.5)
    with pytest.raises(OutOfTime, match="no answer before the deadline"):
        child.start(ignore)
    child.stop()
    assert child._process.returncode == -signal.SIGKILL
