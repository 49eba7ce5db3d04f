"""Reading a serve.yaml: what is refused before vLLM sees it, and what vLLM's parser gives us."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from vllm_gaudi_ext.planner.errors import PlanError
from vllm_gaudi_ext.planner.request import Options, make_deployment
from vllm_gaudi_ext.planner.serve_args import (
    MAX_YAML_BYTES,
    read_yaml,
    recipe_platform,
    serve_args,
)

BOMB = "a: &a [x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
)


def yaml_file(folder: Path, text: str, name: str = "serve.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BOMB, r"YAML aliases \(\*a\) are not accepted"),
        ("a: [1, 2", "not valid YAML at line"),
        ("- a\n- b\n", "expected a mapping"),
        ("1: 2\n", "expected a mapping of flag names"),
        ("", "expected a mapping"),
        ("a: " + "[" * 50 + "]" * 50, "nested deeper than 32"),
        ("a: !!python/object/apply:os.system [true]\n", "not valid YAML"),
        ("a: 2026-99-99\n", "not valid YAML"),
        ("#" * (MAX_YAML_BYTES + 1), "1.0 MB is too large"),
        ("a: \x00\n", "not valid YAML"),
    ],
    ids=["bomb", "cut", "list", "number", "empty", "deep", "tag", "date", "large", "control"],
)
def test_a_bad_yaml_is_one_clear_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says) as caught:
        read_yaml(yaml_file(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_pipe_or_a_missing_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "serve.yaml")
    with pytest.raises(PlanError, match="not a regular file"):
        read_yaml(tmp_path / "serve.yaml")
    with pytest.raises(PlanError, match="No such file"):
        read_yaml(tmp_path / "other.yaml")


def parsed(**values: object) -> argparse.Namespace:
    return argparse.Namespace(**values)


def test_a_mapping_of_drafts_is_taken_from_vllms_arguments(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "model: Qwen/Qwen3.5-4B\n")
    args = serve_args(
        parsed(
            model="Qwen/Qwen3.5-4B",
            speculative_config={"method": "qwen3_5_mtp", "num_speculative_tokens": 3},
            tensor_parallel_size=2,
            gpu_memory_utilization=0.9,
        ),
        path,
    )
    assert (args.method, args.drafts, args.tp, args.utilisation) == ("mtp", 3, 2, 0.9)


def test_drafts_without_their_number_are_refused(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "model: m\n")
    with pytest.raises(PlanError, match="no num_speculative_tokens"):
        serve_args(parsed(model="m", speculative_config={"method": "dflash"}), path)


def test_a_file_without_a_model_is_refused(tmp_path: Path) -> None:
    """vLLM would fall back to a default model of its own."""
    path = yaml_file(tmp_path, "max-num-seqs: 4\n")
    with pytest.raises(PlanError, match="no model is named"):
        serve_args(parsed(model="Qwen/Qwen3-0.6B"), path)


def test_the_platform_comes_from_the_recipe_beside_it(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "model: m\n")
    assert recipe_platform(path) is None
    yaml_file(tmp_path, "schema: 1\nplatform: gaudi3\n", "recipe.yaml")
    assert recipe_platform(path) == "gaudi3"


def test_what_is_typed_beside_the_file_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = yaml_file(tmp_path, "model: Qwen/Qwen3.5-4B\n")
    yaml_file(tmp_path, "platform: gaudi3\n", "recipe.yaml")
    understood = parsed(
        model="Qwen/Qwen3.5-4B",
        max_model_len=16384,
        max_num_seqs=64,
        enable_prefix_caching=None,
        tensor_parallel_size=2,
    )
    monkeypatch.setattr(
        "vllm_gaudi_ext.planner.serve_args.parse_serve_yaml", lambda given: understood
    )
    read = make_deployment(Options(serve=path))
    assert (read.platform.name, read.tp, read.tokens, read.max_num_seqs) == ("gaudi3", 2, 16384, 64)
    # None is vLLM's default, which is on.
    assert read.caching
    typed = make_deployment(
        Options(serve=path, platform="h200", tp=4, tokens=4096, max_num_seqs=8, caching=False)
    )
    assert (typed.platform.name, typed.tp, typed.tokens, typed.max_num_seqs) == ("h200", 4, 4096, 8)
    assert not typed.caching


def test_pipeline_stages_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = yaml_file(tmp_path, "model: Qwen/Qwen3.5-4B\n")
    understood = parsed(model="Qwen/Qwen3.5-4B", pipeline_parallel_size=2)
    monkeypatch.setattr(
        "vllm_gaudi_ext.planner.serve_args.parse_serve_yaml", lambda given: understood
    )
    with pytest.raises(PlanError, match="pipeline-parallel-size 2"):
        make_deployment(Options(serve=path, unit=16))


SERVE = """\
model: Qwen/Qwen3.5-4B
tensor-parallel-size: 2
max-model-len: 16384
max-num-seqs: 64
max-num-batched-tokens: 8192
kv-cache-memory-bytes: 42949672960
kv-cache-dtype: fp8
enable-prefix-caching: true
speculative-config:
  method: dflash
  model: z-lab/Qwen3.5-4B-DFlash
  num_speculative_tokens: 7
attention-config:
  backend: FLASHINFER
additional-config:
  gaudi_ext:
    replay: "on"
"""


@pytest.mark.engine
def test_plan_serve_reads_everything_with_vllms_own_parser(tmp_path: Path) -> None:
    from engine_process import run_with_vllm

    serve = yaml_file(tmp_path, SERVE)
    done = run_with_vllm(
        ["-m", "plan_command", "plan", "--serve", str(serve), "--platform", "h200", "--json"]
    )
    assert done.returncode == 0, done.stderr[-2000:]
    plan = json.loads(done.stdout)
    chosen = plan["deployment"]
    assert chosen["target"]["name"] == "Qwen/Qwen3.5-4B"
    assert chosen["drafter"]["name"] == "z-lab/Qwen3.5-4B-DFlash"
    wanted = {
        "tp": 2,
        "tokens": 16384,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "pool_bytes": 42949672960,
        "kv_dtype": "fp8",
        "caching": True,
        "drafts": 7,
        "method": "dflash",
        "replay": "on",
        "attention_backends": ["FLASHINFER"],
    }
    assert plan["serving"] == "replay"
    assert {key: chosen[key] for key in wanted} == wanted


@pytest.mark.engine
def test_a_key_that_vllm_does_not_know_is_one_line(tmp_path: Path) -> None:
    from engine_process import run_with_vllm

    serve = yaml_file(tmp_path, "model: Qwen/Qwen3.5-4B\ntitle: mine\n")
    done = run_with_vllm(["-m", "plan_command", "plan", "--serve", str(serve), "--unit", "16"])
    assert done.returncode == 2
    assert done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    # vLLM takes the value for its positional model, so it names the flag alone.
    assert errors == [f"error: {serve}: unrecognized arguments: --title"]
