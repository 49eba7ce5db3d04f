"""On a GPU: graphs change no answer, of either runner, with and without asynchronous scheduling."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import oracle_drafter
import pytest
import replay_engine
import torch
from test_replay_drafters import MODEL, dflash, mtp

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
        blocks: of the pool; few make vLLM preempt.
    """

    method: Callable[..., dict[str, Any]] | None
    drafts: int
    graphs: dict[str, Any]
    runner: str = V2
    synchronous: bool = False
    blocks: int = 64


CASES = {
    "dflash-full": Case(dflash, 7, FULL),
    "dflash-full-synchronous": Case(dflash, 7, FULL, synchronous=True),
    "dflash-both": Case(dflash, 15, BOTH),
    "dflash-piecewise": Case(dflash, 7, PIECEWISE),
    "dflash-full-24": Case(dflash, 24, FULL),
    "dflash-full-storm": Case(dflash, 7, FULL, blocks=17),
    "mtp-both": Case(mtp, 3, BOTH),
    "oracle-full": Case(None, 15, FULL, runner=V1),
    "oracle-both": Case(None, 7, BOTH, runner=V1),
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
    engines: Any, texts: Callable[..., Any], models: Callable[[Any], Path], name: str
) -> None:
    case = CASES[name]
    model = MODEL if case.method is not None else replay_engine.SMALL
    if case.blocks < 64:
        model = replay_engine.SMALL
    known = (
        texts(MODEL, lengths=LENGTHS, answer=32) if model is MODEL else texts(replay_engine.SMALL)
    )
    options: dict[str, Any] = {
        "enforce_eager": False,
        "num_gpu_blocks_override": case.blocks,
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
    lengths = LENGTHS if model is MODEL else [90, 96, 127, 8, 200, 65, 170, 72]
    engine = engines(model, **options)
    assert type(engine.runner).__module__ == case.runner
    asynchronous = engine.config.scheduler_config.async_scheduling
    assert asynchronous == (case.runner == V2 and not case.synchronous)
    layers = engine.gdn_layers()
    assert all(type(layer._steps).__name__ == "KernelSteps" for layer in layers)
    with (
        replay_engine.planned(engine) as plans,
        replay_engine.preemptions(engine) as preempted,
        replays() as graphs,
    ):
        results = engine.run(
            [known.prompt(length) for length in lengths],
            max_tokens=[len(known.answers[length].tokens) for length in lengths],
        )
    worst = replay_engine.assert_equal(dict(zip(lengths, results, strict=True)), known.answers)
    reached = plans.reached()
    print(f"{name}: {worst:.1e}, {graphs.count} graphs, {preempted.count} preemptions")
    print(dict(reached))
    for path in ("folds", "drafts rejected", "mixed batches"):
        assert reached[path] > 0, f"no step reached: {path}"
    assert graphs.count > 0
    assert bool(preempted.count) == (case.blocks < 64)
