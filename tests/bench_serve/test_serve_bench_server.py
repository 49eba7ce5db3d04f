"""The server mode: the client's command line, its result, and the server's metrics."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import bench_data
import pytest
from free_ports import free_ports, taken
from pydantic import BaseModel, ValidationError, model_validator

from cuda_ext import refusals
from cuda_ext.bench.serve import server
from cuda_ext.bench.serve.arms import ArmFailed, OutOfTime
from cuda_ext.bench.serve.config import BenchConfig, arm_environment, arm_flags
from cuda_ext.bench.serve.load import Point
from cuda_ext.bench.serve.measure import EngineFigures
from cuda_ext.bench.serve.server import (
    ServerArm,
    client_arguments,
    last_words,
    metric_labels,
    metric_sums,
    port_problems,
    records_of,
    server_problems,
    switches_off,
)
from vllm_gaudi_ext.problems import Problem

METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0",model_name="m"} 4.0
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 870.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="592",num_gpu_blocks="2000"} 1.0
"""


def value(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_the_clients_prompts_have_the_range_of_the_yaml() -> None:
    load = bench_data.CONTENT["load"] | {"prompt_tokens": [3300, 4500]}
    config = bench_data.config(load=load)
    point = Point(64, None, 512, 64)
    found = client_arguments(config, point, 0, "http://x", "m", Path("a/b.json"))
    middle = int(value(found, "--random-input-len"))
    ratio = json.loads(value(found, "--random-range-ratio"))
    assert ratio["output"] == 0
    assert round(middle * (1 - ratio["input"])) == 3300
    assert round(middle * (1 + ratio["input"])) == 4500
    assert value(found, "--random-output-len") == "512"
    assert value(found, "--num-prompts") == value(found, "--max-concurrency") == "64"
    assert "--ignore-eos" in found
    assert "--request-rate" not in found
    assert (value(found, "--result-dir"), value(found, "--result-filename")) == ("a", "b.json")


def test_an_open_loop_has_a_rate_and_no_limit() -> None:
    config = bench_data.config()
    found = client_arguments(config, Point(None, 2.5, 32, 40), 0, "u", "m", Path("b.json"))
    assert value(found, "--request-rate") == "2.5"
    assert "--max-concurrency" not in found


def test_prompts_are_alike_in_both_arms_and_new_for_each_point_and_run() -> None:
    config = bench_data.config()

    def seed(point: Point, run: int, url: str = "u") -> str:
        return value(client_arguments(config, point, run, url, "m", Path("b.json")), "--seed")

    four, eight = Point(4, None, 32, 4), Point(8, None, 32, 8)
    assert seed(four, 0) == seed(four, 0, "another")
    assert len({seed(four, 0), seed(four, 1), seed(eight, 0)}) == 3


def test_the_clients_result_gives_a_record_a_request() -> None:
    result = {
        "input_lens": [30, 40],
        "output_lens": [32, 7],
        "ttfts": [0.1, 0.2],
        "latencies": [1.1, 0.9],
        "errors": ["", "connection lost"],
    }
    good, bad = records_of(result, 32)
    assert good.complete
    assert (good.prompt_tokens, good.tokens, good.ttft_s, good.e2e_s) == (30, 32, 0.1, 1.1)
    assert not bad.complete
    assert bad.error == "connection lost"


def test_metrics_are_summed_over_their_labels() -> None:
    pytest.importorskip("prometheus_client", reason="needs prometheus_client, not installed here")
    assert metric_sums(METRICS) == {
        "running": 5.0,
        "waiting": 7.0,
        "usage": 0.25,
        "preemptions": 4.0,
        "drafts": 100.0,
        "accepted": 870.0,
    }
    assert metric_labels(METRICS, "vllm:cache_config_info")["num_gpu_blocks"] == "2000"
    assert metric_labels(METRICS, "vllm:nothing") == {}


def test_a_points_peaks_are_what_was_seen_meanwhile_and_its_counts_from_before_to_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "POLL_S", 0.0)
    nothing = dict.fromkeys((*server._GAUGES, *server._COUNTERS), 0.0)
    meanwhile = [
        nothing | {"running": 2.0, "usage": 0.5, "drafts": 7.0},
        nothing | {"running": 3.0, "waiting": 4.0, "usage": 0.25},
        ArmFailed("busy"),
        nothing | {"running": 1.0},
    ]
    before = nothing | {"drafts": 5.0, "accepted": 1.0, "preemptions": 1.0}
    after = nothing | {"drafts": 15.0, "accepted": 4.0, "preemptions": 2.0}
    coming = iter([before, *meanwhile])
    all_seen = threading.Event()

    def read() -> dict[str, float]:
        found = next(coming, after)
        if isinstance(found, Exception):
            raise found
        if found is after:
            all_seen.set()
        return found

    ticks: list[dict[str, int]] = []
    sampler = server._Sampler(read, ticks.append)
    assert all_seen.wait(60)
    assert sampler.figures() == EngineFigures(3, 4, 0.5, 1, drafts=10, accepted=3)
    assert [tick["running"] for tick in ticks[:3]] == [2, 3, 1]


