"""A run: the order of its arms, one awake at a time, what the budget leaves out, what is kept."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_data
import pytest
import yaml
from free_ports import free_ports, taken
from rich.console import Console
from typer.testing import CliRunner

from cuda_ext.bench.serve import run as runs
from cuda_ext.bench.serve.arms import ArmFailed
from cuda_ext.bench.serve.load import Point, points
from cuda_ext.bench.serve.measure import Run
from cuda_ext.bench.serve.plan import WARM, Budget, Step, steps
from cuda_ext.bench.serve.progress import Reporter
from vllm_gaudi_ext.cli.app import app

POINTS = points(bench_data.config().load)


def order(found: list[Step]) -> list[tuple[str, int | None, int]]:
    return [(step.arm, step.point.concurrency, step.run) for step in found]


def test_arms_alternate_at_every_point() -> None:
    found = steps(POINTS, ("stock", "replay"), 2, restart=False)
    assert order(found) == [
        ("stock", 4, 0),
        ("replay", 4, 0),
        ("replay", 16, 0),
        ("stock", 16, 0),
        ("stock", 4, 1),
        ("replay", 4, 1),
        ("replay", 16, 1),
        ("stock", 16, 1),
    ]
    assert [step.pair for step in found] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_with_restarts_an_arm_does_all_points_and_the_order_turns() -> None:
    found = steps(POINTS, ("stock", "replay"), 2, restart=True)
    assert [step.arm for step in found] == ["stock"] * 2 + ["replay"] * 4 + ["stock"] * 2
    assert [step.pair for step in found] == [0, 1, 0, 1, 2, 3, 2, 3]


def step(arm: Any, requests: int, output: int = 32, pair: int = 0) -> Step:
    return Step(arm, Point(requests, None, output, requests), 0, pair)


def test_an_estimate_before_two_points_is_the_nearest_one_scaled() -> None:
    budget = Budget(100.0)
    assert budget.estimate(step("stock", 16)) == 0.0
    budget.saw_step(step("replay", 16), 2.0)
    assert budget.estimate(step("stock", 16)) == 2.0
    budget.saw_step(step("stock", 16), 4.0)
    assert budget.estimate(step("stock", 16)) == 4.0
    assert budget.estimate(step("stock", 16, 64)) == 8.0
    # Three waves take thrice as long as one.
    three = Step("stock", Point(16, None, 32, 48), 0, 0)
    assert budget.estimate(three) == pytest.approx(12.0)
    # More requests cost more, but less than in proportion; fewer cost less.
    assert 4.0 < budget.estimate(step("stock", 64)) < 16.0
    assert 1.0 < budget.estimate(step("stock", 8)) < 4.0
    slow = Step("stock", Point(None, 0.5, 32, 16), 0, 0)
    assert budget.estimate(slow) == 32.0


def test_of_points_seen_prompts_and_decoding_are_told_apart() -> None:
    """0.5 s a prompt, and a step of 0.01 s at one request that grows with the batch to the 3/4."""
    budget = Budget(1e6)

    def truth(requests: int, output: int) -> float:
        return 0.5 * requests + 0.01 * output * requests**0.75

    for requests, output in ((16, 512), (64, 512)):
        budget.saw_step(step("stock", requests, output), truth(requests, output))
    # In proportion to the output it would be twice that: prompts are no longer than before.
    wanted = truth(64, 3072)
    assert budget.estimate(step("stock", 64, 3072)) == pytest.approx(wanted)
    assert budget.estimate(step("stock", 256, 512)) == pytest.approx(truth(256, 512))
    # What was seen stands for itself.
    budget.saw_step(step("stock", 64, 512), 99.0)
    assert budget.estimate(step("stock", 64, 512)) == 99.0


def test_what_the_formula_has_no_floor_for_is_scaled() -> None:
    """All points had larger batches: one request takes more than a 64th of what 64 take."""
    budget = Budget(1e6)
    budget.saw_step(step("stock", 64, 512), 20.0)
    budget.saw_step(step("stock", 256, 512), 80.0)
    assert budget.estimate(step("stock", 1, 512)) == pytest.approx(20.0 / 64**0.25)


def test_a_fit_is_never_below_nothing() -> None:
    budget = Budget(1e6)
    # Thrice the output in no more time: only prompts seem to count.
    budget.saw_step(step("stock", 16, 32), 4.0)
    budget.saw_step(step("stock", 16, 96), 3.9)
    assert budget.estimate(step("stock", 16, 960)) == pytest.approx(3.95, abs=0.01)


def test_a_restart_costs_what_that_arm_last_took_and_the_runs_first_start_counts_for_less() -> None:
    budget = Budget(100.0, restart=True)
    assert budget.change("stock") == 0.0
    budget.saw_start("stock", 250.0)
    assert budget.change("replay") == budget.change("stock") == 250.0 * WARM
    budget.saw_start("replay", 74.0)
    assert (budget.change("replay"), budget.change("stock")) == (74.0, 250.0 * WARM)
    budget.saw_start("stock", 80.0)
    assert (budget.change("replay"), budget.change("stock")) == (74.0, 80.0)
    asleep = Budget(100.0)
    asleep.saw_start("stock", 250.0)
    asleep.saw_switch(3.0)
    assert asleep.change("replay") == 3.0


def test_a_step_is_owed_with_its_pair_and_with_what_was_begun() -> None:
    budget = Budget(100.0, restart=True)
    budget.saw_start("stock", 50.0)
    budget.saw_step(step("stock", 4), 3.0)
    four, two = step("stock", 4), step("stock", 4, pair=1)
    plan = [four, two, step("replay", 4), step("replay", 4, pair=1)]
    # Both points of the other arm, and its start.
    owed = budget.obligation(1, plan, {0}, "stock")
    assert owed == pytest.approx(3.0 + 50.0 * WARM + 3.0 + 3.0)
    assert budget.allows(59.0, 41.0)
    assert not budget.allows(59.0, 41.1)
    assert Budget(None).allows(1e9, 1e9)


class FakeArm:
    """An arm that takes its time from a clock of the test's own."""

    events: list[str] = []
    clock = 0.0
    seconds: Callable[[str, Point], float] = staticmethod(lambda arm, point: 1.0)
    fails: tuple[str, int] | None = None

    def __init__(self, arm: Any, config: Any, flags: Any, *_: Any, **__: Any) -> None:
        self.arm = arm
        assert flags.get("enable-sleep-mode", False) == (config.interleave == "sleep")
        self.tell("made")

    def tell(self, what: str, seconds: float = 0.0) -> None:
        FakeArm.events.append(f"{self.arm} {what}")
        FakeArm.clock += seconds

    def start(self, tick: Any) -> dict[str, Any]:
        self.tell("start", 10.0)
        return dict(bench_data.FACTS[self.arm])

    def warm_up(self, tick: Any) -> None:
        self.tell("warm-up")

    def gate(self, tick: Any) -> dict[str, Any]:
        self.tell("gate")
        return bench_data.gate(0.0 if self.arm == "stock" else 0.05)

    def point(self, point: Point, number: int, tick: Any) -> Run:
        if (self.arm, point.concurrency) == FakeArm.fails:
            raise ArmFailed("the engine is gone")
        self.tell(f"{point.concurrency}", FakeArm.seconds(self.arm, point))
        tick({"done": 1, "of": 2, "running": 1, "waiting": 0, "seconds": 1.0, "tokens": 3})
        return bench_data.run(self.arm, point.label, number)

    def profile(self, profile: Any, tick: Any) -> list[dict[str, Any]]:
        self.tell("profile", 5.0)
        line = {"kind": "decode", "concurrency": 4, "running": 4, "tokens": 39.0, "seconds": 5.0}
        return [line | {"error": "ValueError: x"}]

    def sleep(self) -> None:
        self.tell("sleep", 1.0)

    def wake(self) -> None:
        self.tell("wake", 1.0)

    def stop(self, *, force: bool = False) -> None:
        self.tell("kill" if force else "stop")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeArm]:
    FakeArm.events, FakeArm.clock, FakeArm.fails = [], 0.0, None
    FakeArm.seconds = staticmethod(lambda arm, point: 1.0)
    monkeypatch.setattr(runs, "EngineChild", FakeArm)
    # Drawn in test_serve_bench_results.py.
    monkeypatch.setattr(runs.plots, "draw", lambda summary, path: None)
    monkeypatch.setattr(runs.time, "monotonic", lambda: FakeArm.clock)
    return FakeArm


