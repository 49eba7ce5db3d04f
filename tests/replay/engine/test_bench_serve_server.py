"""`gaudi-ext bench serve --mode server`, whole: a real `vllm serve` an arm, and vLLM's own client.

In bf16 and with drafts of DFlash, of which each request has as many: vLLM's own layers serve those
on a CPU. Its sampler there knows no synthetic acceptance, so drafts are accepted as they come.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_on_cpu
import pytest
import tiny_models
from free_ports import free_ports

from cuda_ext.bench.serve.arms import ArmFailed
from cuda_ext.bench.serve.config import arm_environment, arm_flags, checked_config
from cuda_ext.bench.serve.load import Point
from cuda_ext.bench.serve.server import ServerArm

pytestmark = pytest.mark.slow

DRAFTS = 5
ARMS = ("stock", "replay")
CONTENT: dict[str, Any] = {
    "name": "server-cpu",
    "load": {
        "concurrency": [3],
        "waves": 3,
        "request_rates": [4.0],
        "open_requests": 4,
        "prompt_tokens": [20, 60],
        "output_tokens": [64],
        # One start of the client less at each point.
        "warm_up": {"requests": 1, "output_tokens": 2, "before_each_point": 0},
    },
}


@pytest.fixture(scope="module")
def content(models: Callable[[Any], Path]) -> dict[str, Any]:
    serve = bench_on_cpu.SERVE | {
        "model": str(models(tiny_models.CPU_DENSE)),
        "speculative-config": {
            "method": "dflash",
            "model": str(models(tiny_models.DFLASH)),
            "num_speculative_tokens": DRAFTS,
        },
    }
    return bench_on_cpu.COMMON | CONTENT | {"serve": serve}


@pytest.fixture(scope="module")
def folder(content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the run left: results, logs, and the client's last file of each arm."""
    arguments = ["--mode", "server", "--port", str(free_ports(2))]
    return bench_on_cpu.run(content, tmp_path_factory.mktemp("server"), *arguments)


@pytest.fixture(scope="module")
def result(folder: Path) -> Any:
    return json.loads((folder / "server-cpu.json").read_text())


@pytest.fixture(scope="module")
def measured(folder: Path) -> Any:
    """Every request, by arm and point."""
    found = json.loads((folder / "server-cpu.runs.json").read_text())["runs"]
    return {(run["arm"], run["label"]): run for run in found}


def test_each_arm_was_served_as_it_should_be(result: Any, folder: Path) -> None:
    assert result["mode"] == "server"
    for arm in ARMS:
        facts = result["arms"][arm]
        assert facts["vllm"] == "0.31.0"
        assert facts["start_s"] > 0
        assert facts["replay_active"] is (arm == "replay")
        # vLLM's own default for such a model is True, and nothing but the flag says otherwise.
        assert facts["prefix_caching"] is False
        assert facts["drafts"] == DRAFTS
        assert facts["num_gpu_blocks"] == 64
        # Nor are the last lines of a failure's log those of our own looks at the metrics.
        assert "GET /metrics" not in (folder / f"{arm}.log").read_text()


def test_the_gate_is_green_by_what_the_servers_said(result: Any) -> None:
    assert result["gate"] == "green"
    found = {check["name"]: check for check in result["checks"]}
    assert set(found) == {
        "both arms",
        "layers of stock",
        "layers of replay",
        "requests complete",
        "same requests",
        "gate prompts",
        "log-probabilities, prefill",
        "log-probabilities, decode",
    }
    assert found["requests complete"]["value"] == 2 * (9 + 4)
    for name in ("prefill", "decode"):
        check = found[f"log-probabilities, {name}"]
        # Two implementations in bf16: nothing would be compared where they agreed in every bit.
        assert 0 < check["value"] <= check["limit"]
        assert "says little" not in check["note"]
    # Of all that is said of other modes too, one line is of servers.
    assert [note[:16] for note in result["notes"]] == ["no planted fault"]


def test_every_point_has_both_arms_and_its_figures(result: Any) -> None:
    for point in bench_on_cpu.checked_points(result):
        count, most = (9, 3) if point["loop"] == "closed" else (4, 4)
        assert point["requests"] == count
        assert point["output_tokens_sum"] == 64 * count
        assert point["e2e_p50_s"] <= point["wall_s"]
        # As often as the server was asked meanwhile, which may be never in so short a point.
        assert point["running_max"] <= most
        # Some drafts are accepted, and not all.
        assert 1 < point["acceptance_length"] < DRAFTS + 1
    assert all(one["output_tok_s"] > 0 for one in result["ratios"]["points"])


def test_both_arms_had_the_prompts_that_were_asked_for(measured: Any) -> None:
    for label in {label for _, label in measured}:
        stock, replay = (measured[arm, label] for arm in ARMS)
        lengths = [record["prompt_tokens"] for record in stock["records"]]
        assert lengths == [record["prompt_tokens"] for record in replay["records"]]
        assert stock["prompts"] == replay["prompts"]
        assert len(set(lengths)) > 1
        assert all(20 <= length <= 60 for length in lengths)


def test_the_clients_own_sums_are_ours(measured: Any, folder: Path) -> None:
    """Of the last point; the client reads the server's counters too, before and after it."""
    for arm in ARMS:
        run = measured[arm, "4 requests/s, 64 out"]
        client = json.loads((folder / f"{arm}.client.json").read_text())
        assert (client["completed"], client["failed"]) == (4, 0)
        assert (client["request_rate"], client["max_concurrency"]) == (4.0, None)
        assert client["total_output_tokens"] == sum(r["tokens"] for r in run["records"])
        assert client["total_input_tokens"] == sum(r["prompt_tokens"] for r in run["records"])
        assert client["duration"] == run["wall_s"]
        drafts, accepted = run["engine"]["drafts"], run["engine"]["accepted"]
        assert client["spec_decode_num_drafts"] == drafts > 0
        assert client["spec_decode_accepted_tokens"] == accepted > 0
        # A token of each request comes from its prompt, and one more from each verification.
        assert client["total_output_tokens"] <= 4 + drafts + accepted


def test_an_engine_that_is_killed_ends_its_point(content: dict[str, Any], tmp_path: Path) -> None:
    """Requests of a dead engine fail one by one, and the client calls that a result."""
    config = checked_config(content, "bench.yaml")
    flags, environment = arm_flags(config, "replay"), arm_environment(config, "replay")
    arm = ServerArm("replay", config, flags, environment, tmp_path, None, port=free_ports(2))
    killed = []

    def kill(_: dict[str, Any]) -> None:
        # Here a point lasts until its figures were seen.
        found = {} if killed else arm._metrics()
        if found.get("running") and found["usage"]:
            (engine,) = set(re.findall(r"EngineCore pid=(\d+)", arm.log.read_text()))
            os.kill(int(engine), signal.SIGKILL)
            killed.append(engine)

    try:
        arm.start(lambda _: None)
        with pytest.raises(ArmFailed, match="EngineDeadError"):
            arm.point(Point(2, None, 400, 80), 0, kill)
        assert killed
    finally:
        arm.stop(force=True)
