"""The pool keeps every block that compact GDN gives without caching; checkpoints cost none.

Measured by the worker's own `determine_available_memory`, with a device that reports little memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import harness
import pytest

from vllm_gaudi_ext.planner import arithmetic

MIB = 1 << 20
FREE = 24 * MIB
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 512, "num_gpu_blocks_override": None}


@pytest.fixture
def measure(engines: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts an engine that measures its pool; gives (bytes for the pool, blocks in it)."""
    import habana_frameworks.torch as htorch
    from vllm_gaudi.v1.worker import hpu_worker

    determine = hpu_worker.HPUWorker.determine_available_memory
    available: list[int] = []

    def measured(worker: Any) -> int:
        # On the emulated device this would be a flat 4 GiB, whatever the layout.
        with monkeypatch.context() as patch:
            patch.setattr(hpu_worker, "is_fake_hpu", lambda: False)
            patch.setattr(htorch.hpu, "mem_get_info", lambda device=None: (FREE, FREE))
            available.append(determine(worker))
        return available[-1]

    monkeypatch.setattr(hpu_worker.HPUWorker, "determine_available_memory", measured)

    def start(**options: Any) -> tuple[int, int]:
        engine = engines(**OPTIONS | options)
        blocks = engine.scheduler.kv_cache_config.num_blocks
        assert engine.runner.kv_cache_config.num_blocks == blocks
        return available[-1], blocks

    yield start
    # These engines measured a device that is gone with this test.
    engines.stop()


def planned(gdn: int, state: int, attention: int, heads: int, size: int) -> arithmetic.Layout:
    layers = arithmetic.AttentionLayers("target", attention, heads, size, "bfloat16")
    return arithmetic.lay_out(gdn_layers=gdn, state_bytes=state, attention=[layers], unit=128)


def state_bytes(conv: int, heads: int, keys: int, values: int) -> int:
    """A bf16 window of three conv columns, and an fp32 recurrent state."""
    return 3 * conv * 2 + heads * keys * values * 4


def test_pool_with_caching_is_the_whole_pool_and_the_other_layout_loses_two_fifths(
    measure: Any, engines: Any
) -> None:
    cached_bytes, cached_blocks = measure(enable_prefix_caching=True)
    engine = engines._engine
    page, layers = 49152, 2
    # 90 % of the free bytes, less a dummy block for each of the eight layers.
    utilisation = engine.llm.llm_engine.vllm_config.cache_config.gpu_memory_utilization
    assert cached_bytes == int(FREE * utilisation) - 8 * page
    assert cached_blocks == cached_bytes // (page * layers)

    # The pool can be used to its last block, null block apart.
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == cached_blocks - 1
    tokens = harness.prompt(1, 1000)
    first, hit = (engine.run([tokens], max_tokens=4, salt="pool")[0] for _ in range(2))
    assert hit.cached_tokens == 768
    assert hit.distance(first) == 0.0

    compact_bytes, compact_blocks = measure(enable_prefix_caching=False)
    assert cached_bytes / compact_bytes == 1.0
    assert cached_blocks / compact_blocks == 1.0

    # What the other layout would cost: every block's state beside its page.
    separate_bytes, separate_blocks = measure(
        enable_prefix_caching=False, env={"VLLM_COMPACT_GDN": "0"}
    )
    state = state_bytes(384, 8, 32, 32)
    factor = page / (page + state)
    assert separate_bytes == int(compact_bytes * factor)
    assert separate_blocks == separate_bytes // (page * layers)
    # The planner's formula is the engine's.
    layout = planned(6, state, 2, 1, 32)
    assert (layout.block_tokens, layout.page_bytes) == (384, page)
    assert arithmetic.noncompact_pool_factor(layout) == factor == pytest.approx(0.584, abs=5e-4)


@pytest.mark.parametrize(
    ("layout", "block", "factor"),
    [
        (planned(48, state_bytes(10240, 48, 128, 128), 16, 4, 256), 896, 0.534),
        (planned(30, state_bytes(8192, 32, 128, 128), 10, 2, 256), 1152, 0.524),
        # An eighth of the 397B model: 8 of 64 value heads, 1 KV head, expert parallel.
        (planned(45, state_bytes(12288 // 8, 8, 128, 128), 15, 1, 256), 640, 0.551),
    ],
    ids=["27B", "35B-A3B", "397B-A17B-tp8"],
)
def test_pool_factor_of_the_published_models(
    layout: arithmetic.Layout, block: int, factor: float
) -> None:
    assert layout.block_tokens == block
    assert layout.gdn_groups == 3
    assert arithmetic.noncompact_pool_factor(layout) == pytest.approx(factor, abs=5e-4)