def do(out: Path, *, repeats: int = 1, budget_s: float | None = None, **changes: Any) -> Any:
    options = runs.Options(out, repeats=repeats, budget_s=budget_s, session="s", commit="c")
    if "arms" in changes:
        options.arms = changes.pop("arms")
    reporter = Reporter(Console(file=io.StringIO()))
    runs.run(bench_data.config(**changes), options, reporter)
    return json.loads((out / "serve-test.json").read_text())


def test_both_engines_stay_alive_and_one_is_awake(tmp_path: Path, fake: type[FakeArm]) -> None:
    found = do(tmp_path)
    assert fake.events == [
        "stock made",
        "replay made",
        "stock start",
        "stock warm-up",
        "stock gate",
        "stock sleep",
        "replay start",
        "replay warm-up",
        "replay gate",
        "replay 4",
        "replay sleep",
        "stock wake",
        "stock 4",
        "stock 16",
        "stock sleep",
        "replay wake",
        "replay 16",
        "stock stop",
        "replay stop",
    ]
    assert found["gate"] == "green"
    assert [one["output_tok_s"] for one in found["ratios"]["points"]] == [2.0, 2.0]
    assert (tmp_path / "serve-test.runs.json").is_file()


def test_profiles_come_after_all_points(tmp_path: Path, fake: type[FakeArm]) -> None:
    found = do(tmp_path, profile={"concurrency": [4]})
    last = fake.events[fake.events.index("replay 16") + 1 :]
    assert last == [
        "replay profile",
        "replay sleep",
        "stock wake",
        "stock profile",
        "stock stop",
        "replay stop",
    ]
    assert [line["arm"] for line in found["profile"]] == ["stock", "replay"]
    assert found["gate"] == "green"


