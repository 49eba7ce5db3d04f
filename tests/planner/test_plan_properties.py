"""Properties of the arithmetic that no table of examples shows."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_gaudi_ext.planner.arithmetic import (
    KV_DTYPES,
    AttentionLayers,
    Bucket,
    Layout,
    attention_blocks,
    block_tokens,
    capacity,
    ceil_div,
    choose,
    gaudi_slots,
    kv_token_bytes,
    lay_out,
    lay_out_packed,
    request_bytes,
    token_budget,
)

# A busy machine makes single examples slow; none of these depends on time.
settings.register_profile("planner", deadline=None)
settings.load_profile("planner")

states = st.integers(1, 10**8)
units = st.sampled_from([16, 32, 64, 128])
heads = st.sampled_from([1, 2, 4, 8])
dims = st.sampled_from([64, 128, 256])
layers = st.integers(1, 80)
drafter = st.none() | st.tuples(layers, heads, dims, st.none() | st.integers(1, 8192))


@given(states, heads, dims, units)
def test_a_block_is_the_smallest_multiple_that_holds_a_state(
    state: int, kv_heads: int, dim: int, unit: int
) -> None:
    token = kv_token_bytes(kv_heads, dim, "bfloat16")
    block = block_tokens(state, token, unit)
    assert block % unit == 0
    assert block * token >= state > (block - unit) * token


@given(layers, layers, states, heads, dims, units, drafter, st.integers(1, 10**6))
def test_groups_hold_every_layer_once_and_padding_only_adds(
    gdn: int,
    attention: int,
    state: int,
    kv_heads: int,
    dim: int,
    unit: int,
    draft: tuple[int, int, int, int | None] | None,
    tokens: int,
) -> None:
    shapes = [AttentionLayers("target", attention, kv_heads, dim, "bfloat16")]
    if draft is not None:
        count, draft_heads, draft_dim, window = draft
        shapes.append(AttentionLayers("drafter", count, draft_heads, draft_dim, "bfloat16", window))
    layout = lay_out(gdn_layers=gdn, state_bytes=state, attention=shapes, unit=unit)
    assert layout.page_bytes >= layout.state_bytes
    assert layout.padding_bytes >= 0
    assert sum(b.layers for b in layout.buckets) == gdn + sum(s.layers for s in shapes)
    for bucket in layout.buckets:
        assert (bucket.groups - 1) * layout.group_size < bucket.layers
        assert bucket.layers <= bucket.groups * layout.group_size
    request = request_bytes(layout, copies=3, tokens=tokens)
    assert request.padded >= request.ideal
    assert request.padded == request.blocks * layout.group_size * layout.page_bytes
    assert layout.cached_tokens_unit % layout.block_tokens == 0


@given(
    st.integers(128, 4096),
    st.integers(1, 1024),
    st.integers(0, 32),
    st.integers(1, 10**5),
    st.sampled_from([1, 128]),
)
def test_a_recommended_budget_wastes_less_than_its_unit_and_starves_no_prefill(
    block: int, seqs: int, drafts: int, asked: int, unit: int
) -> None:
    budget = token_budget(block, max_num_seqs=seqs, drafts=drafts, asked=asked, unit=unit)
    assert budget.recommended % unit == budget.least % unit == 0
    spare = budget.recommended - seqs * (1 + drafts) - budget.k * block
    assert 0 <= spare < unit
    assert budget.recommended >= max(budget.least, asked)
    assert budget.recommended - max(budget.least, asked) < block + unit


@given(st.integers(1, 512), st.sampled_from([(48, 16), (30, 10), (45, 15), (18, 6)]))
def test_each_sequence_adds_its_own_slots(seqs: int, shape: tuple[int, int]) -> None:
    layout = lay_out(
        gdn_layers=shape[0],
        state_bytes=3_207_168,
        attention=[AttentionLayers("target", shape[1], 4, 256, "bfloat16")],
        unit=128,
    )
    few, more = gaudi_slots(layout, seqs), gaudi_slots(layout, seqs + 1)
    assert more.bytes - few.bytes == few.bytes_per_request == shape[0] * 3_207_168
    assert more.rows - few.rows == 3


@given(heads, dims, st.sampled_from(KV_DTYPES))
def test_a_narrower_kv_dtype_never_takes_more(kv_heads: int, dim: int, dtype: str) -> None:
    assert 0 < kv_token_bytes(kv_heads, dim, dtype) <= kv_token_bytes(kv_heads, dim, "float32")


@pytest.mark.parametrize(
    ("dtype", "token"),
    [
        ("bfloat16", 4096),
        ("fp8", 2048),
        # One fp32 scale for each of 4 heads, of K and of V.
        ("fp8_per_token_head", 2048 + 32),
        ("int4_per_token_head", 1024 + 32),
        # Half a byte an element and an fp8 scale for each 16 of them.
        ("nvfp4", 2 * 4 * (128 + 16)),
    ],
)
def test_bytes_of_a_token_with_4_heads_of_256(dtype: str, token: int) -> None:
    assert kv_token_bytes(4, 256, dtype) == token


@pytest.mark.parametrize(
    ("tokens", "in_flight", "blocks"),
    [(8192, None, 17), (8192, 8192, 17), (65536, 512, 6), (65536, 513, 7), (100, 512, 2)],
)
def test_a_window_holds_itself_what_is_in_flight_and_a_block_for_its_offset(
    tokens: int, in_flight: int | None, blocks: int
) -> None:
    bucket = Bucket("sliding", 4, 4, 512, 2048 + 1, 1, 0, 4 * 2**20)
    assert attention_blocks(bucket, tokens, in_flight) == blocks


# Layers, KV heads, head dim.
Part = tuple[int, int, int]
parts = st.tuples(layers, heads, dims)
# States and ring of 15 drafts: of 32 value heads, and of the 27B's 48.
RING_4B = 2_789_376
RING_27B = 4_044_800
REAL: dict[str, tuple[int, int, int, Part, Part | None]] = {
    "4b": (24, RING_4B, 16, (8, 4, 256), (5, 8, 128)),
    "27b": (48, RING_27B, 16, (16, 4, 256), (5, 8, 128)),
    "35b": (30, RING_4B, 16, (10, 2, 256), (8, 8, 128)),
}


def shapes_of(target: Part, draft: Part | None) -> list[AttentionLayers]:
    shapes = [AttentionLayers("target", *target, "bfloat16")]
    if draft is not None:
        shapes.append(AttentionLayers("drafter", *draft, "bfloat16"))
    return shapes


def both(gdn: int, state: int, unit: int, target: Part, draft: Part | None) -> list[Layout | None]:
    """Pages of one size, and packed."""
    shapes = shapes_of(target, draft)
    return [
        lay(gdn_layers=gdn, state_bytes=state, attention=shapes, unit=unit)
        for lay in (lay_out, lay_out_packed)
    ]


def padded(layout: Layout, tokens: int, copies: int = 1) -> int:
    return request_bytes(layout, copies=copies, tokens=tokens).padded


@given(layers, states, units, parts, st.none() | parts, st.integers(1, 10**6), st.integers(1, 3))
@example(*REAL["4b"], 8192, 1)
@example(*REAL["35b"], 8192, 1)
def test_a_packed_block_holds_any_group_and_every_layer_is_in_one(
    gdn: int,
    state: int,
    unit: int,
    target: Part,
    draft: Part | None,
    tokens: int,
    copies: int,
) -> None:
    today, packed = both(gdn, state, unit, target, draft)
    assert today is not None
    if packed is None:
        return
    shapes = shapes_of(target, draft)
    states, attention = packed.buckets
    assert packed.block_tokens == attention.block_tokens == today.block_tokens
    assert (states.layers, attention.layers) == (gdn, sum(shape.layers for shape in shapes))
    assert attention.drafter_layers == (0 if draft is None else draft[0])
    assert attention.groups == 1
    pages = packed.block_tokens * sum(shape.layers * shape.token_bytes for shape in shapes)
    assert packed.block_bytes >= pages
    assert packed.block_bytes >= ceil_div(gdn, packed.gdn_groups) * state
    # One group fewer would not fit beside the attention layers' own pages.
    if packed.gdn_groups > 1:
        assert ceil_div(gdn, packed.gdn_groups - 1) * state > pages
    assert packed.padding_bytes == 0
    request = request_bytes(packed, copies=copies, tokens=tokens)
    blocks = ceil_div(tokens, packed.block_tokens)
    assert request.ideal == copies * gdn * state + blocks * pages
    assert request.padded >= request.ideal
    assert request.padded == (copies * packed.gdn_groups + blocks) * packed.block_bytes
    pool = 5 * request.padded + packed.block_bytes
    assert capacity(packed, request, pool).requests == 5
    assert capacity(packed, request, pool - 1).requests == 4


@given(
    layers,
    st.integers(1, 10**7),
    units,
    parts,
    st.none() | parts,
    st.integers(1, 3),
    st.data(),
)
def test_the_chosen_layout_never_takes_more_and_is_packed_only_where_it_takes_less(
    gdn: int,
    state: int,
    unit: int,
    target: Part,
    draft: Part | None,
    copies: int,
    data: st.DataObject,
) -> None:
    today, packed = both(gdn, state, unit, target, draft)
    assert today is not None
    block = today.block_tokens
    tokens = data.draw(st.integers(1, 40 * block))
    chosen = choose(today, packed, tokens=tokens, copies=copies)
    assert chosen in (today, packed)
    shorter = data.draw(st.integers(1, tokens))
    for held in {1, min(block, tokens), min(block + 1, tokens), shorter, tokens}:
        assert padded(chosen, held, copies) <= padded(today, held, copies)
    if packed is None:
        return
    # Every length that fills another block, one by one.
    saved = [
        padded(today, min(blocks * block, tokens), copies)
        - padded(packed, min(blocks * block, tokens), copies)
        for blocks in range(1, ceil_div(tokens, block) + 1)
    ]
    assert chosen.packed == (saved[-1] > 0 and min(saved) >= 0)


@pytest.mark.parametrize(
    ("name", "groups", "largest", "blocks", "block_bytes", "chosen"),
    [
        # 13 pages of 688 tokens; 12 states fit into their bytes.
        ("4b", 3, 13, 14, 13 * 688 * 4096, True),
        # 10 pages of 2 KiB a token and 8 of 4 KiB.
        ("35b", 3, 18, 8, 1376 * (10 * 2048 + 8 * 4096), True),
        # Fewer bytes from three blocks of tokens on, but more below.
        ("27b", 4, 21, 12, 21 * 992 * 4096, False),
    ],
)
def test_real_models_of_15_drafts_and_8192_tokens(
    name: str, groups: int, largest: int, blocks: int, block_bytes: int, chosen: bool
) -> None:
    today, packed = both(*REAL[name])
    assert today is not None
    assert packed is not None
    assert packed.groups == groups
    assert packed.group_size == largest
    assert packed.block_bytes == block_bytes
    assert request_bytes(packed, copies=1, tokens=8192).blocks == blocks
    assert padded(packed, 8192) < padded(today, 8192)
    assert choose(today, packed, tokens=8192, copies=1).packed is chosen


def test_the_4b_in_bytes() -> None:
    today, packed = both(*REAL["4b"])
    assert today is not None
    assert packed is not None
    assert packed.block_bytes == 36_634_624
    request = request_bytes(packed, copies=1, tokens=8192)
    assert request.padded == 14 * 36_634_624
    assert request.padded_state == 2 * 36_634_624
    assert request.state == 24 * RING_4B
    assert request.target_kv == 12 * 8 * 688 * 4096
    assert request.drafter_kv == 12 * 5 * 688 * 4096
    assert padded(today, 8192) == 41 * 5 * 688 * 4096


def test_a_tie_stays_as_it_is() -> None:
    """Without a drafter the states already fit vLLM's groups of eight."""
    today, packed = both(24, RING_4B, 16, (8, 4, 256), None)
    assert today is not None
    assert packed is not None
    assert padded(packed, 8192) == padded(today, 8192)
    assert choose(today, packed, tokens=8192, copies=1) is today