def test_a_server_needs_a_checkpoint_with_a_tokenizer() -> None:
    assert server_problems(bench_data.config()) == []
    serve = bench_data.CONTENT["serve"] | {"skip_tokenizer_init": True}
    (told,) = server_problems(bench_data.config(serve=serve))
    assert told.startswith("serve.skip-tokenizer-init")


def test_a_false_flag_is_said_on_the_command_line() -> None:
    """vLLM 0.31.0 passes over it in the file, and one arm would have a prefix cache."""
    assert switches_off(arm_flags(bench_data.config(), "stock")) == ["--no-enable-prefix-caching"]
    assert switches_off({"a-b": False, "c": True, "d": 0, "e": None}) == ["--no-a-b"]


def test_a_switch_that_has_no_opposite_is_left_out_where_it_is_false() -> None:
    """vLLM 0.31.0 ends with: unrecognized arguments: --no-disable-log-stats."""
    flags = bench_data.CONTENT["serve"] | {"disable_log_stats": False, "headless": False}
    written = arm_flags(bench_data.config(serve=flags), "stock")
    assert switches_off(written) == ["--no-enable-prefix-caching"]


def server_config(**changes: object) -> BenchConfig:
    serve = {"disable_log_stats": True, "load-format": "dummy"}
    given: dict[str, object] = {
        "serve": bench_data.CONTENT["serve"] | serve,
        "profile": {"concurrency": [2]},
        "load": bench_data.CONTENT["load"] | {"token_ids": [100, 200]},
    }
    return bench_data.config(**given | changes)


def test_what_a_server_cannot_do_is_refused_all_at_once() -> None:
    found = server_problems(server_config())
    assert [text.split(":")[0] for text in found] == [
        "serve.disable-log-stats",
        "profile.concurrency",
        "load.token_ids",
        "dummy_weights",
    ]
    for text, write in zip(
        found, ("leave it out", "write [], and", "leave it out", "write vllm"), strict=True
    ):
        assert write in text
    well = {
        "serve": bench_data.CONTENT["serve"] | {"disable-log-stats": False, "grpc": False},
        "profile": {"steps": 3},
        "load": bench_data.CONTENT["load"],
    }
    assert server_problems(server_config(**well)) == []
    # Of dummy weights it has to say whose, and only where there are any.
    dummy = {**well, "serve": bench_data.CONTENT["serve"] | {"load_format": "dummy"}}
    assert len(server_problems(server_config(**dummy))) == 1
    assert server_problems(server_config(**dummy, dummy_weights="vllm")) == []
    assert server_problems(server_config(**well, dummy_weights="scaled")) == []


@pytest.mark.parametrize("name", ["headless", "grpc"])
def test_a_server_that_answers_no_http_is_refused(name: str) -> None:
    serve = bench_data.CONTENT["serve"] | {name: True}
    (told,) = server_problems(bench_data.config(serve=serve))
    assert told.startswith(f"serve.{name}: ")


def test_the_result_says_what_the_gate_of_servers_does_not_see() -> None:
    whole = bench_data.results()
    assert "notes" not in whole.summary()
    whole.origin["mode"] = "server"
    (fault,) = whole.summary()["notes"]
    assert fault.startswith("no planted fault")
    serve = bench_data.CONTENT["serve"] | {"load-format": "dummy"}
    whole.config = bench_data.config(serve=serve, dummy_weights="vllm")
    told = whole.summary()["notes"]
    assert told[0] == fault
    assert "say little of GDN" in told[1]
    assert len(told) == 2


