"""Child process: what vLLM plans with and without ReplaySSM, and what the start-up line says.

`python capacity_plans.py CASES.json RESULTS.json`, with VLLM_PLUGINS=gaudi_ext. For each case the
installed vLLM parses the config files of a model and its drafter, builds both on torch's meta
device (no weights, no memory), aligns the block size, asks every layer for its KV-cache spec, and
plans the cache with its own `get_kv_cache_configs`.

Real everywhere: the plug-in through its entry point, EngineArgs and VllmConfig, the out-of-tree
model class, layer and page, the drafter, the grouping, the number of blocks. Supplied: the pool's
bytes, and with "unit" in a case an attention backend as CUDA's are: any layout, and kernel blocks
that are multiples of the unit, or with "split" of just that size. Without it the real CPU platform
decides.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

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
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.utils import (
    get_supported_kv_cache_layouts,
    resolve_kv_cache_layout,
)
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_configs,
    get_max_concurrency_for_kv_cache_config,
)
from vllm.v1.kv_cache_interface import iter_layer_specs
from vllm.v1.worker.worker_base import get_current_attn_backends

from cuda_ext import startup
from cuda_ext.activation import active_layout
from cuda_ext.facts import replay_facts
from cuda_ext.ring import PageLayout


def vllm_config(case: dict[str, Any]) -> VllmConfig:
    """vLLM's own configuration of a case."""
    return EngineArgs(
        model=case["model"],
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        max_model_len=case["tokens"],
        max_num_batched_tokens=8192,
        max_num_seqs=8,
        speculative_config=case["speculative"],
        limit_mm_per_prompt={"image": 0, "video": 0},
        additional_config={"gaudi_ext": {"replay": case["replay"], "packing": case["packing"]}},
        enable_prefix_caching=case["caching"],
        num_gpu_blocks_override=case["blocks"],
    ).create_engine_config()


def build(config: VllmConfig) -> None:
    """Builds the target and its drafter without weights; their layers register themselves."""
    with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
        initialize_model(vllm_config=config)
        speculative = config.speculative_config
        if speculative is not None and speculative.method in ("dflash", "mtp"):
            initialize_model(
                vllm_config=config, model_config=speculative.draft_model_config, prefix="draft"
            )


@contextmanager
def backend(unit: int | None, split: bool) -> Iterator[None]:
    """vLLM's CPU backend with a CUDA backend's blocks and layouts."""
    if unit is None:
        yield
        return
    sizes = [unit if split else MultipleOf(unit)]
    with (
        patch.object(
            CPUAttentionBackend, "get_supported_kernel_block_sizes", staticmethod(lambda *_: sizes)
        ),
        patch.object(CPUAttentionBackend, "supported_kv_cache_layouts", lambda: None),
    ):
        yield


def align(config: VllmConfig, unit: int | None) -> None:
    """Sets the block size and the padded page."""
    if unit is None:
        type(current_platform).update_block_size_for_backend(config)
        return
    config.cache_config.block_size = Platform._preferred_block_size_for_backends(
        [CPUAttentionBackend], config.cache_config.DEFAULT_BLOCK_SIZE, config
    )
    Platform._align_hybrid_block_size(config, CPUAttentionBackend)


def plan(case: dict[str, Any]) -> dict[str, Any]:
    """vLLM's plan of one case, and what ReplaySSM would say of it."""
    with (
        backend(case["unit"], case["split"]),
        patch.dict(os.environ, case["environment"]),
    ):
        return planned(case)


