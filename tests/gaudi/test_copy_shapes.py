"""Copies come in few shapes, all warmed up at start-up, and no step waits for the device.

On HPU a new shape is a new graph, compiled in the middle of serving, and a wait stalls the queue.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import driving
import harness
import pytest

B = 256
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 24,
}
CALLS = ("index_select", "index_copy_", "index_fill_", "cat", "zero_", "new_zeros", "to")
MOTIONS = ("save", "restore", "zero_blocks", "zero_slots", "zero_padding")


@pytest.fixture(scope="module")
def placement() -> Iterator[None]:
    """Keeps what is computed on the device marked as such, from before the engine is made."""
    from hpu_emulation import rules

    with rules.track_placement():
        yield


@contextlib.contextmanager
def motions_watched(engine: Any) -> Iterator[set[Any]]:
    """The distinct eager calls that our motions make while this is open."""
    from hpu_emulation import rules

    checkpoints = engine.runner._checkpoints
    seen: set[Any] = set()

    def watching(motion: Callable[..., None]) -> Callable[..., None]:
        def moved(*args: Any) -> None:
            with rules.watch(CALLS) as calls:
                motion(*args)
            seen.update(calls.distinct())

        return moved

    with contextlib.ExitStack() as stack:
        for name in MOTIONS:
            motion = getattr(checkpoints, name)
            stack.enter_context(driving.replaced(checkpoints, name, watching(motion)))
        yield seen


def long_run(engine: Any, seed: int, requests: int) -> driving.Schedule:
    """Requests that share prefixes, arrive in bursts, and do not fit the pool together."""
    from vllm import SamplingParams

    rng = random.Random(seed)
    salt = driving.salt()
    stems = [harness.prompt(700 + i, 3 * B) for i in range(3)]
    waiting = []
    for i in range(requests):
        stem = rng.choice(stems)[: rng.choice((0, B // 2, B, B + 90, 2 * B, 3 * B))]
        tokens = stem + harness.prompt(800 + i, rng.randint(5, 200))
        prompt = {"prompt_token_ids": tokens, "cache_salt": salt}
        waiting.append((f"r{i}", prompt, rng.randint(2, 40)))
    llm_engine, finished = engine.llm.llm_engine, 0
    with driving.watched(engine) as seen:
        while waiting or llm_engine.has_unfinished_requests():
            for _ in range(rng.choice((0, 0, 0, 1, 4))):
                if waiting:
                    name, prompt, length = waiting.pop()
                    # Without log-probabilities, for which the stock step waits for the device.
                    params = SamplingParams(
                        temperature=0, max_tokens=length, ignore_eos=True, detokenize=False
                    )
                    llm_engine.add_request(name, prompt, params)
            finished += sum(output.finished for output in llm_engine.step())
    assert finished == requests
    return seen


@pytest.fixture
def warm(engines: Any, placement: None) -> Any:
    return engines(driving.small_model(), env={"VLLM_SKIP_WARMUP": "false"}, **OPTIONS)


def test_shapes_of_a_long_run_are_those_of_warm_up(warm: Any) -> None:
    """Warm-up is measured too: it really runs each copy on the device, not only its plan."""
    engine = warm
    checkpoints = engine.runner._checkpoints
    warmed = set(checkpoints.shapes)
    assert warmed, "warm-up did not run"
    assert driving.free_slots(engine) == 4
    assert checkpoints.counters.saved == checkpoints.counters.slots_zeroed == 0
    copies = len(checkpoints.batches)
    fills = len({size for motion, size in warmed if motion == "zero_blocks"})
    assert len(warmed) == 2 * copies + 2 * fills
    with motions_watched(engine) as warm_calls:
        checkpoints.warm_up()
    assert checkpoints.shapes == warmed
    with motions_watched(engine) as calls:
        seen = long_run(engine, 1, 30)
    assert seen.hits > 2
    assert seen.preempted > 0
    assert any(tokens > 0 for _, tokens in seen.resumed)
    assert min(checkpoints.counters.saved, checkpoints.counters.restored) > 20
    assert checkpoints.shapes == warmed, "a motion came in a shape that was not warmed up"
    assert len({name for name, _ in calls}) >= 5, "the device's calls were not seen"
    assert calls <= warm_calls, f"not warmed up: {sorted(calls - warm_calls)[:5]}"
    assert len(calls) < len(seen.steps)


def test_no_step_waits_for_the_device(warm: Any) -> None:
    """Whole steps, stock code included: `execute_model` and `sample_tokens` only enqueue."""
    from hpu_emulation import rules

    runner, checkpoints = warm.runner, warm.runner._checkpoints
    before = checkpoints.counters.saved, checkpoints.counters.restored

    def unwaiting(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            with rules.forbid_host_sync(mixed=True):
                return call(*args, **kwargs)

        return called

    with (
        driving.replaced(runner, "execute_model", unwaiting(runner.execute_model)),
        driving.replaced(runner, "sample_tokens", unwaiting(runner.sample_tokens)),
    ):
        seen = long_run(warm, 2, 24)
    assert seen.hits > 2
    assert seen.preempted > 0
    assert checkpoints.counters.saved > before[0]
    assert checkpoints.counters.restored > before[1]


def test_a_motion_that_waits_would_be_seen(warm: Any, engines: Any) -> None:
    """The rule of the test above finds a wait where one is put into a motion."""
    from hpu_emulation import rules

    checkpoints = warm.runner._checkpoints
    zero = checkpoints.zero_padding

    def waiting() -> None:
        zero()
        checkpoints.states[0].ssm[0, 0].item()

    runner = warm.runner
    update = runner._update_states

    def unwaiting(*args: Any) -> Any:
        with rules.forbid_host_sync():
            return update(*args)

    with (
        driving.replaced(checkpoints, "zero_padding", waiting),
        driving.replaced(runner, "_update_states", unwaiting),
        pytest.raises(rules.HostSyncError),
    ):
        long_run(warm, 3, 1)
    # It ended in the middle of a step.
    engines.stop()
