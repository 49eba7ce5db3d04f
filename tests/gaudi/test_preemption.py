"""Preempted requests: slots come back, resumes restore, and answers stay those of a cold run."""

from __future__ import annotations

from typing import Any

import driving
import fp32
import harness
import pytest

B = 256
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 24,
}


# The scope makes pytest run all tests of one kind of scheduling together, on one engine.
@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def engine(engines: Any, asynchronous: bool) -> Any:
    engine = engines(driving.small_model(), async_scheduling=asynchronous, **OPTIONS)
    assert driving.block_tokens(engine) == B
    assert engine.scheduler.scheduler_config.async_scheduling is asynchronous
    return engine


def assert_close(result: harness.Result, expected: harness.Result) -> None:
    assert result.tokens == expected.tokens
    assert result.distance(expected) <= fp32.TOLERANCE


def assert_slots_are_whole(engine: Any) -> None:
    """Every slot is free or owned by one request, none twice."""
    runner = engine.runner
    owned = list(runner._gdn_req_to_base_slot.values())
    assert sorted(owned + list(runner._gdn_slot_free_list)) == list(range(4))


def test_storm_in_a_small_pool_gives_the_cold_answers(engine: Any) -> None:
    shared = harness.prompt(1, 2 * B)
    prompts = [shared[: B + 40] + harness.prompt(10 + i, 60 + 37 * i) for i in range(4)]
    prompts += [shared + harness.prompt(20 + i, 30 + 50 * i) for i in range(4)]
    lengths = [80, 70, 90, 60, 75, 85, 65, 95]
    expected = [driving.cold(engine, p, n) for p, n in zip(prompts, lengths, strict=True)]
    with driving.ledger(engine) as book, driving.watched(engine) as seen:
        results = engine.run(prompts, max_tokens=lengths, salt=driving.salt())
    assert seen.preempted > 0
    assert any(tokens > 0 for _, tokens in seen.resumed), "no resume on a hit was reached"
    assert book.restored > 0
    for result, cold in zip(results, expected, strict=True):
        assert_close(result, cold)
    assert_slots_are_whole(engine)


@pytest.mark.parametrize("on_hit", [False, True], ids=["from-0", "from-hit"])
@pytest.mark.parametrize("at_once", [False, True], ids=["later", "same-schedule"])
def test_resume_on_a_poisoned_slot(engine: Any, on_hit: bool, at_once: bool) -> None:
    """Case C8, and a preemption that the same schedule resumes."""
    tokens, salt = harness.prompt(30, B + 70), driving.salt()
    expected = driving.cold(engine, tokens, 24)
    other = driving.cold(engine, harness.prompt(31, 90), 24)
    engine.llm.reset_prefix_cache()
    run = driving.Requests(engine)
    run.add("victim", tokens, 24, salt)
    run.add("other", harness.prompt(31, 90), 24, driving.salt())
    preempted = []

    def act(scheduler: Any) -> Any:
        victim = driving.find(engine, "victim")
        if preempted or victim.num_output_tokens < 9:
            return None
        preempted.append(victim.num_computed_tokens)
        slots = engine.runner._slots_of({victim.request_id})[victim.request_id]
        if not on_hit:
            pool = scheduler.kv_cache_manager.block_pool
            pool.evict_blocks({b.block_id for b in pool.blocks if b.block_hash is not None})
        # A step in flight still belongs to the victim; in sync mode there is none.
        if not scheduler.scheduler_config.async_scheduling:
            for state in driving.states(engine):
                state[list(slots)] = driving.SENTINEL
        if at_once and victim.num_output_placeholders:
            # As reset_prefix_cache does it: what is in flight will be dropped.
            victim.async_tokens_to_discard = victim.num_output_placeholders
            victim.num_output_placeholders = 0
        return driving.preempt(scheduler, victim, resume_at_once=at_once)

    with driving.watched(engine) as seen, driving.before_schedule(engine, act):
        run.drain()
    assert preempted
    assert [n for _, n in seen.resumed] == [B if on_hit else 0]
    assert_close(run.result("victim"), expected)
    assert_close(run.result("other"), other)
    assert_slots_are_whole(engine)


@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_forced_reset_of_the_prefix_cache_in_flight(engine: Any, when: str) -> None:
    """Every running request is preempted between two steps and resumed by the next schedule."""
    prompts = [harness.prompt(40 + i, 2 * B + 30 * i) for i in range(3)]
    expected = [driving.cold(engine, p, 12) for p in prompts]
    run = driving.Requests(engine)
    for i, tokens in enumerate(prompts):
        run.add(f"r{i}", tokens, 12, driving.salt())
    for _ in range(2 if when == "prefill" else 12):
        run.step()
    assert engine.scheduler.running
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    with driving.watched(engine) as seen:
        run.drain()
    assert seen.resumed
    for i, cold in enumerate(expected):
        assert_close(run.result(f"r{i}"), cold)
    assert_slots_are_whole(engine)


