"""The planner's formulas, each with the vLLM or vllm-gaudi function that it stands in for.

Bytes and tokens of one card (one tensor-parallel rank) throughout. Line numbers are those of
vLLM 0.26.0 and vllm-gaudi 0.26.0, but for packed layouts, which came with vLLM 0.31.0. Pure
integers: no torch, no vLLM, no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Literal

MIB = 1024**2
GIB = 1024**3

# Smallest kernel block that every attention backend of a hybrid offers; a sliding-window layer
# starts from it and is scaled up (vllm/model_executor/layers/attention/attention.py:95).
SMALLEST_KERNEL_BLOCK = 16

# Bytes of one K or V element (vllm/utils/torch_utils.py:32).
_KV_ITEM_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
    "int8_per_token_head": 1,
    "fp8_per_token_head": 1,
    "int4_per_token_head": 1,
    "nvfp4": 1,
}
KV_DTYPES = tuple(_KV_ITEM_BYTES)


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def kv_token_bytes(kv_heads: int, head_dim: int, kv_dtype: str) -> int:
    """K and V bytes of one token in one layer (`FullAttentionSpec.page_size_bytes`, block of 1).

    Args:
        kv_heads: KV heads on one rank.
        head_dim: elements of a head.
        kv_dtype: a name of `KV_DTYPES`.

    Raises:
        ValueError: the dtype is not in the table.
    """
    if kv_dtype not in _KV_ITEM_BYTES:
        raise ValueError(f"KV dtype {kv_dtype!r} is not one of {', '.join(KV_DTYPES)}")
    if kv_dtype == "nvfp4":
        elements = head_dim // 2 + head_dim // 16
    elif kv_dtype == "int4_per_token_head":
        elements = head_dim // 2
    else:
        elements = head_dim
    token = 2 * kv_heads * elements * _KV_ITEM_BYTES[kv_dtype]
    if kv_dtype.endswith("_per_token_head"):
        # One fp32 scale for each head of K and of V, carved from the page.
        token += 2 * kv_heads * 4
    return token


def ranks_kv_heads(kv_heads: int, tp: int) -> int:
    """KV heads on one rank; fewer heads than ranks are replicated (vllm/config/model.py:1339)."""
    return max(1, kv_heads // tp)


@dataclass(frozen=True)
class AttentionLayers:
    """Attention layers of one shape on one rank.

    Args:
        owner: whose layers they are.
        layers: how many.
        kv_heads: KV heads on one rank.
        head_dim: elements of a head.
        kv_dtype: a name of `KV_DTYPES`.
        window: tokens of the sliding window; None for full attention.
    """

    owner: Literal["target", "drafter"]
    layers: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    window: int | None = None

    @property
    def token_bytes(self) -> int:
        """K and V bytes of one token in one of these layers."""
        return kv_token_bytes(self.kv_heads, self.head_dim, self.kv_dtype)


@dataclass(frozen=True)
class Bucket:
    """Layers that vLLM holds to be of one type, split into `groups` KV-cache groups.

    Args:
        kind: "gdn", "full" or "sliding".
        layers: all layers of the type; `drafter_layers` of them are the drafter's.
        block_tokens: tokens of one block of the type; None for states, which hold one a block.
        window: tokens of the sliding window, else None.
        groups: KV-cache groups that the layers are split into.
        target_bytes: one page of each of the target's layers.
        drafter_bytes: one page of each of the drafter's layers.
    """

    kind: Literal["gdn", "full", "sliding"]
    layers: int
    drafter_layers: int
    block_tokens: int | None
    window: int | None
    groups: int
    target_bytes: int
    drafter_bytes: int


@dataclass(frozen=True)
class Layout:
    """How vLLM will cut the KV-cache pool of one rank.

    Args:
        block_tokens: B, the block size that the scheduler aligns prefill chunks to.
        state_bytes: one state of one layer, before padding.
        page_bytes: the page of every layer; where packed, that of the target's attention layers.
        buckets: the layers by type, states first.
        group_size: layers of the largest group: unless packed, a block holds that many pages.
        padded_attention: an attention page had to be padded, which vLLM allows only for a backend
            that reads KV by the block's stride.
        packed: each layer keeps a page of its own size, and a block holds the pages of any one
            group back to back.
    """

    block_tokens: int
    state_bytes: int
    page_bytes: int
    buckets: tuple[Bucket, ...]
    group_size: int
    padded_attention: bool
    packed: bool = False

    @property
    def gdn_layers(self) -> int:
        """Layers with a recurrent state."""
        return self.buckets[0].layers

    @property
    def gdn_groups(self) -> int:
        """KV-cache groups that hold states."""
        return self.buckets[0].groups

    @property
    def groups(self) -> int:
        """All KV-cache groups."""
        return sum(bucket.groups for bucket in self.buckets)

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes of the pool (`_pool_bytes_per_block`)."""
        if not self.packed:
            return self.group_size * self.page_bytes
        states = ceil_div(self.gdn_layers, self.gdn_groups) * self.state_bytes
        # The attention layers of a packed layout are never split.
        return max(states, *(b.target_bytes + b.drafter_bytes for b in self.buckets[1:]))

    @property
    def padding_bytes(self) -> int:
        """Bytes of a page that a state leaves unused."""
        return 0 if self.packed else self.page_bytes - self.state_bytes

    @property
    def cached_tokens_unit(self) -> int:
        """Cached tokens come in multiples of this (`resolve_kv_cache_block_sizes`, align mode)."""
        sizes = [b.block_tokens for b in self.buckets if b.block_tokens is not None]
        return lcm(self.block_tokens, *sizes)


