"""Memory: the engine's own blocks with and without ReplaySSM are the planner's, and so is the line.

No weights: vLLM builds the models on the meta device from their config files (capacity_plans.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "planner"))

from plan_helpers import DRAFTER_4B, model_config, plan_of, write_config  # noqa: E402

from cuda_ext.startup import Gain  # noqa: E402
from vllm_gaudi_ext.planner.arithmetic import GIB, MIB  # noqa: E402
from vllm_gaudi_ext.planner.facts import load_facts  # noqa: E402
from vllm_gaudi_ext.planner.plan import Plan, Side  # noqa: E402

TOKENS = 8192
# What a B200 keeps at a utilisation of 0.92, by the reading that gives 105 and 274 requests.
WRITE_UP_POOL = 156_500 * MIB


@dataclass(frozen=True)
class Shape:
    """One deployment; `unit` None is the real CPU platform, a number a CUDA-like backend.

    Args:
        layers: of the drafter; 0 for none, and then ngram drafts.
        kv_heads: of the drafter.
        windows: layers of the drafter that have a sliding window.
        split: the backend works in blocks of just the unit, so larger ones are split.
        packing: the option.
        layout: VLLM_KV_CACHE_LAYOUT, if the operator sets it.
        tokens: of the longest request.
        blocks: --num-gpu-blocks-override.
    """

    model: str
    unit: int | None
    replay: str
    drafts: int = 15
    layers: int = 5
    kv_heads: int = 8
    pool_bytes: int = 50 * GIB
    windows: int = 0
    split: bool = False
    packing: str = "auto"
    layout: str | None = None
    tokens: int = TOKENS
    blocks: int | None = None


M4, M35 = "Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-35B-A3B"
SHAPES = {
    f"{name}, {arm}": Shape(replay=replay, **shape)
    for name, shape in {
        "4B on a CPU": {"model": M4, "unit": None},
        "4B, unit 16": {"model": M4, "unit": 16},
        "4B, unit 128": {"model": M4, "unit": 128, "pool_bytes": WRITE_UP_POOL, "split": True},
        "4B, unit 16, 24 drafts": {"model": M4, "unit": 16, "drafts": 24},
        "4B, unit 16, ngram 7": {"model": M4, "unit": 16, "drafts": 7, "layers": 0},
        "35B on a CPU": {"model": M35, "unit": None, "layers": 6},
        "35B, unit 16": {"model": M35, "unit": 16, "layers": 6},
        "35B, unit 128": {"model": M35, "unit": 128, "layers": 6, "split": True},
        "4B, unit 128, whole": {"model": M4, "unit": 128},
        "4B, unit 16, packing off": {"model": M4, "unit": 16, "packing": "off"},
        "4B, unit 16, a layout asked for": {"model": M4, "unit": 16, "layout": "LBNHC"},
        "4B, unit 16, windows": {"model": M4, "unit": 16, "windows": 5},
        # Shorter than a block, so that a state's block is the smallest of all groups'.
        "4B, unit 16, 512 tokens": {"model": M4, "unit": 16, "tokens": 512},
        "4B, unit 16, 3000 blocks": {"model": M4, "unit": 16, "blocks": 3000},
    }.items()
    for arm, replay in (("stock", "off"), ("replay", "auto"))
}
PAIRS = sorted({name.rpartition(", ")[0] for name in SHAPES})
# As many blocks are other pools in the two arms.
OF_ONE_POOL = [name for name in PAIRS if not SHAPES[f"{name}, replay"].blocks]
# vLLM's CPU platform takes blocks of 128 tokens (platforms/cpu.py, 0.31.0).
CPU_UNIT = 128


def drafter_config(shape: Shape) -> dict[str, Any]:
    """A config.json of a DFlash drafter with the shape's layers."""
    target = load_facts().models[shape.model].config
    return {
        **load_facts().drafters[DRAFTER_4B].config,
        "model_type": "qwen3",
        "intermediate_size": 9728,
        "vocab_size": target["vocab_size"],
        "hidden_size": target["hidden_size"],
        "max_position_embeddings": 262144,
        "num_target_layers": target["num_hidden_layers"],
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "layer_types": ["sliding_attention"] * shape.windows
        + ["full_attention"] * (shape.layers - shape.windows),
        "use_sliding_window": bool(shape.windows),
        "sliding_window": 2048 if shape.windows else None,
    }


