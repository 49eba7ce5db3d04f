"""What the demo's verdict rests on: how answers are compared, arms judged and servers stopped."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="the demo reads a server's metrics with it")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import demo
import flow
import gaudi_flow
import replay_flow
import server
from chat import Answer
from free_ports import free_ports


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


GOOD = gaudi_flow.Turn(
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
        with server.serving(command, free_ports(), log, env) as running:
            running.wait_until_healthy(20, lambda _: None)

    with pytest.raises(server.DemoFailure, match="code 3: ValueError: no such model"):
        serve()


def logprobs_of(*tokens: int, logprob: float = -0.5) -> Answer:
    return answer(*((token, {f"token_id:{token}": logprob}) for token in tokens))


def test_answers_of_two_arms_are_compared_token_by_token() -> None:
    same = replay_flow.compare(9, logprobs_of(1, 2, 3), logprobs_of(1, 2, 3))
    assert (same.first_difference, same.logprob_difference) == (None, 0)
    assert not list(same.problems())
    other = replay_flow.compare(9, logprobs_of(1, 2, 3), logprobs_of(1, 7, 3))
    assert other.first_difference == 1
    (problem,) = other.problems()
    assert problem.startswith("prompt of 9 tokens: token 2 ")


@pytest.mark.parametrize("difference", [0.01, float("nan")])
def test_a_state_that_is_a_little_wrong_is_a_problem_though_the_tokens_are_equal(
    difference: float,
) -> None:
    assert not list(replay_flow.Pair(9, None, 1e-4).problems())
    (problem,) = replay_flow.Pair(9, None, difference).problems()
    assert "logprobs" in problem


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"accepted": 0}, "none of 700 drafts"),
        ({"accepted": 700}, "none had to be undone"),
        ({"steps": 8, "accepted": 50}, "no fold happened"),
        ({"steps": 0, "drafted": 0, "accepted": 0}, "no fold happened"),
    ],
    ids=str,
)
def test_an_arm_that_proves_nothing_is_a_problem(changes: dict[str, int], words: str) -> None:
    good = replay_flow.Speculation(steps=100, drafted=700, accepted=90, requests=8)
    assert not list(good.problems())
    assert good.folds == 92
    assert good.tokens_a_step == pytest.approx(1.9)
    problems = list(dataclasses.replace(good, **changes).problems())
    assert any(words in problem for problem in problems)


LINE = (
    "gaudi_ext 0.1.0: ReplaySSM is active for 3 GDN layers, reference backend. Method dflash, "
    "15 drafts: one state a request instead of 16, 15 copies saved in each layer; ring of R=32 "
    "rows, page 435200 bytes (ring 99328, padded to 524288); 136 requests of 2048 tokens fit where "
    "41 did (+95)."
)
LOG = "INFO [kv_cache_utils.py:1] Maximum concurrency for 2,048 tokens per request: 136.40x\n"
PLAN = {name: {"capacity": {"requests": n}} for name, n in (("replay", 136), ("native", 41))}


def test_requests_that_fit_are_read_off_the_log_and_agree() -> None:
    fit = replay_flow.read_fit(LINE, LOG, PLAN)
    assert fit == replay_flow.Fit(15, 2048, 136, 41, 136.4, 136, 41)
    assert not list(fit.problems())


@pytest.mark.parametrize(
    "changes",
    [
        {"copies_saved": 0},
        {"stock": 136, "planned_stock": 136},
        {"engine": 137.2},
        {"planned_replay": 135},
        {"planned_stock": 40},
    ],
    ids=str,
)
def test_figures_that_disagree_are_a_problem(changes: dict[str, Any]) -> None:
    fit = replay_flow.read_fit(LINE, LOG, PLAN)
    assert list(dataclasses.replace(fit, **changes).problems())


@pytest.mark.parametrize(
    ("line", "log"),
    [
        (LINE.split(";")[0], LOG),
        (LINE, ""),
        (LINE, LOG.replace("2,048", "1,024")),
    ],
)
def test_a_log_that_does_not_say_what_fits_is_an_error(line: str, log: str) -> None:
    with pytest.raises(common.DemoFailure):
        replay_flow.read_fit(line, log, PLAN)


def test_counters_add_up_over_labels_and_leave_positions_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (
        "# TYPE vllm:spec_decode_num_drafts counter\n"
        'vllm:spec_decode_num_drafts_total{engine="0"} 5.0\n'
        'vllm:spec_decode_num_drafts_total{engine="1"} 2.0\n'
        "# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter\n"
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 3.0\n'
    )
    response = SimpleNamespace(text=text, raise_for_status=lambda: SimpleNamespace(text=text))
    monkeypatch.setattr(server.httpx, "get", lambda *_, **__: response)
    running = server.Server(None, "http://nowhere", Path("log"))
    counted = running.counters("vllm:spec_decode_num_")
    assert counted["drafts"] == 7
    assert counted["accepted_tokens"] == 0
    assert set(counted) == {"drafts", "accepted_tokens"}


def test_options_become_flags_as_vllm_serve_takes_them(tmp_path: Path) -> None:
    options = {"enforce_eager": True, "dtype": "float32", "seed": 0, "extra": {"a": "b"}}
    command = flow.serve_command(tmp_path, 80, "tiny", options, "--flag")
    at = command.index("--flag")
    assert command[at:] == [
        *("--flag", "--enforce-eager", "--dtype", "float32", "--seed", "0"),
        *("--extra", '{"a": "b"}'),
    ]


def a_flow(tmp_path: Path, **content: object) -> demo.Flow:
    file = tmp_path / "result.json"
    if content:
        file.write_text(json.dumps(content))
    return demo.Flow("A flow", "dev", "a_flow.py", file)


@pytest.mark.parametrize(
    ("content", "code", "status"),
    [
        ({"status": "ok", "problems": []}, 0, "ok"),
        ({"status": "left out", "problems": ["no wheel"]}, 0, "left out"),
        ({"status": "FAILED", "problems": ["a", "b"]}, 1, "FAILED"),
        # Killed, or never begun.
        ({}, 1, "FAILED"),
        ({}, 0, "FAILED"),
        ({"problems": []}, 0, "FAILED"),
        # File and exit code must agree.
        ({"status": "ok", "problems": []}, 1, "FAILED"),
        ({"status": "FAILED", "problems": ["a"]}, 0, "FAILED"),
    ],
    ids=str,
)
def test_how_a_flow_ended_is_read_off_its_file_and_exit_code(
    tmp_path: Path, content: Mapping[str, object], code: int, status: str
) -> None:
    found, why = demo.outcome(a_flow(tmp_path, **content), code)
    assert found == status
    assert bool(why) == (status != "ok")


@pytest.mark.parametrize(
    ("statuses", "line"),
    [
        (("ok", "ok"), "demo: ok"),
        (("left out", "ok"), "demo: ok"),
        (("ok", "left out"), "demo: ok"),
        (("FAILED", "ok"), "demo: FAILED: A flow: why"),
        (("left out", "FAILED"), "demo: FAILED: A flow: why"),
        (("left out", "left out"), "demo: FAILED: A flow left out: why; A flow left out: why"),
    ],
    ids=str,
)
def test_the_last_line_of_the_whole(tmp_path: Path, statuses: tuple[str, ...], line: str) -> None:
    ends = [(a_flow(tmp_path), status, "" if status == "ok" else "why") for status in statuses]
    assert demo.verdict(ends) == (line == "demo: ok", line)


@pytest.mark.parametrize(
    ("raises", "status", "code"),
    [
        (None, "ok", 0),
        (common.LeftOut("no\nwheel"), "left out", 0),
        (common.DemoFailure("it failed"), "FAILED", 1),
        (KeyError("steps"), "FAILED", 1),
        (KeyboardInterrupt(), "FAILED", 130),
    ],
    ids=repr,
)
def test_a_flow_ends_with_its_verdict_whatever_happens(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    raises: BaseException | None,
    status: str,
    code: int,
) -> None:
    monkeypatch.setattr(flow, "BUILD", tmp_path)
    monkeypatch.setattr(flow.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "result.json"

    def run(console: object, result: dict[str, Any]) -> list[str]:
        result["reached"] = 1
        if raises is not None:
            raise raises
        return []

    assert flow.main("A flow", file, "paper", run) == code
    written = json.loads(file.read_text())
    assert (written["status"], written["ok"]) == (status, status == "ok")
    assert written["reached"] == 1
    assert written["device"] == "paper"
    assert demo.outcome(a_flow(tmp_path), code)[0] == status
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"A flow: {status}")


def test_the_demo_needs_only_the_standard_library() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import demo"],
        cwd=Path(__file__).resolve().parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
