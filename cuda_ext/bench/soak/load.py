"""Which prompts there are, and which requests come, by a seed; plain integers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cuda_ext.bench.copy_task import task

SHORTEST_ANSWER = 8
RANDOM_TOKENS = range(3, 256)
"""Of random prompts; ids that any vocabulary has, and no end of text."""


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
        abort_after: tokens after which it is aborted; None for never.
    """

    name: str
    prompt: int
    tokens: int
    abort_after: int | None


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
        aborted = source.random() < aborts
        yield Request(
            f"soak-{number}", prompt, tokens, source.randrange(tokens) if aborted else None
        )
        number += 1


def blocks_needed(tokens: int, groups: Sequence[int | None]) -> int:
    """Blocks that a request of so many tokens holds.

    Args:
        tokens: of prompt and answer.
        groups: by KV cache group, the tokens of a block; None for one of GDN layers, of which a
            request holds one block.
    """
    return sum(1 if block is None else -(-tokens // block) for block in groups)
