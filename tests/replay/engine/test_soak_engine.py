"""A short soak in the engine: green as it is, red with a fault."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import oracle_drafter
import pytest
import replay_engine

from cuda_ext.bench.soak import checks, engine

OPTIONS = {
    name: value
    for name, value in (
        replay_engine.OPTIONS | (replay_engine.GPU_OPTIONS if replay_engine.ON_GPU else {})
    ).items()
    if name not in ("max_model_len", "max_num_seqs", "disable_log_stats")
}


DRAFTS = 7


@dataclasses.dataclass(frozen=True)
class Known:
    """A job with the answers to its prompts."""

    job: engine.Job
    answers: list[list[int]]


@pytest.fixture(scope="module")
def known(models: Callable[[Any], Path], engines: Any, tmp_path_factory: Any) -> Known:
    engines.stop()
    job = engine.Job(
        model=str(models(replay_engine.SMALL)),
        # Most outgrow their first block, of 128 tokens (on a GPU 112).
        prompts={"count": 8, "lengths": (85, 127), "answers": (40, 48), "seed": 5},
        random=True,
        options=OPTIONS,
        speculative=oracle_drafter.speculative_config(DRAFTS),
        concurrency=6,
        minutes=10,
        aborts=0.2,
        pool=0.6,
        every=0,
        seed=1,
        most=24,
    )
    once()
    answers = engine.known_answers(job)["answers"]
    replay_engine._clean_process()
    pairs = zip(job.set_of_prompts(), answers, strict=True)
    texts = tmp_path_factory.mktemp("soak") / "texts.json"
    texts.write_text(json.dumps({"texts": [[*prompt.tokens, *answer] for prompt, answer in pairs]}))
    oracle = {"additional_config": oracle_drafter.additional_config(texts)}
    return Known(dataclasses.replace(job, options=OPTIONS | oracle), answers)


def once() -> None:
    """What `replay_engine.Engine` does before it starts an engine."""
    if not replay_engine.ON_GPU:
        replay_engine._keep_kernel_overrides()


@pytest.fixture(autouse=True)
def one_engine_at_a_time(engines: Any) -> Iterator[None]:
    engines.stop()
    once()
    yield
    replay_engine._clean_process()


def run(known: Known, **changes: Any) -> tuple[dict[str, Any], list[str]]:
    result = engine.serve(dataclasses.replace(known.job, **changes), known.answers, None)
    print({k: v for k, v in result.items() if k != "samples"})
    return result, checks.problems(result, checks.Tally(**result["tally"]), None)


def test_a_soak_is_green(known: Known) -> None:
    result, problems = run(known, aborts=0.25, most=60)
    assert problems == []
    if not replay_engine.ON_GPU:
        # By asynchronous scheduling and other blocks, others are preempted there.
        assert 0 < result["aborted_preempted"] < result["preempted"]
    assert result["finished"] > 10
    assert result["most_running"] > 3
    assert result["tally"]["logprobs"] > 0
    assert len(result["samples"]) >= checks.LEAST_SAMPLES


def test_lost_rows_are_seen(known: Known) -> None:
    _, problems = run(known, fault="lost-row", most=8)
    assert any("answers are wrong" in problem for problem in problems), problems


def test_a_leaked_block_is_seen(known: Known) -> None:
    result, problems = run(known, fault="leaked-block", most=8)
    assert result["tally"]["wrong"] == 0
    assert any("blocks were free before the load" in problem for problem in problems), problems