def block_tokens(state_bytes: int, token_bytes: int, unit: int) -> int:
    """B: the smallest multiple of `unit` tokens whose attention page holds one state.

    `Platform._align_hybrid_block_size` (vllm/platforms/interface.py:765). Only the target's layers
    are seen there, never the drafter's.
    """
    return unit * ceil_div(state_bytes, unit * token_bytes)


def lay_out(
    *, gdn_layers: int, state_bytes: int, attention: Sequence[AttentionLayers], unit: int
) -> Layout:
    """Block size, page size and groups of a hybrid.

    Follows `_align_hybrid_block_size`, then `unify_kv_cache_spec_page_size` (the largest page
    wins; states are padded, attention blocks grow by the ratio), then
    `_get_kv_cache_groups_uniform_page_size` (vllm/v1/core/kv_cache_utils.py:1067, :1137).

    Args:
        gdn_layers: layers with a recurrent state.
        state_bytes: bytes of one state of one layer on one rank.
        attention: the target's layers first, then the drafter's.
        unit: the attention backend's block, or the block size that the user asked for if larger.
    """
    target = attention[0]
    block = block_tokens(state_bytes, target.token_bytes, unit)
    natural = [
        (block if layers.window is None else SMALLEST_KERNEL_BLOCK) * layers.token_bytes
        for layers in attention
    ]
    page = max(natural)
    sizes: dict[tuple[int, int, int, str, int | None], list[int]] = {}
    padded = False
    for layers, own in zip(attention, natural, strict=True):
        tokens = block if layers.window is None else SMALLEST_KERNEL_BLOCK
        if page % own:
            padded = True
        else:
            tokens *= page // own
        key = (tokens, layers.kv_heads, layers.head_dim, layers.kv_dtype, layers.window)
        count = sizes.setdefault(key, [0, 0])
        count[0] += layers.layers
        count[1] += layers.layers if layers.owner == "drafter" else 0

    counts = [gdn_layers] + [count[0] for count in sizes.values()]
    group_size = min(counts)
    if max(counts) < group_size * 1.5:
        group_size = max(counts)
    gdn_groups = ceil_div(gdn_layers, group_size)
    buckets = [Bucket("gdn", gdn_layers, 0, None, None, gdn_groups, gdn_layers * page, 0)]
    for (tokens, _, _, _, window), (count_all, count_drafter) in sizes.items():
        buckets.append(
            Bucket(
                "full" if window is None else "sliding",
                count_all,
                count_drafter,
                tokens,
                window,
                ceil_div(count_all, group_size),
                (count_all - count_drafter) * page,
                count_drafter * page,
            )
        )
    largest = max(ceil_div(bucket.layers, bucket.groups) for bucket in buckets)
    return Layout(block, state_bytes, page, tuple(buckets), largest, padded)


