"""The one line that tells an operator what ReplaySSM does in this server."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cuda_ext.capture_sizes import uncaptured
from cuda_ext.facts import replay_facts
from cuda_ext.packing import attention_layers, settled_layout
from cuda_ext.refusals import backend_of
from cuda_ext.ring import PageLayout, native_layout
from vllm_gaudi_ext import problems
from vllm_gaudi_ext.log import logger_for
from vllm_gaudi_ext.planner import arithmetic
from vllm_gaudi_ext.planner.arithmetic import Layout
from vllm_gaudi_ext.problems import Problem
from vllm_gaudi_ext.version import __version__

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Blocks that attention backends work in.
_UNITS = (16, 32, 64, 128, 256)
_BLOCK_BEFORE = "_gaudi_ext_block_before"


@dataclass(frozen=True)
class Gain:
    """Requests of the longest length that the pool holds, with ReplaySSM and as stock vLLM.

    Args:
        tokens: length of a request.
        stock, replay: whole requests.
        at_once: the shortest requests that ReplaySSM's pool holds.
    """

    tokens: int
    stock: int
    replay: int
    at_once: int


def note_block_size(cache_config: Any) -> None:
    """Remember the block size from which vLLM goes on to align it with the page of a state.

    vLLM overwrites it, and without it nobody can tell the blocks of another page: what fits 1408
    tokens may have been rounded to 64 or to 128.

    Args:
        cache_config: a vllm.config.CacheConfig, before it is aligned; later calls change nothing.
    """
    if not hasattr(cache_config, _BLOCK_BEFORE):
        setattr(cache_config, _BLOCK_BEFORE, cache_config.block_size)


def announce(vllm_config: VllmConfig, prefix: str, page: PageLayout, blocks: int) -> None:
    """Log the line when the first of our layers gets its pages.

    Not for the small pool that vLLM makes and drops to measure its graphs: the configuration does
    not have its size yet.

    Args:
        vllm_config: the worker's.
        prefix: name of the layer that asks.
        page: of one GDN layer.
        blocks: of the pool.
    """
    if vllm_config.cache_config.num_gpu_blocks != blocks:
        return
    layers = vllm_config.compilation_config.static_forward_context
    if prefix != next(n for n, layer in layers.items() if getattr(layer, "replay", None)):
        return
    specs = {
        name: spec
        for name, layer in layers.items()
        if hasattr(layer, "get_kv_cache_spec")
        and (spec := layer.get_kv_cache_spec(vllm_config)) is not None
    }
    states = [name for name, spec in specs.items() if hasattr(spec, "mamba_type")]
    stock = [name for name in states if getattr(layers[name], "replay", None) is None]
    problems.refuse(
        "serve with ReplaySSM",
        [
            Problem(f"{name} is vLLM's own layer", "take other plugins out of VLLM_PLUGINS")
            for name in stock
        ],
    )
    if not is_first_rank():
        return
    facts = replay_facts(vllm_config)
    saved = (
        f"Method {facts.method}, {facts.drafts} drafts: one state a request instead of "
        f"{facts.rows}, {facts.drafts} copies saved in each layer"
        if facts.drafts
        else "No drafts, so no copies are saved"
    )
    packed = packed_pool(vllm_config)
    padded = vllm_config.cache_config.mamba_page_size_padded or page.nbytes
    placed = (
        f"packed with others into blocks of {packed.block_bytes}"
        if packed
        else f"padded to {padded}"
    )
    gained = "requests gained unknown (a layout that the planner does not know)"
    gain = requests_gained(vllm_config, page, specs.values(), blocks)
    if gain is not None:
        gained = (
            f"{gain.replay} requests of {gain.tokens} tokens fit where {gain.stock} did "
            f"({gain.replay - gain.stock:+d})"
        )
    logger_for(__name__).info(
        "gaudi_ext %s: ReplaySSM is active for %d GDN layers, %s backend. %s; ring of R=%d rows, "
        "page %d bytes (ring %d, %s); %s.",
        __version__,
        len(states),
        backend_of(facts),
        saved,
        page.ring_rows,
        page.nbytes,
        page.ring_bytes,
        placed,
        gained,
    )
    _warn_of_graphs(vllm_config, facts.rows, gain)


def _warn_of_graphs(vllm_config: VllmConfig, rows: int, gain: Gain | None) -> None:
    """Say so where the largest decode steps run without CUDA graphs, and how they would not.

    No more requests decode at once than the pool holds, whatever `--max-num-seqs` allows.
    """
    compilation = vllm_config.compilation_config
    if not compilation.cudagraph_capture_sizes:
        return
    scheduler = vllm_config.scheduler_config
    most = scheduler.max_num_seqs
    if gain is not None:
        most = max(1, min(most, gain.at_once))
    sizes = uncaptured(
        compilation.cudagraph_capture_sizes, rows, most, scheduler.max_num_batched_tokens
    )
    if sizes is None:
        return
    largest = max(compilation.cudagraph_capture_sizes)
    logger_for(__name__).warning(
        "gaudi_ext: decode steps of more than %d requests run without CUDA graphs (%d rows each, "
        "graphs of up to %d tokens), and up to %d can decode at once; --compilation-config '%s' "
        "covers them all, or lower --max-num-seqs (%d).",
        largest // rows,
        rows,
        largest,
        most,
        json.dumps({"cudagraph_capture_sizes": sizes}),
        scheduler.max_num_seqs,
    )


def is_first_rank() -> bool:
    """Whether this is the worker that speaks for all of its tensor-parallel group."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank() == 0


