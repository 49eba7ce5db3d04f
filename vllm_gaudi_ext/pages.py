"""Finds, in an initialised KV cache, the tensors that checkpoints move between.

This is the one place that knows how vllm-gaudi 0.26.0 lays its tensors out: K and V of an attention
layer are separate, [(N*r + 1) * kernel block tokens, KV heads, head dim], so that manager block b
is the rows b*B to (b+1)*B, and a spare kernel block lies behind the pool; the conv and recurrent
states of GDN layers are [S, ...], with one tensor shared by the layers at the same position of
every GDN group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from vllm_gaudi_ext.gdn.layout import (
    INT32_BYTES,
    GdnGroup,
    LayerPair,
    RowColumns,
    copy_batches,
    pair_layers,
)
from vllm_gaudi_ext.gdn.motion import CheckpointPages, PageViews, StateViews, int32_rows
from vllm_gaudi_ext.gdn.refusals import LayoutFacts

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

# The enum member of vLLM 0.26.0, and the plain string of releases before the enum.
_GDN_MAMBA_TYPES = ("GDN_ATTN", "gdn_attention")


@dataclass(frozen=True)
class CacheLayout:
    """The groups of a KV cache, as planning needs them."""

    block_tokens: int
    gdn_groups: tuple[GdnGroup, ...]


def _gdn_groups(config: KVCacheConfig) -> list[GdnGroup]:
    return [
        GdnGroup(i, tuple(group.layer_names))
        for i, group in enumerate(config.kv_cache_groups)
        if _is_gdn(group.kv_cache_spec)
    ]


def _is_gdn(spec: object) -> bool:
    return isinstance(spec, MambaSpec) and _type_of(spec) in _GDN_MAMBA_TYPES


def _type_of(spec: MambaSpec) -> str:
    return str(getattr(spec.mamba_type, "name", spec.mamba_type))


def _attention_groups(config: KVCacheConfig) -> list[Any]:
    return [g for g in config.kv_cache_groups if isinstance(g.kv_cache_spec, FullAttentionSpec)]


def pool_kernel_blocks(config: KVCacheConfig, kernel_block_tokens: int) -> int:
    """Kernel blocks that the pool takes in an attention layer; 0 without an attention group."""
    attention = _attention_groups(config)
    block_tokens = attention[0].kv_cache_spec.block_size if attention else 0
    return int(config.num_blocks * block_tokens // kernel_block_tokens)


def cache_layout(config: KVCacheConfig) -> CacheLayout:
    """The groups of a KV cache that has passed `refusals.layout_problems`."""
    block_tokens = config.kv_cache_groups[0].kv_cache_spec.block_size
    return CacheLayout(block_tokens, tuple(_gdn_groups(config)))


def layout_facts(
    config: KVCacheConfig,
    layers: Mapping[str, Any],
    *,
    kernel_block_tokens: int,
    padding_block: int,
    shared_layers: Sequence[str],
) -> LayoutFacts:
    """What the refusals need to know of an initialised KV cache.

    Args:
        config: vLLM's configuration of it.
        layers: every layer by name, with its tensors in `kv_cache` (`static_forward_context`).
        kernel_block_tokens: tokens of a block of the attention kernel.
        padding_block: the kernel block that padding goes to.
        shared_layers: layers that use another layer's KV cache.
    """
    attention = _attention_groups(config)
    groups = _gdn_groups(config)
    foreign = [
        f"{type(spec).__name__}" + (f" ({_type_of(spec)})" if isinstance(spec, MambaSpec) else "")
        for g in config.kv_cache_groups
        if not isinstance(spec := g.kv_cache_spec, FullAttentionSpec) and not _is_gdn(spec)
    ]
    extra = 0
    for group in config.kv_cache_groups:
        for name in ("num_speculative_blocks", "num_prefill_checkpoint_blocks"):
            extra = max(extra, getattr(group.kv_cache_spec, name, 0) or 0)
    pairing, pairs = None, []
    if len(attention) == 1:
        try:
            pairs = pair_layers(attention[0].layer_names, groups)
        except ValueError as error:
            pairing = str(error)
        pairing = pairing or _tensors_not_shared(pairs, layers)
    block_tokens = attention[0].kv_cache_spec.block_size if attention else 0
    state = page = None
    remainder = 0
    if pairs and pairing is None:
        k, v, conv, ssm = _tensors(pairs[0], layers)
        rows = [_row_bytes(k) * block_tokens, _row_bytes(v) * block_tokens]
        states = [_row_bytes(conv), _row_bytes(ssm)]
        state, page = sum(states), sum(rows)
        remainder = max(n % INT32_BYTES for n in rows + states)
    return LayoutFacts(
        group_block_tokens=[g.kv_cache_spec.block_size for g in config.kv_cache_groups],
        attention_groups=len(attention),
        foreign_groups=foreign,
        kernel_block_tokens=kernel_block_tokens,
        pairing=pairing if groups else "the KV cache has no GDN group",
        state_bytes=state,
        page_bytes=page,
        row_remainder_bytes=remainder,
        padding_block=padding_block,
        pool_kernel_blocks=pool_kernel_blocks(config, kernel_block_tokens),
        shared_layers=shared_layers,
        speculative_blocks=extra,
    )


def checkpoint_pages(
    config: KVCacheConfig, layers: Mapping[str, Any], *, end_of_graph: Callable[[], None]
) -> CheckpointPages:
    """Int32 views of every page and state of a KV cache that has passed the refusals."""
    (attention,) = _attention_groups(config)
    block_tokens = attention.kv_cache_spec.block_size
    pages = {
        name: _page_views(layers[name].kv_cache, config.num_blocks, block_tokens)
        for name in attention.layer_names
    }
    states = [
        _state_views(pages[pair.attention], _tensors(pair, layers))
        for pair in pair_layers(attention.layer_names, _gdn_groups(config))
    ]
    batches = copy_batches(max(state.columns.page_bytes for state in states))
    return CheckpointPages(list(pages.values()), states, batches, end_of_graph)


def _page_views(kv_cache: Sequence[torch.Tensor], num_blocks: int, block_tokens: int) -> PageViews:
    k, v = kv_cache[0], kv_cache[1]
    pool = num_blocks * block_tokens
    k_rows, v_rows = int32_rows(k[:pool], num_blocks), int32_rows(v[:pool], num_blocks)
    return PageViews(k_rows, v_rows, (k[pool:], v[pool:]))


def _state_views(page: PageViews, tensors: tuple[torch.Tensor, ...]) -> StateViews:
    _, _, conv, ssm = tensors
    slots = conv.shape[0]
    conv_rows, ssm_rows = int32_rows(conv, slots), int32_rows(ssm, slots)
    columns = RowColumns(conv_rows.shape[1], ssm_rows.shape[1], page.k.shape[1], page.v.shape[1])
    return StateViews(page, conv_rows, ssm_rows, columns)


def _tensors(pair: LayerPair, layers: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """K and V of the attention layer, conv and recurrent state of the GDN layers."""
    attention, gdn = layers[pair.attention].kv_cache, layers[pair.gdn[0]].kv_cache
    return attention[0], attention[1], gdn[0], gdn[1]


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor[0].numel() * tensor.element_size()


def _tensors_not_shared(pairs: Sequence[LayerPair], layers: Mapping[str, Any]) -> str | None:
    """Why slots can't be addressed group by group, None when they can.

    The groups' layers at one position must share their state tensors (they differ by slot), and no
    two positions may.
    """
    owners: dict[int, str] = {}
    for pair in pairs:
        pointers = {layers[name].kv_cache[1].data_ptr() for name in pair.gdn}
        if len(pointers) != 1:
            return f"GDN layers {', '.join(pair.gdn)} do not share one state tensor"
        owner = owners.setdefault(pointers.pop(), pair.attention)
        if owner != pair.attention:
            return f"GDN layers beside {owner} and {pair.attention} share one state tensor"
    return None