def lay_out_packed(
    *, gdn_layers: int, state_bytes: int, attention: Sequence[AttentionLayers], unit: int
) -> Layout | None:
    """Block size and groups where a block's pages may differ in size and lie back to back.

    Follows `_align_hybrid_block_size`, then `_get_packed_kv_cache_groups`
    (vllm/v1/core/kv_cache_utils.py:2001 of 0.31.0), which asks for a block-outermost KV-cache
    layout and states that are not padded: all full-attention layers, the drafter's too, are one
    group and set the block's bytes; the states are split into as few groups as fit into it.

    Args:
        gdn_layers: layers with a recurrent state.
        state_bytes: bytes of one state of one layer on one rank.
        attention: the target's layers first, then the drafter's.
        unit: the attention backend's block, or the block size that the user asked for if larger.

    Returns:
        None where vLLM would not pack (all pages are of one size) or packing is not for us: a
        sliding window, each block of which would take a whole block of the pool, and attention
        pages of several sizes with as many layers each, by whose count vLLM splits the states too.
    """
    if any(layers.window is not None for layers in attention):
        return None
    block = block_tokens(state_bytes, attention[0].token_bytes, unit)
    by_page: dict[int, int] = {}
    for layers in attention:
        page = block * layers.token_bytes
        by_page[page] = by_page.get(page, 0) + layers.layers
    if by_page.keys() == {state_bytes}:
        return None
    if len(by_page) > 1 and len(set(by_page.values())) == 1:
        return None
    owned = {"target": 0, "drafter": 0}
    drafter_layers = 0
    for layers in attention:
        owned[layers.owner] += layers.layers * block * layers.token_bytes
        drafter_layers += layers.layers if layers.owner == "drafter" else 0
    count = sum(by_page.values())
    fitting = max((owned["target"] + owned["drafter"]) // state_bytes, 1)
    groups = ceil_div(gdn_layers, fitting)
    return Layout(
        block,
        state_bytes,
        block * attention[0].token_bytes,
        (
            Bucket("gdn", gdn_layers, 0, None, None, groups, gdn_layers * state_bytes, 0),
            Bucket(
                "full", count, drafter_layers, block, None, 1, owned["target"], owned["drafter"]
            ),
        ),
        max(count, ceil_div(gdn_layers, groups)),
        padded_attention=False,
        packed=True,
    )


def choose(today: Layout, packed: Layout | None, *, tokens: int, copies: int) -> Layout:
    """The layout to serve with: `packed` where it saves memory and no request pays for it.

    Args:
        today: pages of one size, as vLLM lays them out unless it may pack.
        packed: of the same model, or None where there is none.
        tokens: the longest request, for which `packed` must take fewer bytes; a shorter one must
            not take more.
        copies: state blocks that one request holds in each group.
    """
    if packed is None:
        return today

    def saved(blocks: int) -> int:
        held = min(blocks * packed.block_tokens, tokens)
        return (
            request_bytes(today, copies=copies, tokens=held).padded
            - request_bytes(packed, copies=copies, tokens=held).padded
        )

    # Today's attention blocks may hold several times B tokens, but never fewer bytes than the
    # packed ones: least is saved before all of them are full for the first time.
    last = ceil_div(tokens, packed.block_tokens)
    period = min(today.cached_tokens_unit // packed.block_tokens, last)
    if saved(last) > 0 and min(map(saved, range(1, period + 1))) >= 0:
        return packed
    return today


def state_copies(drafts: int, *, caching: bool, replay: bool = False) -> int:
    """State blocks that one request holds in each group (`MambaSpec.max_memory_usage_bytes`).

    One for the running state, one for each draft token, and with prefix caching one more for the
    last boundary. ReplaySSM reserves none for drafts.
    """
    return 1 + (0 if replay else drafts) + (1 if caching else 0)


def attention_blocks(bucket: Bucket, tokens: int, in_flight: int | None) -> int:
    """Blocks that one request of `tokens` tokens holds in one group of an attention bucket.

    Args:
        bucket: full or sliding.
        tokens: prompt and output together.
        in_flight: tokens scheduled but not yet settled (`VllmConfig.max_in_flight_tokens`); None
            when unknown, and a window then counts the whole request, which is the most it can be.
    """
    assert bucket.block_tokens is not None, bucket
    if bucket.window is None:
        return ceil_div(tokens, bucket.block_tokens)
    held = tokens if in_flight is None else min(bucket.window - 1 + in_flight, tokens)
    # The window need not start on a block's first token.
    return ceil_div(held, bucket.block_tokens) + 1


@dataclass(frozen=True)
class RequestBytes:
    """Memory of one request on one rank, by two accountings.

    "Ideal" sums layer by layer; "padded" is what vLLM's pool gives out: every block holds
    the pages of the largest group, also in a group with fewer layers.

    Args:
        copies: state blocks in each group.
        state: ideal bytes of the states.
        target_kv, drafter_kv: ideal bytes of the KV cache.
        blocks: pool blocks.
        padded: bytes of those blocks; `padded_state` of them hold states.
    """

    copies: int
    state: int
    target_kv: int
    drafter_kv: int
    blocks: int
    padded: int
    padded_state: int

    @property
    def kv(self) -> int:
        """Ideal bytes of the KV cache, target and drafter together."""
        return self.target_kv + self.drafter_kv

    @property
    def ideal(self) -> int:
        """Ideal bytes of the request."""
        return self.state + self.kv


def request_bytes(
    layout: Layout, *, copies: int, tokens: int, in_flight: int | None = None
) -> RequestBytes:
    """Memory of one request of `tokens` tokens (`_max_memory_usage_bytes_from_groups`)."""
    target = drafter = 0
    blocks = copies * layout.gdn_groups
    for bucket in layout.buckets[1:]:
        held = attention_blocks(bucket, tokens, in_flight)
        blocks += held * bucket.groups
        target += held * bucket.target_bytes
        drafter += held * bucket.drafter_bytes
    return RequestBytes(
        copies=copies,
        state=copies * layout.buckets[0].target_bytes,
        target_kv=target,
        drafter_kv=drafter,
        blocks=blocks,
        padded=blocks * layout.block_bytes,
        padded_state=copies * layout.gdn_groups * layout.block_bytes,
    )


@dataclass(frozen=True)
class Capacity:
    """What a pool of a given size holds.

    Args:
        blocks: blocks of the pool (`get_num_blocks`).
        concurrency: blocks / blocks of a request: the figure of vLLM's start-up log.
        requests: whole requests, with the block that vLLM keeps empty left out.
        ideal_requests: whole requests by the ideal accounting.
        state_slots: requests whose states fit when nothing else is held.
    """

    blocks: int
    concurrency: float
    requests: int
    ideal_requests: int
    state_slots: int


def capacity(layout: Layout, request: RequestBytes, pool_bytes: int) -> Capacity:
    """Requests that fit in `pool_bytes` of one rank."""
    blocks = pool_bytes // layout.block_bytes
    # Block 0 is the null block of vLLM's BlockPool and is never given out.
    usable = max(blocks - 1, 0)
    return Capacity(
        blocks=blocks,
        concurrency=blocks / request.blocks,
        requests=usable // request.blocks,
        ideal_requests=pool_bytes // request.ideal,
        state_slots=usable // (request.copies * layout.gdn_groups),
    )


def outweighing_drafts(state_bytes_by_drafts: Sequence[tuple[int, int, int]]) -> int | None:
    """First draft length whose state copies take more than the KV cache.

    Args:
        state_bytes_by_drafts: (drafts, state bytes, KV bytes) by rising drafts.
    """
    for drafts, state, kv in state_bytes_by_drafts:
        if state > kv:
            return drafts
    return None


@dataclass(frozen=True)
class GaudiSlots:
    """vllm-gaudi's compact per-request slots, which lie outside of the KV-cache pool.

    Args:
        rows: rows of each state tensor, max_num_seqs * groups + 2: row 0 and the last are reserved
            (vllm_gaudi/v1/worker/hpu_model_runner.py:6609).
        bytes: all state tensors: one for each layer of the largest state group.
        bytes_per_request: what one more sequence adds.
    """

    rows: int
    bytes: int
    bytes_per_request: int


def gaudi_slots(layout: Layout, max_num_seqs: int) -> GaudiSlots:
    """Slots for `max_num_seqs` sequences."""
    tensors = ceil_div(layout.gdn_layers, layout.gdn_groups)
    rows = max_num_seqs * layout.gdn_groups + 2
    return GaudiSlots(
        rows=rows,
        bytes=rows * tensors * layout.state_bytes,
        bytes_per_request=layout.gdn_groups * tensors * layout.state_bytes,
    )


def noncompact_pool_factor(layout: Layout) -> float:
    """Share of the pool that vllm-gaudi keeps when each block also has a state of its own.

    padded page / (attention page + state) (vllm_gaudi/v1/worker/hpu_worker.py:465-479). With
    compact slots the pool keeps its size.
    """
    return layout.page_bytes / (layout.page_bytes + layout.state_bytes)


@dataclass(frozen=True)
class Budget:
    """--max-num-batched-tokens with prefix caching, where prefill ends on multiples of B.

    Args:
        decode_tokens: what a full batch of decodes spends first: max_num_seqs * (1 + drafts).
        least: B + decode_tokens: below it a full batch of decodes leaves no room for a prefill.
        recommended: k * B + decode_tokens.
        k: whole blocks a step.
        unit: what `least` and `recommended` are rounded up to.
    """

    decode_tokens: int
    least: int
    recommended: int
    k: int
    unit: int


# vLLM's default budget (vllm/config/scheduler.py:42): what k aims at when no budget is given.
DEFAULT_BUDGET = 2048


def token_budget(
    block: int, *, max_num_seqs: int, drafts: int, asked: int | None = None, unit: int = 1
) -> Budget:
    """The budget that loses nothing: k whole blocks on top of what the decodes spend.

    Args:
        block: B.
        max_num_seqs: sequences that may decode at once.
        drafts: draft tokens of each.
        asked: the budget that was asked for; k is then the least that reaches it.
        unit: what the budget must be a multiple of; 128 on Gaudi.
    """
    decodes = max_num_seqs * (1 + drafts)
    aim = DEFAULT_BUDGET
    if asked is not None:
        # Rounding up reaches what was asked from here on; a budget that is right stays as it is.
        aim = max((asked - 1) // unit * unit + 1 - decodes, 1)
    k = max(1, ceil_div(aim, block))

    def rounded(tokens: int) -> int:
        return ceil_div(tokens, unit) * unit

    return Budget(decodes, rounded(block + decodes), rounded(k * block + decodes), k, unit)
