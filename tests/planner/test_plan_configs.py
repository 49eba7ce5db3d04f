"""Reading a stranger's config, and the packaged facts: what is unknown stays unknown."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from plan_helpers import DRAFTER_4B, DRAFTER_35B, codes, plan_of, text_config, write_config

from vllm_gaudi_ext.planner.config import (
    MAX_CONFIG_BYTES,
    DrafterOverrides,
    load_drafter,
    load_target,
)
from vllm_gaudi_ext.planner.errors import PlanError
from vllm_gaudi_ext.planner.facts import load_facts, load_platforms

FACTS = load_facts()


@pytest.mark.parametrize("name", FACTS.models)
@pytest.mark.parametrize("wrapped", [False, True], ids=["text", "multimodal"])
def test_a_config_file_gives_what_the_packaged_facts_give(
    tmp_path: Path, name: str, wrapped: bool
) -> None:
    keys = text_config(name)
    content: dict[str, Any] = keys
    if wrapped:
        content = {
            "architectures": keys.pop("architectures"),
            "text_config": keys,
            "vision_config": {"num_hidden_layers": 2, "hidden_size": 7},
        }
    from_file = load_target(str(write_config(tmp_path / "served", content)))
    packaged = load_target(name)
    differing = {"name", "origin", "unknown", "inferred"}
    assert from_file.model_dump(exclude=differing) == packaged.model_dump(exclude=differing)


def test_a_file_and_its_folder_are_the_same_config(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "served", text_config("Qwen/Qwen3.5-4B"))
    from_file = load_target(str(folder / "config.json")).model_dump(exclude={"name", "origin"})
    assert load_target(str(folder)).model_dump(exclude={"name", "origin"}) == from_file


@pytest.mark.parametrize("name", ["Qwen/Qwen3.5-4B", "Qwen3.5-4B", "qwen3.5-4b"])
def test_a_known_model_is_found_with_or_without_its_organisation(name: str) -> None:
    assert load_target(name).name == "Qwen/Qwen3.5-4B"


def test_layers_follow_the_interval_where_layer_types_are_not_given(tmp_path: Path) -> None:
    keys = text_config("Qwen/Qwen3.5-27B")
    del keys["layer_types"]
    target = load_target(str(write_config(tmp_path, keys)))
    assert (target.gdn_layers, target.attention_layers) == (48, 16)


@pytest.mark.parametrize("kind", ["models", "drafters"])
def test_every_packaged_entry_names_its_sources(kind: str) -> None:
    for name, facts in getattr(FACTS, kind).items():
        assert facts.sources, name
        assert not set(facts.unknown) & set(facts.config), name
        assert not set(facts.absent) & set(facts.config), name
        assert set(facts.inferred) <= set(facts.config), name


def test_every_platform_names_where_its_unit_comes_from() -> None:
    platforms = load_platforms()
    assert {"gaudi2", "gaudi3", "h100", "h200", "b200"} <= set(platforms)
    for platform in platforms.values():
        assert platform.unit_source
        assert platform.memory_source


def test_an_unknown_state_dtype_must_be_passed() -> None:
    with pytest.raises(PlanError, match=r"mamba_ssm_dtype is unknown .* pass --state-dtype"):
        plan_of("Qwen3.8-27B", platform="h200")
    assert plan_of("Qwen3.8-27B", platform="h200", state_dtype="float32").native.block_tokens == 784


def test_qwen3_next_keeps_a_bf16_state_unless_told() -> None:
    plan = plan_of("Qwen3-Next-80B-A3B", platform="h200")
    assert plan.deployment.state_dtype == "bfloat16"
    assert "state-dtype" in codes(plan, "warning")
    told = plan_of("Qwen3-Next-80B-A3B", platform="h200", state_dtype="float32")
    assert told.native.block_tokens == 1056
    assert "state-dtype" not in codes(told)


def test_a_ssm_dtype_that_vllm_ignores_is_not_believed(tmp_path: Path) -> None:
    keys = {**text_config("Qwen/Qwen3.5-4B"), "architectures": ["Qwen3_5ForCausalLM"]}
    plan = plan_of(str(write_config(tmp_path, keys)), platform="h200")
    assert plan.deployment.state_dtype == "bfloat16"
    assert "state-dtype" in codes(plan, "warning")


def test_unknown_mtp_layers_must_be_passed() -> None:
    with pytest.raises(PlanError, match=r"mtp_num_hidden_layers is unknown .*--mtp-layers"):
        plan_of("Qwen3.5-2B", platform="h200", drafter="mtp", drafts=3)
    plan = plan_of("Qwen3.5-2B", platform="h200", drafter="mtp", drafts=3, mtp_layers=1)
    assert plan.native.groups[1].layers == 7
    assert plan.native.groups[1].drafter_layers == 1


@pytest.mark.parametrize(
    ("drafter", "says"),
    [
        (DRAFTER_35B, "num_hidden_layers is unknown .8 in revision a6ab3a2"),
        ("z-lab/Qwen3.5-27B-DFlash", "num_key_value_heads is unknown .8 by analogy"),
        ("z-lab/Qwen3.6-35B-A3B-DFlash", "num_key_value_heads is unknown .4 in revision"),
    ],
)
def test_a_drafter_whose_revisions_disagree_must_be_described(drafter: str, says: str) -> None:
    with pytest.raises(PlanError, match=says) as caught:
        load_drafter(drafter, load_target("Qwen3.5-35B-A3B"))
    assert "--drafter-" in str(caught.value)


def test_block_size_is_read_from_dflash_config_or_top_level(tmp_path: Path) -> None:
    target = load_target("Qwen3.5-4B")
    keys = {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    nested = {**keys, "dflash_config": {"block_size": 16}}
    top = {**keys, "block_size": 8}
    assert load_drafter(str(write_config(tmp_path / "n", nested)), target).block_size == 16
    assert load_drafter(str(write_config(tmp_path / "t", top)), target).block_size == 8


@pytest.mark.parametrize(
    ("extra", "sliding", "window"),
    [
        ({}, 0, None),
        ({"sliding_window": 4096}, 0, None),
        ({"layer_types": ["sliding_attention"] * 4 + ["full_attention"]}, None, None),
        (
            {
                "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
                "sliding_window": 2048,
            },
            4,
            2048,
        ),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 1024}}, 5, 1024),
        ({"dflash_config": {"use_swa": True}, "sliding_window": 512}, 5, 512),
    ],
)
def test_sliding_layers_are_resolved_as_vllm_does(
    tmp_path: Path, extra: dict[str, Any], sliding: int | None, window: int | None
) -> None:
    keys = {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "head_dim": 128,
        **extra,
    }
    folder = str(write_config(tmp_path, keys))
    target = load_target("Qwen3.5-4B")
    if sliding is None:
        with pytest.raises(PlanError, match="4 layers slide but no sliding_window"):
            load_drafter(folder, target)
    else:
        drafter = load_drafter(folder, target)
        assert (drafter.sliding_layers, drafter.window) == (sliding, window)


def test_the_command_line_replaces_a_drafters_layers() -> None:
    target = load_target("Qwen3.5-4B")
    overrides = DrafterOverrides(layers=6, sliding_layers=4, window=2048)
    drafter = load_drafter(DRAFTER_4B, target, overrides)
    assert (drafter.full_layers, drafter.sliding_layers, drafter.window) == (2, 4, 2048)


def _llama() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }


def _broken(**changes: Any) -> dict[str, Any]:
    keys = text_config("Qwen/Qwen3.5-4B")
    keys.update(changes)
    return keys


BAD_CONFIGS = {
    "no-gdn": (_llama(), "no Gated DeltaNet layer .LlamaForCausalLM"),
    "all-full": (_broken(layer_types=["full_attention"] * 32), "no Gated DeltaNet layer"),
    "all-gdn": (_broken(layer_types=["linear_attention"] * 32), "32 of 32 layers"),
    "other-layer": (
        _broken(layer_types=["linear_attention", "mamba"] * 16),
        "layer type 'mamba'",
    ),
    "short-types": (_broken(layer_types=["linear_attention"]), "1 layer_types for 32 layers"),
    "negative": (_broken(num_hidden_layers=-4), "num_hidden_layers: .*got '-4'"),
    "absurd": (_broken(head_dim=10**9), "head_dim: .*100000"),
    "text": (_broken(num_key_value_heads="four"), "num_key_value_heads: .*'four'"),
    "fraction": (_broken(linear_key_head_dim=128.5), "linear_key_head_dim"),
    "boolean": (_broken(num_key_value_heads=True), "num_key_value_heads"),
    "null": (_broken(linear_num_value_heads=None), "linear_num_value_heads"),
    "odd-heads": (_broken(linear_num_value_heads=40), "40 value heads are not a multiple"),
    "odd-dtype": (_broken(dtype="float8"), "dtype must be one of"),
    "fp32": (_broken(dtype="float32"), "pass the --dtype that you serve with"),
    "empty": ({}, "no Gated DeltaNet layer"),
    "list": ([1, 2], "expected a JSON object, found list"),
    "missing": (
        {k: v for k, v in _broken().items() if k != "linear_num_key_heads"},
        "linear_num_key_heads is not given",
    ),
}


@pytest.mark.parametrize(("content", "says"), BAD_CONFIGS.values(), ids=BAD_CONFIGS.keys())
def test_a_bad_config_is_one_clear_line(tmp_path: Path, content: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says) as caught:
        plan_of(str(write_config(tmp_path / "served", content)), platform="h200")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"{", "not valid JSON at line 1"),
        (b"\xff\xfe\x00", "not UTF-8 text"),
        (b"[" * 100_000 + b"]" * 100_000, "nested deeper than 32 levels"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, "nested deeper than 32 levels"),
        (b'{"num_hidden_layers": ' + b"9" * 5000 + b"}", "a number is too long"),
        (b"", "not valid JSON"),
        (b" " * (MAX_CONFIG_BYTES + 1), "5.0 MB is too large"),
    ],
    ids=["cut", "binary", "deep-list", "deep-object", "huge-number", "empty", "large"],
)
def test_a_malformed_file_is_one_clear_line(tmp_path: Path, text: bytes, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(PlanError, match=says) as caught:
        load_target(str(path))
    assert "\n" not in str(caught.value)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(PlanError, match="not a regular file"):
        load_target(str(tmp_path / "config.json"))


def test_a_missing_file_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="No such file"):
        load_target(str(tmp_path / "config.json"))
    with pytest.raises(PlanError, match=r"holds no config\.json"):
        load_target(str(tmp_path))


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"known are Qwen/Qwen3\.5-9B"):
        load_target("Qwen3.5-9b-chat")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vocab_size": 32000}, "vocabulary has 32000 tokens, Qwen/Qwen3.5-4B's has 248320"),
        ({"dflash_config": {"mask_token_id": 999_999}}, "mask token 999999 is outside"),
        ({"dflash_config": {"target_layer_ids": [1, 61]}}, "reads layer 61 .* has 32 layers"),
        ({"layer_types": ["linear_attention"] * 5}, "drafter layer type 'linear_attention'"),
    ],
    ids=["vocabulary", "mask", "taps", "recurrent"],
)
def test_a_drafter_for_another_model_is_refused(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    keys = {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 248320,
        **change,
    }
    with pytest.raises(PlanError, match=says):
        load_drafter(str(write_config(tmp_path, keys)), load_target("Qwen3.5-4B"))


def test_a_window_that_transformers_drops_is_told(tmp_path: Path) -> None:
    keys = {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 2,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": 2048,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    served = str(write_config(tmp_path / "a", keys))
    set_right = str(write_config(tmp_path / "b", {**keys, "use_sliding_window": True}))
    options = {"platform": "h200", "drafts": 15}
    assert "window-ignored" in codes(plan_of("Qwen3.5-4B", drafter=served, **options), "warning")
    assert "window-ignored" not in codes(plan_of("Qwen3.5-4B", drafter=set_right, **options))


def test_a_checkpoint_that_quantises_its_kv_cache_is_told(tmp_path: Path) -> None:
    keys = _broken(quantization_config={"kv_cache_scheme": {"num_bits": 8}})
    served = str(write_config(tmp_path, keys))
    assert "quantised-kv" in codes(plan_of(served, platform="h200"), "warning")
    assert "quantised-kv" not in codes(plan_of(served, platform="h200", kv_dtype="fp8"))


def test_packaged_facts_hold_no_machine_path() -> None:
    text = json.dumps(FACTS.model_dump())
    assert re.search(r"[\s\"(]/[a-z]+/", text) is None
