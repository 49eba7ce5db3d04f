"""Prints how many blocks the stock compact GDN engine, without prefix caching, gives a model.

    python tests/demo/stock_pool.py MODEL

A process of its own, since vLLM picks its platform once. The last line is JSON: `blocks`, and
`block_tokens` for the tokens in each.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "engines"))

import harness
from common import ENGINE

# Without it, this package's entry points stand aside.
os.environ.pop("VLLM_PLUGINS", None)


def main(model: str) -> None:
    harness.activate()
    options = ENGINE | {"enable_prefix_caching": False, "num_gpu_blocks_override": None}
    with harness.start(Path(model), **options) as engine:
        if type(engine.runner).__module__.split(".")[0] != "vllm_gaudi":
            raise RuntimeError(f"the stock runner was wanted, {type(engine.runner)} is active")
        cache = engine.runner.kv_cache_config
        # Without caching a GDN group's one block holds a whole request, so only attention's count.
        specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
        (attention,) = [spec for spec in specs if type(spec).__name__ == "FullAttentionSpec"]
        pool = {
            "blocks": cache.num_blocks,
            "block_tokens": attention.block_size,
            "compact_gdn": engine.runner._compact_gdn_enabled,
        }
    print(json.dumps(pool))


if __name__ == "__main__":
    main(sys.argv[1])
