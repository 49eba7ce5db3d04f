"""Each fault of vllm-gaudi 0.26.0 that caching makes reachable: right with our override, and wrong
or stopped without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import driving
import fp32
import harness
import pytest
from vllm_gaudi.v1.worker.hpu_model_runner import HPUModelRunner

from vllm_gaudi_ext.runner import GaudiExtModelRunner
from vllm_gaudi_ext.scheduler import GdnAsyncScheduler

B = 256


def start(engines: Any, fault: str) -> Any:
    return engines(
        driving.small_model(),
        async_scheduling=fault not in SYNCHRONOUS,
        dtype="float32",
        max_num_batched_tokens=1024,
        num_gpu_blocks_override=40,
    )


Scenario = Callable[[Any], list[tuple[harness.Result, harness.Result]]]
"""Runs a schedule, and returns pairs of a result and its cold run."""


def resumed(
    engine: Any, tokens: list[int], max_tokens: int, after: int, salt: str
) -> harness.Result:
    """The answer of a request that is preempted after some outputs, and resumes on one block."""
    run, done = driving.Requests(engine), []
    run.add("victim", tokens, max_tokens, salt)

    def act(scheduler: Any) -> Any:
        victim = driving.find(engine, "victim")
        if done or victim.num_output_tokens < after:
            return None
        done.append(victim)
        return driving.preempt(scheduler, victim)

    with driving.watched(engine) as seen, driving.before_schedule(engine, act):
        run.drain()
    assert [n for _, n in seen.resumed] == [B]
    return run.result("victim")


def resume_on_a_hit(engine: Any) -> list[tuple[harness.Result, harness.Result]]:
    """Resumed with many outputs on a hit inside its prompt."""
    tokens = harness.prompt(1, B + 60)
    cold = driving.cold(engine, tokens, 40)
    engine.llm.reset_prefix_cache()
    return [(resumed(engine, tokens, 40, 20, driving.salt()), cold)]


def resume_behind_the_prompt(engine: Any) -> list[tuple[harness.Result, harness.Result]]:
    """Resumed on a hit behind its prompt, on blocks that its outputs filled before."""
    tokens, salt = harness.prompt(2, B - 100), driving.salt()
    engine.llm.reset_prefix_cache()
    cold = engine.run([tokens], max_tokens=160, salt=salt)[0]
    return [(resumed(engine, tokens, 160, 130, salt), cold)]


def skipped_decode(engine: Any) -> list[tuple[harness.Result, harness.Result]]:
    """A decode that one step leaves out, beside one that goes on."""
    prompts = {"a": harness.prompt(3, 50), "b": harness.prompt(4, 70)}
    cold = {name: driving.cold(engine, p, 16) for name, p in prompts.items()}
    run, done = driving.Requests(engine), []
    for name, tokens in prompts.items():
        run.add(name, tokens, 16, driving.salt())

    def act(scheduler: Any) -> Any:
        request = driving.find(engine, "a") if not done else None
        if request is None or request.num_output_tokens < 5:
            return None
        done.append(request)
        scheduler.running.remove(request)
        return lambda: scheduler.running.insert(0, request)

    with driving.before_schedule(engine, act):
        run.drain()
    return [(run.result(name), cold[name]) for name in prompts]


def forced_reset(engine: Any) -> list[tuple[harness.Result, harness.Result]]:
    """The prefix cache is reset by force while decodes are in flight.

    The long one resumes in several chunks, and is still at it when its stale token comes back.
    """
    prompts = {f"r{i}": harness.prompt(5 + i, n) for i, n in enumerate((40, 70, 1300))}
    cold = {name: driving.cold(engine, p, 16) for name, p in prompts.items()}
    run = driving.Requests(engine)
    for name, tokens in prompts.items():
        run.add(name, tokens, 16, driving.salt())
    while driving.find(engine, "r2").num_output_tokens < 4:
        run.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    run.drain()
    return [(run.result(name), cold[name]) for name in prompts]


def hit_on_a_block_of_the_same_step(engine: Any) -> list[tuple[harness.Result, harness.Result]]:
    """A prompt recomputes an attention block under an older checkpoint, and another hits it.

    Two batch rows freed between two decodes make vllm-gaudi's own order run the hit first. They
    are freed in the step of the admission, which asynchronous scheduling does not let happen.
    """
    shared = harness.prompt(9, 2 * B)
    writer, reader = shared + harness.prompt(10, 30), shared[: B + 10] + harness.prompt(11, 40)
    salt = driving.salt()
    cold = {"writer": driving.cold(engine, writer, 6), "reader": driving.cold(engine, reader, 6)}
    engine.llm.reset_prefix_cache()
    # One block a chunk, so that the block inside the writer's prompt has a checkpoint.
    with driving.forced_cuts(engine, {0: B, B: B}):
        engine.run([shared[: B + 1]], max_tokens=1, salt=salt)
    pool = engine.scheduler.kv_cache_manager.block_pool
    attention = next(
        i
        for i, g in enumerate(engine.runner.kv_cache_config.kv_cache_groups)
        if type(g.kv_cache_spec).__name__ == "FullAttentionSpec"
    )
    from vllm.v1.core.kv_cache_utils import get_group_id

    cached = [b for b in pool.blocks if b.block_hash is not None]
    pool.evict_blocks({b.block_id for b in cached if get_group_id(b.block_hash) == attention})
    run = driving.Requests(engine)
    for name, length, count in (("x0", 20, 5), ("d1", 21, 40), ("x2", 22, 5), ("d3", 23, 40)):
        run.add(name, harness.prompt(length, length), count, driving.salt())
    while not {"x0", "x2"} <= run.finished:
        run.step()
    run.add("writer", writer, 6, salt)
    run.add("reader", reader, 6, salt)
    with driving.watched(engine) as seen:
        run.drain()
    together = [
        step
        for step in seen.steps
        if {r.req_id.split("-")[0] for r in step.scheduled_new_reqs} == {"writer", "reader"}
    ]
    assert together, "writer and reader were not admitted in one step"
    assert [r.num_computed_tokens for r in together[0].scheduled_new_reqs] == [0, B]
    return [(run.result(name), cold[name]) for name in cold]


def neighbour_decodes_first(engine: Any) -> list[tuple[harness.Result, harness.Result]]:
    """A hot short prompt turns into a decode while a greedy long one is still at its chunks."""
    tokens = harness.prompt(30, 4 * B + 20)
    cold = driving.cold(engine, tokens, 12)
    run = driving.Requests(engine)
    with driving.forced_cuts(engine, {0: 3 * B, 3 * B: B}), driving.watched(engine) as seen:
        run.add("greedy", tokens, 12, driving.salt())
        run.add("hot", harness.prompt(31, 60), 30, driving.salt(), temperature=2.0, seed=5)
        run.drain()
    first, second = list(seen.chunks().values())
    assert (first[0], second[0]) == ((0, 3 * B), (0, 60)), "not prefilled in one step"
    return [(run.result("greedy"), cold)]


def grammar_beside_a_hot_prompt(engine: Any) -> list[tuple[harness.Result, harness.Result]]:
    """A greedy request with a grammar decodes while a hot prompt is prefilled beside it."""
    from vllm.sampling_params import StructuredOutputsParams

    def ask(run: driving.Requests, name: str) -> None:
        structured = StructuredOutputsParams(regex="[a-z ]{60}")
        tokens = harness.prompt(50, 60)
        run.add(name, tokens, 30, driving.salt(), structured_outputs=structured)

    alone = driving.Requests(engine)
    ask(alone, "alone")
    alone.drain()
    run = driving.Requests(engine)
    ask(run, "grammar")
    while driving.find(engine, "grammar").num_output_tokens < 4:
        run.step()
    with driving.watched(engine) as seen:
        run.add("hot", harness.prompt(51, 4 * B + 20), 12, driving.salt(), temperature=2.0, seed=7)
        run.drain()
    assert any(
        len(s.num_scheduled_tokens) == 2 and s.has_structured_output_requests for s in seen.steps
    ), "the grammar was never sampled beside the prompt"
    return [(run.result("grammar"), alone.result("alone"))]


def restore_stock(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(GaudiExtModelRunner, name, getattr(HPUModelRunner, name))


def leave_out(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(GaudiExtModelRunner, name, lambda self, step: None)


FAULTS = {
    "a logits row for each old output": (
        resume_on_a_hit,
        leave_out("_count_replays_as_prompt"),
    ),
    "positions of replayed outputs": (
        resume_behind_the_prompt,
        restore_stock("_align_and_pad_mrope_positions"),
    ),
    "stale token after a skipped step": (
        skipped_decode,
        restore_stock("_prepare_input_ids"),
    ),
    "renamed discard counter": (
        forced_reset,
        lambda patch: patch.delattr(GdnAsyncScheduler, "_update_request_with_output"),
    ),
    "preempted and resumed in one schedule": (
        forced_reset,
        leave_out("_drop_rows_of_resumed"),
    ),
    "sampling parameters of a neighbour": (
        neighbour_decodes_first,
        restore_stock("_ensure_decodes_first"),
    ),
    "a grammar's step beside a prompt": (
        grammar_beside_a_hot_prompt,
        restore_stock("_run_sampling"),
    ),
    "a hit before its writer": (
        hit_on_a_block_of_the_same_step,
        restore_stock("_ensure_decodes_first"),
    ),
}


# Faults that need synchronous scheduling to be reached.
SYNCHRONOUS = {"a hit before its writer"}


def is_right(pairs: list[tuple[harness.Result, harness.Result]]) -> bool:
    return all(r.tokens == c.tokens and r.distance(c) <= fp32.TOLERANCE for r, c in pairs)


@pytest.mark.parametrize("fault", FAULTS)
def test_right_with_the_override(engines: Any, fault: str) -> None:
    scenario, _ = FAULTS[fault]
    assert is_right(scenario(start(engines, fault)))


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_or_stopped_without_the_override(
    engines: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario, remove = FAULTS[fault]
    engine = start(engines, fault)
    remove(monkeypatch)
    try:
        right = is_right(scenario(engine))
    except (KeyError, AttributeError, IndexError, RuntimeError, ValueError):
        right = False
    finally:
        engines.stop()
    assert not right


ALLOWED = {"long": [100, 101, 102], "short": [200, 201, 202]}


def answers_within_bounds(engine: Any) -> bool:
    """Two prompts that may answer only some tokens change rows; each must keep its own bounds."""
    run = driving.Requests(engine)
    # It frees the first row just when the short prompt arrives, ahead of the long one's.
    run.add("first", harness.prompt(40, 40), 3, driving.salt())
    run.step()
    run.add("long", harness.prompt(41, 7 * B - 100), 6, driving.salt(), ALLOWED["long"])
    moved = []
    batch = engine.runner.input_batch
    swap = batch.swap_states

    def swapping(a: int, b: int) -> None:
        moved.append((a, b))
        swap(a, b)

    with (
        driving.replaced(batch, "swap_states", swapping),
        # Chunks of one block, so that the long prompt is still at it when the short one comes.
        driving.forced_cuts(engine, {k * B: B for k in range(6)}),
    ):
        while "first" not in run.finished:
            run.step()
        run.add("short", harness.prompt(42, 100), 6, driving.salt(), ALLOWED["short"])
        run.drain()
    assert moved, "no row was moved"
    return all(set(run.result(name).tokens) <= set(ids) for name, ids in ALLOWED.items())


@pytest.mark.parametrize("mended", [True, False], ids=["with-override", "without"])
def test_allowed_tokens_follow_their_request(
    engines: Any, mended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(engines, "allowed tokens")
    if not mended:
        monkeypatch.setattr(GaudiExtModelRunner, "_allowed_token_masks", lambda self: {})
    assert answers_within_bounds(engine) is mended
