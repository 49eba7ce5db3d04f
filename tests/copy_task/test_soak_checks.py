"""The soak's load and gate, on invented answers and samples."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest

from cuda_ext.bench.copy_task import task
from cuda_ext.bench.soak import checks, load

WORDS = 40
TRUTHS = [task.answer(task.words(WORDS, seed)) for seed in range(4)]


def spoiled(tokens: list[int], words: int) -> list[int]:
    """With the tags of the first `words` words wrong."""
    found = list(tokens)
    for at in range(task.WORD_TOKENS - 1, words * task.WORD_TOKENS, task.WORD_TOKENS):
        found[at] = task.FIRST_TAG + (found[at] - task.FIRST_TAG + 1) % task.TAGS
    return found


def test_requests_are_random_but_the_same_for_one_seed() -> None:
    answers = [100, 4, 30]
    some = list(itertools.islice(load.requests(answers, 0.25, 7), 400))
    assert some == list(itertools.islice(load.requests(answers, 0.25, 7), 400))
    assert len({request.name for request in some}) == 400
    assert {request.prompt for request in some} == {0, 2}
    assert all(load.SHORTEST_ANSWER <= r.tokens <= answers[r.prompt] for r in some)
    aborted = [request for request in some if request.abort_after is not None]
    assert 60 < len(aborted) < 140
    assert all(r.abort_after < r.tokens for r in aborted if r.abort_after is not None)
    assert len(Counter(request.tokens for request in some)) > 50


def test_answers_of_which_nothing_is_known_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[3, 0\]"):
        next(load.requests([3, 0], 0.0, 1))


def test_copy_prompts_have_the_truth_with_them() -> None:
    prompts = load.copy_prompts(6, (3, 9), 11)
    assert len({prompt.answer for prompt in prompts}) > 1
    for index, prompt in enumerate(prompts):
        words = task.words(prompt.answer // task.WORD_TOKENS, 11 + index)
        assert list(prompt.tokens) == task.prompt(words)
        assert list(prompt.truth) == task.answer(words)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 4), (127, 4), (128, 4), (129, 5), (257, 6)])
def test_blocks_of_a_request(tokens: int, blocks: int) -> None:
    assert load.blocks_needed(tokens, [None, None, 128, None]) == blocks


def test_an_exact_answer_may_end_early_only_if_it_was_aborted() -> None:
    tally = checks.Tally()
    tally.look("a", [1, 2, 3], [1, 2, 3, 4], asked=3)
    tally.look("b", [1, 2], [1, 2, 3, 4], asked=None)
    tally.look("c", [], [1, 2, 3, 4], asked=None)
    assert (tally.checked, tally.aborted, tally.tokens, tally.wrong, tally.short) == (3, 2, 5, 0, 0)
    tally.look("d", [1, 2], [1, 2, 3, 4], asked=3)
    assert (tally.wrong, tally.short) == (0, 1)
    tally.look("e", [1, 9, 3], [1, 2, 3, 4], asked=3)
    tally.look("f", [8], [1, 2, 3, 4], asked=None)
    assert tally.wrong == 2
    assert tally.first_wrong == "e: token 1 of 3 is 9, not 2"


def test_more_tokens_than_are_known_are_wrong_and_no_error() -> None:
    tally = checks.Tally()
    tally.look("a", [1, 2, 3], [1, 2], asked=3)
    assert tally.wrong == 1
    assert tally.first_wrong == "a: 3 tokens, and only 2 are known"


def test_words_are_counted_and_a_ruined_answer_is_wrong() -> None:
    tally = checks.Tally()
    truth = TRUTHS[0]
    cut = 10 * task.WORD_TOKENS + 3
    tally.look_at_words("a", spoiled(truth, 1)[:cut], truth, asked=cut, usual=0)
    assert (tally.words, tally.word_errors, tally.wrong) == (10, 1, 0)
    tally.look_at_words("b", spoiled(truth, 11), truth, asked=len(truth), usual=1)
    assert (tally.words, tally.word_errors, tally.wrong) == (10 + WORDS, 12, 0)
    tally.look_at_words("c", spoiled(truth, 12), truth, asked=len(truth), usual=1)
    assert tally.wrong == 1
    tally.look_at_words("d", [7] * len(truth), truth, asked=len(truth), usual=0)
    assert tally.wrong == 2


def test_what_is_usual_is_the_worse_of_two_rounds_and_what_they_differ_in() -> None:
    one = [spoiled(TRUTHS[0], 2), *TRUTHS[1:]]
    other = [TRUTHS[0], spoiled(TRUTHS[1], 3), *TRUTHS[2:]]
    found = checks.usual([one, other], TRUTHS)
    words = WORDS * len(TRUTHS)
    assert found.word_error_rate == 3 / words
    assert found.differs == 5 / words
    assert found.allowed == pytest.approx((3 + 5 + checks.UNSEEN) / words)
    assert list(found.by_prompt) == [2, 3, 0, 0]


def test_a_model_that_can_not_copy_these_texts_is_of_no_use() -> None:
    """Or every answer might be wrong behind a green gate, as a whole soak's once were."""
    words = WORDS * len(TRUTHS)
    right = [spoiled(TRUTHS[0], int(task.MAY_ERR * words)), *TRUTHS[1:]]
    assert checks.usual([right, TRUTHS], TRUTHS).problem((20, 40)) is None
    wrong = [right[0], spoiled(TRUTHS[1], 1), *TRUTHS[2:]]
    problem = checks.usual([TRUTHS, wrong], TRUTHS).problem((20, 40))
    assert problem is not None
    assert "5.6% of the words are wrong" in problem
    assert "20 to 40 words, and --words" in problem