def test_with_restarts_an_arm_is_profiled_at_its_last_point(
    tmp_path: Path, fake: type[FakeArm]
) -> None:
    do(tmp_path, repeats=2, interleave="restart", profile={"concurrency": [4]})
    told = [event for event in fake.events if event.split()[1] in ("16", "profile")]
    assert told == [
        "stock 16",
        "replay 16",
        "replay 16",
        "replay profile",
        "stock 16",
        "stock profile",
    ]


def test_a_profile_that_has_no_time_is_left_out_and_said(
    tmp_path: Path, fake: type[FakeArm]
) -> None:
    # 25 s until the first pair is done; the second takes 4, and the profiles are thought to take
    # 40 and take 10.
    assert "left_out" not in do(tmp_path, profile={"concurrency": [4]}, budget_s=90.0)
    pair = ["stock at 16 in flight, 32 out, run 0", "replay at 16 in flight, 32 out, run 0"]
    fake.clock, fake.events = 0.0, []
    found = do(tmp_path, profile={"concurrency": [4]}, budget_s=60.0)
    assert found["left_out"] == pair
    assert {"stock profile", "replay profile"} <= set(fake.events)
    fake.clock, fake.events = 0.0, []
    found = do(tmp_path, profile={"concurrency": [4]}, budget_s=40.0)
    assert found["left_out"] == [*pair, "profile of stock", "profile of replay"]
    assert len(found["points"]) == 2
    assert not any("profile" in event for event in fake.events)


def test_with_restarts_a_profile_leaves_time_for_the_other_arm(
    tmp_path: Path, fake: type[FakeArm]
) -> None:
    # 11 s until the first arm's point is done, and 11 for the other's, which is thought to take 7.
    def left_out(budget_s: float) -> list[str]:
        fake.clock = 0.0
        found = do(
            tmp_path,
            load=bench_data.CONTENT["load"] | {"concurrency": [4]},
            profile={"concurrency": [4]},
            interleave="restart",
            budget_s=budget_s,
        )
        assert len(found["points"]) == 2
        return list(found.get("left_out", ()))

    assert left_out(60.0) == []
    # 11 + 7 + 20 for a profile; without the first one the other has 22 + 20.
    assert left_out(37.0) == ["profile of stock", "profile of replay"]
    assert left_out(43.0) == ["profile of replay"]


def test_with_restarts_one_process_lives_at_a_time(tmp_path: Path, fake: type[FakeArm]) -> None:
    found = do(tmp_path, repeats=2, interleave="restart")
    lives = [event for event in fake.events if event.split()[1] in ("made", "stop", "gate")]
    assert lives == [
        "stock made",
        "stock gate",
        "stock stop",
        "replay made",
        "replay gate",
        "replay stop",
        "stock made",
        "stock stop",
    ]
    assert found["gate"] == "green"
    assert [point["runs"] for point in found["points"]] == [2, 2, 2, 2]


