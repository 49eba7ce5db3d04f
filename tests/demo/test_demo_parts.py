"""What the demo's verdict rests on: how answers are compared, turns judged and servers stopped."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="the demo reads a server's metrics with it")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import demo
import server
from chat import Answer


def answer(*steps: tuple[int, dict[str, float]]) -> Answer:
    return Answer(tuple(t for t, _ in steps), tuple(top for _, top in steps), 9, 0, 0.1)


def test_answers_are_compared_up_to_the_first_token_they_choose_differently() -> None:
    mine = answer((1, {"a": -0.1, "b": -2.0}), (2, {"a": -1.0, "b": -1.2}), (3, {"a": -9.0}))
    theirs = answer((1, {"a": -0.1, "b": -2.0}), (7, {"a": -1.3, "b": -1.2}), (3, {"a": -1.0}))
    assert mine.difference(theirs) == pytest.approx(0.3)
    assert mine.difference(mine) == 0


def test_a_token_that_one_answer_does_not_name_counts_as_its_least_likely() -> None:
    mine, theirs = answer((1, {"a": -0.5, "b": -1.0})), answer((1, {"c": -3.0, "d": -4.0}))
    assert mine.difference(theirs) == theirs.difference(mine) == pytest.approx(3.5)


GOOD = demo.Turn(
    turn=3,
    prompt_tokens=1343,
    cached_tokens=768,
    expected_cached_tokens=768,
    cold_cached_tokens=0,
    checkpoint="prefill",
    cold_seconds=2.0,
    cached_seconds=1.0,
    logprob_difference=0.0,
    same_tokens=True,
)


@pytest.mark.parametrize(
    "changes",
    [
        {"cached_tokens": 384},
        {"cached_tokens": 0},
        {"cold_cached_tokens": 384},
        {"logprob_difference": 1e-6},
        {"logprob_difference": float("nan")},
        {"same_tokens": False},
        {"checkpoint": "decode", "logprob_difference": 0.8},
        {"checkpoint": "decode", "logprob_difference": float("nan")},
    ],
    ids=str,
)
def test_a_wrong_turn_is_a_problem(changes: dict[str, object]) -> None:
    assert list(GOOD.problems()) == []
    assert list(dataclasses.replace(GOOD, **changes).problems())


def test_a_state_made_by_decode_may_round_otherwise() -> None:
    rounded = dataclasses.replace(GOOD, checkpoint="decode", logprob_difference=0.13)
    assert list(rounded.problems()) == []


@pytest.mark.parametrize("stubborn", [False, True], ids=["ends on SIGTERM", "ignores SIGTERM"])
def test_no_process_of_a_server_is_left_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stubborn: bool
) -> None:
    monkeypatch.setattr(server, "STOP_SECONDS", 0.5)
    trap = "trap '' TERM; " if stubborn else ""
    ready, log = tmp_path / "ready", tmp_path / "log"
    script = f"{trap}sleep 60 & sleep 60 & touch {ready}; wait; wait"
    seen: list[subprocess.Popen[bytes]] = []

    def serve_and_fail() -> None:
        command = ["sh", "-c", script]
        with server.serving(command, 0, log, {"PATH": "/usr/bin:/bin"}) as running:
            seen.append(running._process)
            _wait(ready.exists)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        serve_and_fail()
    assert seen[0].returncode in (-signal.SIGTERM, -signal.SIGKILL)
    # Killed orphans are gone once whoever inherited them has reaped them.
    _wait(lambda: not server._signal(seen[0].pid, 0))


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_that_ends_early_is_named_with_its_last_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = "echo starting; echo 'ValueError: no such model'; echo bye; exit 3"
    command, env = ["sh", "-c", script], {"PATH": "/usr/bin:/bin"}

    def serve() -> None:
        with server.serving(command, server.free_port(), log, env) as running:
            running.wait_until_healthy(20, lambda _: None)

    with pytest.raises(server.DemoFailure, match="code 3: ValueError: no such model"):
        serve()
