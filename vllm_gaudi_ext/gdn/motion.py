"""The batched int32 copies and fills that move GDN states between slots and pages.

Every method enqueues on the current stream and waits for nothing. Copies are bit-exact: states and
pages are seen as int32 rows, so no value is ever converted. Index lists are padded to a few fixed
lengths, because on HPU each new shape costs a new graph; the lengths used are kept in `shapes`.

The views alias the runner's tensors and keep them alive: drop this object before the KV cache is
freed (sleep mode), and build a new one with the new cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from vllm_gaudi_ext.gdn.layout import RowColumns
from vllm_gaudi_ext.gdn.plan import SlotBlock, padded_batches

# Row fills hold nothing in temporary memory, so their lists may be longer than those of copies.
FILL_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class PageViews:
    """Int32 views of one attention layer's pages.

    Args:
        k: [N, k_columns], the K part of every manager block.
        v: [N, v_columns], the V part.
        spare: the kernel block behind the pool, K and V, where padding is written.
    """

    k: torch.Tensor
    v: torch.Tensor
    spare: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class StateViews:
    """Int32 views of the states at one layer position, and the pages that hold their checkpoints.

    Args:
        page: the pages of the attention layer at this position.
        conv: [S, conv columns], the conv state of every slot.
        ssm: [S, ssm columns], the recurrent state of every slot.
        columns: the row's layout.
    """

    page: PageViews
    conv: torch.Tensor
    ssm: torch.Tensor
    columns: RowColumns


def int32_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """A [rows, columns] int32 view of a contiguous tensor.

    Raises:
        ValueError: the tensor is not contiguous, does not divide into the rows, or a row is no
            whole number of int32.
    """
    if not tensor.is_contiguous() or tensor.numel() % rows:
        raise ValueError(
            f"a state or page tensor of shape {tuple(tensor.shape)} is not contiguous, or does not "
            f"divide into {rows} rows"
        )
    flat = tensor.view(rows, -1)
    if flat.shape[1] * flat.element_size() % 4:
        raise ValueError(f"a row of {flat.shape[1]} x {flat.dtype} is no whole number of int32")
    return flat.view(torch.int32)


@dataclass
class CopyCounters:
    """Rows moved since start-up, before padding; read by tests and logs, never waited for."""

    saved: int = 0
    restored: int = 0
    blocks_zeroed: int = 0
    slots_zeroed: int = 0


@dataclass
class CheckpointPages:
    """All of a rank's pages and states, and the four motions of a step.

    Args:
        pages: one entry for each attention layer, whether or not it holds states.
        states: one entry for each position at which GDN layers keep states.
        batches: allowed batch lengths of copies, rising (`layout.copy_batches`).
        end_of_graph: called behind each motion; `mark_step` of the HPU bridge, which in lazy mode
            keeps the motion out of the next graph, and does nothing otherwise.
    """

    pages: Sequence[PageViews]
    states: Sequence[StateViews]
    batches: Sequence[int]
    end_of_graph: Callable[[], None]
    counters: CopyCounters = field(default_factory=CopyCounters)
    shapes: set[tuple[str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        # Uploaded once: they are zeroed in every step.
        self._reserved_slots = self._upload([0, self.states[0].conv.shape[0] - 1])

    def save(self, rows: Sequence[SlotBlock]) -> None:
        """Copies each slot's state into its block's pages; the rest of the page becomes zero."""
        for slots, blocks in self._index_pairs("save", rows):
            for state in self.states:
                row = torch.cat(
                    (
                        state.conv.index_select(0, slots),
                        state.ssm.index_select(0, slots),
                        state.ssm.new_zeros((slots.shape[0], state.columns.padding)),
                    ),
                    dim=1,
                )
                state.page.k.index_copy_(0, blocks, row[:, : state.columns.k_columns])
                state.page.v.index_copy_(0, blocks, row[:, state.columns.k_columns :])
        self._finish(rows)
        self.counters.saved += len(rows)

    def restore(self, rows: Sequence[SlotBlock]) -> None:
        """Copies each block's checkpoint back into its slot; the page stays as it is."""
        for slots, blocks in self._index_pairs("restore", rows):
            for state in self.states:
                conv, page = state.columns.conv, state.page
                row = torch.cat((page.k.index_select(0, blocks), page.v.index_select(0, blocks)), 1)
                state.conv.index_copy_(0, slots, row[:, :conv])
                state.ssm.index_copy_(0, slots, row[:, conv : state.columns.state])
        self._finish(rows)
        self.counters.restored += len(rows)

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Zeroes the pages of these blocks, K and V, in every layer."""
        for index in self._indices("zero_blocks", blocks):
            for page in self.pages:
                page.k.index_fill_(0, index, 0)
                page.v.index_fill_(0, index, 0)
        self._finish(blocks)
        self.counters.blocks_zeroed += len(blocks)

    def zero_slots(self, slots: Sequence[int]) -> None:
        """Zeroes the conv and recurrent state of these slots in every layer."""
        for index in self._indices("zero_slots", slots):
            for state in self.states:
                state.conv.index_fill_(0, index, 0)
                state.ssm.index_fill_(0, index, 0)
        self._finish(slots)
        self.counters.slots_zeroed += len(slots)

    def zero_padding(self) -> None:
        """Zeroes what padded rows read and write: the spare kernel block, the first and last slot.

        vllm-gaudi sends padding to the last slot and to the spare block, and keeps slot 0 unused;
        without this a non-finite value that a padded row once produced would stay for good.
        """
        for page in self.pages:
            for tensor in page.spare:
                tensor.zero_()
        for state in self.states:
            for tensor in (state.conv, state.ssm):
                tensor.index_fill_(0, self._reserved_slots, 0)
        self.end_of_graph()

    def warm_up(self) -> None:
        """Runs every copy and fill once in each of its shapes, on slot 0 and the null block.

        Neither holds anything: slot 0 is unused and zero, and block 0 is vLLM's null block.
        """
        for size in self.batches:
            self.save([SlotBlock(0, 0)] * size)
            self.restore([SlotBlock(0, 0)] * size)
        for size in FILL_BATCHES:
            self.zero_blocks([0] * size)
            self.zero_slots([0] * size)
        self.zero_padding()
        self.counters = CopyCounters()

    def _index_pairs(
        self, motion: str, rows: Sequence[SlotBlock]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = []
        for batch in padded_batches(rows, self.batches):
            self.shapes.add((motion, len(batch)))
            slots = self._upload([row.slot for row in batch])
            pairs.append((slots, self._upload([row.block for row in batch])))
        return pairs

    def _indices(self, motion: str, rows: Sequence[int]) -> list[torch.Tensor]:
        indices = []
        for batch in padded_batches(rows, FILL_BATCHES):
            self.shapes.add((motion, len(batch)))
            indices.append(self._upload(batch))
        return indices

    def _upload(self, values: list[int]) -> torch.Tensor:
        device = self.pages[0].k.device
        return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)

    def _finish(self, rows: Sequence[object]) -> None:
        if rows:
            self.end_of_graph()
