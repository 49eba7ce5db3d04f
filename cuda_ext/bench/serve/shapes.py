"""Writes config.json files of a shape, to be served with dummy weights.

The target's numbers are the planner's facts of a real model; the class is the text-only one, which
has the same layers. What no public file gives of a drafter stands in the benchmark's YAML.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cuda_ext.bench.serve.config import Shape
from vllm_gaudi_ext.planner.facts import load_facts

MAX_POSITIONS = 32768
_COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": MAX_POSITIONS,
}
_TAKEN = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "mamba_ssm_dtype",
    "tie_word_embeddings",
    "full_attention_interval",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


def vocabulary(shape: Shape) -> int:
    """Rows of the embedding."""
    return shape.vocab_size or int(load_facts().models[shape.model].config["vocab_size"])


def target_config(shape: Shape) -> dict[str, Any]:
    """config.json of the target."""
    facts = load_facts().models[shape.model].config
    layers = shape.layers or facts["num_hidden_layers"]
    interval = facts["full_attention_interval"]
    experts = facts.get("num_experts") or 0
    config = dict(_COMMON) | {name: facts[name] for name in _TAKEN if name in facts}
    config |= {
        "architectures": ["Qwen3_5MoeForCausalLM" if experts else "Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_moe_text" if experts else "qwen3_5_text",
        "num_hidden_layers": layers,
        "layer_types": [
            "linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)
        ],
        "vocab_size": vocabulary(shape),
        "attn_output_gate": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        },
    }
    if experts:
        config |= {"num_experts": experts, "norm_topk_prob": True}
    return config


def drafter_config(shape: Shape) -> dict[str, Any]:
    """config.json of the DFlash drafter."""
    drafter, target = shape.drafter, target_config(shape)
    assert drafter is not None
    return dict(_COMMON) | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": target["hidden_size"],
        "intermediate_size": drafter.intermediate_size,
        "num_hidden_layers": drafter.layers,
        "num_attention_heads": drafter.heads,
        "num_key_value_heads": drafter.kv_heads,
        "head_dim": drafter.head_dim,
        "layer_types": ["full_attention"] * drafter.layers,
        "vocab_size": target["vocab_size"],
        "rope_theta": 1e7,
        "tie_word_embeddings": True,
        "num_target_layers": target["num_hidden_layers"],
        "block_size": 16,
        "dflash_config": {
            "target_layer_ids": drafter.target_layers,
            # Among the ids that no prompt has (load.token_range).
            "mask_token_id": target["vocab_size"] - 267,
        },
    }


def write_shape(shape: Shape, folder: Path) -> tuple[Path, Path | None]:
    """Write both below `folder`.

    Returns:
        The folders of target and drafter; no second one where the shape has no drafter.
    """

    def write(name: str, config: dict[str, Any]) -> Path:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        return folder / name

    target = write("target", target_config(shape))
    return target, write("drafter", drafter_config(shape)) if shape.drafter else None
