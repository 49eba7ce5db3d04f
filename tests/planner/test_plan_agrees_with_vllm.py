"""vLLM's own KV-cache planning and the planner, on the same config files.

What is real and what is supplied in the child process is said in vllm_plans.py.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine_process import HERE, run_with_vllm
from plan_helpers import model_config, plan_of, write_config

from vllm_gaudi_ext.planner.arithmetic import GIB, KV_DTYPES, kv_token_bytes
from vllm_gaudi_ext.planner.facts import load_facts
from vllm_gaudi_ext.planner.plan import Side

POOL_GIB = 50
BUDGET = 8192


@dataclass(frozen=True)
class Shape:
    """One deployment; `unit` None is the real Gaudi platform, a number a CUDA-like backend."""

    model: str
    unit: int | None = None
    drafter: str | None = None
    drafts: int = 0
    kv_dtype: str = "auto"
    state_dtype: str = "auto"
    tp: int = 1
    caching: bool = False
    replay: bool = False
    mixed: bool = False
    tokens: int = 8192
    drafter_changes: dict[str, Any] = field(default_factory=dict)


DFLASH_4B = "z-lab/Qwen3.5-4B-DFlash"
SHAPES = {
    "dense-gaudi": Shape("Qwen/Qwen3.5-27B"),
    "dense-gaudi-cached": Shape("Qwen/Qwen3.5-27B", caching=True),
    "dense-gaudi-fp8": Shape("Qwen/Qwen3.5-27B", kv_dtype="fp8_inc", caching=True),
    "moe-gaudi-cached": Shape("Qwen/Qwen3.6-35B-A3B", caching=True),
    # Without expert parallelism: its expert map can't be built on the meta device, and it touches
    # neither states nor KV cache.
    "moe-gaudi-tp8": Shape("Qwen/Qwen3.5-397B-A17B", tp=8, caching=True),
    "next-gaudi-bf16-state": Shape("Qwen/Qwen3-Next-80B-A3B-Instruct"),
    "next-gaudi-fp32-state": Shape(
        "Qwen/Qwen3-Next-80B-A3B-Instruct", state_dtype="float32", caching=True
    ),
    "dense-no-drafts": Shape("Qwen/Qwen3.5-0.8B", unit=16),
    "dense-ngram-5": Shape("Qwen/Qwen3.5-27B", unit=16, drafts=5),
    "dense-mtp-3-fp8": Shape("Qwen/Qwen3.5-27B", unit=16, drafter="mtp", drafts=3, kv_dtype="fp8"),
    "dense-dflash-7": Shape("Qwen/Qwen3.5-4B", unit=16, drafter=DFLASH_4B, drafts=7),
    "dense-dflash-15": Shape("Qwen/Qwen3.5-4B", unit=16, drafter=DFLASH_4B, drafts=15),
    "dense-dflash-15-tp4": Shape("Qwen/Qwen3.5-4B", unit=16, drafter=DFLASH_4B, drafts=15, tp=4),
    "dense-dflash-15-cached": Shape(
        "Qwen/Qwen3.5-4B", unit=16, drafter=DFLASH_4B, drafts=15, caching=True
    ),
    "dense-dflash-15-replay": Shape(
        "Qwen/Qwen3.5-4B", unit=16, drafter=DFLASH_4B, drafts=15, replay=True
    ),
    "dense-dflash-24-replay-unit-128": Shape(
        "Qwen/Qwen3.5-4B", unit=128, drafter=DFLASH_4B, drafts=24, replay=True
    ),
    "dense-dflash-16-sliding": Shape(
        "Qwen/Qwen3.6-27B",
        unit=16,
        drafter="z-lab/Qwen3.6-27B-DFlash",
        drafts=16,
        mixed=True,
        # Longer than what a window holds with two batches in flight.
        tokens=65536,
        drafter_changes={"use_sliding_window": True},
    ),
    "moe-dflash-15-unit-128": Shape(
        "Qwen/Qwen3.5-35B-A3B",
        unit=128,
        drafter=DFLASH_4B,
        drafts=15,
        caching=True,
        drafter_changes={
            "num_hidden_layers": 6,
            "hidden_size": 2048,
            "layer_types": ["full_attention"] * 6,
        },
    ),
    "next-mtp-2": Shape(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        unit=16,
        drafter="mtp",
        drafts=2,
        state_dtype="float32",
    ),
}


def drafter_config(shape: Shape) -> dict[str, Any]:
    """A config.json of the drafter."""
    assert shape.drafter is not None
    target = load_facts().models[shape.model].config
    return {
        **load_facts().drafters[shape.drafter].config,
        "model_type": "qwen3",
        "intermediate_size": 9728,
        "vocab_size": target["vocab_size"],
        "max_position_embeddings": 262144,
        "num_target_layers": target["num_hidden_layers"],
        **shape.drafter_changes,
    }


def folders(shape: Shape, where: Path) -> tuple[Path, Path | None]:
    """The config folders of a shape."""
    model = write_config(where / "model", model_config(shape.model))
    if shape.drafter in (None, "mtp"):
        return model, None
    return model, write_config(where / "drafter", drafter_config(shape))


def case_of(shape: Shape, model: Path, drafter: Path | None) -> dict[str, Any]:
    """What the child process reads."""
    speculative: dict[str, Any] | None = None
    if shape.drafts:
        speculative = {"num_speculative_tokens": shape.drafts, "method": "ngram"}
        if shape.drafter == "mtp":
            speculative["method"] = "mtp"
        elif drafter is not None:
            speculative.update(method="dflash", model=str(drafter))
        else:
            speculative["prompt_lookup_max"] = 4
    return {
        "model": str(model),
        "speculative": speculative,
        "tokens": shape.tokens,
        "max_num_batched_tokens": BUDGET,
        "pool_bytes": POOL_GIB * GIB,
        "unit": shape.unit,
        "kv_dtype": shape.kv_dtype,
        "state_dtype": shape.state_dtype,
        "tp": shape.tp,
        "caching": shape.caching,
        "replay": shape.replay,
        "mixed": shape.mixed,
        "limit_mm_per_prompt": None if "Next" in shape.model else {"image": 0, "video": 0},
    }


@pytest.fixture(scope="module")
def vllms_plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """What vLLM planned for every shape, and where the shape's config folders are."""
    root = tmp_path_factory.mktemp("shapes")
    cases: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        model, drafter = folders(shape, root / name)
        cases[name] = case_of(shape, model, drafter)
    cases["token bytes"] = [
        [heads, dim, dtype] for heads in (1, 4) for dim in (128, 256) for dtype in KV_DTYPES
    ]
    (root / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    done = run_with_vllm(
        [str(HERE / "vllm_plans.py"), str(root / "cases.json"), str(root / "results.json")]
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((root / "results.json").read_text(encoding="utf-8"))
    found = {name: (results[name], root / name) for name in SHAPES}
    return {**found, "token bytes": (results["token bytes"], root)}


def ours(shape: Shape, where: Path) -> Side:
    """The planner's side of a shape, from the same files."""
    drafter = shape.drafter
    if drafter not in (None, "mtp"):
        drafter = str(where / "drafter")
    plan = plan_of(
        str(where / "model"),
        platform="gaudi3" if shape.unit is None else None,
        unit=shape.unit,
        drafter=drafter,
        drafts=shape.drafts,
        # The file of Qwen3-Next has no key for it, and vLLM builds one layer.
        mtp_layers=1 if drafter == "mtp" else None,
        tokens=shape.tokens,
        tp=shape.tp,
        kv_dtype=shape.kv_dtype,
        state_dtype=shape.state_dtype,
        caching=shape.caching,
        pool_gib=float(POOL_GIB),
        max_num_batched_tokens=BUDGET,
    )
    side = plan.replay if shape.replay else plan.native
    assert side is not None
    return side


KINDS = {"MambaSpec": "gdn", "FullAttentionSpec": "full", "SlidingWindowSpec": "sliding"}


@pytest.mark.engine
@pytest.mark.parametrize("name", SHAPES)
def test_block_page_groups_and_block_count_are_vllms(
    vllms_plans: dict[str, tuple[Any, Path]], name: str
) -> None:
    theirs, where = vllms_plans[name]
    assert "failed" not in theirs, theirs
    side = ours(SHAPES[name], where)
    assert side.capacity is not None

    assert side.block_tokens == theirs["block_tokens"]
    assert [side.page_bytes] == theirs["pages"]
    assert side.group_size == max(group["layers"] for group in theirs["groups"])
    their_groups: Counter[tuple[str, int | None]] = Counter()
    their_layers: Counter[tuple[str, int | None]] = Counter()
    for group in theirs["groups"]:
        kind = KINDS[group["kind"]]
        key = (kind, None if kind == "gdn" else group["block"])
        their_groups[key] += 1
        their_layers[key] += group["layers"]
    our_groups: Counter[tuple[str, int | None]] = Counter()
    our_layers: Counter[tuple[str, int | None]] = Counter()
    for view in side.groups:
        our_groups[(view.kind, view.block_tokens)] += view.groups
        our_layers[(view.kind, view.block_tokens)] += view.layers
    assert our_groups == their_groups
    assert our_layers == their_layers
    assert side.capacity.pool_blocks == theirs["blocks"]
    assert side.capacity.vllm_concurrency == pytest.approx(theirs["concurrency"], rel=1e-12)
    if SHAPES[name].caching:
        assert side.cached_tokens_multiple_of == theirs["unit"]


@pytest.mark.engine
def test_bytes_of_a_token_are_vllms_for_every_kv_dtype(
    vllms_plans: dict[str, tuple[Any, Path]],
) -> None:
    theirs = {
        (heads, dim, dtype): size for heads, dim, dtype, size in vllms_plans["token bytes"][0]
    }
    assert len(theirs) == 4 * len(KV_DTYPES)
    assert theirs == {shape: kv_token_bytes(*shape) for shape in theirs}


@pytest.mark.engine
def test_planning_a_shape_takes_vllm_seconds_not_minutes(
    vllms_plans: dict[str, tuple[Any, Path]],
) -> None:
    """The first shape of an architecture may wait for vLLM to inspect its class in a process."""
    seconds = sorted(vllms_plans[name][0]["seconds"] for name in SHAPES)
    assert seconds[len(seconds) // 2] < 10
