"""A small benchmark as data, for the tests of this folder."""

from __future__ import annotations

import copy
from typing import Any

from cuda_ext.bench.serve.config import BenchConfig
from cuda_ext.bench.serve.measure import EngineFigures, Record, Run
from cuda_ext.bench.serve.results import Results

CONTENT: dict[str, Any] = {
    "name": "serve-test",
    "serve": {
        "model": "a/model",
        "max-model-len": 8192,
        "enable-prefix-caching": False,
        "speculative-config": {"method": "dflash", "model": "a/b", "num_speculative_tokens": 15},
        "additional-config": {"gdn_prefill_backend": "triton"},
    },
    "acceptance_length": 9.7,
    "load": {"concurrency": [4, 16], "prompt_tokens": [30, 40], "output_tokens": [32]},
}


def config(**changes: Any) -> BenchConfig:
    """The benchmark, with other values at the top level."""
    return BenchConfig.model_validate(copy.deepcopy(CONTENT) | changes)


def run(arm: str, label: str = "4 in flight, 32 out", number: int = 0, **changes: Any) -> Run:
    """A run in which all went well; ReplaySSM takes half the time."""
    pace = 1.0 if arm == "stock" else 0.5
    records = tuple(Record(35, 32, 32, 0.1 * pace * i, 2.0 * pace) for i in range(1, 5))
    engine = EngineFigures(4, 2, 0.5, 0, drafts=1000, accepted=8700)
    given: dict[str, Any] = {"wall_s": 2.0 * pace, "prompts": f"p{number}"}
    return Run(arm, label, number, **given | {"records": records, "engine": engine} | changes)


FACTS: dict[str, dict[str, Any]] = {
    "stock": {"gdn_layers": 24, "replay_layers": 0, "fit_8k": 77.5, "drafts": 15},
    "replay": {"gdn_layers": 24, "replay_layers": 24, "fit_8k": 201.5, "drafts": 15},
}


def gate(shift: float = 0.0, decoded: float = 0.0) -> dict[str, Any]:
    """Log-probabilities: 0.1 from itself in another batch, and when decoded; moved by `shift`.

    A lost row moves what is decoded by 1.
    """
    prompt = [[-11.0 - i % 3 for i in range(20)], [-12.0, -10.0]]

    def moved(values: list[list[float]], by: float) -> list[list[float]]:
        return [[value + by * (-1) ** i for i, value in enumerate(one)] for one in values]

    lost = {"every": 1, "folds": 12, "said": moved(prompt, 1.0), "read": prompt}
    return {
        "prompts": "same",
        "read": {"together": moved(prompt, shift), "alone": moved(prompt, shift + 0.1)},
        "decode": {"together": {"said": moved(prompt, 0.1 + decoded), "read": prompt}},
        "faults": [lost, lost | {"every": 16, "folds": 1, "said": moved(prompt, 0.05)}],
    }


def results(**changes: Any) -> Results:
    """A whole run, green unless changed."""
    origin = {
        "command": "bench",
        "commit": "c",
        "versions": {"vllm": "0.31.0"},
        "torch_note": None,
        "device": "a GPU",
        "machine": {"device": "a GPU", "id": "1"},
        "date": "2026-11-29T00:00:00+00:00",
        "session": "s",
        "mode": "in-process",
        "interleave": "sleep",
    }
    given: dict[str, Any] = {
        "config": config(),
        "origin": origin,
        "facts": copy.deepcopy(FACTS),
        "gates": {"stock": gate(), "replay": gate(0.05)},
        "runs": [run("stock"), run("replay")],
    }
    return Results(**given | changes)