def samples(count: int = 16, **slope: float) -> list[checks.Sample]:
    """With `slope` MiB a sample added to a figure."""
    base = {"resident": 5000 * checks.MIB, "allocated": 900 * checks.MIB}
    return [
        checks.Sample(
            seconds=10.0 * n,
            reserved=1000 * checks.MIB + int(slope.get("reserved", 0) * n * checks.MIB),
            free_blocks=3,
            running=8,
            waiting=0,
            finished=n,
            **{k: v + int(slope.get(k, 0) * n * checks.MIB) for k, v in base.items()},
        )
        for n in range(count)
    ]


def test_growth_is_from_the_second_quarter_to_the_last() -> None:
    assert checks.growth(samples()) == {"allocated": 0, "reserved": 0, "resident": 0}
    grown = checks.growth(samples(allocated=0.5, resident=1))
    assert grown == {"allocated": 4, "reserved": 0, "resident": 8}
    assert checks.growth(samples(checks.LEAST_SAMPLES - 1)) == {}


def green() -> tuple[dict[str, Any], checks.Tally]:
    result = {
        "layers": "ReplayGatedDeltaNetAttention",
        "added": 50,
        "aborted": 5,
        "preempted": 3.0,
        "accepted": 800.0,
        "drafting": True,
        "free_blocks_before": 90,
        "free_blocks_after": 90,
        "growth_mib": checks.growth(samples()),
    }
    return result, checks.Tally(checked=50, aborted=5, words=1000, word_errors=4, logprobs=70)


def test_a_sound_soak_is_green() -> None:
    assert checks.problems(*green(), 0.004) == []
    assert checks.problems(*green(), None) == []


RED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "stock": ({"layers": "QwenGatedDeltaNetAttention"}, {}, "served by Qwen"),
    "an answer is lost": ({"added": 51}, {}, "51 requests were sent, 50 answers came back"),
    "all aborted": ({}, {"aborted": 50}, "no request was finished"),
    "short": ({}, {"short": 2}, "2 answers have another length"),
    "wrong": ({}, {"wrong": 1, "first_wrong": "x: token 3"}, "1 of 50 answers are wrong: x: tok"),
    "words": ({}, {"word_errors": 5}, "5 of 1000 words are wrong, 4 allowed"),
    "nan": ({}, {"not_finite": 1}, "1 of 70 log-probabilities"),
    "no logprobs": ({}, {"logprobs": 0}, "0 of 0 log-probabilities"),
    "no preemption": ({"preempted": 0.0}, {}, "no request was preempted"),
    "no abort": ({"aborted": 0}, {}, "no request was aborted"),
    "no draft": ({"accepted": 0.0}, {}, "no draft was accepted"),
    "leak": ({"free_blocks_after": 89}, {}, "90 blocks were free before the load, 89 are after"),
    "no samples": ({"growth_mib": {}}, {}, "growth of memory was not judged"),
    "torch grows": (
        {"growth_mib": checks.growth(samples(allocated=0.6))},
        {},
        "allocated memory grew by 4.8 MiB, 4 allowed",
    ),
    "process grows": (
        {"growth_mib": checks.growth(samples(resident=40))},
        {},
        "resident memory grew by 320.0 MiB",
    ),
}


@pytest.mark.parametrize("name", RED)
def test_red(name: str) -> None:
    changes, tally_changes, text = RED[name]
    result, tally = green()
    tally = dataclasses.replace(tally, **tally_changes)
    found = checks.problems(result | changes, tally, 0.004)
    assert len(found) == 1, found
    assert text in found[0]


def test_log_probabilities_that_are_no_numbers_are_counted() -> None:
    tally = checks.Tally()
    tally.look_at_logprobs([-0.5, float("nan"), float("-inf"), 0.0])
    assert (tally.logprobs, tally.not_finite) == (4, 2)
