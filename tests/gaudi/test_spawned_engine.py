"""The engine as it is served: found through the entry points, its core in a spawned process."""

from __future__ import annotations

from typing import Any

import child
import driving
import pytest

B = 384


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    found: dict[str, Any] = child.run("spawned.py", "gaudi_ext")
    return found


def test_spawned_core_runs_every_piece_of_this_package(seen: dict[str, Any]) -> None:
    sizes = seen["sizes"]
    assert sizes["pid"] != seen["parent"]
    assert sizes["worker"] == "GaudiExtWorker"
    assert sizes["runner"] == "GaudiExtModelRunner"
    assert sizes["scheduler"] == "GdnAsyncScheduler"


@pytest.mark.parametrize("when", ["sizes", "sizes later"])
def test_live_block_size_of_a_spawned_core_stays_b(seen: dict[str, Any], when: str) -> None:
    """vLLM resolves the configuration again behind the handshake, and stock code then says 128."""
    sizes = seen[when]
    assert sizes["worker shares it"]
    assert sizes["block tokens"] == B
    assert sizes["block_size"] == B
    assert sizes["mamba_block_size"] == B
    # 2 * B * 1 head * 32 * 2 bytes.
    assert sizes["mamba_page_size_padded"] == 49152


def test_spawned_hits_equal_cold_bit_for_bit(seen: dict[str, Any]) -> None:
    runs = seen["hits"]
    assert [runs[name][2] for name in ("cold", "again", "first", "second")] == [0, 0, 2 * B, 2 * B]
    for name in ("again", "first", "second"):
        assert runs[name][:2] == runs["cold"][:2]


def test_spawned_hit_on_a_prompt_of_whole_blocks_computes_its_last_block(
    seen: dict[str, Any],
) -> None:
    """Only checkpoints at B, and not at 128, give cached_tokens that are multiples of B."""
    cold, hit = seen["whole blocks"]
    assert (cold[2], hit[2]) == (0, 2 * B)
    assert hit[:2] == cold[:2]


def test_live_block_size_of_an_in_process_engine_stays_b(engines: Any) -> None:
    engine = engines(max_num_batched_tokens=512)
    cache = engine.scheduler.cache_config
    assert driving.block_tokens(engine) == cache.block_size == cache.mamba_block_size == B
    config = engine.llm.llm_engine.vllm_config
    assert config.cache_config is cache
    # What vLLM does in a spawned core, where stock code makes it 128.
    config.__post_init__()
    assert (cache.block_size, cache.mamba_block_size) == (B, B)
    assert config.scheduler_config.scheduler_cls == "vllm_gaudi_ext.scheduler.GdnAsyncScheduler"