def test_what_the_budget_does_not_allow_is_left_out_and_said(
    tmp_path: Path, fake: type[FakeArm]
) -> None:
    fake.seconds = staticmethod(lambda arm, point: 20.0)
    # 21 s until both are started and 42 for the first pair; the second needs some 110.
    found = do(tmp_path, budget_s=100.0)
    assert [point["concurrency"] for point in found["points"]] == [4, 4]
    assert found["left_out"] == [
        "stock at 16 in flight, 32 out, run 0",
        "replay at 16 in flight, 32 out, run 0",
    ]
    assert "stock 16" not in fake.events
    assert found["gate"] == "green"


def test_the_first_arm_leaves_time_for_the_other(tmp_path: Path, fake: type[FakeArm]) -> None:
    fake.seconds = staticmethod(lambda arm, point: 5.0)
    # One start and one point of each arm fit, not a second point of both.
    found = do(tmp_path, budget_s=35.0, interleave="restart")
    assert [(p["arm"], p["concurrency"]) for p in found["points"]] == [("stock", 4), ("replay", 4)]
    assert len(found["left_out"]) == 2


def test_a_failure_keeps_what_was_measured_and_stops_both(
    tmp_path: Path, fake: type[FakeArm]
) -> None:
    fake.fails = ("stock", 16)
    found = do(tmp_path)
    assert [p["concurrency"] for p in found["points"]] == [4, 4]
    assert found["failure"] == "the engine is gone"
    assert fake.events[-2:] == ["stock kill", "replay kill"]


def test_a_killed_run_has_every_finished_step_on_disk(
    tmp_path: Path, fake: type[FakeArm], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def count(arm: str, point: Point) -> float:
        file = tmp_path / "serve-test.json"
        seen.append(len(json.loads(file.read_text())["points"]))
        return 1.0

    fake.seconds = staticmethod(count)
    do(tmp_path)
    assert seen == [0, 1, 2, 3]


def test_one_arm_alone_is_a_partial_result(tmp_path: Path, fake: type[FakeArm]) -> None:
    found = do(tmp_path, arms=("replay",))
    assert found["gate"] == "red"
    assert "ratios" not in found
    assert {point["arm"] for point in found["points"]} == {"replay"}
    assert not any(event.startswith("stock") for event in fake.events)


def test_lines_come_now_and_then_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("cuda_ext.bench.serve.progress.time.monotonic", lambda: now[0])
    text = io.StringIO()
    reporter = Reporter(Console(file=text))
    with reporter.step("stock, 4 in flight") as tick:
        for second in range(1, 26):
            now[0] = float(second)
            tick({"done": second, "of": 64, "seconds": float(second), "tokens": 100 * second})
    lines = text.getvalue().splitlines()
    assert len(lines) == 2
    assert "stock, 4 in flight: 10/64 requests, 100 tok/s" in lines[0]


def test_a_bar_is_drawn_in_a_terminal() -> None:
    text = io.StringIO()
    reporter = Reporter(Console(file=text, force_terminal=True, width=100))
    with reporter.step("stock") as tick:
        tick({"done": 3, "of": 64, "running": 2, "waiting": 1})
    assert "3/64 requests, 2 running, 1 waiting" in text.getvalue()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing"], "is no file"),
        (["--merge", "none.json"], "none.runs.json"),
        (["--collect", "none.json"], "none.json"),
        (["h200-4b", "--mode", "server"], "no tokenizer"),
        (["h200-4b", "--output-tokens", "8000"], "serve.max-model-len: 8192"),
    ],
    ids=["config", "merge", "collect", "server", "too long"],
)
def test_what_cannot_be_run_is_told_and_writes_nothing(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert runs.main(arguments) == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_collection_without_a_point_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs.plots, "draw", lambda summary, path: None)
    monkeypatch.chdir(tmp_path)
    both = [bench_data.run(a, f"{n} in flight, 32 out") for n in (4, 16) for a in runs.ARMS]
    path = str(bench_data.results(runs=both).save(tmp_path / "in"))
    asked = ["bench", "serve", "--collect", path, "--without", "s:4x32", "--out", "out"]
    assert CliRunner().invoke(app, asked).exit_code == 0
    found = json.loads((tmp_path / "out" / "serve-test.json").read_text())
    assert [point["concurrency"] for point in found["points"]] == [16, 16]
    assert found["left_out"][0].startswith("by --without s:4x32: ")
    capsys.readouterr()
    assert runs.main(["--collect", path, "--without", "s:9x32", "--out", "none"]) == 2
    assert "no such point" in capsys.readouterr().err
    for wrong in (["h200-4b"], ["--merge", path]):
        with pytest.raises(SystemExit):
            runs.main([*wrong, "--without", "s:4x32", "--out", "none"])
        assert "--without goes with --collect" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


