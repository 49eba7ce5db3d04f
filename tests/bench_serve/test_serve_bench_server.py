"""The server mode: the client's command line, its result, and the server's metrics."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import bench_data
import pytest

from cuda_ext.bench.serve import server
from cuda_ext.bench.serve.arms import OutOfTime
from cuda_ext.bench.serve.config import arm_environment, arm_flags
from cuda_ext.bench.serve.load import Point
from cuda_ext.bench.serve.server import (
    ServerArm,
    client_arguments,
    metric_labels,
    metric_sums,
    records_of,
    server_problems,
)

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


def test_a_server_needs_a_checkpoint_with_a_tokenizer() -> None:
    assert server_problems(bench_data.config()) == []
    serve = bench_data.CONTENT["serve"] | {"skip_tokenizer_init": True}
    (told,) = server_problems(bench_data.config(serve=serve))
    assert told.startswith("serve.skip-tokenizer-init")


def alive(pid: int) -> bool:
    """Neither gone nor a zombie that nobody asks for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_servers_engine_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the server hears nothing, and its engine would be left with the device."""
    monkeypatch.setattr(ServerArm, "module", "stub_server")
    monkeypatch.setattr(server, "READY_POLL_S", 0.02)
    monkeypatch.setattr(server, "STOP_S", 0.1)
    here = str(Path(__file__).resolve().parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
    told = tmp_path / "engine.pid"

    def until_told(self: ServerArm) -> None:
        assert self._process is not None
        assert self._process.poll() is None
        if told.is_file():
            raise OutOfTime("the engine is there")

    monkeypatch.setattr(ServerArm, "_check_alive", until_told)
    config = bench_data.config()
    flags, environment = arm_flags(config, "stock"), arm_environment(config, "stock")
    arm = ServerArm("stock", config, flags, environment, tmp_path, None, port=1)
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
        # Killed is not yet gone.
        for _ in range(500):
            if not alive(engine):
                break
            time.sleep(0.01)
        assert not alive(engine)
    finally:
        if alive(engine):
            os.kill(engine, signal.SIGKILL)
