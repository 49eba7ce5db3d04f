"""Which prompts there are, and which requests come, by a seed; plain integers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cuda_ext.bench.copy_task import task

SHORTEST_ANSWER = 8
AT_ONCE = -1
"""`Request.abort_after` of one that is aborted while it waits or while its prompt is read."""
ABORTED_AT_ONCE = 0.25
"""Share of the aborted ones."""
RANDOM_TOKENS = range(3, 256)
"""Of random prompts; ids that any vocabulary has, and no end of text."""
SPARE_BLOCKS = 2
"""More than the largest request needs; the fault `leaked-block` takes one."""


@dataclass(frozen=True)
class Prompt:
    """One of the fixed set.

    Args:
        tokens: of the prompt.
        answer: tokens of an answer at most.
        truth: the right answer, where the task has one.
    """

    tokens: tuple[int, ...]
    answer: int
    truth: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """One request of the load.

    Args:
        name: unique.
        prompt: index in the fixed set.
        tokens: of the answer.
        abort_after: tokens after which it is aborted, or `AT_ONCE`; None for never.
    """

    name: str
    prompt: int
    tokens: int
    abort_after: int | None

    @property
    def end(self) -> int:
        """Tokens of the answer that it lives to see."""
        return self.tokens if self.abort_after is None else self.abort_after + 1


def copy_prompts(count: int, words: tuple[int, int], seed: int) -> list[Prompt]:
    """Texts of the copy task.

    Args:
        count: prompts.
        words: least and most of a text.
        seed: of lengths and words.
    """
    source = random.Random(seed)
    found = []
    for index in range(count):
        text = task.words(source.randint(*words), seed + index)
        truth = tuple(task.answer(text))
        found.append(Prompt(tuple(task.prompt(text)), len(truth), truth))
    return found


def random_prompts(
    count: int, lengths: tuple[int, int], answers: tuple[int, int], seed: int
) -> list[Prompt]:
    """Texts of random tokens.

    Args:
        count: prompts.
        lengths: least and most tokens of a prompt.
        answers: least and most tokens of an answer.
        seed: of lengths and tokens.
    """
    source = random.Random(seed)
    return [
        Prompt(
            tuple(source.choice(RANDOM_TOKENS) for _ in range(source.randint(*lengths))),
            source.randint(*answers),
        )
        for _ in range(count)
    ]


def requests(answers: Sequence[int], aborts: float, seed: int) -> Iterator[Request]:
    """Requests without end.

    Args:
        answers: by prompt, how many tokens of its answer are known.
        aborts: share of the requests that are aborted.
        seed: of every draw.
    """
    source = random.Random(seed)
    usable = [index for index, known in enumerate(answers) if known >= SHORTEST_ANSWER]
    if not usable:
        raise ValueError(f"no answer has {SHORTEST_ANSWER} tokens that are known: {list(answers)}")
    number = 0
    while True:
        prompt = source.choice(usable)
        tokens = source.randint(SHORTEST_ANSWER, answers[prompt])
        after = None
        if source.random() < aborts:
            at_once = source.random() < ABORTED_AT_ONCE
            after = AT_ONCE if at_once else source.randrange(tokens)
        yield Request(f"soak-{number}", prompt, tokens, after)
        number += 1


def blocks_needed(tokens: int, groups: Sequence[int | None]) -> int:
    """Blocks that a request of so many tokens holds.

    Args:
        tokens: of prompt and answer.
        groups: by KV cache group, the tokens of a block; None for one of GDN layers, of which a
            request holds one block from its start.
    """
    return sum(1 if block is None else -(-tokens // block) for block in groups)


def tokens_ahead(drafts: int, lookahead: int, *, asynchronous: bool) -> int:
    """Tokens beyond the known ones for which a decode step takes blocks.

    The step computes the last known token and D drafts, and the drafter writes `lookahead` behind
    them; with asynchronous scheduling it stands behind another step's 1 + D rows, of which nothing
    is known yet (`KVCacheManager.allocate_slots`, `AsyncScheduler`, vLLM 0.31.0).

    Args:
        drafts: D.
        lookahead: the scheduler's `num_lookahead_tokens`.
        asynchronous: whether it schedules a step before the last one's tokens are known.
    """
    return drafts + lookahead + (1 + drafts if asynchronous else 0)


def mean_blocks(
    prompts: Sequence[int], some: Iterable[Request], groups: Sequence[int | None], ahead: int
) -> float:
    """Blocks that a request in flight holds, averaged over the lives of `some` requests.

    All requests in flight move on at the same pace, so a life weighs as much as the tokens it
    lives to see:

        sum over requests, t = 0 .. end - 1, of blocks_needed(prompt + t + ahead)
        / sum over requests of end

    For answers of 1 to A tokens, all as likely, that is what prompt + A / 3 tokens hold: half of
    its answer for each request, and a longer one is met more often.

    Args:
        prompts: tokens of each of the fixed set.
        some: requests of the load.
        groups: see `blocks_needed`.
        ahead: see `tokens_ahead`.
    """
    held = lived = 0
    for request in some:
        first = prompts[request.prompt] + ahead
        for block in groups:
            held += request.end if block is None else _ceilings(first, request.end, block)
        lived += request.end
    return held / lived


def _ceilings(first: int, count: int, block: int) -> int:
    """Sum of ceil(n / block) over `count` numbers n from `first` on."""

    def below(end: int) -> int:
        whole, rest = divmod(end, block)
        return block * whole * (whole + 1) // 2 + rest * (whole + 1)

    return below(first + count - 1) - below(first - 1)


def pool_blocks(share: float, concurrency: int, mean: float, largest: int) -> int:
    """Blocks of a pool that is too small for all requests, and large enough for each.

    Args:
        share: of what `concurrency` requests hold on average.
        concurrency: requests in flight.
        mean: blocks that one holds on average (`mean_blocks`).
        largest: blocks that one holds at most.

    Raises:
        ValueError: a pool that one request needs is enough for all.
    """
    least, all_hold = largest + SPARE_BLOCKS, concurrency * mean
    if least >= all_hold:
        raise ValueError(
            f"one request holds up to {largest} blocks, and {concurrency} hold {all_hold:.0f} on "
            "average: none would be preempted; raise --concurrency"
        )
    return max(int(share * all_hold), least)