def planned(case: dict[str, Any]) -> dict[str, Any]:
    """The same, under the backend and the environment of the case."""
    config = vllm_config(case)
    if case["configuration alone"]:
        return {"prefix_caching": config.cache_config.enable_prefix_caching}
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            store = Path(tempfile.mkdtemp()) / "store"
            init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
            initialize_model_parallel(1)
        # Made once, for whichever model comes first; those with experts need it too.
        parallel_state._EP = parallel_state._EP or parallel_state._TP
        build(config)
        align(config, case["unit"])
        block = config.cache_config.block_size
        layers = config.compilation_config.static_forward_context
        specs = {
            name: spec
            for name, layer in layers.items()
            if isinstance(layer, AttentionLayerBase)
            and (spec := layer.get_kv_cache_spec(config)) is not None
        }
        layouts = get_supported_kv_cache_layouts(get_current_attn_backends(config))
        names = [layout.name for layout in layouts]
        resolve_kv_cache_layout(config, [names], specs.values())
        cache = get_kv_cache_configs(config, [specs], [case["pool_bytes"]])[0]
        # As the engine core leaves it (v1/engine/core.py), before any layer gets its pages.
        config.cache_config.block_size = min(
            group.kv_cache_spec.block_size for group in cache.kv_cache_groups
        )
    page = active_layout(config)
    gain = page and startup.requests_gained(config, page, specs.values(), cache.num_blocks)
    facts = replay_facts(config)
    told = page and start_up_lines(config, page, cache.num_blocks)
    mixed = page and start_up_of_mixed_layers(config, page, cache.num_blocks)
    return {
        "lines": told,
        "mixed": mixed,
        "unknown": page and unknown_gains(config, page, specs, cache.num_blocks),
        "block_tokens": block,
        "layout": config.cache_config.kv_cache_layout,
        "pages": sorted(
            {
                spec.page_size_bytes
                for group in cache.kv_cache_groups
                for spec in iter_layer_specs(group.kv_cache_spec)
            }
        ),
        "groups": [len(group.layer_names) for group in cache.kv_cache_groups],
        # Every tensor says the bytes of the one allocation that all lie in.
        "block_bytes": cache.kv_cache_tensors[0].size / cache.num_blocks,
        "blocks": cache.num_blocks,
        "concurrency": get_max_concurrency_for_kv_cache_config(config, cache),
        "layers": sorted({type(layer).__module__ for layer in layers.values()}),
        "gain": asdict(gain) if gain else None,
        "page": page.nbytes if page else None,
        "facts": {
            "method": facts.method,
            "drafts": facts.drafts,
            "drafter_has_states": facts.drafter_has_states,
            "device": facts.device,
            "architecture": facts.architecture,
            "heads": asdict(facts.heads) if facts.heads else None,
            "dtypes": [facts.dtype, facts.conv_dtype, facts.state_dtype],
            "prefix_caching": facts.prefix_caching,
            "vllm": facts.vllm,
        },
    }


def start_up_lines(config: VllmConfig, page: PageLayout, blocks: int) -> list[list[str]]:
    """What is logged for vLLM's passing pool, for the first layer of the real one, for another."""
    lines: list[str] = []
    startup.logger_for = lambda name: SimpleNamespace(  # type: ignore[assignment]
        info=lambda text, *values: lines.append(text % values)
    )
    layers = config.compilation_config.static_forward_context
    first, second, *_ = (name for name, layer in layers.items() if hasattr(layer, "replay"))
    told = []
    for prefix, known in ((first, None), (first, blocks), (second, blocks)):
        lines.clear()
        config.cache_config.num_gpu_blocks = known
        startup.announce(config, prefix, page, blocks)
        told.append(list(lines))
    return told


def start_up_of_mixed_layers(config: VllmConfig, page: PageLayout, blocks: int) -> str:
    """What the start-up ends with where another plug-in has put vLLM's own layer first."""
    layers = config.compilation_config.static_forward_context
    first, second, *_ = (name for name, layer in layers.items() if hasattr(layer, "replay"))
    kept, layers[first].replay = layers[first].replay, None
    try:
        startup.announce(config, second, page, blocks)
    except RuntimeError as error:
        return str(error).replace(first, "FIRST")
    finally:
        layers[first].replay = kept
    return "no refusal"


def unknown_gains(config: VllmConfig, page: PageLayout, specs: Any, blocks: int) -> list[Any]:
    """What is gained with a page that is not the planner's, and with no block size noted."""
    cache = config.cache_config
    padded, cache.mamba_page_size_padded = cache.mamba_page_size_padded, 1
    found = [startup.requests_gained(config, page, specs.values(), blocks)]
    cache.mamba_page_size_padded = padded
    delattr(cache, startup._BLOCK_BEFORE)
    return [*found, startup.requests_gained(config, page, specs.values(), blocks)]


def main() -> None:
    """Plans every case; one that fails is reported and does not stop the others."""
    cases = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    results: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            results[name] = plan(case)
        except Exception as error:
            where = traceback.format_exc().splitlines()[-3:-1]
            results[name] = {"failed": f"{type(error).__name__}: {error}", "where": where}
    Path(sys.argv[2]).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
