"""Short ways to a plan, for the planner's tests."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from vllm_gaudi_ext.planner.config import DrafterOverrides
from vllm_gaudi_ext.planner.facts import load_facts
from vllm_gaudi_ext.planner.findings import findings
from vllm_gaudi_ext.planner.plan import Plan, make_plan
from vllm_gaudi_ext.planner.request import Options, make_deployment

DRAFTER_4B = "z-lab/Qwen3.5-4B-DFlash"
DRAFTER_35B = "z-lab/Qwen3.5-35B-A3B-DFlash"

# The 35B drafter as the ReplaySSM write-up's 4 KiB a token a layer describe it; public revisions
# disagree, so the planner takes it from the command line only.
WRITE_UP_35B = DrafterOverrides(layers=6, kv_heads=8, head_dim=128, sliding_layers=0)

EIGHT_LAYERS = DrafterOverrides(layers=8, kv_heads=8, head_dim=128, sliding_layers=0)
DRAFTING = {"method": "dflash", "model": DRAFTER_4B, "num_speculative_tokens": 15}


def plan_of(model: str, **options: Any) -> Plan:
    """The plan of a known model or config path."""
    return make_plan(make_deployment(Options(model=model, **options)), findings)


def codes(plan: Plan, level: str | None = None) -> set[str]:
    """Codes of a plan's findings."""
    return {f.code for f in plan.findings if level is None or f.level == level}


def text_config(name: str) -> dict[str, Any]:
    """A packaged model's config keys, with the layer_types that its config.json would have."""
    keys = dict(load_facts().models[name].config)
    layers = keys["num_hidden_layers"]
    keys["layer_types"] = [
        "full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(layers)
    ]
    return keys


def write_config(folder: Path, content: Any) -> Path:
    """Writes a config.json and returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def model_config(name: str) -> dict[str, Any]:
    """A config.json that vLLM loads: the packaged keys and a token vision tower."""
    keys = text_config(name)
    architectures = keys.pop("architectures")
    if "Next" in name:
        return {**keys, "architectures": architectures, "model_type": "qwen3_next"}
    kind = "qwen3_5_moe" if keys.get("num_experts") else "qwen3_5"
    return {
        "architectures": architectures,
        "model_type": kind,
        "text_config": {**keys, "model_type": f"{kind}_text"},
        "vision_config": {
            "depth": 1,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 8,
            "out_hidden_size": keys["hidden_size"],
        },
    }


def serve_yaml(
    folder: Path, monkeypatch: pytest.MonkeyPatch, recipe: str | None = None, **arguments: Any
) -> Path:
    """A serve.yaml of the 4B, for which vLLM's parser gives `arguments`; a recipe.yaml beside it.

    Args:
        folder: of both files.
        monkeypatch: stands in for the parser.
        recipe: content of the recipe.yaml; None for none.
        arguments: beside the model, prefix caching off, and 15 drafts.
    """
    path = folder / "serve.yaml"
    path.write_text("model: Qwen/Qwen3.5-4B\n", encoding="utf-8")
    if recipe is not None:
        (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    given = {
        "model": "Qwen/Qwen3.5-4B",
        "enable_prefix_caching": False,
        "speculative_config": DRAFTING,
        **arguments,
    }
    parsed = argparse.Namespace(**given)
    monkeypatch.setattr("vllm_gaudi_ext.planner.serve_args.parse_serve_yaml", lambda given: parsed)
    return path
