"""The judge on made-up observations: what is granted to whom, and what one hit alone hides."""

from __future__ import annotations

from vllm_gaudi_ext.check.answer import Answer, Prompt
from vllm_gaudi_ext.check.scenarios import Ask, Role
from vllm_gaudi_ext.check.verdict import CaseResult, Cuts, Observation, Verdict, judge

B = 128
PROMPT: Prompt = tuple(range(300))


def observed(
    role: Role,
    logprob: float,
    cached: int = 0,
    *,
    prompt: Prompt = PROMPT,
    case: str = "case",
    chain: str = "chain",
    in_batch: int = 1,
    prefilled: bool = True,
    decoded: tuple[tuple[int, int], ...] = (),
    tail_of_seed: int | None = None,
    tokens: int = 4,
    shared: int | None = None,
) -> Observation:
    ask = Ask(
        case,
        role,
        prompt,
        None if role is Role.COLD else chain,
        tokens,
        prefilled=prefilled,
        decoded=decoded,
        tail_of_seed=tail_of_seed,
    )
    labels = ("7",) * tokens
    answer = Answer(labels, (7,) * tokens, (logprob,) * tokens, None, "", len(prompt), cached)
    return Observation("scenario", ask, answer, in_batch=in_batch, shared=shared)


def judged(*observations: Observation, cuts: Cuts = "auto", case: str = "case") -> CaseResult:
    cases, _ = judge(observations, B, cuts=cuts)
    return next(c for c in cases if c.case == case)


# A noise play in which prefill and decode differ by 0.1.
ROUNDING = (
    observed(Role.SEED, -1.0, case="noise", chain="noise"),
    observed(Role.COLD, -1.1, case="noise", tail_of_seed=2, tokens=2, prompt=(*PROMPT, 7, 7)),
)


def test_two_hits_that_disagree_are_different_though_each_is_within_what_is_granted() -> None:
    hits = [observed(Role.HIT, x, 128, prefilled=False) for x in (-1.02, -0.98)]
    result = judged(*ROUNDING, observed(Role.COLD, -1.0), *hits)
    assert result.verdict is Verdict.DIFFERENT
    assert "two hits of one prompt on the same 128 cached tokens disagree" in result.detail
    agreeing = judged(*ROUNDING, observed(Role.COLD, -1.0), hits[0], hits[0])
    assert agreeing.verdict is Verdict.EQUAL_WITHIN_ROUNDING


def test_hits_on_other_blocks_need_not_agree() -> None:
    hits = [observed(Role.HIT, x, n) for x, n in ((-1.02, 128), (-1.0, 256))]
    result = judged(*ROUNDING, observed(Role.COLD, -1.0), *hits)
    assert result.verdict is Verdict.EQUAL_WITHIN_ROUNDING


def test_rounding_is_granted_where_a_hit_does_not_end_on_the_last_whole_block() -> None:
    cold = observed(Role.COLD, -1.0)
    on_last = observed(Role.HIT, -1.02, 256)
    before_last = observed(Role.HIT, -1.02, 128)
    assert judged(*ROUNDING, cold, on_last).verdict is Verdict.DIFFERENT
    assert judged(*ROUNDING, cold, before_last).verdict is Verdict.EQUAL_WITHIN_ROUNDING
    assert judged(*ROUNDING, cold, before_last, cuts="same").verdict is Verdict.DIFFERENT
    assert judged(*ROUNDING, cold, on_last, cuts="any").verdict is Verdict.EQUAL_WITHIN_ROUNDING
    # Where the chain's blocks came from several requests, cuts may differ anywhere.
    mixed = observed(Role.HIT, -1.02, 256, prefilled=False)
    assert judged(*ROUNDING, cold, mixed).verdict is Verdict.EQUAL_WITHIN_ROUNDING


def test_more_than_twice_the_rounding_is_different() -> None:
    hit = observed(Role.HIT, -1.21, 128)
    assert judged(*ROUNDING, observed(Role.COLD, -1.0), hit).verdict is Verdict.DIFFERENT


def test_what_rests_on_a_decoded_state_stays_so_in_later_turns() -> None:
    turns = [
        observed(Role.COLD, -1.0, case="turn 2"),
        observed(Role.HIT, -1.02, 256, case="turn 2", decoded=((250, 260),)),
        observed(Role.COLD, -1.0, case="turn 3"),
        observed(Role.HIT, -1.02, 256, case="turn 3", decoded=()),
    ]
    for case in ("turn 2", "turn 3"):
        # Even with cuts="same", since decoding made the state.
        result = judged(*ROUNDING, *turns, cuts="same", case=case)
        assert result.verdict is Verdict.EQUAL_WITHIN_ROUNDING, case
    # A hit below the decoded span rests on prefill alone.
    below = [turns[0], observed(Role.HIT, -1.02, 128, case="turn 2", decoded=((250, 260),))]
    assert judged(*ROUNDING, *below, cuts="same", case="turn 2").verdict is Verdict.DIFFERENT


def test_a_decode_made_state_is_compared_with_the_answer_that_made_it() -> None:
    longer = (*PROMPT, 7, 7)
    seed = observed(Role.SEED, -1.0)
    cold = observed(Role.COLD, -1.3, prompt=longer, tail_of_seed=2, tokens=2)
    span = ((300, 304),)
    hit = observed(Role.HIT, -1.0, 256, prompt=longer, tail_of_seed=2, tokens=2, decoded=span)
    # The cold prefill differs by 0.3, the uninterrupted answer not at all.
    assert judged(seed, cold, hit).verdict is Verdict.EQUAL


def test_noise_of_batches_is_granted_to_batches() -> None:
    together = [
        observed(Role.COLD, -1.0),
        observed(Role.COLD, -1.03, in_batch=2),
        observed(Role.COLD, -1.03, in_batch=2),
    ]
    alone = observed(Role.HIT, -1.04, 256)
    batch = observed(Role.HIT, -1.04, 256, in_batch=2)
    assert judged(*together, alone).verdict is Verdict.DIFFERENT
    assert judged(*together, batch).verdict is Verdict.EQUAL_WITHIN_NOISE


def test_a_warm_seed_is_an_ignored_salt_unless_it_was_sent_twice() -> None:
    cold, hit = observed(Role.COLD, -1.0), observed(Role.HIT, -1.0, 256)
    warm = observed(Role.SEED, -1.0, 256)
    assert judged(cold, warm, hit).verdict is Verdict.SALT_IGNORED
    assert warm.answer is not None
    sent_twice = Answer(**{**vars(warm.answer), "attempts": 2})
    again = Observation("scenario", warm.ask, sent_twice)
    assert judged(cold, again, hit).verdict is Verdict.EQUAL


def test_a_hit_longer_than_what_was_ever_sent_is_impossible() -> None:
    cold = observed(Role.COLD, -1.0)
    result = judged(cold, observed(Role.HIT, -1.0, 256, shared=200))
    assert result.verdict is Verdict.IMPOSSIBLE_HIT
    assert judged(cold, observed(Role.HIT, -1.0, 128, shared=200)).verdict is Verdict.EQUAL


def test_a_fault_without_a_reported_hit_is_still_a_fault() -> None:
    cold = observed(Role.COLD, -1.0)
    assert judged(cold, observed(Role.HIT, -1.5, 0)).verdict is Verdict.DIFFERENT
    assert judged(cold, observed(Role.HIT, -1.0, 0)).verdict is Verdict.NO_HIT
