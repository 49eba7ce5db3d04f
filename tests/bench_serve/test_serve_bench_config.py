"""The YAML of a serving benchmark: refused with every problem, and the same for both arms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bench_data
import pytest
import yaml

from cuda_ext.bench.serve import shapes
from cuda_ext.bench.serve.config import (
    CONFIGS,
    ConfigError,
    arm_environment,
    arm_flags,
    find_config,
    load_config,
)
from cuda_ext.bench.serve.server import server_problems


def written(folder: Path, content: Any) -> Path:
    path = folder / "bench.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def refusal(folder: Path, content: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(written(folder, content))
    return str(caught.value)


def test_a_good_file_is_read(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, bench_data.CONTENT)) == bench_data.config()


def test_wrong_keys_and_values_are_all_told_with_their_keys(tmp_path: Path) -> None:
    load = {"concurrency": [0], "prompt_tokens": [1], "output_tokens": [], "sed": 1}
    text = refusal(
        tmp_path, {"name": "Upper", "serve": {}, "load": load, "repeats": 3, "gate": {"slack": 0.5}}
    )
    told = [line.split(". ", 1)[1].split(":")[0] for line in text.splitlines()[1:]]
    assert sorted(told) == [
        "gate.slack",
        "load.concurrency.0",
        "load.output_tokens",
        "load.prompt_tokens.1",
        "load.sed",
        "name",
        "repeats",
    ]


def test_what_the_fields_say_together_is_all_told(tmp_path: Path) -> None:
    serve = {
        "max-model-len": 64,
        "enable_prefix_caching": True,
        "enable-sleep-mode": True,
        "speculative-config": {"method": "ngram", "num_speculative_tokens": 3},
        "additional-config": {"gaudi_ext": {"replay": "on"}},
    }
    text = refusal(
        tmp_path,
        {
            "name": "x",
            "serve": serve,
            "acceptance_length": 9.7,
            "environment": {"VLLM_PLUGINS": "gaudi_ext"},
            "load": {"prompt_tokens": [50, 40], "output_tokens": [32]},
        },
    )
    told = [line.split(". ", 1)[1].split(":")[0] for line in text.splitlines()[1:]]
    assert sorted(told) == [
        "acceptance_length",
        "environment.VLLM_PLUGINS",
        "load",
        "load.prompt_tokens",
        "serve.additional-config.gaudi_ext.replay",
        "serve.enable-prefix-caching",
        "serve.enable-sleep-mode",
        "serve.max-model-len",
        "serve.model",
    ]
    assert text.startswith(f"{tmp_path / 'bench.yaml'}: 9 problems")


def test_synthetic_acceptance_needs_drafts(tmp_path: Path) -> None:
    content = bench_data.CONTENT | {
        "serve": {"model": "m", "max-model-len": 8192, "enable-prefix-caching": False}
    }
    assert "acceptance_length: needs serve.speculative-config" in refusal(tmp_path, content)


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ({"model": "nobody/knows"}, "is not among the planner's models"),
        ({"model": "Qwen/Qwen3.5-4B", "layers": 64}, "has 32"),
        ({"model": "Qwen/Qwen3.5-2B"}, "intermediate_size of Qwen/Qwen3.5-2B is unknown"),
        ({"model": "Qwen/Qwen3.5-4B"}, "shape.drafter: needed"),
    ],
    ids=["model", "layers", "unknown", "drafter"],
)
def test_a_shape_that_cannot_be_written_is_refused(
    tmp_path: Path, shape: dict[str, Any], told: str
) -> None:
    serve = {k: v for k, v in bench_data.CONTENT["serve"].items() if k != "model"}
    assert told in refusal(tmp_path, bench_data.CONTENT | {"shape": shape, "serve": serve})


def test_no_file_and_no_packaged_name_names_the_packaged_ones() -> None:
    with pytest.raises(ConfigError, match="h200-35b, h200-4b"):
        find_config("h100")


def test_arms_differ_in_replay_and_plugins_alone() -> None:
    config = bench_data.config()
    stock, replay = (arm_flags(config, arm, sleep=True) for arm in ("stock", "replay"))
    assert stock["additional-config"].pop("gaudi_ext") == {"replay": "off"}
    assert replay["additional-config"].pop("gaudi_ext") == {"replay": "on"}
    assert stock == replay
    assert stock["additional-config"] == {"gdn_prefill_backend": "triton"}
    assert stock["enable-sleep-mode"] is True
    assert stock["speculative-config"]["synthetic_acceptance_length"] == 9.7
    one, other = (arm_environment(config, arm) for arm in ("stock", "replay"))
    # Empty, not absent: absent would load every plugin, this package's too.
    assert one.pop("VLLM_PLUGINS") == ""
    assert other.pop("VLLM_PLUGINS") == "gaudi_ext"
    assert one == other


def test_another_option_of_ours_reaches_both_arms() -> None:
    extra = {"additional-config": {"gaudi_ext": {"backend": "reference"}}}
    config = bench_data.config(serve=bench_data.CONTENT["serve"] | extra)
    found = [
        arm_flags(config, arm)["additional-config"]["gaudi_ext"] for arm in ("stock", "replay")
    ]
    assert [options["backend"] for options in found] == ["reference", "reference"]


def test_the_digest_changes_with_flags_and_load_but_not_with_words() -> None:
    digest = bench_data.config().digest()
    assert bench_data.config(about="x", interleave="restart").digest() == digest
    load = bench_data.CONTENT["load"] | {"seed": 1}
    assert bench_data.config(load=load).digest() != digest
    assert bench_data.config(environment={"A": "1"}).digest() != digest


def test_a_point_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    load = bench_data.CONTENT["load"] | {"points": ["4x32", "4x32x2", "4x64"]}
    assert "load.points: 4x32 is there twice" in refusal(
        tmp_path, bench_data.CONTENT | {"load": load}
    )
    load = bench_data.CONTENT["load"] | {"points": ["4x9000"]}
    assert "serve.max-model-len: 8192" in refusal(tmp_path, bench_data.CONTENT | {"load": load})
    assert "load.points.0" in refusal(
        tmp_path, bench_data.CONTENT | {"load": load | {"points": ["4"]}}
    )


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_packaged_configs_ask_for_what_the_figures_were_measured_with(path: Path) -> None:
    config = load_config(path)
    assert config.load.concurrency == [1, 4, 16, 64, 128, 256]
    assert config.load.output_tokens == [512, 3072]
    assert config.load.prompt_tokens == (3300, 4500)
    assert config.acceptance_length == 9.7
    flags = arm_flags(config, "stock", model="m", drafter="d")
    assert flags["speculative-config"]["num_speculative_tokens"] == 15
    wanted = {"max-model-len": 8192, "max-num-seqs": 256, "max-num-batched-tokens": 16384}
    assert wanted.items() <= flags.items()
    assert config.load.waves == 3
    # Before a point a whole step of prompts runs, and a mixed one.
    settling = config.load.warm_up.before_each_point * config.load.prompt_tokens[0]
    assert settling > flags["max-num-batched-tokens"]
    # The largest decode batch of the largest point, in both arms.
    for arm in ("stock", "replay"):
        sizes = arm_flags(config, arm)["compilation-config"]["cudagraph_capture_sizes"]
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == 256 * (15 + 1)


def test_the_servers_packaged_config_is_that_of_the_engines_with_real_weights() -> None:
    config, engines = (load_config(find_config(name)) for name in ("h200-4b-server", "h200-4b"))
    assert server_problems(config) == []
    assert (config.shape, config.flag("load-format")) == (None, None)
    assert config.load.request_rates
    assert engines.shape is not None
    assert config.flag("model") == engines.shape.model
    chosen = {"model", "speculative-config", "additional-config"}
    same = [{k: v for k, v in c.serve.items() if k not in chosen} for c in (config, engines)]
    assert same[0] == same[1]


def test_a_shape_is_written_as_its_model_is(tmp_path: Path) -> None:
    config = load_config(find_config("h200-4b"))
    assert config.shape is not None
    target = shapes.target_config(config.shape)
    assert target["architectures"] == ["Qwen3_5ForCausalLM"]
    assert target["layer_types"].count("linear_attention") == 24
    assert target["layer_types"][3] == "full_attention"
    assert (target["linear_num_key_heads"], target["linear_num_value_heads"]) == (16, 32)
    drafter = shapes.drafter_config(config.shape)
    assert drafter["hidden_size"] == target["hidden_size"]
    assert drafter["dflash_config"]["mask_token_id"] < target["vocab_size"]
    folders = shapes.write_shape(config.shape, tmp_path)
    assert [folder and (folder / "config.json").is_file() for folder in folders] == [True, True]


def test_a_shape_of_experts_and_fewer_layers() -> None:
    config = load_config(find_config("h200-35b"))
    assert config.shape is not None
    target = shapes.target_config(config.shape.model_copy(update={"layers": 8}))
    assert target["architectures"] == ["Qwen3_5MoeForCausalLM"]
    assert (target["num_experts"], target["num_experts_per_tok"]) == (256, 8)
    assert len(target["layer_types"]) == target["num_hidden_layers"] == 8
