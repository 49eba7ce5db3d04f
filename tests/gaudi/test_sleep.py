"""Sleep mode: the KV cache is really freed, and after waking nothing of it is hit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import driving
import fp32
import harness
import pytest

B = 256
# One block a chunk: a hit and a cold run have the same chunks, so they are equal to the last bit.
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_batched_tokens": 384,
    "enable_sleep_mode": True,
}


@pytest.fixture
def engine(engines: Any) -> Iterator[Any]:
    engine = engines(driving.small_model(), **OPTIONS)
    assert driving.block_tokens(engine) == B
    yield engine
    if engine.llm is not None and engine.worker.kv_cache_sleeping:
        engine.llm.wake_up()


def storages(engine: Any) -> list[weakref.ref[Any]]:
    """Weak references to every page and state tensor, and to the views that checkpoints use."""
    tensors = driving.pages(engine) + driving.states(engine)
    for page in engine.runner._checkpoints.pages:
        tensors += [page.k, page.v, *page.spare]
    for state in engine.runner._checkpoints.states:
        tensors += [state.conv, state.ssm]
    return [weakref.ref(tensor) for tensor in tensors]


def alive(references: list[weakref.ref[Any]]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_every_page_and_state(engine: Any, level: int) -> None:
    """A view of ours that stayed would keep the memory of the whole KV cache."""
    engine.run([harness.prompt(1, B + 10)], max_tokens=2, salt=driving.salt())
    references = storages(engine)
    assert alive(references) == len(references)
    engine.llm.sleep(level=level)
    assert engine.runner._checkpoints is None
    assert alive(references) == 0
    engine.llm.wake_up()
    assert engine.runner._checkpoints is not None


@pytest.mark.parametrize("tags", [None, [["weights"], ["kv_cache"]]], ids=["at once", "by tags"])
def test_after_waking_nothing_is_hit_until_it_was_computed_again(
    engine: Any, tags: list[list[str]] | None
) -> None:
    tokens, salt = harness.prompt(2, 2 * B + 40), driving.salt()
    expected = driving.cold(engine, tokens, 6)
    engine.run([tokens], max_tokens=6, salt=salt)
    (hit,) = engine.run([tokens], max_tokens=6, salt=salt)
    assert hit.cached_tokens == 2 * B
    engine.llm.sleep(level=1)
    for tag in tags or [None]:
        engine.llm.wake_up(tag)
    first, second = (engine.run([tokens], max_tokens=6, salt=salt)[0] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 2 * B)
    assert first.distance(expected) == second.distance(expected) == 0.0


def test_views_after_waking_are_those_of_the_new_cache(engine: Any) -> None:
    engine.llm.sleep(level=1)
    engine.llm.wake_up()
    pages = {tensor.data_ptr() for tensor in driving.pages(engine)}
    slots = {tensor.data_ptr() for tensor in driving.states(engine)}
    views = engine.runner._checkpoints
    assert {view.data_ptr() for page in views.pages for view in (page.k, page.v)} == pages
    assert {view.data_ptr() for state in views.states for view in (state.conv, state.ssm)} == slots
    assert {view.data_ptr() for s in views.states for view in (s.page.k, s.page.v)} == pages
    assert engine.runner._PAD_BLOCK_ID == 40 * 2


def test_requests_that_sleep_kept_are_computed_again(engine: Any) -> None:
    """mode="keep": what runs is preempted, sleeps as token ids, and resumes from the start."""
    long, short = harness.prompt(3, B + 70), harness.prompt(4, 50)
    expected = [driving.cold(engine, tokens, 12) for tokens in (long, short)]
    run = driving.Requests(engine)
    run.add("long", long, 12, driving.salt())
    run.add("short", short, 12, driving.salt())
    while driving.find(engine, "long").num_output_tokens < 4:
        run.step()
    engine.llm.sleep(level=1, mode="keep")
    engine.llm.wake_up()
    with driving.watched(engine) as seen:
        run.drain()
    assert [n for _, n in seen.resumed] == [0, 0]
    for name, cold in zip(("long", "short"), expected, strict=True):
        # What was generated before is replayed as prefill, so the sums run in another order.
        assert run.result(name).distance(cold) <= fp32.TOLERANCE
    assert driving.free_slots(engine) + len(engine.runner._gdn_req_to_base_slot) == 4
    after = driving.cold(engine, long, 12)
    assert after.distance(expected[0]) == 0.0


def test_requests_that_sleep_aborted_leave_their_slots(engine: Any) -> None:
    tokens = harness.prompt(5, B + 70)
    expected = driving.cold(engine, tokens, 4)
    run = driving.Requests(engine)
    run.add("gone", harness.prompt(6, 3 * B), 20, driving.salt())
    for _ in range(3):
        run.step()
    engine.llm.sleep(level=1)
    engine.llm.wake_up()
    # In process, vLLM does not tell its front end of an abort that the core decided.
    run.abort("gone")
    run.drain()
    assert driving.cold(engine, tokens, 4).distance(expected) == 0.0
    owned = len(engine.runner._gdn_req_to_base_slot)
    assert owned <= 1
    assert driving.free_slots(engine) + owned == 4
