"""The planner's layouts, packed and not, are vLLM's own groups of the same layers.

What is real and what is supplied in the child process is said in packed_plans.py.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from vllm_gaudi_ext.planner.arithmetic import (
    AttentionLayers,
    Layout,
    choose,
    lay_out,
    lay_out_packed,
    request_bytes,
)

Case = dict[str, Any]
RING = 2_789_376
REAL: dict[str, Case] = {
    "4b": {"gdn": 24, "state": RING, "target": [8, 4, 256], "drafter": [5, 8, 128]},
    "4b-no-drafter": {"gdn": 24, "state": RING, "target": [8, 4, 256], "drafter": None},
    "27b": {"gdn": 48, "state": 4_044_800, "target": [16, 4, 256], "drafter": [5, 8, 128]},
    "35b": {"gdn": 30, "state": RING, "target": [10, 2, 256], "drafter": [8, 8, 128]},
    "balanced": {"gdn": 30, "state": RING, "target": [10, 2, 256], "drafter": [10, 8, 128]},
    "one-size": {"gdn": 24, "state": 688 * 4096, "target": [8, 4, 256], "drafter": [5, 8, 128]},
    "one-state-a-block": {"gdn": 5, "state": RING, "target": [1, 4, 256], "drafter": None},
}
RANDOM = 250


def cases() -> dict[str, Case]:
    """The real ones, and as many as chance gives."""
    chance = random.Random(20261130)
    found = {name: {"unit": 16, "tokens": 8192, **case} for name, case in REAL.items()}

    def part(most: int) -> list[int]:
        layers = chance.randint(1, most)
        return [layers, chance.choice([1, 2, 4, 8]), chance.choice([64, 80, 128, 256])]

    for number in range(RANDOM):
        found[f"random-{number}"] = {
            "gdn": chance.randint(1, 60),
            "state": 4 * chance.randint(1000, 1_500_000),
            "unit": chance.choice([16, 32, 64, 128]),
            "target": part(20),
            "drafter": part(12) if chance.random() < 0.8 else None,
            "tokens": chance.randint(1, 100_000),
        }
    return found


CASES = cases()


@pytest.fixture(scope="module")
def vllms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """vLLM's groups of every case."""
    folder = tmp_path_factory.mktemp("packed")
    (folder / "cases.json").write_text(json.dumps(CASES), encoding="utf-8")
    child = Path(__file__).with_name("packed_plans.py")
    done = subprocess.run(
        [sys.executable, str(child), str(folder / "cases.json"), str(folder / "results.json")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert isinstance(results, dict)
    assert results.keys() == CASES.keys()
    return results


def ours(case: Case) -> tuple[Layout, Layout | None]:
    """Pages of one size, and packed."""
    shapes = [
        AttentionLayers(owner, *case[owner], "bfloat16")
        for owner in ("target", "drafter")
        if case[owner] is not None
    ]
    given = {"gdn_layers": case["gdn"], "state_bytes": case["state"], "unit": case["unit"]}
    return lay_out(**given, attention=shapes), lay_out_packed(**given, attention=shapes)


def groups_of(layout: Layout) -> Counter[tuple[str, int | None, int]]:
    """Kind, tokens of a block, and layers, of each group."""
    found: Counter[tuple[str, int | None, int]] = Counter()
    for bucket in layout.buckets:
        kind = "MambaSpec" if bucket.kind == "gdn" else "FullAttentionSpec"
        for index in range(bucket.groups):
            layers = len(range(index, bucket.layers, bucket.groups))
            found[(kind, bucket.block_tokens, layers)] += 1
    return found


def their_groups(theirs: dict[str, Any]) -> Counter[tuple[str, int | None, int]]:
    return Counter(
        (kind, block[0] if block else None, layers) for kind, layers, *block in theirs["groups"]
    )


def agrees(layout: Layout, theirs: dict[str, Any], case: Case) -> None:
    """Groups, bytes of a block of the pool, and of a request are vLLM's."""
    layers = case["gdn"] + sum(case[who][0] for who in ("target", "drafter") if case[who])
    assert theirs["layers"] == theirs["distinct"] == layers
    assert groups_of(layout) == their_groups(theirs)
    assert layout.block_bytes == theirs["block_bytes"]
    request = request_bytes(layout, copies=1, tokens=case["tokens"])
    assert request.padded == theirs["request_bytes"]


def balanced(case: Case) -> bool:
    """As many layers of the drafter as of the target, of another size."""
    if case["drafter"] is None:
        return False
    (layers, *target), (drafts, *draft) = case["target"], case["drafter"]
    return bool(layers == drafts and target[0] * target[1] != draft[0] * draft[1])


@pytest.mark.engine
@pytest.mark.parametrize("name", CASES)
def test_a_packed_layout_is_vllms_with_blocks_outermost(vllms: dict[str, Any], name: str) -> None:
    case, theirs = CASES[name], vllms[name]
    today, packed = ours(case)
    assert today.block_tokens == theirs["block"]
    outermost = theirs["BLNHC"]
    if packed is None:
        # vLLM keeps to one size there, or splits the states by the count that both have.
        assert balanced(case) or not outermost["packs"]
        return
    assert not balanced(case)
    assert outermost["packs"]
    agrees(packed, outermost, case)


@pytest.mark.engine
@pytest.mark.parametrize("name", CASES)
def test_todays_layout_is_vllms_with_layers_outermost(vllms: dict[str, Any], name: str) -> None:
    case, theirs = CASES[name], vllms[name]
    today, _ = ours(case)
    assert not theirs["LBNHC"]["packs"]
    agrees(today, theirs["LBNHC"], case)


@pytest.mark.engine
def test_what_is_chosen_takes_no_more_by_vllms_own_account(vllms: dict[str, Any]) -> None:
    packed = 0
    for name, case in CASES.items():
        both, theirs = ours(case), vllms[name]
        if both[1] is None:
            continue
        if choose(*both, tokens=case["tokens"], copies=1).packed:
            packed += 1
            assert theirs["BLNHC"]["request_bytes"] < theirs["LBNHC"]["request_bytes"], name
    assert packed > len(CASES) // 5


@pytest.mark.engine
def test_the_4b_and_the_35b_by_vllms_own_account(vllms: dict[str, Any]) -> None:
    four = vllms["4b"]["BLNHC"]
    assert [layers for _, layers, *_ in four["groups"]] == [12, 12, 13]
    assert four["block_bytes"] == 36_634_624
    assert four["request_bytes"] == 14 * 36_634_624
    assert len(vllms["4b"]["LBNHC"]["groups"]) == 8
    thirty = vllms["35b"]["BLNHC"]
    assert [layers for _, layers, *_ in thirty["groups"]] == [15, 15, 18]
    assert thirty["request_bytes"] == 8 * 1376 * (10 * 2048 + 8 * 4096)
