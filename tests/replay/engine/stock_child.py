"""What vLLM does with the tiny model in this process, with or without this package's plugin.

Run as a script: `stock_child.py MODEL RESULT` with `VLLM_PLUGINS` set or not; RESULT gets JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import harness
import replay_engine

DRAFTS = 7
LENGTHS = [9, 63, 64, 65, 90, 150]
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 2}


def cache_config(engine: Any) -> dict[str, Any]:
    """Everything that decides what a request costs."""
    config = engine.scheduler.kv_cache_config
    cache = engine.config.cache_config
    return {
        "blocks": config.num_blocks,
        "groups": [
            [group.layer_names, repr(group.kv_cache_spec)] for group in config.kv_cache_groups
        ],
        "tensors": [repr(tensor) for tensor in config.kv_cache_tensors],
        "states": [[list(view.shape) for view in _states(layer)] for layer in engine.gdn_layers()],
        "block size": cache.block_size,
        "mamba block size": cache.mamba_block_size,
        "padded page": cache.mamba_page_size_padded,
        "caching": cache.enable_prefix_caching,
        "mode": cache.mamba_cache_mode,
    }


def _states(layer: Any) -> list[Any]:
    return list(layer.kv_cache)


def main(model: Path) -> dict[str, Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    common: dict[str, Any] = {"dtype": "bfloat16", "num_gpu_blocks_override": None}
    found: dict[str, Any] = {}
    engine = replay_engine.Engine(model, **common)
    found["plain"] = cache_config(engine)
    prompts = [harness.prompt(700 + length, length) for length in LENGTHS]
    results = engine.run(prompts, max_tokens=16)
    # A hit, in blocks that the first round left.
    results += engine.run(prompts[-1:], max_tokens=16)
    found["answers"] = [[list(r.tokens), list(r.logprobs)] for r in results]
    found["layer"] = sorted({type(layer).__name__ for layer in engine.gdn_layers()})
    engine.shutdown()
    off = {"additional_config": {"gaudi_ext": {"replay": "off"}}}
    engine = replay_engine.Engine(model, speculative_config=NGRAM, **off, **common)
    found["drafts"] = cache_config(engine)
    engine.shutdown()
    return found


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(Path(sys.argv[1]))))
