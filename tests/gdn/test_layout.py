"""Pairing of layers, columns of a checkpoint row, and the fixed set of copy sizes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_gaudi_ext.gdn.layout import (
    INT32_BYTES,
    GdnGroup,
    LayerPair,
    RowColumns,
    copy_batches,
    pair_layers,
)

MIB = 1 << 20

# On a loaded machine an example may take any time; that is no failure.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def names(kind: str, count: int) -> tuple[str, ...]:
    return tuple(f"{kind}.{i}" for i in range(count))


def test_layers_are_paired_by_their_position_in_the_group() -> None:
    groups = [GdnGroup(1, ("g1.0", "g1.1")), GdnGroup(2, ("g2.0", "g2.1"))]
    assert pair_layers(["attn.0", "attn.1"], groups) == [
        LayerPair("attn.0", ("g1.0", "g2.0")),
        LayerPair("attn.1", ("g1.1", "g2.1")),
    ]


def test_a_short_group_leaves_its_last_positions_to_the_others() -> None:
    groups = [GdnGroup(1, ("g1.0", "g1.1")), GdnGroup(3, ("g3.0",))]
    assert pair_layers(["attn.0", "attn.1"], groups) == [
        LayerPair("attn.0", ("g1.0", "g3.0")),
        LayerPair("attn.1", ("g1.1",)),
    ]


def test_attention_layers_without_a_gdn_layer_are_left_out() -> None:
    pairs = pair_layers(["attn.0", "attn.1", "attn.2"], [GdnGroup(1, ("g.0",))])
    assert pairs == [LayerPair("attn.0", ("g.0",))]


@pytest.mark.parametrize("attention", [[], ["attn.0"]], ids=["no attention", "one attention layer"])
def test_a_gdn_layer_without_an_attention_layer_is_refused_by_name(attention: list[str]) -> None:
    groups = [GdnGroup(1, ("g1.0", "g1.1")), GdnGroup(2, ("g2.0",))]
    unpaired = [name for g in groups for name in g.layers[len(attention) :]]
    with pytest.raises(ValueError, match=f"^{len(unpaired)} GDN layers") as error:
        pair_layers(attention, groups)
    for name in unpaired:
        assert name in str(error.value)
    assert f"{len(attention)} attention layers" in str(error.value)


def test_no_groups_give_no_pairs() -> None:
    assert pair_layers(["attn.0"], []) == []


@unhurried
@given(
    attention=st.integers(0, 20),
    sizes=st.lists(st.integers(0, 20), max_size=5),
)
def test_every_gdn_layer_is_paired_once_with_the_layer_at_its_position(
    attention: int, sizes: list[int]
) -> None:
    groups = [GdnGroup(g, names(f"g{g}", size)) for g, size in enumerate(sizes)]
    if any(size > attention for size in sizes):
        with pytest.raises(ValueError, match="no attention layer"):
            pair_layers(names("attn", attention), groups)
        return
    pairs = pair_layers(names("attn", attention), groups)
    held = {gdn: pair.attention for pair in pairs for gdn in pair.gdn}
    assert held == {f"g{g}.{i}": f"attn.{i}" for g, size in enumerate(sizes) for i in range(size)}
    assert sum(len(pair.gdn) for pair in pairs) == sum(sizes)
    assert all(pair.gdn for pair in pairs)


# State and page bytes of one layer, from the published shapes of real models in bf16 at TP 1.
@pytest.mark.parametrize(
    ("conv_bytes", "ssm_bytes", "half_page_bytes", "fits"),
    [
        pytest.param(61_440, 3_145_728, 1_835_008, True, id="27B, B=896"),
        pytest.param(49_152, 2_097_152, 1_179_648, True, id="35B-A3B, B=1152"),
        pytest.param(61_440, 3_145_728, 1_572_864, False, id="27B, B=768"),
    ],
)
def test_columns_tell_whether_the_state_fits(
    conv_bytes: int, ssm_bytes: int, half_page_bytes: int, fits: bool
) -> None:
    half = half_page_bytes // INT32_BYTES
    columns = RowColumns(conv_bytes // INT32_BYTES, ssm_bytes // INT32_BYTES, half, half)
    assert columns.state_bytes == conv_bytes + ssm_bytes
    assert columns.page_bytes == 2 * half_page_bytes
    assert columns.state + columns.padding == columns.page
    assert (columns.padding >= 0) == fits


def test_copy_batches_of_a_real_page() -> None:
    # 3.5 MiB a page: 16 of them are 56 MiB, 32 would be 112 MiB.
    assert copy_batches(3_670_016) == (1, 2, 4, 8, 16)


def test_copy_batches_stop_at_the_largest_count() -> None:
    assert copy_batches(4096) == (1, 2, 4, 8, 16, 32, 64)
    assert copy_batches(4096, most=100) == (1, 2, 4, 8, 16, 32, 64)


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        pytest.param(32 * MIB - 1, (1, 2), id="two pages just below the budget"),
        pytest.param(32 * MIB, (1, 2), id="two pages are the budget"),
        pytest.param(32 * MIB + 1, (1,), id="two pages just above the budget"),
        pytest.param(500 * MIB, (1,), id="one page above the budget"),
    ],
)
def test_copy_batches_keep_to_the_budget(page: int, expected: tuple[int, ...]) -> None:
    assert copy_batches(page) == expected


@unhurried
@given(page=st.integers(1, 1 << 33), budget=st.integers(1, 1 << 33), most=st.integers(1, 1000))
def test_copy_batches_are_rising_powers_of_two_within_both_limits(
    page: int, budget: int, most: int
) -> None:
    sizes = copy_batches(page, budget, most)
    assert sizes == tuple(1 << i for i in range(len(sizes)))
    assert len(sizes) == 1 or (sizes[-1] <= most and sizes[-1] * page <= budget)
    larger = 2 * sizes[-1]
    assert larger > most or larger * page > budget