def test_a_length_between_that_would_take_more_keeps_todays() -> None:
    """One block of tokens and many take fewer bytes, two more: today's blocks hold twice as many.

    The drafter's layers have twice the target's bytes a token, so its page is everyone's.
    """
    today, packed = both(10, RING_4B, 16, (12, 2, 256), (11, 8, 128))
    assert today is not None
    assert packed is not None
    block = packed.block_tokens
    assert today.buckets[1].block_tokens == 2 * block
    worse = [
        blocks
        for blocks in range(1, 20)
        if padded(packed, blocks * block) > padded(today, blocks * block)
    ]
    assert worse
    assert 1 not in worse
    assert padded(packed, 19 * block) < padded(today, 19 * block)
    assert not choose(today, packed, tokens=19 * block, copies=1).packed


def test_no_packing_where_vllm_would_not_or_it_is_not_for_us() -> None:
    full = AttentionLayers("target", 8, 4, 256, "bfloat16")

    def packed(state: int, *attention: AttentionLayers) -> Layout | None:
        return lay_out_packed(gdn_layers=24, state_bytes=state, attention=attention, unit=16)

    drafter = AttentionLayers("drafter", 5, 8, 128, "bfloat16")
    window = AttentionLayers("drafter", 5, 8, 128, "bfloat16", window=2048)
    assert packed(RING_4B, full, drafter) is not None
    assert packed(RING_4B, full, window) is None
    # A state that fills the page to the byte: one size, so vLLM pads nothing and packs nothing.
    assert packed(688 * 4096, full, drafter) is None
    assert packed(688 * 4096 - 4, full, drafter) is not None
    # As many layers of each of two sizes: vLLM splits the states by their count.
    wider = AttentionLayers("drafter", 8, 8, 256, "bfloat16")
    assert packed(RING_4B, full, wider) is None
    assert packed(RING_4B, full, AttentionLayers("drafter", 7, 8, 256, "bfloat16")) is not None
    same = AttentionLayers("drafter", 8, 8, 128, "bfloat16")
    assert packed(RING_4B, full, same) is not None
