"""Schedules that more than one test file runs."""

from __future__ import annotations

from typing import Any

import reference_texts
import replay_engine


def short_chunk_first(engine: Any, known: Any) -> replay_engine.Plans:
    """Case C24, and a long chunk after a short one, whose rows lie in the ring.

    The first request's 1 + D rows and a second prompt leave a few tokens of the budget to a third,
    so that its first chunk goes to the ring, and its next one is a prefill chunk.

    Returns:
        The plans, of which the third is that step.
    """
    drafts = engine.drafts
    filler = reference_texts.filler(drafts)
    lengths = [90, filler, 200]
    engine.drafter.follow([(drafts, drafts), (drafts, drafts // 2)])
    run = replay_engine.Requests(engine)
    with replay_engine.planned(engine) as plans:
        run.add("90", known.prompt(90), 48)
        run.step()
        run.step()
        for length in lengths[1:]:
            run.add(str(length), known.prompt(length), 40)
        run.drain()
    replay_engine.assert_equal(
        {length: run.result(str(length)) for length in lengths}, known.answers
    )
    rows = [row.rows for row in plans.steps[2]]
    assert rows == [drafts + 1, filler, min(drafts + 1, 4)]
    return plans
