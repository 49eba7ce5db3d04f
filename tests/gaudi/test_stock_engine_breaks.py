"""Stock vllm-gaudi 0.26.0 fails where this package helps, so the tests beside this one can fail.

Run without the plugin in a process of its own (stock.py). What is asserted here are faults.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import stock

B = stock.B


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return stock.results()


def test_stock_engine_is_stock(seen: dict[str, Any]) -> None:
    """With both packages installed and VLLM_PLUGINS unset, nothing of ours is active."""
    assert seen["platform"].startswith("vllm_gaudi.")
    assert seen["spawned"]["worker"] == "HPUWorker"
    assert seen["spawned"]["runner"] == "HPUModelRunner"
    assert seen["spawned"]["scheduler"] == "HPUAsyncScheduler"


@pytest.mark.parametrize("engine", ["hits", "spawned hits", "non-compact hits"])
def test_stock_hits_differ_from_cold_and_from_each_other(seen: dict[str, Any], engine: str) -> None:
    """`non-compact hits` ran with VLLM_COMPACT_GDN=0, which does not help either."""
    runs = seen[engine]
    assert runs["cold"][:2] == runs["again"][:2], "cold runs must agree, or nothing is shown"
    assert [runs[name][2] for name in ("cold", "again", "first", "second")] == [0, 0, 2 * B, 2 * B]
    assert runs["first"][0] != runs["cold"][0]
    assert runs["second"][0] != runs["cold"][0]
    assert runs["first"][0] != runs["second"][0]


def test_stock_live_block_size_flips_to_128_in_a_spawned_engine(seen: dict[str, Any]) -> None:
    sizes = seen["spawned"]
    assert sizes["own process"]
    assert sizes["block tokens"] == sizes["mamba_block_size"] == B
    assert sizes["block_size"] == 128


def test_stock_engine_asserts_on_prefills_of_several_requests(seen: dict[str, Any]) -> None:
    assert seen["merged prefills"] == "_form_prefill_batch"


def test_stock_nan_in_slots_poisons_all_later_requests(seen: dict[str, Any]) -> None:
    assert not any(map(math.isnan, seen["poisoned"]["before"][1]))
    for tokens, logprobs, _ in seen["poisoned"]["after"]:
        assert set(tokens) == {0}
        assert all(map(math.isnan, logprobs))
