"""The copy task's texts and its word error, in plain Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, strategies

from cuda_ext.bench.copy_task import task


def text(*words: str) -> list[tuple[int, ...]]:
    """Words from letters: the first is the class."""
    return [
        (
            task.FIRST_CLASS + ord(word[0]) - ord("a"),
            *(task.FIRST_LETTER + ord(letter) - ord("a") for letter in word[1:]),
        )
        for word in words
    ]


def tag(count: int) -> int:
    return task.FIRST_TAG + count


def test_a_word_is_one_class_and_letters() -> None:
    words = task.words(500, seed=1)
    assert len(words) == 500
    for word in words:
        assert len(word) == task.WORD_TOKENS - 1
        assert task.FIRST_CLASS <= word[0] < task.FIRST_LETTER
        assert all(task.FIRST_LETTER <= letter < task.VOCAB for letter in word[1:])
    assert len({word[0] for word in words}) == task.CLASSES
    assert task.words(500, seed=1) == words
    assert task.words(500, seed=2) != words


def test_kinds_of_token_share_no_id() -> None:
    kinds = [
        (task.END_OF_TEXT, task.BOS, task.COPY, task.END),
        range(task.FIRST_TAG, task.FIRST_TAG + task.TAGS),
        range(task.FIRST_CLASS, task.FIRST_CLASS + task.CLASSES),
        range(task.FIRST_LETTER, task.VOCAB),
    ]
    tokens = [token for kind in kinds for token in kind]
    assert sorted(tokens) == list(range(task.VOCAB))


def test_prompt_and_answer_are_written_out() -> None:
    words = text("abcde", "bcdef", "axxxx")
    (first, second, third) = words
    end = task.END
    assert task.prompt(words) == [task.BOS, *first, end, *second, end, *third, end, task.COPY]
    assert task.answer(words) == [*first, tag(1), *second, tag(1), *third, tag(2)]


def test_tags_count_each_class_and_start_again() -> None:
    words = text(*(["aaaaa"] * 9), "baaaa")
    tags = task.answer(words)[task.WORD_TOKENS - 1 :: task.WORD_TOKENS]
    assert tags == [*(tag(count % task.TAGS) for count in range(1, 10)), tag(1)]


def test_in_a_full_answer_a_class_lies_far_back() -> None:
    """What attention would have to tell apart: 16 words of a class, the last 200 tokens ago."""
    words = task.words(512, seed=0)
    kinds = [word[0] for word in words]
    assert min(Counter(kinds).values()) > 4
    gaps = [
        index - (len(kinds[:index]) - 1 - kinds[:index][::-1].index(kind))
        for index, kind in enumerate(kinds)
        if kind in kinds[:index]
    ]
    assert sum(gaps) / len(gaps) * task.WORD_TOKENS > 120
    assert max(gaps) * task.WORD_TOKENS > 600


def spoil(tokens: list[int], index: int, token: int) -> list[int]:
    return [*tokens[:index], token, *tokens[index + 1 :]]


ANSWER = task.answer(task.words(20, seed=3))
W = task.WORD_TOKENS


@pytest.mark.parametrize(
    ("found", "errors", "first"),
    [
        pytest.param(ANSWER, 0, None, id="right"),
        pytest.param([], 20, 0, id="nothing"),
        pytest.param(spoil(ANSWER, 3 * W + 2, task.VOCAB - 1), 1, 3, id="one letter"),
        pytest.param(spoil(ANSWER, 4 * W - 1, tag(7)), 1, 3, id="one tag"),
        pytest.param(ANSWER[: 5 * W] + ANSWER[6 * W :], 1, 5, id="a word left out"),
        pytest.param(ANSWER[: 5 * W] + ANSWER[4 * W :], 1, 5, id="a word said twice"),
        pytest.param(ANSWER[:-2], 1, 19, id="cut within a word"),
        pytest.param(ANSWER[: 10 * W], 10, 10, id="half"),
        pytest.param([*ANSWER, task.FIRST_CLASS], 1, 20, id="too long"),
        # Two words become one that is neither.
        pytest.param(spoil(ANSWER, 4 * W - 1, task.VOCAB - 1), 2, 3, id="no tag"),
    ],
)
def test_word_errors(found: list[int], errors: int, first: int | None) -> None:
    # Tag 7 must be wrong there, and the letter too, for the cases to mean anything.
    assert ANSWER[4 * W - 1] != tag(7)
    assert ANSWER[3 * W + 2] != task.VOCAB - 1
    assert task.word_errors(found, ANSWER) == errors
    assert task.word_errors(ANSWER, found) == errors
    assert task.first_wrong_word(found, ANSWER) == first


def test_split_keeps_every_token() -> None:
    words = list(task.split(ANSWER[:-2]))
    assert [token for word in words for token in word] == ANSWER[:-2]
    assert len(words) == 20


def edits(mine: Sequence[int], theirs: Sequence[int]) -> int:
    """Levenshtein's definition, of words of one tag each."""
    if not mine or not theirs:
        return len(mine) + len(theirs)
    return min(
        edits(mine[1:], theirs) + 1,
        edits(mine, theirs[1:]) + 1,
        edits(mine[1:], theirs[1:]) + (mine[0] != theirs[0]),
    )


tags = strategies.lists(strategies.sampled_from([tag(0), tag(1), tag(2)]), max_size=5)


@given(tags, tags)
def test_word_errors_are_the_fewest_edits(found: list[int], wanted: list[int]) -> None:
    """What both begin and end with is left out of the table."""
    assert task.word_errors(found, wanted) == edits(found, wanted)
