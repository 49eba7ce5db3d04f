"""Random schedules against known answers: arrivals, drafts, aborts, preemptions and poison."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import replay_engine
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from oracle_drafter import Policy

LENGTHS = [1, 2, 8, 9, 33, 52, 60, 63, 64, 65, 72, 89, 90, 96, 127, 128, 129, 150, 170, 200]
LONGEST = 40


@dataclass(frozen=True)
class Arrival:
    step: int
    length: int
    max_tokens: int
    abort_after: int | None


@dataclass(frozen=True)
class Schedule:
    """What happens when; `resets` are steps after which every running request is preempted."""

    arrivals: list[Arrival]
    resets: list[int]
    poison: float | None
    policy: Policy


SCHEDULES = st.builds(
    Schedule,
    arrivals=st.lists(
        st.builds(
            Arrival,
            step=st.integers(0, 20),
            length=st.sampled_from(LENGTHS),
            max_tokens=st.integers(1, LONGEST),
            abort_after=st.none() | st.none() | st.none() | st.integers(1, 15),
        ),
        min_size=2,
        max_size=9,
    ),
    resets=st.lists(st.integers(1, 30), max_size=3),
    poison=st.sampled_from([None, math.nan, math.inf, 7.0]),
    policy=st.builds(
        Policy,
        seed=st.integers(0, 1000),
        right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        silent=st.sampled_from([0.0, 0.2, 0.6]),
        pause=st.sampled_from([0.0, 0.3]),
        whole=st.sampled_from([0.0, 0.3]),
        ragged=st.booleans(),
    ),
)


def execute(engine: Any, known: Any, schedule: Schedule) -> Counter[str]:
    engine.drafter.reset()
    engine.drafter.policy = schedule.policy
    run = replay_engine.Requests(engine)
    waiting = sorted(enumerate(schedule.arrivals), key=lambda pair: pair[1].step)
    aborts: dict[int, list[str]] = {}
    aborted: set[str] = set()
    step = resets = 0
    with replay_engine.planned(engine) as plans, replay_engine.preemptions(engine) as seen:
        while waiting or run.unfinished:
            while waiting and waiting[0][1].step <= step:
                number, arrival = waiting.pop(0)
                run.add(str(number), known.prompt(arrival.length), arrival.max_tokens)
                if arrival.abort_after is not None:
                    aborts.setdefault(step + arrival.abort_after, []).append(str(number))
            for name in aborts.pop(step, ()):
                if name not in run.finished:
                    run.abort(name)
                    aborted.add(name)
            if schedule.poison is not None:
                free = replay_engine.free_blocks(engine)
                replay_engine.fill(engine, free, schedule.poison)
            run.step()
            if step in schedule.resets and engine.scheduler.running:
                replay_engine.reset_running(engine)
                resets += 1
            step += 1
            assert step < 3000, "the schedule does not come to an end"
    assert len(replay_engine.free_blocks(engine)) == engine.pool.num_gpu_blocks - 1
    for number, arrival in enumerate(schedule.arrivals):
        name = str(number)
        if name in aborted:
            continue
        result = run.result(name)
        limit = len(known.answers[arrival.length].tokens)
        assert len(result.tokens) == arrival.max_tokens
        replay_engine.assert_equal(
            {arrival.length: replay_engine.first(result, limit)}, known.answers
        )
    reached = plans.reached()
    reached["preempted"] = seen.count
    reached["resets"] = resets
    reached["aborted"] = len(aborted)
    reached["finished"] = len(schedule.arrivals) - len(aborted)
    return reached


PATHS = (
    "folds",
    "mixed batches",
    "ragged batches",
    "batches without drafts after some",
    "all rows pending",
    "wraps",
    "slots used again",
    "preempted",
    "resets",
    "aborted",
)


def run_schedules(engine: Any, known: Any, examples: int) -> None:
    totals: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(SCHEDULES)
    def one(schedule: Schedule) -> None:
        totals.update(execute(engine, known, schedule))
        totals["schedules"] += 1

    one()
    print(f"D={engine.drafts}, random schedules:", dict(totals))
    for path in PATHS:
        assert totals[path] > 0, f"no schedule reached: {path}"


@pytest.fixture
def engine(oracle_engine: Callable[..., Any], request: pytest.FixtureRequest) -> Any:
    return oracle_engine(replay_engine.SMALL, request.param, num_gpu_blocks_override=17)


@pytest.fixture
def known(texts: Callable[[Any], Any]) -> Any:
    return texts(replay_engine.SMALL)


@pytest.mark.parametrize("engine", [7, 24], indirect=True, ids=lambda drafts: f"D={drafts}")
def test_random_schedules(engine: Any, known: Any) -> None:
    run_schedules(engine, known, 20)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "engine", [1, 3, 7, 15, 24, 31], indirect=True, ids=lambda drafts: f"D={drafts}"
)
def test_hundreds_of_random_schedules(engine: Any, known: Any) -> None:
    run_schedules(engine, known, 150)
