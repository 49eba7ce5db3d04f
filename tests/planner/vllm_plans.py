"""Child process: what vLLM itself plans for a list of shapes, on a machine without an accelerator.

`python vllm_plans.py CASES.json RESULTS.json`. For each case the installed vLLM parses the model's
and the drafter's config.json, builds the real model classes on torch's meta device (no weights,
no memory), aligns the block size, asks every real layer for its KV-cache spec, and plans the cache
with its own `get_kv_cache_configs`.

Real everywhere: EngineArgs and VllmConfig, the model, drafter and layer classes, their state shapes
and specs, the grouping, the block count, the concurrency and the hit unit. Supplied:
  * the pool's size, which a device would report;
  * with "unit" in a case, the attention backend: a stub that offers multiples of that unit, and
    vLLM's default block of 16 and two batches in flight, as on CUDA (vllm-gaudi switches async
    scheduling off beside drafts); without it the real HPU platform and its backend decide;
  * with tp > 1, the tensor-parallel group: a stand-in of that size (nothing communicates here);
  * for a drafter that mixes sliding and full layers, that the V2 runner is used (needs Triton);
  * with "replay", the page's states: those of cuda_ext.ring, as an out-of-tree layer would give.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    init_distributed_environment,
    initialize_model_parallel,
    parallel_state,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.platforms.interface import Platform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE, set_default_torch_dtype
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_configs,
    get_max_concurrency_for_kv_cache_config,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, get_kv_quant_mode

from cuda_ext.ring import GdnHeads, replay_layout


@contextmanager
def runner_v2(answer: bool | None) -> Iterator[None]:
    """Answers whether the V2 runner is used; None leaves vLLM's own answer."""
    original = VllmConfig.use_v2_model_runner
    if answer is not None:
        VllmConfig.use_v2_model_runner = property(lambda self: answer)
    try:
        yield
    finally:
        VllmConfig.use_v2_model_runner = original


@contextmanager
def ranks(tp: int) -> Iterator[None]:
    """A tensor-parallel and expert-parallel group of `tp` ranks, of which this is the first."""
    group, experts = parallel_state._TP, parallel_state._EP
    processes = types.SimpleNamespace(size=lambda: tp, rank=lambda: 0)
    stand_in = types.SimpleNamespace(
        world_size=tp, rank_in_group=0, rank=0, ranks=list(range(tp)), device_group=processes
    )
    parallel_state._TP = stand_in if tp > 1 else group
    parallel_state._EP = stand_in if tp > 1 else experts or group
    try:
        yield
    finally:
        parallel_state._TP, parallel_state._EP = group, experts


def vllm_config(case: dict[str, Any]) -> VllmConfig:
    """vLLM's own configuration of a case."""
    arguments = EngineArgs(
        model=case["model"],
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        max_model_len=case["tokens"],
        max_num_batched_tokens=case["max_num_batched_tokens"],
        max_num_seqs=8,
        enable_prefix_caching=case["caching"],
        kv_cache_dtype=case["kv_dtype"],
        mamba_ssm_cache_dtype=case["state_dtype"],
        tensor_parallel_size=case["tp"],
        speculative_config=case["speculative"],
        limit_mm_per_prompt=case["limit_mm_per_prompt"],
    )
    with runner_v2(False if case["mixed"] else None):
        return arguments.create_engine_config()


def build(case: dict[str, Any], config: VllmConfig) -> None:
    """Builds the target and the drafter without weights; their layers register themselves."""
    with (
        ranks(case["tp"]),
        runner_v2(True if case["mixed"] else None),
        set_default_torch_dtype(config.model_config.dtype),
        torch.device("meta"),
    ):
        initialize_model(vllm_config=config)
        speculative = config.speculative_config
        if speculative is not None and speculative.method in ("mtp", "dflash"):
            initialize_model(
                vllm_config=config,
                model_config=speculative.draft_model_config,
                prefix="draft",
            )


def replay_states(config: VllmConfig) -> tuple[tuple[Any, ...], tuple[torch.dtype, ...]]:
    """Shapes and dtypes of the ReplaySSM page."""
    text = config.model_config.hf_text_config
    heads = GdnHeads(
        text.linear_num_key_heads,
        text.linear_num_value_heads,
        text.linear_key_head_dim,
        text.linear_value_head_dim,
        text.linear_conv_kernel_dim,
    ).shard(config.parallel_config.tensor_parallel_size)
    page = replay_layout(heads, config.speculative_config.num_speculative_tokens)
    return page.shapes, tuple(getattr(torch, dtype) for dtype in page.dtypes)