class NoServer(FakeArm):
    """Must not be made."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise AssertionError("a server was started")


def server_yaml(folder: Path, **changes: Any) -> str:
    path = folder / "bench.yaml"
    path.write_text(yaml.safe_dump(bench_data.CONTENT | changes))
    return str(path)


@pytest.mark.parametrize("interleave", ["sleep", "restart"])
@pytest.mark.parametrize("arm", [0, 1], ids=runs.ARMS)
def test_a_port_that_is_taken_is_told_before_any_server_starts(
    interleave: str,
    arm: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With restarts it was told when the first arm had done its whole matrix."""
    monkeypatch.setattr(runs, "ServerArm", NoServer)
    port = free_ports(2)
    asked = [server_yaml(tmp_path), "--mode", "server", "--interleave", interleave]
    asked += ["--port", str(port), "--out", str(tmp_path / "out")]
    with taken(port + arm):
        assert runs.main(asked) == 2
    told = capsys.readouterr().err
    assert f"1. --port {port}: {port + arm}, of {runs.ARMS[arm]}, can't be had (" in told
    assert not (tmp_path / "out").exists()


def test_all_that_is_against_a_server_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "ServerArm", NoServer)
    port = free_ports(2)
    config = server_yaml(tmp_path, load=bench_data.CONTENT["load"] | {"token_ids": [10, 20]})
    asked = [config, "--mode", "server", "--profile", "2", "--port", str(port)]
    asked += ["--out", str(tmp_path / "out")]
    with taken(port):
        assert runs.main(asked) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0].endswith("bench.yaml: 3 problems in server mode")
    assert [line.split(":")[0] for line in told[1:]] == [
        "  1. profile.concurrency",
        "  2. load.token_ids",
        f"  3. --port {port}",
    ]


@pytest.mark.parametrize("port", ["0", "65535", "70000"])
def test_a_port_without_a_next_one_is_refused(
    port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        runs.main(["h200-4b", "--mode", "server", "--port", port])
    assert ended.value.code == 2
    assert f"{port} is not from 1 to 65534" in capsys.readouterr().err


def test_waves_of_the_command_stand_before_the_yamls() -> None:
    def waves(*more: str) -> list[int]:
        found = runs._configured(runs._parser().parse_args(["h200-4b", *more]))
        return [point.requests for point in points(found.load)][:2]

    assert waves() == [3, 12]
    assert waves("--waves", "1") == [1, 4]


def configured(*arguments: str) -> Any:
    return runs._configured(runs._parser().parse_args(["h200-4b", *arguments]))


def test_points_of_the_command_are_measured_in_their_order_and_no_other() -> None:
    found = points(configured("--points", "256x512,64x3072x2").load)
    assert [(p.concurrency, p.output_tokens, p.requests) for p in found] == [
        (256, 512, 768),
        (64, 3072, 128),
    ]
    assert configured("--profile", "16,64").profile.concurrency == [16, 64]


def test_a_key_of_the_command_stands_before_the_yamls() -> None:
    found = configured("--set", "attention-config.backend=X", "--set", "gate.slack=2")
    assert found.serve["attention-config"] == {"backend": "X"}
    assert found.gate.slack == 2
    assert configured("--set", "acceptance_length=3.5").acceptance_length == 3.5
    assert configured("--set", "max-num-seqs=8").serve["max-num-seqs"] == 8
    for wrong in ("dtype", "dtype.x=1", "a..b=1"):
        with pytest.raises(runs.ConfigError, match="--set"):
            configured("--set", wrong)


def test_the_command_of_a_result_names_no_folder() -> None:
    given = ["/home/me/x.yaml", "--out", "/home/me/out", "--repeats", "2", "--out=/home/me/out"]
    assert runs._command(given) == ["gaudi-ext bench serve", "x.yaml", "--repeats", "2"]
