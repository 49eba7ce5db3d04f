"""`gaudi-ext bench serve` end to end: both arms in child processes, one after the other.

vLLM's own layers need bf16 on this machine, and break with ragged drafts, so both arms are without
drafts; the gate's log-probabilities are the real ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_on_cpu
import pytest
import tiny_models

from cuda_ext.bench.serve.server import ONE_WAY, switches_off
from vllm_gaudi_ext.planner.serve_args import vllm_argument_parser

CONTENT: dict[str, Any] = {
    "name": "serve-cpu",
    "load": {
        "concurrency": [2],
        "request_rates": [20.0],
        "open_requests": 2,
        "prompt_tokens": [20, 60],
        "output_tokens": [12],
        "token_ids": [tiny_models.FIRST_PLAIN, tiny_models.LAST_PLAIN],
        "warm_up": {"requests": 1, "output_tokens": 2, "before_each_point": 1},
    },
    "profile": {"concurrency": [2], "steps": 3},
}

KINDS = ("decode", "prefill")


@pytest.fixture(scope="module")
def result(models: Callable[[Any], Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    serve = bench_on_cpu.SERVE | {
        "skip-tokenizer-init": True,
        # Of the checkpoint only its config is read.
        "model": str(models(tiny_models.CPU_DENSE)),
        "load-format": "dummy",
    }
    content = bench_on_cpu.COMMON | CONTENT | {"serve": serve}
    out = bench_on_cpu.run(content, tmp_path_factory.mktemp("bench"))
    return json.loads((out / "serve-cpu.json").read_text())


def test_every_switch_of_vllm_can_be_said_to_be_off() -> None:
    """Where a switch has no `--no-` form, by leaving it out."""
    parser = vllm_argument_parser()
    switches = [action for action in parser._actions if action.nargs == 0 and action.dest != "help"]
    one_way = {
        action.option_strings[0].removeprefix("--")
        for action in switches
        if not isinstance(action, argparse.BooleanOptionalAction)
    }
    assert one_way == ONE_WAY
    flags = {action.option_strings[0].removeprefix("--"): False for action in switches}
    assert len(flags) > 50
    parsed = parser.parse_args(["some/model", *switches_off(flags)])
    assert [action.dest for action in switches if getattr(parsed, action.dest)] == []


def test_each_arm_was_served_by_its_own_layers(result: Any) -> None:
    stock, replay = (result["arms"][arm] for arm in ("stock", "replay"))
    assert stock["layer_classes"] == ["QwenGatedDeltaNetAttention"]
    assert (stock["gdn_layers"], stock["replay_layers"]) == (3, 0)
    assert replay["layer_classes"] == ["ReplayGatedDeltaNetAttention"]
    assert (replay["gdn_layers"], replay["replay_layers"]) == (3, 3)
    assert stock["prefix_caching"] is replay["prefix_caching"] is False


def test_both_arms_have_the_same_dummy_weights(result: Any) -> None:
    stock, replay = (result["arms"][arm]["dummy_weights"] for arm in ("stock", "replay"))
    assert stock == replay
    (model,) = stock["models"]
    # More than a tensor a layer and a norm, so whole layers are among them.
    assert model["tensors"] > 30
    assert "dummy weights by one rule" in {check["name"] for check in result["checks"]}


def test_a_row_lost_in_the_engine_is_seen_by_the_gate(result: Any) -> None:
    """With vLLM's own dummy weights it is not: the distance is 0 to the bit."""
    (check,) = (c for c in result["checks"] if c["name"] == "planted fault is seen")
    (decode,) = (c for c in result["checks"] if c["name"] == "log-probabilities, decode")
    assert check["ok"]
    # Far past the limit, not by chance.
    assert check["value"] > 5 * decode["limit"]
    folds = int(check["note"].split("lost, ")[1].split()[0])
    # Two requests of 24 tokens through three layers of one group each; not one fold more, since
    # the fault ends with the part of the gate that it is for.
    assert folds == 2 * (24 - 2) * 3


def test_stock_was_measured_against_itself_in_other_batches(result: Any) -> None:
    bf16 = result["bf16"]
    assert set(bf16["stock_to_itself"]) == {"alone", "in pairs", "cut early", "cut late"}
    assert set(bf16["replay_to_stock"]) == {"together", *bf16["stock_to_itself"]}
    # A prompt that is cut has other chunks from there on.
    for name in ("cut early", "cut late"):
        assert bf16["stock_to_itself"][name]["positions"] > 0
        assert bf16["replay_to_stock"][name]["positions"] > 0


def test_each_arm_was_profiled_when_its_points_were_done(result: Any) -> None:
    found = {(line["arm"], line["kind"]): line for line in result["profile"]}
    assert set(found) == {(arm, kind) for arm in ("stock", "replay") for kind in KINDS}
    for line in found.values():
        assert "error" not in line
        assert line["wall_ms"] > 0
        # A CPU has no device to be busy.
        assert line["busy_ms"] == 0
        assert line["preemptions"] == 0 if line["kind"] == "decode" else line["tokens"] == 255
    # Of two requests, both decoding, without drafts.
    decode = found["replay", "decode"]
    assert (decode["running"], decode["tokens"], decode["steps"]) == (2, 2.0, 3)


def test_what_serves_is_on_record(result: Any) -> None:
    for arm in ("stock", "replay"):
        facts = result["arms"][arm]
        assert facts["attention_backends"] == ["CPU_ATTN"]
        assert facts["kv_cache_layout"] == "LBHNC"
        groups = facts["kv_cache_groups"]
        assert [group["layers"] for group in groups] == [1, 1, 1, 1]
        assert [group["kinds"] for group in groups][-1] == ["FullAttentionSpec"]
        assert len({group["block_bytes"] for group in groups}) == 1
        assert facts["pool_bytes"] == facts["num_gpu_blocks"] * groups[0]["block_bytes"]
        assert facts["cudagraph_capture_sizes"] == []


def test_the_gate_compared_log_probabilities(result: Any) -> None:
    assert result["gate"] == "green"
    distances = {c["name"]: c for c in result["checks"] if c["name"].startswith("log-prob")}
    assert set(distances) == {"log-probabilities, prefill", "log-probabilities, decode"}
    # Two implementations in bf16: nothing would be compared where they agreed in every bit.
    assert all(check["value"] > 0 for check in distances.values())
    assert not any("says little" in check["note"] for check in distances.values())


def test_every_point_has_both_arms_and_its_figures(result: Any) -> None:
    points = bench_on_cpu.checked_points(result)
    for point in points:
        assert point["requests"] == 2
        assert point["output_tokens_sum"] == 24
        assert 1 <= point["running_max"] <= 2
        assert point["kv_usage_max"] > 0
    assert points[0]["running_max"] == 2


def test_what_fits_is_vllms_own_figure(result: Any) -> None:
    """One block a GDN layer's group, and as many of attention as 8k tokens need."""
    for arm in ("stock", "replay"):
        facts = result["arms"][arm]
        longest = bench_on_cpu.SERVE["max-model-len"]
        (attention,) = (size for size in facts["block_sizes"] if size != longest)
        needed = 3 + -(-8192 // attention)
        assert facts["num_gpu_blocks"] == 64
        assert facts["fit_8k"] == pytest.approx(64 / needed, abs=0.01)
        assert result["fit_8k"][arm] == facts["fit_8k"]
        assert facts["bytes_per_8k_request"] == facts["pool_bytes"] // 64 * needed
        # Attention of two heads of 64 in bf16, and as large as the state.
        assert facts["pool_bytes"] == 64 * attention * 2 * 2 * 64 * 2
