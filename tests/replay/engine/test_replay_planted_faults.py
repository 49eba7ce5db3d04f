"""Each fault that the other tests of this folder are for, planted, and seen to change an answer.

A comparison that passes with one of these in place compares nothing.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import replay_cases
import replay_engine
import torch
from oracle_drafter import Policy

DRAFTS = 7
LENGTHS = [90, 52, 200, 8, 72]


def run_mix(engine: Any, known: Any) -> list[replay_engine.Plans]:
    """Cases C2, C5, C23 and C24, chunks, ragged drafts and reused slots.

    Returns:
        The plans of both parts.

    Raises:
        AssertionError: an answer differs.
    """
    engine.drafter.policy = Policy(seed=3, right=0.8, silent=0.2, pause=0.2, whole=0.2)
    run = replay_engine.Requests(engine)
    for length in LENGTHS:
        run.add(str(length), known.prompt(length), 40)
    step = 0
    with replay_engine.planned(engine) as plans:
        while run.unfinished:
            run.step()
            step += 1
            if step in (9, 15):
                replay_engine.reset_running(engine)
    results = {length: run.result(str(length)) for length in LENGTHS}
    replay_engine.assert_equal(results, known.answers)
    return [plans, replay_cases.short_chunk_first(engine, known)]


Change = Callable[[Any, Any], Any]


def _changed_plan(change: Change) -> Callable[[Any], Any]:
    """A planner whose plan of each step passes through `change(planner, rows)`."""

    def plant(monkeypatch: Any) -> None:
        from cuda_ext.backend.step_plan import StepPlanner

        plan = StepPlanner.plan
        monkeypatch.setattr(
            StepPlanner, "plan", lambda self, *args: change(self, plan(self, *args))
        )

    return plant


def _lens(rows: Any) -> Any:
    return rows.row_start.diff()


def drop_pending(planner: Any, rows: Any) -> Any:
    """Accepted rows never get into the state."""
    return dataclasses.replace(rows, base=torch.where(rows.base > 0, rows.start, rows.base))


def forget_to_advance(planner: Any, rows: Any) -> Any:
    """The cursor stays, so that rows are folded twice."""
    planner.cursor[rows.slot.long()] = rows.base
    return rows


def keep_rejected(planner: Any, rows: Any) -> Any:
    """Every row of a verification counts as accepted: the native path's fault of C5."""
    planner.cursor[rows.slot.long()] = rows.start + _lens(rows)
    return rows


def lose_the_offset_without_drafts(planner: Any, rows: Any) -> Any:
    """C23: a batch without drafts takes one row to be pending, whatever was accepted."""
    if int(_lens(rows).max()) > 1:
        return rows
    return dataclasses.replace(rows, base=torch.where(rows.start > 0, rows.start - 1, rows.base))


def take_a_short_prompt_for_drafts(planner: Any, rows: Any) -> Any:
    """C2: of a prompt of at most 1 + D tokens only the first stays."""
    second = (rows.base == 0) & (rows.start > 1) & (rows.start <= planner.max_rows)
    return dataclasses.replace(rows, start=torch.where(second, 1, rows.start))


def start_a_chunk_from_the_bare_state(planner: Any, rows: Any) -> Any:
    """A long chunk after a short one, whose rows are pending."""
    chunk = _lens(rows) > planner.max_rows
    return dataclasses.replace(rows, base=torch.where(chunk, rows.start, rows.base))


def trust_the_last_owner(planner: Any, rows: Any) -> Any:
    """A new request starts from the state that lies in its slot."""
    return dataclasses.replace(rows, base=torch.where(rows.start == 0, 1, rows.base))


def swap_slots(planner: Any, rows: Any) -> Any:
    """Two requests read and write each other's page."""
    return dataclasses.replace(rows, slot=rows.slot.flip(0)) if len(rows.slot) > 1 else rows


def _changed_step(change: Callable[..., tuple[Any, ...]]) -> Callable[[Any], None]:
    def plant(monkeypatch: Any) -> None:
        from cuda_ext.ops import reference

        step = reference.replay_step

        def changed(
            pages: Any, weights: Any, heads: Any, qkv: Any, a: Any, b: Any, *rest: Any
        ) -> None:
            step(*change(pages, weights, heads, qkv, a, b), *rest)

        monkeypatch.setattr(reference, "replay_step", changed)

    return plant


def take_the_next_rows_gates(*args: Any) -> tuple[Any, ...]:
    """C24: gates of another row of the batch."""
    *before, a, b = args
    return (*before, a.roll(1, 0), b.roll(1, 0))


def read_the_window_a_column_late(pages: Any, *args: Any) -> tuple[Any, ...]:
    """The conv window by order of arrival, not by position."""
    pages.conv.copy_(pages.conv.roll(1, 1))
    return (pages, *args)


def keep_unrolled_rings(pages: Any, *args: Any) -> tuple[Any, ...]:
    """A ring that forgets its first row."""
    pages.k[:, 0] = 0
    return (pages, *args)


PLANS = [
    drop_pending,
    forget_to_advance,
    keep_rejected,
    lose_the_offset_without_drafts,
    take_a_short_prompt_for_drafts,
    start_a_chunk_from_the_bare_state,
    trust_the_last_owner,
    swap_slots,
]
STEPS = [take_the_next_rows_gates, read_the_window_a_column_late, keep_unrolled_rings]
FAULTS = [(change.__name__, _changed_plan(change)) for change in PLANS]
FAULTS += [(change.__name__, _changed_step(change)) for change in STEPS]


@pytest.fixture
def known(texts: Callable[[Any], Any]) -> Any:
    return texts(replay_engine.SMALL)


@pytest.fixture
def engine(oracle_engine: Callable[..., Any]) -> Any:
    return oracle_engine(replay_engine.SMALL, DRAFTS, num_gpu_blocks_override=17)


def test_the_mix_reaches_every_path(engine: Any, known: Any) -> None:
    reached: Counter[str] = Counter()
    for plans in run_mix(engine, known):
        reached.update(plans.reached())
    for path in (
        "mixed batches",
        "ragged batches",
        "chunks that fold first",
        "batches without drafts after some",
        "prompts of ring rows",
        "wraps",
        "slots used again",
    ):
        assert reached[path] > 0, f"no step reached: {path}"


@pytest.mark.parametrize("plant", [plant for _, plant in FAULTS], ids=[name for name, _ in FAULTS])
def test_a_planted_fault_is_seen(
    engine: Any, known: Any, plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    # A cursor that can't be right is refused by the step itself.
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        run_mix(engine, known)
    print(str(caught.value)[:200])
