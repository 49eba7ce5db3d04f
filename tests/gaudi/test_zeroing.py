"""A non-finite value cannot outlive the step that produced it, wherever it lies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import driving
import harness
import pytest

B = 384


@pytest.fixture
def engine(engines: Any) -> Any:
    return engines(max_num_batched_tokens=512)


def poison_reserved_slots(engine: Any) -> None:
    for tensor in driving.states(engine):
        tensor[0] = math.nan
        tensor[-1] = math.nan


def poison_spare_block(engine: Any) -> None:
    blocks = engine.runner.kv_cache_config.num_blocks
    for tensor in driving.pages(engine):
        tensor[blocks * B :] = math.nan


def poison_slots(engine: Any) -> None:
    driving.fill_slots(engine, math.nan)


def poison_free_pages(engine: Any) -> None:
    assert driving.fill_free_pages(engine, math.nan) > 0


# Where the poison lies, and the motion that takes it away.
PLACES: dict[str, tuple[Callable[[Any], None], str]] = {
    "the two reserved slots": (poison_reserved_slots, "zero_padding"),
    "the spare kernel block": (poison_spare_block, "zero_padding"),
    "every slot": (poison_slots, "zero_slots"),
    "every free page": (poison_free_pages, "zero_blocks"),
}


def run_padded(engine: Any) -> list[harness.Result]:
    """Three requests: their decode batch is padded to four rows."""
    prompts = [harness.prompt(seed, 100 + 40 * seed) for seed in (1, 2, 3)]
    return engine.run(prompts, max_tokens=8, salt=driving.salt())


def is_finite(results: list[harness.Result]) -> bool:
    return all(math.isfinite(x) for result in results for x in result.logprobs)


@pytest.mark.parametrize("place", PLACES)
def test_poison_is_gone_before_the_next_step_reads_it(engine: Any, place: str) -> None:
    engine.llm.reset_prefix_cache()
    clean = run_padded(engine)
    PLACES[place][0](engine)
    poisoned = run_padded(engine)
    assert is_finite(poisoned)
    assert [r.tokens for r in poisoned] == [r.tokens for r in clean]
    assert [r.distance(c) for r, c in zip(poisoned, clean, strict=True)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("place", ["the two reserved slots", "every slot", "every free page"])
def test_without_the_zeroing_it_spreads(engines: Any, engine: Any, place: str) -> None:
    engine.llm.reset_prefix_cache()
    poison, motion = PLACES[place]
    with driving.replaced(engine.runner._checkpoints, motion, lambda *_: None):
        poison(engine)
        spread = not is_finite(run_padded(engine))
    engines.stop()
    assert spread


def test_nan_of_a_live_request_is_gone_with_it(engine: Any) -> None:
    """A state that turns NaN while its request runs harms nobody who comes after it.

    Neighbours in the same decode batch are not safe from it in vllm-gaudi 0.26.0, with or without
    caching: its decode attention spreads rows over blocks by multiplying with zeros and ones.
    """
    engine.llm.reset_prefix_cache()
    clean = run_padded(engine)
    run = driving.Requests(engine)
    run.add("sick", harness.prompt(9, 150), 12, driving.salt())
    run.step()
    while driving.find(engine, "sick").num_output_tokens < 3:
        run.step()
    slots = engine.runner._slots_of({driving.find(engine, "sick").request_id})
    for tensor in driving.states(engine):
        for rows in slots.values():
            tensor[list(rows)] = math.nan
    run.drain()
    assert not is_finite([run.result("sick")])
    after = run_padded(engine)
    assert [r.distance(c) for r, c in zip(after, clean, strict=True)] == [0.0, 0.0, 0.0]
