"""A hit gives exactly what a cold run gives, on checkpoints that prefill made.

The token budget holds one block and not two, so every chunk is one block and a cold run has
the same chunk cuts as a hit: then tokens and log-probabilities must be equal to the last bit.
"""

from __future__ import annotations

import math
from typing import Any

import driving
import harness
import pytest

B = 384
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 512}
POISONS = (math.nan, math.inf, driving.SENTINEL)


@pytest.fixture
def engine(engines: Any) -> Any:
    engine = engines(**OPTIONS)
    assert driving.block_tokens(engine) == B
    return engine


def assert_equal(result: harness.Result, expected: harness.Result) -> None:
    assert result.tokens == expected.tokens
    assert result.distance(expected) == 0.0


@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_repeated_prompt_around_a_block_boundary(engine: Any, blocks: int, offset: int) -> None:
    """Case C14: the last token is always computed, so k*B tokens hit k-1 blocks."""
    tokens = harness.prompt(blocks * 10 + offset, blocks * B + offset)
    salt = driving.salt()
    expected = driving.cold(engine, tokens, 8)
    first, second, third = (engine.run([tokens], salt=salt)[0] for _ in range(3))
    assert_equal(first, expected)
    assert_equal(second, expected)
    assert_equal(third, expected)
    cached = blocks * B if offset > 0 else (blocks - 1) * B
    assert (first.cached_tokens, second.cached_tokens, third.cached_tokens) == (0, cached, cached)


@pytest.mark.parametrize("suffix", [40, 376, 1296])
def test_divergent_suffix_hits_the_shared_blocks(engine: Any, suffix: int) -> None:
    """Case C15: the same cached tokens each time, whatever follows the shared prefix."""
    shared, salt = harness.prompt(100, 500), driving.salt()
    queries = [shared + harness.prompt(seed, suffix) for seed in (201, 202, 203)]
    engine.run([shared + harness.prompt(200, 30)], salt=salt)
    for tokens in queries:
        expected = driving.cold(engine, tokens, 6)
        hit = engine.run([tokens], max_tokens=6, salt=salt)[0]
        assert hit.cached_tokens == B
        assert_equal(hit, expected)


@pytest.mark.parametrize("poison", POISONS, ids=str)
def test_hit_does_not_see_the_slot_of_a_previous_owner(engine: Any, poison: float) -> None:
    tokens, salt = harness.prompt(300, 2 * B + 50), driving.salt()
    expected = driving.cold(engine, tokens, 8)
    engine.run([tokens], salt=salt)
    driving.fill_slots(engine, poison)
    hit = engine.run([tokens], salt=salt)[0]
    assert hit.cached_tokens == 2 * B
    assert_equal(hit, expected)


@pytest.mark.parametrize("poison", POISONS, ids=str)
def test_neither_hit_nor_cold_sees_what_free_pages_held(engine: Any, poison: float) -> None:
    tokens, salt = harness.prompt(301, 2 * B + 50), driving.salt()
    expected = driving.cold(engine, tokens, 8)
    engine.llm.reset_prefix_cache()
    engine.run([tokens], salt=salt)
    assert driving.fill_free_pages(engine, poison) > 20
    hit = engine.run([tokens], salt=salt)[0]
    assert hit.cached_tokens == 2 * B
    assert_equal(hit, expected)
    driving.fill_free_pages(engine, poison)
    driving.fill_slots(engine, poison)
    assert_equal(driving.cold(engine, tokens, 8), expected)


def test_request_that_takes_over_a_slot_resumes_from_the_checkpoint(engine: Any) -> None:
    """Case C9: A leaves a slot, B takes it and hits two blocks of an earlier request."""
    tokens, salt = harness.prompt(400, 2 * B + 17), driving.salt()
    expected = driving.cold(engine, tokens, 8)
    engine.run([tokens], salt=salt)
    before = engine.runner._gdn_slot_free_list[-1]
    other = engine.run([harness.prompt(401, B + 100)], salt=driving.salt())[0]
    assert other.cached_tokens == 0
    assert engine.runner._gdn_slot_free_list[-1] == before, "B must take the slot that A left"
    hit = engine.run([tokens], salt=salt)[0]
    assert hit.cached_tokens == 2 * B
    assert_equal(hit, expected)


def test_three_requests_share_one_and_a_half_blocks(engine: Any) -> None:
    """Case C11: the second turn hits one block; every answer equals its cold run."""
    shared, salt = harness.prompt(500, B + B // 2), driving.salt()
    queries = [shared + harness.prompt(seed, 100) for seed in (501, 502, 503)]
    expected = [driving.cold(engine, tokens, 6) for tokens in queries]
    results = [engine.run([tokens], max_tokens=6, salt=salt)[0] for tokens in queries]
    assert [r.cached_tokens for r in results] == [0, B, B]
    for result, cold in zip(results, expected, strict=True):
        assert_equal(result, cold)


def test_two_prompts_hit_in_one_batch(engine: Any) -> None:
    shared, salt = harness.prompt(600, B + 20), driving.salt()
    queries = [shared + harness.prompt(seed, 30) for seed in (601, 602)]
    expected = [driving.cold(engine, tokens, 6) for tokens in queries]
    engine.run([shared], salt=salt)
    results = engine.run(queries, max_tokens=6, salt=salt)
    assert [r.cached_tokens for r in results] == [B, B]
    for result, cold in zip(results, expected, strict=True):
        assert_equal(result, cold)


def test_checkpoint_is_the_slot_bit_for_bit(engine: Any) -> None:
    """What the pages of a cached block hold is the state that made it, with a zero tail."""
    saved = []
    checkpoints = engine.runner._checkpoints
    save = checkpoints.save

    def recorded(rows: Any) -> None:
        save(rows)
        for slot, block in rows:
            for state in checkpoints.states:
                conv, ssm = state.conv[slot].clone(), state.ssm[slot].clone()
                saved.append((block, state.page, conv, ssm))

    with driving.replaced(checkpoints, "save", recorded):
        # Prefill ends at 2B-3, so decode fills the second block.
        tokens, salt = harness.prompt(700, 2 * B - 3), driving.salt()
        made = engine.run([tokens], max_tokens=12, salt=salt)[0]
    assert len(saved) == 2 * 3 * 2, "two blocks, three groups, two layers each"
    for block, page, conv, ssm in saved:
        row = page.k[block].tolist() + page.v[block].tolist()
        state = conv.tolist() + ssm.tolist()
        assert row[: len(state)] == state
        assert not any(row[len(state) :])

    # A hit on the block that decode filled: chunk and decode numerics differ by nature, so the
    # bound is that of the two ways to compute the same tokens, not zero.
    longer = tokens + list(made.tokens) + harness.prompt(701, 40)
    hit = engine.run([longer], max_tokens=6, salt=salt)[0]
    assert hit.cached_tokens == 2 * B
    cold = driving.cold(engine, longer, 6)
    assert hit.tokens[0] == cold.tokens[0]
    assert abs(hit.logprobs[0] - cold.logprobs[0]) < 0.2


def test_no_slot_leaks(engine: Any) -> None:
    engine.run([harness.prompt(seed, 60) for seed in range(9)], max_tokens=3, salt=driving.salt())
    # The last step's finished requests hand their slots back with the next step.
    engine.run([harness.prompt(99, 20)], max_tokens=2, salt=driving.salt())
    assert driving.free_slots(engine) + len(engine.runner._gdn_req_to_base_slot) == 4
    assert len(engine.runner._gdn_req_to_base_slot) <= 1