def packed_pool(vllm_config: VllmConfig) -> Layout | None:
    """The layout of a pool that vLLM packed; None where it did not, for whatever reason.

    An operator's own `VLLM_KV_CACHE_LAYOUT` can stand against it.
    """
    return settled_layout(vllm_config) if _block_outermost(vllm_config) else None


def _block_outermost(vllm_config: VllmConfig) -> bool:
    name = getattr(vllm_config.cache_config, "kv_cache_layout", None) or ""
    return bool(name.startswith("B"))


def requests_gained(
    vllm_config: VllmConfig, page: PageLayout, specs: Iterable[Any], blocks: int
) -> Gain | None:
    """What the pool holds, and would hold with a state for each draft.

    Args:
        vllm_config: the worker's, after `note_block_size`.
        page: of one GDN layer.
        specs: KV-cache specs of all layers, the target's first.
        blocks: of the pool.

    Returns:
        None where nobody noted the block size, or the planner's arithmetic does not come to the
        page that vLLM chose: then its figures for the other arm would not be vLLM's either.
    """
    facts = replay_facts(vllm_config)
    assert facts.heads is not None
    specs = list(specs)
    attention = attention_layers(specs)
    gdn_layers = sum(hasattr(spec, "mamba_type") for spec in specs)
    # vLLM's block size itself is overwritten by the smallest of all groups' before this is asked.
    padded = vllm_config.cache_config.mamba_page_size_padded
    before = getattr(vllm_config.cache_config, _BLOCK_BEFORE, None)
    if not attention or before is None:
        return None
    stock_page = native_layout(
        facts.heads.shard(facts.tp),
        facts.drafts,
        conv_dtype=facts.conv_dtype,
        ssm_dtype=facts.state_dtype,
    )

    def lay_out(state_bytes: int, unit: int) -> Layout:
        return arithmetic.lay_out(
            gdn_layers=gdn_layers, state_bytes=state_bytes, attention=attention, unit=unit
        )

    # A backend whose smallest block is larger than that rounds to its own.
    for unit in (before, *(unit for unit in _UNITS if unit > before)):
        ours = lay_out(page.nbytes, unit)
        if ours.block_tokens * attention[0].token_bytes == (padded or page.nbytes):
            break
    else:
        return None
    packed = packed_pool(vllm_config)
    if packed is None and _block_outermost(vllm_config):
        # The operator's own layout, by which vLLM may pack in another way.
        return None
    ours = packed or ours
    tokens = vllm_config.model_config.max_model_len
    pool_bytes = blocks * ours.block_bytes
    in_flight = vllm_config.max_in_flight_tokens

    def fit(layout: Layout, copies: int, length: int) -> int:
        request = arithmetic.request_bytes(
            layout, copies=copies, tokens=length, in_flight=in_flight
        )
        return arithmetic.capacity(layout, request, pool_bytes).requests

    return Gain(
        tokens,
        stock=fit(lay_out(stock_page.nbytes, unit), facts.rows, tokens),
        replay=fit(ours, 1, tokens),
        at_once=fit(ours, 1, 1),
    )
