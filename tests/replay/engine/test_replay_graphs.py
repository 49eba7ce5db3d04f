"""On a GPU: graphs change no answer, of either runner, with and without asynchronous scheduling.

V1 serves the drafters that V2 does not know, all without asynchronous scheduling.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import oracle_drafter
import pytest
import replay_engine
import suffix_cache
import tiny_models
import torch
from test_replay_drafters import MODEL, dflash, mtp, ngram, suffix
from test_replay_models import SHARDS

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not replay_engine.ON_GPU, reason="needs an NVIDIA GPU"),
]

LENGTHS = [8, 63, 65, 90, 150]
FULL = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
PIECEWISE = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}
BOTH: dict[str, Any] = {}
"""vLLM's default: FULL for batches of rows with all drafts, PIECEWISE for the others."""
V1, V2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"


@dataclasses.dataclass(frozen=True)
class Case:
    """One engine.

    Args:
        method: makes the speculative config of D drafts; None for the oracle, which only V1 takes.
        drafts: D.
        graphs: options that choose the graphs.
        runner: module of the model runner that must serve.
        synchronous: whether scheduling waits for each step.
        storm: whether every running request is preempted again and again.
        model: the target.
    """

    method: Callable[..., dict[str, Any]] | None
    drafts: int
    graphs: dict[str, Any]
    runner: str = V2
    synchronous: bool = False
    storm: bool = False
    model: tiny_models.TinyModel = MODEL


CASES = {
    "dflash-full": Case(dflash, 7, FULL),
    "dflash-full-synchronous": Case(dflash, 7, FULL, synchronous=True),
    "dflash-both": Case(dflash, 15, BOTH),
    "dflash-piecewise": Case(dflash, 7, PIECEWISE),
    "dflash-full-24": Case(dflash, 24, FULL),
    "dflash-full-storm": Case(dflash, 7, FULL, storm=True),
    "mtp-both": Case(mtp, 3, BOTH),
    "oracle-full": Case(None, 15, FULL, runner=V1),
    "oracle-both": Case(None, 7, BOTH, runner=V1),
    "ngram-both": Case(ngram, 7, BOTH, runner=V1),
    "suffix-both": Case(suffix, 7, BOTH, runner=V1),
    "moe-both": Case(dflash, 7, BOTH, model=tiny_models.CPU_MOE),
    "next-full": Case(dflash, 7, FULL, model=tiny_models.CPU_NEXT),
    **{f"{model.name}-full": Case(dflash, 15, FULL, model=model) for model in SHARDS},
}


@dataclasses.dataclass
class Replays:
    """CUDA graphs replayed."""

    count: int = 0


@contextlib.contextmanager
def replays() -> Iterator[Replays]:
    """Counts while it is open."""
    seen, replay = Replays(), torch.cuda.CUDAGraph.replay

    def counted(self: Any) -> Any:
        seen.count += 1
        return replay(self)

    torch.cuda.CUDAGraph.replay = counted
    try:
        yield seen
    finally:
        torch.cuda.CUDAGraph.replay = replay


@pytest.mark.parametrize("name", CASES)
def test_graphs_change_no_token(
    engines: Any,
    texts: Callable[..., Any],
    models: Callable[[Any], Path],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    case = CASES[name]
    if case.method is suffix:
        suffix_cache.stand_in(monkeypatch)
    known = texts(case.model, lengths=LENGTHS, answer=32)
    options: dict[str, Any] = {
        "enforce_eager": False,
        # Room for part of a prompt beside the rows of all who decode.
        "max_num_batched_tokens": 64 + 4 * (case.drafts + 1),
        **case.graphs,
    }
    if case.synchronous:
        options["async_scheduling"] = False
    if case.method is None:
        # Ragged rows would never be decoded by a FULL graph.
        uniform = {"ragged": False, "silent": 0.0, "pause": 0.0}
        options["speculative_config"] = oracle_drafter.speculative_config(case.drafts)
        options["additional_config"] = oracle_drafter.additional_config(known.file, **uniform)
    else:
        options["speculative_config"] = case.method(models, case.drafts)
    engine = engines(case.model, **options)
    assert type(engine.runner).__module__ == case.runner
    # vLLM 0.31.0 turns it off for drafts that are made from the host's tokens (config/vllm.py), not
    # for the runner: test_replay_packing.py has V1 with it.
    ahead = case.method in (dflash, mtp) and not case.synchronous
    assert engine.config.scheduler_config.async_scheduling is ahead
    layers = engine.gdn_layers()
    assert all(type(layer._steps).__name__ == "KernelSteps" for layer in layers)
    run = replay_engine.Requests(engine)
    for length in LENGTHS:
        run.add(str(length), known.prompt(length), len(known.answers[length].tokens))
    step = 0
    with (
        replay_engine.planned(engine) as plans,
        replay_engine.preemptions(engine) as preempted,
        replays() as graphs,
    ):
        while run.unfinished:
            run.step()
            step += 1
            if case.storm and step % 9 == 0 and step <= 45:
                replay_engine.reset_running(engine)
    results = {length: run.result(str(length)) for length in LENGTHS}
    worst = replay_engine.assert_equal(results, known.answers)
    reached = plans.reached()
    print(f"{name}: {worst:.1e}, {graphs.count} graphs, {preempted.count} preemptions")
    print(dict(reached))
    for path in ("folds", "drafts rejected", "mixed batches"):
        assert reached[path] > 0, f"no step reached: {path}"
    assert all(len(results[n].tokens) == len(known.answers[n].tokens) for n in LENGTHS)
    assert graphs.count > 0
    assert bool(preempted.count) == case.storm
