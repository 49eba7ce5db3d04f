"""Which page holds which layer's state, how many int32 columns, and does it fit. Ints only.

A KV block belongs to one cache group at a time, and each attention layer has a page (a K part and
a V part) for every block. Block b of GDN group g holds that group's checkpoint: the state of the
group's i-th layer lies in block b's page of the i-th attention layer. Layers are paired by their
position inside their group, which holds for vLLM 0.26.0's `KVCacheTensor.shared_by` and for the
`layers` that replaced it later.

A checkpoint row of one layer is `conv | ssm | padding` as int32 columns; its first `k_columns` lie
in the K part, the rest in the V part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

INT32_BYTES = 4


@dataclass(frozen=True)
class GdnGroup:
    """A cache group of GDN layers: its id in the KV-cache config, and its layers in order."""

    group_id: int
    layers: tuple[str, ...]


@dataclass(frozen=True)
class LayerPair:
    """An attention layer, and the GDN layers (at most one a group) whose states its pages hold."""

    attention: str
    gdn: tuple[str, ...]


@dataclass(frozen=True)
class RowColumns:
    """The int32 columns of one layer's checkpoint row, and of the page that holds it."""

    conv: int
    ssm: int
    k_columns: int
    v_columns: int

    @property
    def state(self) -> int:
        """Columns that the state takes: conv, then ssm."""
        return self.conv + self.ssm

    @property
    def page(self) -> int:
        """Columns that a page offers: its K part, then its V part."""
        return self.k_columns + self.v_columns

    @property
    def padding(self) -> int:
        """Columns of the page behind the state; negative where the state does not fit."""
        return self.page - self.state

    @property
    def state_bytes(self) -> int:
        return self.state * INT32_BYTES

    @property
    def page_bytes(self) -> int:
        return self.page * INT32_BYTES


def pair_layers(attention: Sequence[str], groups: Sequence[GdnGroup]) -> list[LayerPair]:
    """Pairs each attention layer with the GDN layers at its position in their groups.

    Attention layers whose position no GDN group reaches are left out: no state is kept in them.

    Raises:
        ValueError: a GDN layer has no attention layer at its position.
    """
    unpaired = [name for group in groups for name in group.layers[len(attention) :]]
    if unpaired:
        raise ValueError(
            f"{len(unpaired)} GDN layers have no attention layer to hold their checkpoint "
            f"({len(attention)} attention layers): {', '.join(unpaired)}"
        )
    return [
        LayerPair(name, gdn)
        for position, name in enumerate(attention)
        if (gdn := tuple(g.layers[position] for g in groups if position < len(g.layers)))
    ]


def copy_batches(page_bytes: int, budget_bytes: int = 64 << 20, most: int = 64) -> tuple[int, ...]:
    """The batch sizes, in rows, that checkpoint copies are padded to: powers of two.

    On HPU a new shape means a new graph, so copies come in these sizes and no others. The largest
    is the largest power of two whose rows stay within `budget_bytes`, since a copy holds about
    three times its rows in temporary memory, and at most `most`.
    """
    sizes = [1]
    while sizes[-1] * 2 <= most and sizes[-1] * 2 * page_bytes <= budget_bytes:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes)
