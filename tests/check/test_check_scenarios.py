"""The plays alone: lengths, order, prefixes, and how B is found. No server."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_gaudi_ext.check.answer import Answer
from vllm_gaudi_ext.check.scenarios import (
    SCENARIO_NAMES,
    Ask,
    PlanOptions,
    PromptMaker,
    Role,
    Scenario,
    learn_block,
    plan,
)
from vllm_gaudi_ext.check.verdict import shared_tokens

POOL = range(100, 400)


def an_answer(ask: Ask) -> Answer:
    """Token ids that no prompt holds, so that answers show in later prompts."""
    ids = tuple(range(9000, 9000 + ask.answer_tokens))
    return Answer(tuple(map(str, ids)), ids, None, None, "", len(ask.prompt), 0)


def play(scenario: Scenario) -> list[list[Ask]]:
    running = scenario.play()
    batches = [next(running)]
    while True:
        try:
            batches.append(running.send([an_answer(a) for a in batches[-1]]))
        except StopIteration:
            return batches


def scenarios(block: int, **options: object) -> list[Scenario]:
    fits, left_out = plan(block, PromptMaker(POOL, 0), PlanOptions(**options), None)
    assert not left_out
    return fits


def asks(block: int, name: str, **options: object) -> list[Ask]:
    chosen = [s for s in scenarios(block, **options) if s.name == name]
    assert chosen
    return [a for s in chosen for batch in play(s) for a in batch]


@pytest.mark.parametrize("block", [16, 96, 384, 896, 2176])
def test_every_play_keeps_to_the_requests_and_tokens_it_announces(block: int) -> None:
    for scenario in scenarios(block):
        batches = play(scenario)
        assert sum(map(len, batches)) == scenario.requests, scenario
        longest = max(len(a.prompt) + a.answer_tokens for b in batches for a in b)
        assert longest <= scenario.tokens, scenario
        # Generous by little: an announced length that is far too long leaves scenarios out.
        assert scenario.tokens - longest <= 20, scenario


def test_every_named_scenario_is_planned() -> None:
    assert {s.name for s in scenarios(96)} == set(SCENARIO_NAMES)


def test_boundary_prompts_are_one_below_at_and_above_each_boundary() -> None:
    lengths = defaultdict(list)
    for ask in asks(96, "boundary"):
        lengths[ask.case].append((ask.role, len(ask.prompt)))
    expected = {95, 96, 97, 191, 192, 193, 287, 288, 289}
    assert {n for case in lengths.values() for _, n in case} == expected
    for case in lengths.values():
        assert [role for role, _ in case] == [Role.COLD, Role.SEED, Role.HIT, Role.HIT]
        assert len({n for _, n in case}) == 1


def test_cold_runs_have_a_salt_of_their_own_and_hits_share_one() -> None:
    for scenario in scenarios(96):
        for ask in (a for batch in play(scenario) for a in batch):
            assert (ask.chain is None) == (ask.role is Role.COLD), ask.case


def test_each_hit_shares_a_block_with_its_chain_where_one_is_possible() -> None:
    for scenario in scenarios(96):
        sent = defaultdict(list)
        for batch in play(scenario):
            for ask in batch:
                if ask.role is Role.HIT and len(ask.prompt) > 96:
                    assert shared_tokens(ask.prompt, sent[ask.chain]) >= 96, ask.case
            for ask in batch:
                sent[ask.chain].append(ask.prompt + an_answer(ask).units())


def test_divergent_suffixes_share_exactly_their_prefix() -> None:
    for case_asks, prefix in zip(
        [
            [a for s in [s] for b in play(s) for a in b]
            for s in scenarios(96)
            if s.name == "divergent"
        ],
        (96, 144, 192),
        strict=True,
    ):
        prompts = {a.prompt for a in case_asks}
        assert len(prompts) == 5
        for prompt in prompts:
            assert shared_tokens(prompt, prompts - {prompt}) == prefix
        lengths = {len(a.prompt) - prefix for a in case_asks if a.role is Role.HIT}
        assert lengths == {40, 376, 1296}
        assert [len(a.prompt) - prefix for a in case_asks][-4:] == [1296] * 4


def test_a_b_a_interleaves_two_sessions() -> None:
    order = [a.prompt for a in asks(96, "a-b-a") if a.role is not Role.COLD]
    a, b = order[0], order[1]
    assert a != b
    assert order[:6] == [a, b] * 3
    c, d = order[6], order[7]
    assert order[6:] == [c, d] * 2
    assert shared_tokens(c, [d]) == 192


def test_each_chat_turn_contains_the_answers_before_it() -> None:
    turns = [a for a in asks(96, "chat") if a.chain == "chat"]
    assert len(turns) == 4
    for earlier, later in pairwise(turns):
        with_answer = earlier.prompt + an_answer(earlier).units()
        assert later.prompt[: len(with_answer)] == with_answer
        assert len(later.prompt) == len(with_answer) + 48
    start, end = turns[-1].decoded[0]
    assert turns[-1].prompt[start:end] == an_answer(turns[0]).units()


def test_decoding_crosses_the_boundary_that_the_next_prompt_starts_from() -> None:
    for seed, cold, hit in zip(*[iter(asks(96, "decode-made"))] * 3, strict=True):
        k = len(hit.prompt) // 96
        assert len(seed.prompt) < k * 96 < len(seed.prompt) + seed.answer_tokens - 1
        assert len(hit.prompt) == k * 96 + 1
        assert cold.prompt == hit.prompt
        kept = hit.tail_of_seed
        assert kept is not None
        assert hit.prompt == seed.prompt + an_answer(seed).units()[:kept]
        assert seed.answer_tokens - kept == hit.answer_tokens


def test_without_answer_ids_no_prompt_ends_inside_of_an_answer() -> None:
    some = scenarios(96, rebuilds_answers=False)
    assert "decode-made" not in {s.name for s in some}
    for scenario in some:
        assert all(a.tail_of_seed is None for batch in play(scenario) for a in batch)


def test_concurrent_hits_go_out_together() -> None:
    for scenario in scenarios(96):
        if scenario.name == "concurrent":
            batches = play(scenario)
            assert [a.role for a in batches[-1]] == [Role.HIT] * 4


def test_what_does_not_fit_the_server_is_left_out_and_named() -> None:
    fits, left_out = plan(96, PromptMaker(POOL, 0), PlanOptions(), 250)
    assert all(s.tokens <= 250 for s in fits)
    assert {"3*B+1", "chat"} <= {s.first_case for s in left_out}
    assert "1*B+1" in {s.first_case for s in fits}


def test_equal_seeds_give_equal_prompts_and_others_do_not() -> None:
    a, b, c = (PromptMaker(POOL, seed).fresh("x", 50) for seed in (1, 1, 2))
    assert a == b != c
    assert len(a) == 50


def test_prompts_leave_room_for_the_tokens_that_the_server_adds() -> None:
    maker = PromptMaker(POOL, 0, overhead=1)
    assert len(maker.fresh("x", 97)) == 96
    assert len(maker.cut(maker.fresh("x", 97), 50)) == 49
    assert len(maker.suffix("x", 0, 10)) == 10


def test_a_pool_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="pool of 3 units"):
        PromptMaker([1, 2, 3], 0)


def learn(limit: int, cached: object) -> tuple[int | None, list[int]]:
    search = learn_block(limit)
    asked = [next(search)]
    while True:
        try:
            asked.append(search.send(cached(asked[-1])))  # type: ignore[operator]
        except StopIteration as e:
            return e.value, asked


@settings(max_examples=400, deadline=None)
@given(
    block=st.integers(1, 272).map(lambda n: 8 * n),
    chunk_blocks=st.integers(1, 40),
    given_back=st.integers(0, 1),
    limit=st.integers(8000, 20_000),
)
def test_b_is_learned_whatever_the_budget_and_with_speculative_decoding(
    block: int, chunk_blocks: int, given_back: int, limit: int
) -> None:
    def cached(tokens: int) -> int:
        """An exact repeat under the aligned split: states are kept at chunk ends only."""
        last = max(tokens // block - given_back, 0)
        kept = set(range(chunk_blocks, last, chunk_blocks)) | {last}
        usable = [k for k in kept if k * block <= tokens - 1]
        return max(usable, default=0) * block

    found, asked = learn(limit, cached)
    assert found == block
    assert len(asked) <= 7
    assert max(asked) <= limit


def test_nothing_is_learned_where_nothing_is_cached() -> None:
    found, asked = learn(4000, lambda _: 0)
    assert found is None
    assert asked == [1025, 2049, 3999]
