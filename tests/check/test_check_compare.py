"""The comparison of two answers, and what the noise grants: numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from vllm_gaudi_ext.check.answer import Answer
from vllm_gaudi_ext.check.verdict import (
    NOISE_CAP,
    CaseResult,
    CheckReport,
    Noise,
    Verdict,
    compare,
    shared_tokens,
)


def answer(*places: dict[str, float | None], with_top: bool = True) -> Answer:
    """The first label of each place is the generated token."""
    labels = tuple(next(iter(p)) for p in places)
    top = tuple({k: v for k, v in p.items() if v is not None} for p in places)
    return Answer(
        labels=labels,
        token_ids=None,
        logprobs=tuple(p[label] for p, label in zip(places, labels, strict=True)),
        top=top if with_top else None,
        text="".join(labels),
        prompt_tokens=10,
        cached_tokens=0,
    )


def test_equal_answers_do_not_differ() -> None:
    a = answer({"x": -0.1, "y": -2.0}, {"z": -0.3})
    c = compare(a, a)
    assert c.differences == (0, 0)
    assert c.parted is None
    assert c.beyond(0) is None


def test_the_largest_difference_of_all_common_labels_counts() -> None:
    a = answer({"x": -0.1, "y": -2.0}, {"z": -0.3})
    b = answer({"x": -0.1, "y": -2.25}, {"z": -0.4})
    c = compare(a, b)
    assert c.differences == pytest.approx((0.25, 0.1))
    assert c.beyond(0.2) == 0
    assert c.beyond(0.05) == 0
    assert c.beyond(0.3) is None


def test_the_first_token_beyond_the_noise_is_named() -> None:
    a = answer({"x": -0.1}, {"x": -0.1}, {"x": -0.1})
    b = answer({"x": -0.1}, {"x": -0.11}, {"x": -0.9})
    assert compare(a, b).beyond(0.05) == 2


def test_nothing_is_compared_after_the_tokens_part() -> None:
    a = answer({"x": -0.6, "y": -0.8}, {"z": -0.1})
    b = answer({"y": -0.7, "x": -0.7}, {"w": -5.0})
    c = compare(a, b)
    assert c.parted == 0
    assert c.differences == pytest.approx((0.1,))
    # A near tie: within noise of 0.1 each may be the likelier.
    assert c.beyond(0.11) is None
    assert c.beyond(0.09) == 0


def test_a_label_that_one_list_leaves_out_lies_below_that_lists_least() -> None:
    a = answer({"x": -0.1, "y": -3.0})
    b = answer({"w": -0.2, "y": -3.0})
    # x has -0.1 in one and at most -3.0 in the other.
    assert compare(a, b).differences == pytest.approx((2.9,))


def test_other_tokens_without_lists_are_different_beyond_any_noise() -> None:
    a = answer({"x": -0.1}, with_top=False)
    b = answer({"y": -0.1}, with_top=False)
    assert compare(a, b).beyond(1e9) == 0


def test_a_shorter_answer_is_different() -> None:
    a = answer({"x": -0.1}, {"x": -0.1})
    assert compare(a, answer({"x": -0.1})).beyond(1e9) == 1


@pytest.mark.parametrize("with_top", [True, False])
@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_a_logprob_that_is_no_number_is_named(bad: float | None, with_top: bool) -> None:
    a = answer({"x": -0.1}, {"x": -0.1}, with_top=with_top)
    b = answer({"x": -0.1}, {"x": bad}, with_top=with_top)
    assert compare(a, b).not_finite == 1
    assert compare(b, a).not_finite == 1
    assert compare(b, b).not_finite == 1


def test_tokens_alone_are_compared_where_logprobs_are_missing() -> None:
    a = Answer(("1", "2"), (1, 2), None, None, "", None, None)
    b = Answer(("1", "3"), (1, 3), None, None, "", None, None)
    assert not compare(a, b).by_logprobs
    assert compare(a, b).beyond(1e9) == 1
    assert compare(a, a).beyond(0) is None


def test_noise_is_granted_twice_and_only_where_it_belongs() -> None:
    noise = Noise(alone=0.01, together=0.02, prefill_decode=0.1)
    assert noise.granted(together=False, rounding=False) == pytest.approx(0.02)
    assert noise.granted(together=True, rounding=False) == pytest.approx(0.04)
    assert noise.granted(together=False, rounding=True) == pytest.approx(0.2)
    assert Noise().granted(together=True, rounding=True) == 0


def test_rounding_noise_is_capped() -> None:
    noise = Noise(alone=0.0, prefill_decode=3.0)
    assert noise.granted(together=False, rounding=True) == NOISE_CAP


def test_a_server_hides_faults_only_where_its_repeats_differ_by_more_than_the_cap() -> None:
    noise = Noise(alone=0.1, together=0.6)
    assert not noise.hides_faults(together=False)
    assert noise.hides_faults(together=True)


def test_shared_tokens_is_the_longest_common_beginning() -> None:
    assert shared_tokens((1, 2, 3), [(1, 2), (1, 2, 4), (2, 3)]) == 2
    assert shared_tokens((1, 2, 3), []) == 0
    assert shared_tokens((1, 2), [(1, 2, 3)]) == 2


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([Verdict.EQUAL, Verdict.NEVER_CACHED, Verdict.NO_HIT, Verdict.LEFT_OUT], 0),
        ([Verdict.EQUAL_WITHIN_NOISE, Verdict.EQUAL_WITHIN_ROUNDING], 0),
        ([Verdict.EQUAL, Verdict.DIFFERENT, Verdict.FAILED], 1),
        ([Verdict.IMPOSSIBLE_HIT], 1),
        ([Verdict.NOT_FINITE, Verdict.EQUAL], 1),
        # Nothing was compared, so nothing is proved.
        ([Verdict.NO_HIT, Verdict.NEVER_CACHED], 2),
        ([], 2),
        ([Verdict.EQUAL, Verdict.FAILED], 2),
        ([Verdict.CACHING_OFF], 2),
        ([Verdict.EQUAL, Verdict.TOO_NOISY], 2),
        ([Verdict.LOGPROBS_NOT_OFFERED], 2),
        ([Verdict.CACHED_TOKENS_NOT_REPORTED], 2),
        ([Verdict.SALT_IGNORED], 2),
    ],
)
def test_exit_code(verdicts: list[Verdict], code: int) -> None:
    cases = tuple(CaseResult(case="x", scenario="x", verdict=v) for v in verdicts)
    assert CheckReport(url="", cases=cases).exit_code == code


def test_every_verdict_has_words_and_one_sort() -> None:
    for verdict in Verdict:
        assert verdict.words
        assert verdict.passed + verdict.is_difference + verdict.is_gap <= 1
