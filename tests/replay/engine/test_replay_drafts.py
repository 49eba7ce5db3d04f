"""Answers with drafts equal those without, for every draft length, on every path of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle_drafter
import pytest
import reference_texts
import replay_cases
import replay_engine
from reference_texts import CHUNK, DRAFTS

PATHS = (
    "folds",
    "later chunks",
    "mixed batches",
    "ragged batches",
    "batches without drafts after some",
    "rows without drafts after some",
    "all rows pending",
    "wraps",
    "prompts of ring rows",
    "slots used again",
)


def test_decoding_without_drafts_equals_transformers(texts: Callable[[Any], Any]) -> None:
    """Every token of every text; see reference_texts.py."""
    known = texts(replay_engine.SMALL)
    tokens = sum(len(answer.tokens) for answer in known.answers.values())
    print(f"{len(known.answers)} prompts, {tokens} tokens: {known.worst:.1e}, gap {known.gap:.1e}")
    assert tokens > 1000


# The scope makes pytest run all tests of one draft length together, on one engine.
@pytest.fixture(scope="module", params=DRAFTS, ids=lambda drafts: f"D={drafts}")
def drafts(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def known(texts: Callable[[Any], Any]) -> Any:
    return texts(replay_engine.SMALL)


@pytest.fixture
def engine(oracle_engine: Callable[..., Any], drafts: int) -> Any:
    return oracle_engine(replay_engine.SMALL, drafts)


def test_random_drafts_change_no_token(engine: Any, known: Any, drafts: int) -> None:
    lengths = reference_texts.lengths(drafts)
    assert len(lengths) > engine.scheduler.max_num_running_reqs
    with replay_engine.planned(engine) as plans:
        results = engine.run(
            [known.prompt(length) for length in lengths],
            max_tokens=[len(known.answers[length].tokens) for length in lengths],
        )
    worst = replay_engine.assert_equal(dict(zip(lengths, results, strict=True)), known.answers)
    reached = plans.reached()
    print(f"D={drafts}: {worst:.1e}", dict(reached))
    for path in PATHS:
        assert reached[path] > 0, f"no step reached: {path}"


def run_one(engine: Any, known: Any, length: int, tokens: int) -> list[replay_engine.Row]:
    """Run one prompt alone, check its answer, and give its rows."""
    with replay_engine.planned(engine) as plans:
        (result,) = engine.run([known.prompt(length)], max_tokens=tokens)
    replay_engine.assert_equal({length: result}, known.answers)
    rows = [row for step in plans.steps for row in step]
    assert len({row.slot for row in rows}) == 1
    return rows


def test_prompt_of_as_many_rows_as_a_verification(engine: Any, known: Any, drafts: int) -> None:
    """Case C2: 1 + D prompt tokens look like D drafts, but all of them stay."""
    engine.drafter.follow([(drafts, drafts)] * 3)
    rows = run_one(engine, known, drafts + 1, min(40, 2 * drafts + 4))
    assert (rows[0].start, rows[0].rows) == (0, drafts + 1)
    assert rows[1].pending == drafts + 1, "all rows of the prompt are to be folded"
    assert rows[1].rows == drafts + 1
    if drafts <= 15:
        assert rows[2].pending == drafts + 1, "the drafts were not accepted"


def test_step_without_drafts_after_some_were_rejected(engine: Any, known: Any, drafts: int) -> None:
    """Case C5: 3 of 5 accepted, then a step without drafts, then drafts again."""
    count = min(5, drafts)
    right = min(3, drafts - 1)
    engine.drafter.follow([(count, right), (0, 0), (count, count), (0, 0), (0, 0), (count, 0)])
    rows = run_one(engine, known, 90, 24)
    rest = 90 - CHUNK
    seen = [(row.pending, row.rows) for row in rows[2:9]]
    assert seen == [
        (rest if rest <= drafts + 1 else 0, count + 1),
        (right + 1, 1),
        (1, count + 1),
        (count + 1, 1),
        (1, 1),
        (1, count + 1),
        (1, 1),
    ]


def test_batch_without_drafts_after_batches_with_some(engine: Any, known: Any, drafts: int) -> None:
    """Case C23: no request has drafts, and each has another number of accepted rows pending."""
    drafter, lengths = engine.drafter, [90, 63, 65]
    right = {
        drafter.text(known.prompt(length)): count
        for length, count in zip(lengths, (0, drafts // 2, drafts), strict=True)
    }

    def every_other_step(tokens: Any) -> list[int]:
        if drafter.calls % 2:
            return []
        count = right[drafter.text(tokens)]
        drafted = drafter.continuation(tokens)[:drafts]
        return [t if i < count else oracle_drafter.spoiled(t) for i, t in enumerate(drafted)]

    drafter.script = every_other_step
    with replay_engine.planned(engine) as plans:
        results = engine.run([known.prompt(length) for length in lengths], max_tokens=40)
    replay_engine.assert_equal(dict(zip(lengths, results, strict=True)), known.answers)
    assert plans.reached()["batches without drafts after some"] > 0
    bare = [s for s in plans.steps if s and all(r.rows == 1 and r.start for r in s)]
    assert any(len({row.pending for row in step}) > 1 for step in bare)


def test_prefill_beside_drafts_takes_its_own_gates(engine: Any, known: Any) -> None:
    """Case C24, and a long chunk after a short one; see replay_cases.py."""
    plans = replay_cases.short_chunk_first(engine, known)
    reached = plans.reached()
    assert reached["mixed batches"] > 0
    assert reached["chunks that fold first"] > 0


def test_chunk_ends_and_rests_of_one_row(engine: Any, known: Any, drafts: int) -> None:
    """Prompts whose last chunk has 1, D, D + 1 or D + 2 rows, one by one."""
    engine.drafter.follow([(drafts, drafts // 2)] * 4)
    for length in (CHUNK + 1, CHUNK + drafts + 1, 2 * CHUNK, 2 * CHUNK + 1):
        rows = run_one(engine, known, length, 8)
        rest = length % CHUNK or CHUNK
        first_token = [row for row in rows if row.start + row.rows == length]
        assert [row.rows for row in first_token] == [rest]
