"""The numbered copy: words are repeated, each with how often its class came up, modulo 8.

A prompt is `BOS word END word END ... COPY`, the answer `word tag word tag ...` with the same
words. A word is one class token and `LETTERS` letters. Its tag is the number of answer words of
that class so far, this one included, modulo `TAGS`.

Letters and classes can be found again in the prompt by attention. The tag can't: it is the last
tag of the class plus one, and the last tag is some 200 tokens back in a text where the class
stands dozens of times. A delta-rule state is made for it: it keeps one value per class and
overwrites it. A state that lost a row, kept a rejected one or faded gives a wrong tag, and all
later tags of the class are wrong with it: degeneration becomes visible as word error.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

END_OF_TEXT, BOS, COPY, END = 0, 1, 2, 3
TAGS, FIRST_TAG = 8, 4
CLASSES, FIRST_CLASS = 32, 12
FIRST_LETTER = FIRST_CLASS + CLASSES
VOCAB = 256
LETTERS = 4
WORD_TOKENS = 1 + LETTERS + 1
"""Tokens of a word with its end or tag."""
FULL_ANSWER = 3072
"""Tokens of the answers that the task is scored on."""
FULL_WORDS = FULL_ANSWER // WORD_TOKENS
"""Of a text with such an answer. `train` ends with this length, and no other is copied well."""
MAY_ERR = 0.05
"""Share of the words that a model may have wrong by itself. Among more, a fault's hardly show."""

Word = tuple[int, ...]


def words(count: int, seed: int) -> list[Word]:
    """`count` random words, [class, letters...] each."""
    source = random.Random(seed)
    return [
        (
            source.randrange(FIRST_CLASS, FIRST_LETTER),
            *(source.randrange(FIRST_LETTER, VOCAB) for _ in range(LETTERS)),
        )
        for _ in range(count)
    ]


def prompt(chosen: Sequence[Word]) -> list[int]:
    """Tokens of the prompt that asks for `chosen`."""
    return [BOS, *(token for word in chosen for token in (*word, END)), COPY]


def answer(chosen: Sequence[Word]) -> list[int]:
    """Tokens of the right answer, `WORD_TOKENS` a word."""
    seen: dict[int, int] = {}
    tokens: list[int] = []
    for word in chosen:
        seen[word[0]] = seen.get(word[0], 0) + 1
        tokens += (*word, FIRST_TAG + seen[word[0]] % TAGS)
    return tokens


def split(tokens: Sequence[int]) -> Iterator[Word]:
    """Words of an answer with their tags; what has no tag at the end is a word too."""
    word: list[int] = []
    for token in tokens:
        word.append(token)
        if FIRST_TAG <= token < FIRST_TAG + TAGS:
            yield tuple(word)
            word = []
    if word:
        yield tuple(word)


def whole_words(tokens: Sequence[int]) -> int:
    """Tokens of an answer less the last word, where that was cut."""
    return len(tokens) // WORD_TOKENS * WORD_TOKENS


def _alike(mine: Sequence[Word], theirs: Sequence[Word]) -> int:
    """Words that both begin with."""
    pairs = enumerate(zip(mine, theirs, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(mine), len(theirs)))


def word_errors(found: Sequence[int], wanted: Sequence[int]) -> int:
    """Words to substitute, insert or delete to make one answer of another (Levenshtein).

    Args:
        found, wanted: tokens of answers.
    """
    mine, theirs = list(split(found)), list(split(wanted))
    # What both begin or end with costs nothing. Of right answers that is all, and the table of two
    # whole ones takes as long as an engine's step.
    first = _alike(mine, theirs)
    mine, theirs = mine[first:], theirs[first:]
    last = _alike(mine[::-1], theirs[::-1])
    mine, theirs = mine[: len(mine) - last], theirs[: len(theirs) - last]
    above = list(range(len(theirs) + 1))
    for row, word in enumerate(mine, 1):
        line = [row]
        for column, other in enumerate(theirs, 1):
            line.append(min(above[column] + 1, line[-1] + 1, above[column - 1] + (word != other)))
        above = line
    return above[-1]


def first_wrong_word(found: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Index of the first word that differs."""
    mine, theirs = list(split(found)), list(split(wanted))
    index = _alike(mine, theirs)
    return index if index < max(len(mine), len(theirs)) else None
