"""Other models: MoE, Qwen3-Next with its interleaved projections, the vision wrapper, shards.

What a rank of a tensor-parallel group computes is a model of fewer heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import replay_engine
import tiny_models

DRAFTS = 7
LENGTHS = [8, 52, 63, 65, 90, 150]
FAMILIES = [tiny_models.CPU_MOE, tiny_models.CPU_NEXT, tiny_models.CPU_DENSE_VISION]
SHARDS = [
    dataclasses.replace(
        tiny_models.CPU_DENSE,
        name=f"tiny-shard-{key_heads}-{value_heads}",
        text=dict(tiny_models.CPU_DENSE.text)
        | {"linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads},
    )
    for key_heads, value_heads in ((8, 16), (4, 8))
]
"""Key and value heads of 4B and 35B-A3B with TP 2 and TP 4; with TP 8 they are 2 and 4, as all
other models here have. Further shards: tests/kernels/test_kernel_steps.py."""


@pytest.mark.parametrize(
    "model",
    [*FAMILIES, SHARDS[0], pytest.param(SHARDS[1], marks=pytest.mark.slow)],
    ids=lambda model: model.name,
)
def test_tokens_with_drafts_equal_those_without(
    oracle_engine: Callable[..., Any], texts: Callable[..., Any], model: Any
) -> None:
    """Without drafts they equal those of transformers, too (reference_texts.py)."""
    known = texts(model, lengths=LENGTHS, answer=32)
    engine = oracle_engine(model, DRAFTS, known)
    assert {type(layer).__name__ for layer in engine.gdn_layers()} == {
        "ReplayGatedDeltaNetAttention"
    }
    with replay_engine.planned(engine) as plans:
        results = engine.run(
            [known.prompt(length) for length in LENGTHS],
            max_tokens=[len(known.answers[length].tokens) for length in LENGTHS],
        )
    worst = replay_engine.assert_equal(dict(zip(LENGTHS, results, strict=True)), known.answers)
    reached = plans.reached()
    print(f"{model.name}: {worst:.1e} {known.worst:.1e} {known.gap:.1e}", dict(reached))
    for path in ("folds", "mixed batches", "ragged batches", "wraps", "all rows pending"):
        assert reached[path] > 0, f"no step reached: {path}"
