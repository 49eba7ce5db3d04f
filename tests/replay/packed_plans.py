"""Child process: how the installed vLLM groups a list of shapes, packed and not.

`python packed_plans.py CASES.json RESULTS.json`. A case is layers with states, a state's bytes, the
unit that blocks are rounded up to, attention layers of the target and of the drafter, and the
tokens of a request. vLLM's own specs, grouping, sizing and accounting; supplied are the few fields
of its configuration that those read, among them the KV-cache layout that was resolved.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, iter_layer_specs
from vllm.v1.kv_cache_layout import KVCacheLayout

POOL_BLOCKS = 7


def config_of(layout: str, tokens: int) -> Any:
    """What the grouping reads of a VllmConfig."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
            prefix_cache_retention_interval=None,
            num_gpu_blocks_override=None,
            mamba_cache_mode="none",
        ),
        speculative_config=None,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        model_config=SimpleNamespace(
            max_model_len=tokens, hf_config=SimpleNamespace(model_type="qwen3_5")
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        kv_transfer_config=None,
    )


def attention_spec(block: int, kv_heads: int, head_dim: int) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block, num_kv_heads=kv_heads, head_size=head_dim, dtype=torch.bfloat16
    )


def specs_of(case: dict[str, Any], block: int) -> dict[str, KVCacheSpec]:
    """The target's layers, states and attention by turns, then the drafter's."""
    state = MambaSpec(
        block_size=case["tokens"],
        shapes=((case["state"] // 4,),),
        dtypes=(torch.float32,),
        page_size_padded=None,
        mamba_cache_mode="none",
    )
    assert state.page_size_bytes == case["state"]
    count, *shape = case["target"]
    attention = attention_spec(block, *shape)
    specs: dict[str, KVCacheSpec] = {}
    for index in range(max(case["gdn"], count)):
        if index < case["gdn"]:
            specs[f"target.{index}.gdn"] = state
        if index < count:
            specs[f"target.{index}.attention"] = attention
    if case["drafter"] is not None:
        count, *shape = case["drafter"]
        for index in range(count):
            specs[f"drafter.{index}.attention"] = attention_spec(block, *shape)
    return specs


def described(config: Any, groups: list[Any]) -> dict[str, Any]:
    """The groups, a block's bytes in a pool of them, and those of one request."""
    found = []
    for group in groups:
        kinds = {type(spec).__name__ for spec in iter_layer_specs(group.kv_cache_spec)}
        blocks = {
            spec.block_size
            for spec in iter_layer_specs(group.kv_cache_spec)
            if not isinstance(spec, MambaSpec)
        }
        found.append([*kinds, len(group.layer_names), *blocks])
    bytes_per_block = kv_cache_utils._get_kv_cache_bytes_per_block(groups)
    cache = kv_cache_utils.get_kv_cache_config_from_groups(
        config, groups, (POOL_BLOCKS + 1) * bytes_per_block - 1
    )
    assert cache.num_blocks == POOL_BLOCKS
    request = kv_cache_utils._max_memory_usage_bytes_from_groups(config, groups)
    names = [name for group in groups for name in group.layer_names]
    return {
        "groups": found,
        "block_bytes": cache.kv_cache_tensors[0].size // POOL_BLOCKS,
        "request_bytes": request,
        "layers": len(names),
        "distinct": len(set(names)),
    }


def plan(case: dict[str, Any]) -> dict[str, Any]:
    """vLLM's groups of one case with blocks outermost, and with layers outermost."""
    one_token = attention_spec(1, *case["target"][1:]).page_size_bytes
    block = case["unit"] * -(-case["state"] // (case["unit"] * one_token))
    found: dict[str, Any] = {"block": block}
    for layout in ("BLNHC", "LBNHC"):
        config = config_of(layout, case["tokens"])
        packs = kv_cache_utils._get_packed_kv_cache_groups(config, specs_of(case, block))
        groups = kv_cache_utils.get_kv_cache_groups(config, specs_of(case, block))
        found[layout] = {"packs": packs is not None, **described(config, groups)}
    return found


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    results = {name: plan(case) for name, case in cases.items()}
    Path(sys.argv[2]).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
