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
    at_once = [request for request in aborted if request.abort_after == load.AT_ONCE]
    assert 10 < len(at_once) < 50
    assert {request.end for request in at_once} == {0}
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
    few = int(task.MAY_ERR * WORDS * len(TRUTHS))
    wrong = [spoiled(TRUTHS[0], few), spoiled(TRUTHS[1], 1), *TRUTHS[2:]]
    problem = checks.usual([TRUTHS, wrong], TRUTHS).problem((20, 40))
    assert problem is not None
    assert "5.6% of the words are wrong" in problem
    assert "20 to 40 words, and --words" in problem


def test_what_few_words_do_not_show_may_not_hide_a_fault() -> None:
    """With 160 words any gate let 15 % of wrong ones through."""
    assert checks.Usual(0.0, 0.0, 480, []).problem((40, 40)) is None
    assert checks.Usual(0.0, 0.0, 479, []).problem((40, 40)) is not None
    problem = checks.Usual(0.0, 0.0, 160, []).problem((40, 40))
    assert problem is not None
    assert "15.0% of the words might be wrong" in problem
    assert "15.0% is for what 160 words do not show" in problem
    assert "--count or --words for 480 at least" in problem


def test_rounds_that_differ_may_not_hide_a_fault() -> None:
    """4.6 % wrong and 8.8 % different allowed 13.5 %, and with rows lost 12.6 % were wrong."""
    problem = checks.Usual(0.046, 0.088, 24_000, []).problem((20, 400))
    assert problem is not None
    assert "with drafts 13.5% of the words might be wrong" in problem
    assert "4.6% are without drafts, in 8.8% two batch compositions differ" in problem
    assert "--words names lengths that the model was trained for" in problem
    assert "--count" not in problem


def test_more_words_are_asked_for_where_they_help() -> None:
    problem = checks.Usual(0.02, 0.01, 1000, []).problem((20, 400))
    assert problem is not None
    assert "--count or --words for 1200 at least" in problem
    assert checks.Usual(0.02, 0.01, 1201, []).problem((20, 400)) is None


def test_exact_answers_must_be_known_for_the_most_part() -> None:
    answers = [[1] * 40, [2] * 9]
    assert checks.exact_problem(answers, 98, [(), ()], None) is None
    problem = checks.exact_problem(answers, 99, [(), ()], None)
    assert problem is not None
    assert "of 99 tokens of the answers 49 are clear" in problem


def test_exact_answers_to_copy_texts_must_be_right() -> None:
    """An engine that is wrong without drafts as with them agrees with itself."""
    words, asked = (WORDS, WORDS), sum(len(truth) for truth in TRUTHS)
    cut = [truth[: -1 - number] for number, truth in enumerate(TRUTHS)]
    assert checks.exact_problem(cut, asked, TRUTHS, words) is None
    wrong = [spoiled(cut[0], 9), *cut[1:]]
    problem = checks.exact_problem(wrong, asked, TRUTHS, words)
    assert problem is not None
    assert "without drafts 5.8% of the words are wrong" in problem
    assert "40 to 40 words, and --words" in problem


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
            preempted=n,
            accepted=9 * n,
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
        "answers": 50,
        "finished": 45,
        "aborted": 5,
        "aborted_unanswered": 1,
        "preempted": 3.0,
        "proposed": 1000.0,
        "accepted": 800.0,
        "drafting": True,
        "concurrency": 40,
        "mean_running": 36.0,
        "pool": 0.9,
        "pool_blocks": 90,
        "least_free_blocks": 0,
        "ended_early": [],
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
    "a stock layer beside": (
        {"layers": "QwenGatedDeltaNetAttention, ReplayGatedDeltaNetAttention"},
        {},
        "served by QwenGatedDeltaNetAttention, Replay",
    ),
    "no GDN layer": ({"layers": ""}, {}, "served by "),
    "nearly all aborted": ({"finished": 39}, {}, "39 requests were finished, fewer than are sent"),
    "one at a time": ({"mean_running": 17.9}, {}, "17.9 requests ran at a time on average"),
    "short": ({}, {"short": 2}, "2 answers have another length"),
    "wrong": ({}, {"wrong": 1, "first_wrong": "x: token 3"}, "1 of 50 answers are wrong: x: tok"),
    "words": ({}, {"word_errors": 5}, "5 of 1000 words are wrong, 4 allowed"),
    "nan": ({}, {"not_finite": 1}, "1 of 70 log-probabilities"),
    "no logprobs": ({}, {"logprobs": 0}, "0 of 0 log-probabilities"),
    "no preemption": (
        {"preempted": 0.0, "least_free_blocks": 7},
        {},
        "no request was preempted: --pool 0.9 left 7 of 90 blocks free at the least: lower it",
    ),
    "no abort": ({"aborted": 0, "aborted_unanswered": 0}, {}, "no request was aborted"),
    "none aborted at once": ({"aborted_unanswered": 0}, {}, "aborted before its first token"),
    "no draft": ({"accepted": 0.0}, {}, "0 drafts were accepted in 50 answers: --speculative"),
    "hardly a draft": ({"accepted": 49.0}, {}, "49 drafts were accepted in 50 answers"),
    "no draft refused": ({"proposed": 800.0}, {}, "none of 800 drafts was refused"),
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


def test_a_run_that_ended_early_is_red_for_that_alone() -> None:
    result, tally = green()
    result |= {"ended_early": ["ended after 20%"], "preempted": 0, "accepted": 0, "finished": 1}
    result |= {"growth_mib": {}, "mean_running": 1.0}
    assert checks.problems(result, tally, None) == ["ended after 20%"]
    result |= {"free_blocks_after": 89}
    assert len(checks.problems(result, tally, None)) == 2


def test_a_run_ends_early_once_it_could_have_seen_what_it_has_not() -> None:
    found, _ = green()
    assert checks.in_vain(found, 1.0, 100) == []
    assert checks.in_vain(found | {"accepted": 49.0, "drafting": False}, 1.0, 100) == []
    found |= {"preempted": 0.0, "least_free_blocks": 7}
    assert checks.in_vain(found, 0.19, 100) == []
    assert checks.in_vain(found, 0.2, 3) == []
    assert checks.in_vain(found | {"concurrency": 51}, 0.2, 4) == []
    assert checks.in_vain(found, 0.2, 4) == [
        "ended after 20% of the time: no request was preempted: --pool 0.9 left 7 of 90 blocks "
        "free at the least: lower it"
    ]
    assert len(checks.in_vain(found | {"accepted": 49.0}, 0.2, 4)) == 2


def test_log_probabilities_that_are_no_numbers_are_counted() -> None:
    tally = checks.Tally()
    tally.look_at_logprobs([-0.5, float("nan"), float("-inf"), 0.0])
    assert (tally.logprobs, tally.not_finite) == (4, 2)