def test_each_arm_has_to_have_its_port() -> None:
    port = free_ports(2)
    assert port_problems(port, ("stock", "replay")) == []
    with taken(port + 1):
        (told,) = port_problems(port, ("stock", "replay"))
        assert told.startswith(f"--port {port}: {port + 1}, of replay, can't be had (")
        assert port_problems(port, ("stock",)) == []
        assert port_problems(port, ("replay",)) == [told]
        assert len(port_problems(port + 1, ("stock",))) == 1


def test_a_servers_last_words_are_its_errors(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    assert last_words(log) == ""
    lines = [f"(EngineCore pid=1) INFO 11-30 [shutdown] line {number}" for number in range(40)]
    log.write_text("\n".join(lines))
    assert last_words(log).splitlines()[-1] == lines[-1]
    error = "(EngineCore pid=1) ERROR 11-30 [core.py:1] ValueError: no room"
    harmless = "(APIServer pid=2) WARNING 11-30 [u.py:2] may end in `OSError: too many files`"
    log.write_text("\n".join([harmless, error, error, *lines]))
    assert last_words(log) == "ValueError: no room"


PREFIX = "(EngineCore pid=7) ERROR 11-30 07:27:08 [core.py:1058] "
OTHER = "(APIServer pid=2) INFO 11-30 07:27:08 [launcher.py:178] [shutdown] API server"
TRACE = ["Traceback (most recent call last):", '  File "x.py", line 1, in f', "    f()", "    ^^^"]


def refusal() -> str:
    """What the operator has to read, as `refusals.refuse` writes it."""
    found = [
        Problem("KV transfer said OSError: none", "remove --kv-transfer-config"),
        refusals.not_named(),
    ]
    with pytest.raises(RuntimeError) as caught:
        refusals.refuse(found)
    return f"RuntimeError: {caught.value}"


def pydantic_refusal() -> str:
    class VllmConfig(BaseModel):
        size: int

        @model_validator(mode="after")
        def check(self) -> VllmConfig:
            raise ValueError("size 3: write --size 4")

    with pytest.raises(ValidationError) as caught:
        VllmConfig(size=3)
    return f"ValidationError: {caught.value}"


@pytest.mark.parametrize("error", [refusal, pydantic_refusal], ids=["ours", "pydantic"])
@pytest.mark.parametrize("after", ["nothing", "another", "chained", "warning"])
@pytest.mark.parametrize("logged", [True, False], ids=["logged", "raw"])
def test_a_servers_last_words_have_the_reasons_below_an_error(
    error: Callable[[], str], after: str, logged: bool, tmp_path: Path
) -> None:
    """The operator saw: RuntimeError: gaudi_ext cannot serve with ReplaySSM (2 problems):"""
    told = error()
    assert len(told.splitlines()) > 2
    name = "pydantic_core._pydantic_core." if error is pydantic_refusal else ""
    message = [*TRACE, *f"{name}{told}".splitlines()]
    tail = {
        "nothing": [],
        "another": ["INFO:     Shutting down", OTHER],
        "chained": ["", "During handling of the above exception, another one occurred:", *TRACE],
        "warning": ["lib/resource_tracker.py:254: UserWarning: leaked", "  warnings.warn('x')"],
    }[after]
    lines = [OTHER, *([PREFIX + line for line in message] if logged else message)]
    log = tmp_path / "server.log"
    # As vLLM ends the lines of one message.
    log.write_bytes("\r\n".join([*lines, *tail, OTHER]).encode())
    assert last_words(log) == told


def test_an_error_that_was_logged_and_raised_is_told_once(tmp_path: Path) -> None:
    told = refusal()
    raised = [*TRACE, *told.splitlines()]
    died = "EngineDeadError: the engine died"
    lines = [*(PREFIX + line for line in raised), OTHER, *raised, "", *TRACE, died]
    log = tmp_path / "server.log"
    log.write_text("\n".join(lines))
    assert last_words(log) == f"{told}\n{died}"
    # Lines that go on without an end are not all of them told.
    log.write_text("\n".join([died, *map(str, range(1000))]))
    assert last_words(log).splitlines()[-1] == str(server.ERROR_LINES - 2)


def alive(pid: int) -> bool:
    """Neither gone nor a zombie that nobody asks for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ServerArm]]:
    """Makes an arm of that model whose server is the stub; it is stopped at the end."""
    monkeypatch.setattr(ServerArm, "module", "stub_server")
    monkeypatch.setattr(server, "READY_POLL_S", 0.02)
    monkeypatch.setattr(server, "CLIENT_POLL_S", 0.02)
    monkeypatch.setattr(server, "STOP_S", 0.1)
    here = str(Path(__file__).resolve().parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
    made: list[ServerArm] = []

    def make(model: str, **changes: object) -> ServerArm:
        load = bench_data.CONTENT["load"] | {"warm_up": {"before_each_point": 0}}
        config = bench_data.config(serve=bench_data.CONTENT["serve"] | {"model": model}, load=load)
        flags = arm_flags(config, "stock") | changes
        environment = arm_environment(config, "stock")
        port = free_ports()
        made.append(ServerArm("stock", config, flags, environment, tmp_path, None, port=port))
        return made[-1]

    yield make
    for arm in made:
        arm.stop(force=True)


def start(arm: ServerArm) -> dict[str, object]:
    pytest.importorskip("prometheus_client", reason="needs prometheus_client, not installed here")
    return arm.start(lambda _: None)


def measure(arm: ServerArm) -> None:
    arm.point(Point(4, None, 32, 4), 0, lambda _: None)


def gone(pid: int) -> bool:
    """Killed is not yet gone."""
    for _ in range(500):
        if not alive(pid):
            return True
        time.sleep(0.01)
    return False


def test_a_server_tells_of_itself(stub: Callable[..., ServerArm]) -> None:
    facts = start(stub("well"))
    assert (facts["vllm"], facts["num_gpu_blocks"], facts["drafts"]) == ("stub", 64, 15)
    assert facts["prefix_caching"] is facts["replay_active"] is False


def test_a_server_with_a_prefix_cache_is_refused(stub: Callable[..., ServerArm]) -> None:
    with pytest.raises(ArmFailed, match="enable_prefix_caching is 'True'"):
        start(stub("well", **{"enable-prefix-caching": True}))


def test_a_port_that_another_listens_on_is_refused(stub: Callable[..., ServerArm]) -> None:
    arm = stub("well")
    with taken(arm._port), pytest.raises(ArmFailed, match=f"port {arm._port} can't be had"):
        arm.start(lambda _: None)


def test_a_server_that_is_killed_ends_its_point(
    stub: Callable[..., ServerArm], tmp_path: Path
) -> None:
    """Its client would wait on, or come back with a result in which all requests failed."""
    arm = stub("killed")
    start(arm)
    with pytest.raises(ArmFailed, match="vllm serve ended with -9"):
        measure(arm)
    assert gone(int((tmp_path / "client.pid").read_text()))


def test_a_result_of_a_server_whose_engine_died_is_none(stub: Callable[..., ServerArm]) -> None:
    arm = stub("sick")
    start(arm)
    with pytest.raises(ArmFailed, match="/health said 503\nRuntimeError: the engine is sick"):
        measure(arm)


def test_a_server_that_is_gone_fails_whatever_is_asked_of_it(
    stub: Callable[..., ServerArm],
) -> None:
    arm = stub("well")
    start(arm)
    assert arm._process is not None
    arm._process.kill()
    arm._process.wait()
    for ask in (
        arm.sleep,
        arm.wake,
        lambda: measure(arm),
        lambda: arm._complete([1], 1, score=True),
    ):
        with pytest.raises(ArmFailed, match="vllm serve ended with -9"):
            ask()


def test_a_servers_engine_ends_with_it(
    stub: Callable[..., ServerArm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the server hears nothing, and its engine would be left with the device."""
    told = tmp_path / "engine.pid"

    def until_told(self: ServerArm, awaited: str) -> None:
        assert self._process is not None
        assert self._process.poll() is None
        if told.is_file():
            raise OutOfTime("the engine is there")

    monkeypatch.setattr(ServerArm, "_check_alive", until_told)
    arm = stub("deaf")
    try:
        with pytest.raises(OutOfTime):
            arm.start(lambda _: None)
        engine = int(told.read_text())
        assert alive(engine)
    finally:
        arm.stop(force=True)
    assert arm._process is not None
    assert arm._process.returncode == -signal.SIGKILL
    try:
        assert gone(engine)
    finally:
        if alive(engine):
            os.kill(engine, signal.SIGKILL)