def align(case: dict[str, Any], config: VllmConfig) -> None:
    """Sets B and the padded page, by the real platform or by vLLM's base one with a stub."""
    if case["unit"] is None:
        type(current_platform).update_block_size_for_backend(config)
        return

    class Backend:
        @staticmethod
        def get_supported_kernel_block_sizes() -> list[MultipleOf]:
            return [MultipleOf(case["unit"])]

    config.cache_config.block_size = config.cache_config.DEFAULT_BLOCK_SIZE
    config.scheduler_config.async_scheduling = True
    if not case["replay"]:
        Platform._align_hybrid_block_size(config, Backend)
        return
    from vllm.model_executor.models import ModelRegistry

    model, _ = ModelRegistry.resolve_model_cls(
        config.model_config.architecture, model_config=config.model_config
    )
    originals = {
        name: model.__dict__.get(name)
        for name in ("get_mamba_state_shape_from_config", "get_mamba_state_dtype_from_config")
    }
    shapes, dtypes = replay_states(config)
    model.get_mamba_state_shape_from_config = classmethod(lambda cls, _: shapes)
    model.get_mamba_state_dtype_from_config = classmethod(lambda cls, _: dtypes)
    try:
        Platform._align_hybrid_block_size(config, Backend)
    finally:
        for name, original in originals.items():
            if original is None:
                delattr(model, name)
            else:
                setattr(model, name, original)


def specs_of(case: dict[str, Any], config: VllmConfig) -> dict[str, Any]:
    """The KV-cache spec of every layer that was built."""
    specs = {}
    for name, layer in config.compilation_config.static_forward_context.items():
        if not isinstance(layer, AttentionLayerBase):
            continue
        spec = layer.get_kv_cache_spec(config)
        if case["replay"] and isinstance(spec, MambaSpec):
            shapes, dtypes = replay_states(config)
            spec = dataclasses.replace(spec, shapes=shapes, dtypes=dtypes, num_speculative_blocks=0)
        if spec is not None:
            specs[name] = spec
    return specs


def plan(case: dict[str, Any]) -> dict[str, Any]:
    """vLLM's plan of one case."""
    started = time.monotonic()
    config = vllm_config(case)
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            store = Path(tempfile.mkdtemp()) / "store"
            init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
            initialize_model_parallel(1)
        build(case, config)
        align(case, config)
        block = config.cache_config.block_size
        cache = get_kv_cache_configs(config, [specs_of(case, config)], [case["pool_bytes"]])[0]
        unit, _ = resolve_kv_cache_block_sizes(cache, config)
    groups = [
        {
            "kind": type(group.kv_cache_spec).__name__,
            "layers": len(group.layer_names),
            "block": group.kv_cache_spec.block_size,
        }
        for group in cache.kv_cache_groups
    ]
    pages = {group.kv_cache_spec.page_size_bytes for group in cache.kv_cache_groups}
    return {
        "block_tokens": block,
        "pages": sorted(pages),
        "groups": groups,
        "blocks": cache.num_blocks,
        "concurrency": get_max_concurrency_for_kv_cache_config(config, cache),
        "unit": unit,
        "seconds": time.monotonic() - started,
    }


def token_bytes(kv_heads: int, head_dim: int, kv_dtype: str) -> int:
    """K and V bytes of one token in one layer, by vLLM's own spec."""
    return FullAttentionSpec(
        block_size=1,
        num_kv_heads=kv_heads,
        head_size=head_dim,
        dtype=STR_DTYPE_TO_TORCH_DTYPE[kv_dtype],
        kv_quant_mode=get_kv_quant_mode(kv_dtype),
    ).page_size_bytes


def main() -> None:
    """Plans every case; one that fails is reported and does not stop the others."""
    cases = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    results: dict[str, Any] = {}
    results["token bytes"] = [[*shape, token_bytes(*shape)] for shape in cases.pop("token bytes")]
    for name, case in cases.items():
        try:
            results[name] = plan(case)
        except Exception as error:
            where = traceback.format_exc().splitlines()[-3:-1]
            results[name] = {"failed": f"{type(error).__name__}: {error}", "where": where}
    Path(sys.argv[2]).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
