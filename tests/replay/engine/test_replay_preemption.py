"""Preemption, resume, abort and reuse of slots, on clean and on poisoned pages: no answer changes.

vLLM resumes a preempted request from its first token, in another slot. A slot's page is what its
last owner left, or poison; the first step of a request reads none of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import replay_engine
import torch

DRAFTS = 7
SMALL_POOL = {"num_gpu_blocks_override": 14 if replay_engine.ON_GPU else 17}
"""Four requests of one attention block each, beside their three GDN blocks, and the null block. On
a GPU a block has 112 tokens instead of 128: three requests there, and a block to spare."""
LENGTHS = [90, 96, 89, 127, 128, 8, 200, 65, 170, 72]
"""Several outgrow their first attention block while they decode."""


@pytest.fixture
def known(texts: Callable[[Any], Any]) -> Any:
    return texts(replay_engine.SMALL)


@pytest.fixture
def engine(oracle_engine: Callable[..., Any]) -> Any:
    engine = oracle_engine(replay_engine.SMALL, DRAFTS, **SMALL_POOL)
    yield engine
    if not engine.dirty:
        assert len(replay_engine.free_blocks(engine)) == engine.pool.num_gpu_blocks - 1, (
            "a block leaked"
        )


VICTIMS = ("96", "90", "200", "65")


def answers(run: replay_engine.Requests, names: Any) -> dict[int, Any]:
    return {int(name.split("-")[0]): run.result(name) for name in names}


def test_storm_in_a_small_pool(engine: Any, known: Any) -> None:
    """Requests outgrow the pool's blocks, so that vLLM preempts the youngest again and again."""
    with replay_engine.planned(engine) as plans, replay_engine.preemptions(engine) as seen:
        results = engine.run(
            [known.prompt(length) for length in LENGTHS],
            max_tokens=[len(known.answers[length].tokens) for length in LENGTHS],
        )
    replay_engine.assert_equal(dict(zip(LENGTHS, results, strict=True)), known.answers)
    reached = plans.reached()
    print(f"{seen.count} preemptions", dict(reached))
    assert seen.count > 0
    assert reached["slots used again"] > 0


@pytest.mark.parametrize("every", [1, 3, 7])
def test_forced_preemption_of_all_requests(engine: Any, known: Any, every: int) -> None:
    """`reset_prefix_cache(reset_running_requests=True)`, in prefill and in decode."""
    lengths = LENGTHS[:5]
    run = replay_engine.Requests(engine)
    for length in lengths:
        run.add(f"{length}", known.prompt(length), 40)
    step = 0
    with replay_engine.planned(engine) as plans, replay_engine.preemptions(engine) as seen:
        while run.unfinished:
            run.step()
            step += 1
            # With a reset after every step nothing would ever get done.
            if step % every == 0 and step <= 24:
                replay_engine.reset_running(engine)
    replay_engine.assert_equal(answers(run, run.finished), known.answers)
    assert len(run.finished) == len(lengths)
    assert seen.count >= 24 // every
    reached = plans.reached()
    assert reached["folds"] > 0
    assert reached["slots used again"] > 0


def test_aborts_in_prefill_and_in_decode(engine: Any, known: Any) -> None:
    """A slot that comes back in mid-flight serves the next request."""
    run = replay_engine.Requests(engine)
    with replay_engine.planned(engine) as plans:
        for length in LENGTHS:
            run.add(str(length), known.prompt(length), 40)
        for victim in VICTIMS:
            run.step()
            run.step()
            run.abort(victim)
        run.drain()
    kept = [name for name in run.finished if name not in VICTIMS]
    assert len(kept) == 6
    replay_engine.assert_equal(answers(run, kept), known.answers)
    assert plans.reached()["slots used again"] > 0


@pytest.mark.parametrize("value", [math.nan, 7.0, math.inf], ids=["nan", "7", "inf"])
def test_poisoned_pages_change_no_answer(engine: Any, known: Any, value: float) -> None:
    """Poison in all six states of each block that no request holds, before and between steps."""
    replay_engine.fill(engine, [0, *replay_engine.free_blocks(engine)], value)
    null = replay_engine.null_page(engine)
    run = replay_engine.Requests(engine)
    for length in LENGTHS:
        run.add(str(length), known.prompt(length), 30)
    step = filled = 0
    with replay_engine.planned(engine) as plans, replay_engine.preemptions(engine) as seen:
        while run.unfinished:
            run.step()
            step += 1
            if step in (9, 21):
                replay_engine.reset_running(engine)
            free = replay_engine.free_blocks(engine)
            replay_engine.fill(engine, free, value)
            filled += len(free)
    replay_engine.assert_equal(answers(run, run.finished), known.answers)
    assert len(run.finished) == len(LENGTHS)
    assert filled > 0
    assert seen.count > 0
    assert plans.reached()["slots used again"] > 0
    for before, after in zip(null, replay_engine.null_page(engine), strict=True):
        assert torch.equal(before.nan_to_num(1.5), after.nan_to_num(1.5)), "null block written"
