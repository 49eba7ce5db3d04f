"""Random schedules against cold runs: arrivals, hits, small pools, aborts and cache resets.

fp32, so that a cold run and any other way to the same tokens agree to 1e-4 (fp32.py). A ledger
checks beside it that each restore reads what a save wrote, bit for bit.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import driving
import fp32
import harness
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

B = 256
LONGEST = 40
PROMPTS = [
    harness.prompt(base, length) + harness.prompt(1000 + base * 10 + i, tail)
    for base in (1, 2)
    for i, (length, tail) in enumerate(
        [
            (B - 1, 0), (B, 0), (B + 1, 0), (B + 90, 0), (B + 90, 70), (2 * B - 20, 0),
            (2 * B + 1, 0), (2 * B + 1, 33), (2 * B + 100, 100), (3 * B - 1, 2),
        ]
    )
]  # fmt: skip


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: int
    max_tokens: int
    abort_after: int | None


@st.composite
def schedules(draw: Any) -> tuple[list[Arrival], list[int], bool]:
    """Arrivals, the steps at which the prefix cache is reset by force, and whether to poison."""
    arrivals = draw(
        st.lists(
            st.builds(
                Arrival,
                step=st.integers(0, 25),
                prompt=st.integers(0, len(PROMPTS) - 1),
                max_tokens=st.integers(1, LONGEST),
                abort_after=st.none() | st.none() | st.integers(1, 12),
            ),
            min_size=2,
            max_size=7,
        )
    )
    resets = draw(st.lists(st.integers(2, 40), max_size=1))
    return arrivals, resets, draw(st.booleans())


def execute(
    engine: Any,
    cold: list[harness.Result],
    schedule: tuple[list[Arrival], list[int], bool],
) -> Counter[str]:
    arrivals, resets, poison = schedule
    reached: Counter[str] = Counter()
    run = driving.Requests(engine)
    salt = driving.salt()
    waiting = sorted(enumerate(arrivals), key=lambda pair: pair[1].step)
    names = {i: f"{salt}-{i}" for i, _ in waiting}
    aborts: dict[int, list[str]] = {}
    with driving.ledger(engine) as book, driving.watched(engine) as seen:
        if poison:
            driving.fill_slots(engine, math.nan)
            driving.fill_free_pages(engine, math.nan)
        step = 0
        while waiting or engine.llm.llm_engine.has_unfinished_requests():
            while waiting and waiting[0][1].step <= step:
                i, arrival = waiting.pop(0)
                run.add(names[i], PROMPTS[arrival.prompt], arrival.max_tokens, salt)
                if arrival.abort_after is not None:
                    aborts.setdefault(step + arrival.abort_after, []).append(names[i])
            for name in aborts.pop(step, ()):
                run.abort(name)
            if step in resets and engine.scheduler.running:
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
                reached["reset"] += 1
            run.step()
            step += 1
            assert step < 3000, "the schedule does not come to an end"
    worst = 0.0
    for i, arrival in enumerate(arrivals):
        if names[i] not in run.finished or arrival.abort_after is not None:
            continue
        result, expected = run.result(names[i]), cold[arrival.prompt]
        assert result.tokens == expected.tokens[: arrival.max_tokens]
        for mine, theirs in zip(result.logprobs, expected.logprobs, strict=False):
            worst = max(worst, abs(mine - theirs))
        assert worst <= fp32.TOLERANCE
        reached["finished"] += 1
    runner = engine.runner
    owned = list(runner._gdn_req_to_base_slot.values())
    assert sorted(owned + list(runner._gdn_slot_free_list)) == list(range(4))
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "a block leaked"
    reached["hits"] += seen.hits
    reached["preempted"] += seen.preempted
    reached["resumed on a hit"] += sum(n > 0 for _, n in seen.resumed)
    reached["saved"] += book.saved
    reached["restored"] += book.restored
    reached["worst in 1e-9"] = max(reached["worst in 1e-9"], round(worst * 1e9))
    return reached


def run_schedules(engine: Any, examples: int) -> Counter[str]:
    assert driving.block_tokens(engine) == B
    cold = [driving.cold(engine, tokens, LONGEST) for tokens in PROMPTS]
    totals: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(schedules())
    def one(schedule: tuple[list[Arrival], list[int], bool]) -> None:
        reached = execute(engine, cold, schedule)
        worst = max(totals["worst in 1e-9"], reached["worst in 1e-9"])
        totals.update(reached)
        totals["worst in 1e-9"] = worst
        totals["schedules"] += 1

    one()
    print("random schedules:", dict(totals))
    for path in ("hits", "preempted", "resumed on a hit", "restored", "reset", "finished"):
        assert totals[path] > 0, f"no schedule reached: {path}"
    return totals


# The scope makes pytest run all tests of one kind of scheduling together, on one engine.
@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def engine(engines: Any, asynchronous: bool) -> Any:
    return engines(
        driving.small_model(),
        async_scheduling=asynchronous,
        dtype="float32",
        max_num_batched_tokens=512,
        num_gpu_blocks_override=24,
    )


def test_random_schedules_equal_cold_runs(engine: Any) -> None:
    run_schedules(engine, 25)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_hundreds_of_random_schedules_equal_cold_runs(engine: Any) -> None:
    run_schedules(engine, 200)