def test_resume_whose_hit_leaves_one_token(engine: Any) -> None:
    """Case C22: the token that is fed is the request's own, not a stale one of the last step."""
    tokens, salt = harness.prompt(50, 2 * B - 5), driving.salt()
    engine.llm.reset_prefix_cache()
    first = engine.run([tokens], max_tokens=30, salt=salt)[0]
    other_tokens = harness.prompt(51, 40)
    other = driving.cold(engine, other_tokens, 30)
    run = driving.Requests(engine)
    run.add("victim", tokens, 30, salt)
    run.add("other", other_tokens, 30, driving.salt())
    preempted = []

    def act(scheduler: Any) -> Any:
        victim = driving.find(engine, "victim")
        # What is in flight brings the token behind block 2: then 2B+1 tokens are known.
        if preempted or victim.num_computed_tokens != 2 * B:
            return None
        preempted.append(victim.request_id)
        return driving.preempt(scheduler, victim)

    with driving.watched(engine) as seen, driving.before_schedule(engine, act):
        run.drain()
    assert preempted
    assert [n for _, n in seen.resumed] == [2 * B]
    resumed = [c for c in seen.chunks()[preempted[0]] if c[0] == 2 * B]
    assert resumed[-1] == (2 * B, 1), "the hit must leave exactly one token"
    assert_close(run.result("victim"), first)
    assert_close(run.result("other"), other)


def test_replay_that_is_skipped_for_a_step_still_counts_its_outputs_as_prompt(engine: Any) -> None:
    """A resumed request loses its batch row in mid-replay, and comes back with tokens computed."""
    tokens = harness.prompt(60, 2 * B - 40)
    expected = driving.cold(engine, tokens, 90)
    run = driving.Requests(engine)
    run.add("victim", tokens, 90, driving.salt())
    done: list[str] = []

    def act(scheduler: Any) -> Any:
        victim = driving.find(engine, "victim")
        if not done and victim.num_output_tokens >= 60:
            done.append("preempted")
            pool = scheduler.kv_cache_manager.block_pool
            pool.evict_blocks({b.block_id for b in pool.blocks if b.block_hash is not None})
            return driving.preempt(scheduler, victim)
        if done == ["preempted"] and victim in scheduler.running:
            done.append("skipped")
            scheduler.running.remove(victim)
            return lambda: scheduler.running.append(victim)
        return None

    rows = []
    runner = engine.runner
    form = runner._form_prefill_batch

    def formed(contents: Any) -> Any:
        rows.extend(len(positions) for positions in contents.logits_positions)
        return form(contents)

    with (
        driving.replaced(runner, "_form_prefill_batch", formed),
        driving.watched(engine) as seen,
        driving.before_schedule(engine, act),
    ):
        run.drain()
    assert done == ["preempted", "skipped"]
    assert [n for _, n in seen.resumed] == [0]
    assert max(rows) == 1
    assert_close(run.result("victim"), expected)


def test_decode_that_was_skipped_for_a_step_gets_its_own_token(engine: Any) -> None:
    prompts = {name: harness.prompt(70 + i, 50 + 20 * i) for i, name in enumerate("abc")}
    expected = {name: driving.cold(engine, p, 20) for name, p in prompts.items()}
    run = driving.Requests(engine)
    for name, tokens in prompts.items():
        run.add(name, tokens, 20, driving.salt())
    skipped = []

    def act(scheduler: Any) -> Any:
        request = driving.find(engine, "a")
        if len(skipped) >= 3 or request.num_output_tokens < 5 or request not in scheduler.running:
            return None
        if skipped and skipped[-1] + 3 > request.num_output_tokens:
            return None
        skipped.append(request.num_output_tokens)
        place = scheduler.running.index(request)
        scheduler.running.remove(request)
        return lambda: scheduler.running.insert(place, request)

    with driving.before_schedule(engine, act):
        run.drain()
    assert len(skipped) == 3
    for name, cold in expected.items():
        assert_close(run.result(name), cold)


@pytest.mark.parametrize("where", ["mid-prefill", "decode", "preempted"])
def test_abort_leaks_no_slot_and_harms_nobody(engine: Any, where: str) -> None:
    kept_tokens = harness.prompt(80, B + 20)
    kept = driving.cold(engine, kept_tokens, 16)
    run = driving.Requests(engine)
    run.add("gone", harness.prompt(81, 3 * B + 5), 30, driving.salt())
    run.add("kept", kept_tokens, 16, driving.salt())
    run.step()
    if where != "mid-prefill":
        while driving.find(engine, "gone").num_output_tokens < 4:
            run.step()
    if where == "preempted":
        with driving.before_schedule(
            engine, lambda s: driving.preempt(s, driving.find(engine, "gone"))
        ):
            run.step()
    run.abort("gone")
    run.drain()
    assert_close(run.result("kept"), kept)
    after = driving.cold(engine, kept_tokens, 16)
    assert_close(after, kept)
    assert_slots_are_whole(engine)
