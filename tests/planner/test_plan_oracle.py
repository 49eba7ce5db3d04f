"""Block sizes, pages and pool factors that were observed in public, reproduced one by one.

Every row of the oracle table of the planner's design notes is one case here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from plan_helpers import DRAFTER_4B, DRAFTER_35B, WRITE_UP_35B, plan_of

from cuda_ext.ring import native_layout
from vllm_gaudi_ext.planner.arithmetic import MIB, ceil_div
from vllm_gaudi_ext.planner.plan import attention_layers, gdn_heads


@dataclass(frozen=True)
class Row:
    """One row: `least` tokens hold a state, `block` is what was observed."""

    model: str
    least: int
    block: int
    source: str
    options: dict[str, Any] = field(default_factory=dict)


ROWS = {
    "27B-none": Row("Qwen3.5-27B", 783, 784, "vllm#51250", {"platform": "h200"}),
    "27B-dflash-16": Row("Qwen3.5-27B", 863, 864, "vllm#50457", {"platform": "h200", "drafts": 16}),
    "27B-ngram-5": Row(
        "Qwen3.5-27B",
        808,
        816,
        "vllm#55766",
        {"platform": "h200", "drafts": 5, "method": "ngram"},
    ),
    "27B-mtp-3-fp8": Row(
        "Qwen3.5-27B",
        1596,
        1600,
        "vllm#45238 comment",
        {"platform": "h200", "drafter": "mtp", "drafts": 3, "kv_dtype": "fp8"},
    ),
    "4B-none": Row("Qwen3.5-4B", 524, 528, "XPU log in vllm#37467", {"platform": "h200"}),
    "9B-none": Row("Qwen3.5-9B", 524, 528, "XPU log in vllm#37467", {"platform": "h200"}),
    "122B-none": Row("Qwen3.5-122B-A10B", 2084, 2096, "PR vllm#36734", {"platform": "h200"}),
    "397B-none": Row("Qwen3.5-397B-A17B", 2084, 2096, "PR vllm#36734", {"platform": "h200"}),
    # Coder-Next has Qwen3-Next's shape. Its log shows 1072: that is two MTP drafts (1064); one
    # draft would give 1056, no draft 1048 -> 1056.
    "coder-next-none": Row(
        "Qwen3-Next-80B-A3B",
        1048,
        1056,
        "spark#47",
        {"platform": "h200", "state_dtype": "float32"},
    ),
    "coder-next-mtp-2": Row(
        "Qwen3-Next-80B-A3B",
        1064,
        1072,
        "spark#47",
        {
            "platform": "h200",
            "state_dtype": "float32",
            "drafter": "mtp",
            "mtp_layers": 1,
            "drafts": 2,
        },
    ),
    "27B-gaudi": Row("Qwen3.5-27B", 783, 896, "Gaudi write-up", {"platform": "gaudi3"}),
    "35B-gaudi": Row("Qwen3.6-35B-A3B", 1048, 1152, "Gaudi write-up", {"platform": "gaudi3"}),
    "397B-tp8-gaudi": Row(
        "Qwen3.5-397B-A17B",
        521,
        640,
        "Gaudi write-up",
        {"platform": "gaudi3", "tp": 8, "ep": True},
    ),
    "4B-dflash-15-unit-128": Row(
        "Qwen3.5-4B",
        584,
        640,
        "serving write-up",
        {"platform": "b200", "drafter": DRAFTER_4B, "drafts": 15},
    ),
    "35B-dflash-15-unit-128": Row(
        "Qwen3.5-35B-A3B",
        1168,
        1280,
        "serving write-up",
        {"platform": "b200", "drafter": DRAFTER_35B, "overrides": WRITE_UP_35B, "drafts": 15},
    ),
    "0.8B-none": Row("Qwen3.5-0.8B", 530, 544, "vllm-metal", {"platform": "h200"}),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_block_size_is_the_observed_one(row: Row) -> None:
    plan = plan_of(row.model, **row.options)
    target = attention_layers(plan.deployment)[0]
    assert ceil_div(plan.native.state_bytes, target.token_bytes) == row.least, row.source
    assert plan.native.block_tokens == row.block, row.source


@pytest.mark.parametrize(
    ("row", "mib"), [("4B-dflash-15-unit-128", 2.5), ("35B-dflash-15-unit-128", 5.0)]
)
def test_pages_of_the_serving_write_up(row: str, mib: float) -> None:
    assert plan_of(ROWS[row].model, **ROWS[row].options).native.page_bytes == mib * MIB


def test_the_unit_is_an_input_and_not_a_constant() -> None:
    options = ROWS["4B-dflash-15-unit-128"].options
    assert plan_of("Qwen3.5-4B", **options, unit=16).native.block_tokens == 592
    assert plan_of("Qwen3.5-4B", **options, unit=128).native.block_tokens == 640
    assert plan_of("Qwen3.5-4B", **options, unit=16, block_size=64).native.block_tokens == 640


@pytest.mark.parametrize(
    ("model", "tp", "block", "row_bytes", "page", "factor"),
    [
        ("Qwen3.5-27B", 1, 896, 3_207_168, 3_670_016, "0.534"),
        ("Qwen3.5-27B", 2, 896, 1_603_584, 1_835_008, "0.534"),
        ("Qwen3.5-27B", 4, 896, 801_792, 917_504, "0.534"),
        ("Qwen3.5-27B", 8, 512, 400_896, 524_288, "0.567"),
        ("Qwen3.6-35B-A3B", 1, 1152, 2_146_304, 2_359_296, "0.524"),
        ("Qwen3.6-35B-A3B", 4, 640, 536_576, 655_360, "0.550"),
        ("Qwen3.5-397B-A17B", 1, 2176, 4_268_032, 4_456_448, "0.511"),
        ("Qwen3.5-397B-A17B", 2, 2176, 2_134_016, 2_228_224, "0.511"),
        ("Qwen3.5-397B-A17B", 4, 1152, 1_067_008, 1_179_648, "0.525"),
        ("Qwen3.5-397B-A17B", 8, 640, 533_504, 655_360, "0.551"),
    ],
)
def test_gaudi_blocks_rows_and_pool_factors(
    model: str, tp: int, block: int, row_bytes: int, page: int, factor: str
) -> None:
    plan = plan_of(model, platform="gaudi2", tp=tp)
    assert plan.native.block_tokens == block
    assert plan.native.state_bytes == row_bytes
    assert plan.native.page_bytes == page
    assert plan.gaudi is not None
    assert f"{plan.gaudi.noncompact_pool_factor:.3f}" == factor


@pytest.mark.parametrize("model", ["Qwen3.5-27B", "Qwen3.6-35B-A3B", "Qwen3.5-397B-A17B"])
def test_gaudi_models_make_three_state_groups_and_no_leftover(model: str) -> None:
    plan = plan_of(model, platform="gaudi3", tp=8 if "397B" in model else 1)
    gdn, attention = plan.native.groups
    assert gdn.groups == 3
    assert attention.groups == 1
    assert gdn.layers == 3 * attention.layers


@pytest.mark.parametrize(
    ("model", "mib"),
    [
        ("Qwen3.5-0.8B", 18.6),
        ("Qwen3.5-2B", 18.6),
        ("Qwen3.5-4B", 49.1),
        ("Qwen3.5-9B", 49.1),
        ("Qwen3.5-35B-A3B", 61.4),
        ("Qwen3-Next-80B-A3B", 73.7),
        ("Qwen3.5-27B", 146.8),
        ("Qwen3.5-122B-A10B", 146.5),
        ("Qwen3.5-397B-A17B", 183.2),
    ],
)
def test_one_state_of_all_layers(model: str, mib: float) -> None:
    """sglang#28730 gives 73.7 for Qwen3-Next, tpu#3508 183 for the 397B."""
    plan = plan_of(model, platform="gaudi3", state_dtype="float32")
    page = native_layout(gdn_heads(plan.deployment))
    assert round(page.nbytes * plan.deployment.target.gdn_layers / MIB, 1) == mib


def test_fp8_kv_doubles_the_block_on_gaudi() -> None:
    plan = plan_of("Qwen3.5-27B", platform="gaudi3", kv_dtype="fp8_inc")
    assert plan.native.block_tokens == 1664
