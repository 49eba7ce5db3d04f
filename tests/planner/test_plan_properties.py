"""Properties of the arithmetic that no table of examples shows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_gaudi_ext.planner.arithmetic import (
    KV_DTYPES,
    AttentionLayers,
    Bucket,
    attention_blocks,
    block_tokens,
    gaudi_slots,
    kv_token_bytes,
    lay_out,
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
    bucket = Bucket("sliding", 4, 4, 512, 2048 + 1, 1)
    assert attention_blocks(bucket, tokens, in_flight) == blocks