@dataclass(frozen=True)
class Planned:
    """Both sides of a shape."""

    shape: Shape
    theirs: dict[str, Any]
    plan: Plan

    @property
    def ours(self) -> Side:
        side = self.plan.native if self.shape.replay == "off" else self.plan.replay
        assert side is not None
        return side


def our_plan(shape: Shape, model: Path, drafter: Path | None) -> Plan:
    whole = shape.unit is not None and not shape.split
    return plan_of(
        str(model),
        # Whose attention takes whole blocks; another machine's need not.
        platform="h200" if whole else None,
        unit=shape.unit or CPU_UNIT,
        packing="off" if shape.layout else shape.packing,
        drafter=str(drafter) if drafter else None,
        drafts=shape.drafts,
        tokens=shape.tokens,
        pool_bytes=None if shape.blocks else shape.pool_bytes,
        pool_blocks=shape.blocks,
        max_num_batched_tokens=8192,
    )


Engine = tuple[dict[str, Planned], dict[str, Any]]
# Of the first shape, as far as vLLM's own configuration, with what is changed.
HYBRID_DRAFTER = {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "vocab_size": load_facts().models[M4].config["vocab_size"],
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 262144,
    "mamba_d_ssm": 256,
    "mamba_n_heads": 4,
    "mamba_d_head": 64,
    "torch_dtype": "bfloat16",
}
NGRAM = {"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 32}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "caching by default": {"replay": "auto", "caching": None},
    "caching by default, off": {"replay": "off", "caching": None},
    "caching asked for": {"replay": "auto", "caching": True},
    "caching asked for, off": {"replay": "off", "caching": True},
    "caching and too many drafts": {"replay": "auto", "caching": True, "speculative": NGRAM},
    # Of another family: of its own, vLLM takes a draft model's MTP head instead.
    "a drafter with states": {"replay": "auto", "caching": None, "speculative": None},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """What vLLM and the planner make of every shape, from the same files; and of caching."""
    root = tmp_path_factory.mktemp("shapes")
    cases, plans = {}, {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        model = write_config(root / str(number) / "model", model_config(shape.model))
        speculative: dict[str, Any] = {"num_speculative_tokens": shape.drafts}
        drafter = None
        if shape.layers:
            drafter = write_config(root / str(number) / "drafter", drafter_config(shape))
            speculative |= {"method": "dflash", "model": str(drafter)}
        else:
            speculative |= {"method": "ngram", "prompt_lookup_max": 4}
        cases[name] = {
            "model": str(model),
            "speculative": speculative,
            "tokens": shape.tokens,
            "blocks": shape.blocks,
            "pool_bytes": shape.pool_bytes,
            "unit": shape.unit,
            "split": shape.split,
            "packing": shape.packing,
            "environment": {"VLLM_KV_CACHE_LAYOUT": shape.layout} if shape.layout else {},
            "replay": shape.replay,
            # With its own layer vLLM caches by default, and plans one block more for it.
            "caching": False if shape.replay == "off" else None,
            "configuration alone": False,
        }
        plans[name] = our_plan(shape, model, drafter)
    first = cases[next(iter(cases))] | {"configuration alone": True}
    hybrid = write_config(root / "hybrid", HYBRID_DRAFTER)
    drafting = {"method": "draft_model", "model": str(hybrid), "num_speculative_tokens": 3}
    for name, changes in CONFIGURATIONS.items():
        cases[name] = first | changes
        cases[name]["speculative"] = cases[name]["speculative"] or drafting
    (root / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    done = subprocess.run(
        [
            sys.executable,
            str(TESTS / "replay" / "capacity_plans.py"),
            str(root / "cases.json"),
            str(root / "results.json"),
        ],
        env={
            **os.environ,
            "VLLM_PLUGINS": "gaudi_ext",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(TESTS.parent),
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((root / "results.json").read_text(encoding="utf-8"))
    found = {name: Planned(shape, results[name], plans[name]) for name, shape in SHAPES.items()}
    return found, {name: results[name] for name in CONFIGURATIONS}


@pytest.fixture(scope="module")
def planned(engine: Engine) -> dict[str, Planned]:
    return engine[0]


pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", SHAPES)
def test_the_engines_blocks_and_pages_are_the_planners(
    planned: dict[str, Planned], name: str
) -> None:
    found = planned[name]
    theirs, ours = found.theirs, found.ours
    assert "failed" not in theirs, theirs
    assert ours.capacity is not None
    assert theirs["block_tokens"] == ours.block_tokens
    assert theirs["block_bytes"] == ours.block_mib * MIB
    assert len(theirs["groups"]) == ours.group_count
    assert max(theirs["groups"]) == ours.group_size
    assert sum(theirs["groups"]) == sum(group.layers for group in ours.groups)
    if ours.packed:
        assert {ours.state_bytes, ours.page_bytes} <= set(theirs["pages"])
    else:
        assert theirs["pages"] == [ours.page_bytes]
    assert theirs["blocks"] == ours.capacity.pool_blocks
    assert theirs["concurrency"] == pytest.approx(ours.capacity.vllm_concurrency, rel=1e-12)


@pytest.mark.parametrize("name", SHAPES)
def test_only_the_arm_that_replays_has_our_layers(planned: dict[str, Planned], name: str) -> None:
    found = planned[name]
    assert "cuda_ext.layers.gdn_replay" in found.theirs["layers"]
    active = found.shape.replay != "off"
    assert found.theirs["page"] == (found.ours.state_bytes if active else None)
    assert (found.theirs["gain"] is not None) == active
    assert found.theirs["facts"]["prefix_caching"] is False


@pytest.mark.parametrize("pair", OF_ONE_POOL)
def test_the_lines_requests_are_the_planners(planned: dict[str, Planned], pair: str) -> None:
    found = planned[f"{pair}, replay"]
    plan = found.plan
    assert plan.replay is not None
    assert plan.native.capacity is not None
    assert plan.replay.capacity is not None
    want = Gain(
        tokens=found.shape.tokens,
        stock=plan.native.capacity.requests,
        replay=plan.replay.capacity.requests,
        # A block of each group, two where a window may begin inside one; vLLM keeps one empty.
        at_once=(plan.replay.capacity.pool_blocks - 1)
        // sum(g.groups * (2 if g.window else 1) for g in plan.replay.groups),
    )
    assert Gain(**found.theirs["gain"]) == want
    assert want.replay > want.stock


@pytest.mark.parametrize("pair", PAIRS)
def test_one_line_is_told_of_the_real_pool_alone(planned: dict[str, Planned], pair: str) -> None:
    found = planned[f"{pair}, replay"]
    passing, (line,), another = found.theirs["lines"]
    assert passing == another == []
    theirs = found.theirs
    gain, drafts = theirs["gain"], found.shape.drafts
    gdn = next(group.layers for group in found.ours.groups if group.kind == "gdn")
    for fragment in (
        f"active for {gdn} GDN layers, reference backend",
        f"{drafts} drafts: one state a request instead of {drafts + 1}, {drafts} copies saved",
        f"ring of R={found.ours.ring_rows} rows, page {found.ours.state_bytes} bytes",
        f"(ring {found.ours.ring_bytes}, "
        + (
            f"packed with others into blocks of {theirs['block_bytes']:.0f})"
            if found.ours.packed
            else "padded to "
        ),
        f"{gain['replay']} requests of {gain['tokens']} tokens fit where {gain['stock']} did",
        f"(+{gain['replay'] - gain['stock']})",
    ):
        assert fragment in line, line


@pytest.mark.parametrize("pair", PAIRS)
def test_a_model_with_layers_of_both_is_refused(planned: dict[str, Planned], pair: str) -> None:
    assert "FIRST is vLLM's own layer" in planned[f"{pair}, replay"].theirs["mixed"]


@pytest.mark.parametrize("pair", PAIRS)
def test_no_figure_is_made_up(planned: dict[str, Planned], pair: str) -> None:
    assert planned[f"{pair}, replay"].theirs["unknown"] == [None, None]


@pytest.mark.parametrize("pair", PAIRS)
def test_the_arms_differ_in_copies_and_rings_alone(planned: dict[str, Planned], pair: str) -> None:
    stock, replay = planned[f"{pair}, stock"], planned[f"{pair}, replay"]
    drafts = stock.shape.drafts
    assert stock.ours.state_copies == drafts + 1
    assert replay.ours.state_copies == 1
    ring = replay.ours.ring_bytes
    assert ring is not None
    assert replay.ours.state_bytes == stock.ours.state_bytes + ring


PACKED = {
    "4B, unit 16": [12, 12, 13],
    "4B, unit 16, 24 drafts": [12, 12, 13],
    "4B, unit 128, whole": [12, 12, 13],
    "4B, unit 16, 512 tokens": [12, 12, 13],
    "35B, unit 16": [15, 15, 16],
}
"""The only shapes that vLLM packs, with its groups.

Not where the backend has one layout (a real CPU), splits blocks, the drafter has windows, the
operator said so or counts blocks, or nothing is saved (no drafter).
"""


@pytest.mark.parametrize("name", SHAPES)
def test_vllm_packs_where_it_saves_memory_and_can_be_read(
    planned: dict[str, Planned], name: str
) -> None:
    found = planned[name]
    pair, _, arm = name.rpartition(", ")
    wanted = arm == "replay" and pair in PACKED
    assert found.ours.packed == wanted
    assert found.theirs["layout"].startswith("B") == wanted
    if wanted:
        assert sorted(found.theirs["groups"]) == PACKED[pair]
        # Padding them to one page was what cost memory.
        assert len(found.theirs["pages"]) > 1


def test_packing_gains_requests(planned: dict[str, Planned]) -> None:
    fits = {
        name: planned[f"{name}, replay"].theirs["gain"]["replay"]
        for name in ("4B, unit 16", "4B, unit 16, packing off", "4B, unit 16, a layout asked for")
    }
    packed, *others = fits.values()
    assert others == [92, 92]
    assert packed == 104


def test_figures_of_the_design_notes(planned: dict[str, Planned]) -> None:
    """Pages of 2.5 and 3.0 MiB and 105 and 274 requests for the 4B, 5 and 5.5 MiB for the 35B."""
    four = {arm: planned[f"4B, unit 128, {arm}"] for arm in ("stock", "replay")}
    assert four["stock"].theirs["pages"] == [2.5 * MIB]
    assert four["replay"].theirs["pages"] == [3 * MIB]
    assert four["replay"].theirs["gain"] == {"tokens": TOKENS, "stock": 105, "replay": 274} | {
        "at_once": 10432 // 8
    }
    big = {arm: planned[f"35B, unit 128, {arm}"] for arm in ("stock", "replay")}
    assert big["stock"].theirs["pages"] == [5 * MIB]
    assert big["replay"].theirs["pages"] == [5.5 * MIB]
    stock, replay = (big[arm].theirs["concurrency"] for arm in ("stock", "replay"))
    assert round(replay / stock, 2) == 5.08
    # As measured on an H200: 592 tokens a block where blocks are multiples of 16.
    assert planned["4B, unit 16, stock"].theirs["block_tokens"] == 592


@pytest.mark.parametrize("pair", PAIRS)
def test_facts_are_read_off_the_configuration(planned: dict[str, Planned], pair: str) -> None:
    found = planned[f"{pair}, replay"]
    facts = found.theirs["facts"]
    config = load_facts().models[found.shape.model].config
    assert facts["drafts"] == found.shape.drafts
    assert facts["method"] == ("dflash" if found.shape.layers else "ngram")
    # ngram has no model of its own, and a DFlash drafter no recurrent layer.
    assert facts["drafter_has_states"] is False
    assert facts["device"] == "cpu"
    assert facts["architecture"] == config["architectures"][0]
    assert facts["heads"] == {
        "key_heads": config["linear_num_key_heads"],
        "value_heads": config["linear_num_value_heads"],
        "key_dim": config["linear_key_head_dim"],
        "value_dim": config["linear_value_head_dim"],
        "conv_kernel": config["linear_conv_kernel_dim"],
    }
    assert facts["dtypes"] == ["bfloat16", "bfloat16", "float32"]
    assert facts["vllm"].split("+")[0] == "0.31.0"


def test_caching_by_default_is_turned_off_and_asked_for_is_refused(engine: Engine) -> None:
    found = engine[1]
    assert found["caching by default"] == {"prefix_caching": False}
    assert found["caching by default, off"] == {"prefix_caching": True}
    assert found["caching asked for, off"] == {"prefix_caching": True}
    refused = found["caching asked for"]["failed"]
    assert refused.startswith("RuntimeError: gaudi_ext cannot serve with ReplaySSM (1 problem)")
    assert "--no-enable-prefix-caching" in refused


def test_all_reasons_of_a_real_configuration_are_told_at_once(engine: Engine) -> None:
    refused = engine[1]["caching and too many drafts"]["failed"]
    assert refused.startswith("RuntimeError: gaudi_ext cannot serve with ReplaySSM (2 problems)")
    assert "32 draft tokens are more than the 31" in refused
    assert "--no-enable-prefix-caching" in refused


def test_a_draft_model_with_recurrent_layers_is_refused(engine: Engine) -> None:
    refused = engine[1]["a drafter with states"]["failed"]
    assert refused.startswith("RuntimeError: gaudi_ext cannot serve with ReplaySSM (1 problem)")
    assert "'draft_model' has recurrent states" in refused
