"""Whether vLLM's packed grouping of the KV cache is asked for, and what it comes to.

By default a block holds as many pages as the smallest group has layers, all padded to one size: for
Qwen3.5-4B with a five-layer drafter eight groups of five, of which the states' pages and those of
the last groups are partly empty. From 0.31.0 on vLLM has another grouping for layouts whose
outermost dimension is the block (`_get_packed_kv_cache_groups`, vllm/v1/core/kv_cache_utils.py):
all full-attention layers, whatever the size of their pages, are one group, a block holds a page of
each, and the states are spread over as few groups as such blocks allow. Three groups instead of
eight, 14 blocks of 35 MiB for a request of 8,192 tokens instead of 41 of 13.4 MiB, and a scheduler
that walks three groups instead of eight.

It is reached by what our own layer says, and by nothing else: the layouts that its backend prefers
(`PackedReplayBackend`), and a page that is not padded to the target's. Each alone changes nothing.

Plain but for what it reads off vLLM's layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from vllm_gaudi_ext.config import read_options
from vllm_gaudi_ext.planner import arithmetic
from vllm_gaudi_ext.planner.arithmetic import AttentionLayers, Layout

_SETTLED = "_gaudi_ext_packed"


def attention_layers(specs: Iterable[Any]) -> list[AttentionLayers] | None:
    """Attention layers by shape, in the order of the specs; None where a kind is not known.

    Args:
        specs: KV-cache specs of all layers; those with states are passed over.
    """
    found: list[AttentionLayers] = []
    for spec in specs:
        if hasattr(spec, "mamba_type"):
            continue
        try:
            one = AttentionLayers(
                # The owner only divides a sum that is not asked for here.
                owner="target",
                layers=1,
                kv_heads=spec.num_kv_heads,
                head_dim=spec.head_size,
                kv_dtype=str(spec.dtype).removeprefix("torch."),
                window=getattr(spec, "sliding_window", None),
            )
            same = one.token_bytes * spec.block_size == spec.page_size_bytes
        except (AttributeError, ValueError):
            return None
        if not same:
            return None
        for index, known in enumerate(found):
            if replace(known, layers=1) == one:
                found[index] = replace(known, layers=known.layers + 1)
                break
        else:
            found.append(one)
    return found


def packed_layout(vllm_config: Any) -> Layout | None:
    """The packed layout, where it holds more requests of the longest length; else None.

    None too where it can't be had: an older vLLM, an attention layer that is not plain full
    attention, blocks of several sizes, or a backend that works in smaller blocks than vLLM's (those
    lie one after the other only while a block is one layer's page: `create_kv_cache_views`).

    Args:
        vllm_config: a vllm.config.VllmConfig. Before its block size is aligned with the page of a
            state the answer is None, and of no consequence: layouts and specs are asked after it.
    """
    cache = vllm_config.cache_config
    # Whoever counts blocks has vLLM's own in mind, which are smaller.
    if read_options(vllm_config.additional_config).packing == "off" or (
        cache.num_gpu_blocks_override is not None
    ):
        return None
    pages = [
        layer.replay
        for layer in _kv_layers(vllm_config)
        if getattr(layer, "replay", None) is not None
    ]
    others = [layer for layer in _kv_layers(vllm_config) if not hasattr(layer, "replay")]
    block = cache.block_size
    if not pages or not others or not block or not _has_layouts(others):
        return None
    specs = []
    for layer in others:
        spec = layer.get_kv_cache_spec(vllm_config)
        if spec is None:
            continue
        if not _plain(spec, block) or not _whole(layer.get_attn_backend(), block, vllm_config):
            return None
        specs.append(spec)
    attention = attention_layers(specs)
    state = pages[0].nbytes
    if not attention or attention[0].token_bytes * block < state:
        return None
    today, packed = (
        lay_out(gdn_layers=len(pages), state_bytes=state, attention=attention, unit=block)
        for lay_out in (arithmetic.lay_out, arithmetic.lay_out_packed)
    )
    assert today is not None
    tokens = vllm_config.model_config.max_model_len
    chosen = arithmetic.choose(today, packed, tokens=tokens, copies=1)
    return chosen if chosen.packed else None


def settled_layout(vllm_config: Any) -> Layout | None:
    """`packed_layout` as it was when the first layer gave its spec, and from then on.

    vLLM overwrites the block size later, with the smallest of all groups', by which the answer
    would be another one for the same pool.
    """
    cache = vllm_config.cache_config
    if not hasattr(cache, _SETTLED):
        setattr(cache, _SETTLED, packed_layout(vllm_config))
    layout: Layout | None = getattr(cache, _SETTLED)
    return layout


def asks_to_pack(vllm_config: Any) -> bool:
    """Whether our layers prefer block-outermost layouts; asked before and after specs are given."""
    if hasattr(vllm_config.cache_config, _SETTLED):
        return settled_layout(vllm_config) is not None
    return packed_layout(vllm_config) is not None


def _kv_layers(vllm_config: Any) -> list[Any]:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if isinstance(layer, AttentionLayerBase)]


def _has_layouts(layers: Iterable[Any]) -> bool:
    """Whether this vLLM lets a backend say which layouts it takes (0.31.0 on)."""
    return all(hasattr(layer.get_attn_backend(), "supported_kv_cache_layouts") for layer in layers)


def _plain(spec: Any, block: int) -> bool:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    # A subclass may be grouped or cut otherwise.
    return (
        type(spec) is FullAttentionSpec
        and spec.block_size == block
        and spec.attention_chunk_size is None
    )


def _whole(backend: Any, block: int, vllm_config: Any) -> bool:
    """Whether the backend's kernels take vLLM's block unsplit, by vLLM's own choice."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.utils import select_common_block_size

    # Backends look up the configuration, and this is asked outside of any.
    with set_current_vllm_config(vllm_config):
        try:
            return bool(select_common_block_size(block, [backend]) == block)
        except ValueError:
            return False
