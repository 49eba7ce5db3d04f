"""What a step zeroes, restores and saves: a plan on ints, made without torch or a device.

The lifecycle of a GDN state, per request:
- a request that starts at token 0 gets zeroed slots (one a GDN group);
- one that starts at k*B, on a hit or resumed after preemption, gets block k-1's checkpoint;
- a step that ends at k*B leaves a checkpoint in block k-1;
- a preempted or finished request hands its slots back.
B is the block size of the KV-cache config, in tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

NULL_BLOCK = 0

T = TypeVar("T")


class SlotBlock(NamedTuple):
    """A slot row of the state tensors, and the block whose pages hold its checkpoint."""

    slot: int
    block: int


@dataclass(frozen=True)
class Position:
    """Where a request stands: before a step its first token, after it the first one not computed.

    Args:
        request_id: vLLM's id of the request.
        tokens: tokens before this position.
        slots: the request's slot row in each GDN group.
        blocks: the request's block ids in each GDN group, in the order of its tokens.
    """

    request_id: str
    tokens: int
    slots: Sequence[int]
    blocks: Sequence[Sequence[int]]


@dataclass(frozen=True)
class StepPlan:
    """The four short lists of a step; the first three act before the forward pass, save after."""

    zero_blocks: tuple[int, ...] = ()
    zero_slots: tuple[int, ...] = ()
    restore: tuple[SlotBlock, ...] = ()
    save: tuple[SlotBlock, ...] = ()


def plan_step(
    block_tokens: int,
    starts: Iterable[Position],
    ends: Iterable[Position],
    new_attention_blocks: Iterable[int],
) -> StepPlan:
    """Plans one step.

    Args:
        block_tokens: B.
        starts: the requests that are new to their slots in this step (new or resumed).
        ends: the requests whose scheduled tokens end on a multiple of B.
        new_attention_blocks: blocks that the attention group got in this step.

    Raises:
        RuntimeError: a start that is not on a block boundary, or a position without its block.
    """
    zero_slots: list[int] = []
    restore: list[SlotBlock] = []
    for start in starts:
        if start.tokens == 0:
            zero_slots.extend(start.slots)
        else:
            restore.extend(_checkpoint_rows(start, block_tokens))
    save = [row for end in ends for row in _checkpoint_rows(end, block_tokens)]
    return StepPlan(tuple(new_attention_blocks), tuple(zero_slots), tuple(restore), tuple(save))


def _checkpoint_rows(position: Position, block_tokens: int) -> list[SlotBlock]:
    if position.tokens % block_tokens:
        raise RuntimeError(
            f"request {position.request_id} stands at {position.tokens} tokens, which is not a "
            f"multiple of the block size B={block_tokens}: no checkpoint exists there"
        )
    index = position.tokens // block_tokens - 1
    rows = []
    for slot, blocks in zip(position.slots, position.blocks, strict=True):
        if not 0 <= index < len(blocks) or blocks[index] == NULL_BLOCK:
            raise RuntimeError(
                f"request {position.request_id} at {position.tokens} tokens (B={block_tokens}) has "
                f"no block {index} for its checkpoint; its blocks are {list(blocks)}"
            )
        rows.append(SlotBlock(slot, blocks[index]))
    return rows


def ends_on_boundary(computed: int, scheduled: int, block_tokens: int) -> bool:
    """Whether a step that schedules some tokens after `computed` ends on a multiple of B."""
    return scheduled > 0 and (computed + scheduled) % block_tokens == 0


def release_order(preempted: Iterable[str]) -> list[str]:
    """The order in which preempted requests hand their slots back.

    The ids arrive as a set, whose order differs from process to process; the free list must be the
    same on every rank, since each rank takes slots from it by itself.
    """
    return sorted(preempted)


def padded_batches(rows: Sequence[T], sizes: Sequence[int]) -> Iterator[list[T]]:
    """Cuts rows into batches whose lengths are all among `sizes`.

    The last batch is filled up with its last row: copying or zeroing a row twice changes nothing.

    Args:
        rows: what to copy.
        sizes: allowed batch lengths, rising.
    """
    largest = sizes[-1]
    for first in range(0, len(rows), largest):
        batch = list(rows[first : first + largest])
        size = next(s for s in sizes if s >= len(batch))
        batch.extend([batch[-1]] * (size - len(batch)))
        yield batch


def schedule_order(batch: Sequence[str], first: int, scheduled: Sequence[str]) -> list[int]:
    """Swaps that put a batch's prompts in the order in which they were scheduled.

    A request is hit only on blocks of requests scheduled before it, so in this order a hit never
    reads a block before the step has computed it.

    Args:
        batch: request ids by batch row.
        first: the row of the first prompt; the rows before it stay.
        scheduled: the step's request ids in the order of its schedule.

    Returns:
        A flat list of row pairs (a, b), to be swapped one after another.
    """
    rank = {request_id: i for i, request_id in enumerate(scheduled)}
    rows = list(batch[first:])
    wanted = sorted(rows, key=rank.__getitem__)
    where = {request_id: row for row, request_id in enumerate(rows)}
    swaps: list[int] = []
    for target, request_id in enumerate(wanted):
        source = where[request_id]
        if source != target:
            moved = rows[target]
            rows[target], rows[source] = request_id, moved
            where[moved] = source
            swaps += (first + target, first + source)
    return swaps


@dataclass
class Replays:
    """Resumed requests that still run tokens which they had generated before.

    Until such a request has caught up, its outputs count as prompt: otherwise the runner asks for
    one logits row for each old output, or takes the last token for a decode. Behind that point the
    prompt length may stay as it was set: every token it counts is computed then.
    """

    _until: dict[str, int] = field(default_factory=dict)

    def resume(self, request_id: str, known_tokens: int) -> None:
        """A request resumes with this many known tokens, prompt and outputs together."""
        self._until[request_id] = known_tokens

    def prompt_tokens(self, computed_of: dict[str, int]) -> dict[str, int]:
        """The prompt length to use for each replaying request among `computed_of`.

        Args:
            computed_of: tokens computed before this step, of every request in the batch.
        """
        for request_id in [r for r in self._until if computed_of.get(r, 0) >= self._until[r]]:
            del self._until[request_id]
        return {r: n for r, n in self._until.items() if r in computed_of}

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests that finished, or were preempted again."""
        for request_id in request_ids:
            self._until.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._until)
