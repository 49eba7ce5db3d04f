"""The stock vllm-gaudi 0.26.0 engine, run in a process of its own without this package's plugin.

Both packages are installed there and `VLLM_PLUGINS` is unset: vLLM asks ours too, which answers
that it is not wanted. One process runs every scenario, one engine after another.
"""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path
from typing import Any

import child
import driving
import harness

B = 384


@functools.cache
def results() -> dict[str, Any]:
    """Every scenario's observations, by name."""
    found: dict[str, Any] = child.run("stock.py", None)
    return found


def plain(result: harness.Result) -> list[Any]:
    """A result as JSON gives it back."""
    return [list(result.tokens), list(result.logprobs), result.cached_tokens]


def uncached_answers(engine: Any) -> list[list[Any]]:
    """Prompts around B, one by one and together, decoded while others prefill."""
    lengths = (40, B - 1, B + 60, 2 * B + 5)
    prompts = [harness.prompt(900 + i, length) for i, length in enumerate(lengths)]
    alone = [engine.run([tokens], max_tokens=6)[0] for tokens in prompts]
    together = engine.run(prompts, max_tokens=[6, 9, 12, 5])
    return [plain(result) for result in alone + together]


def hits(engine: Any) -> dict[str, Any]:
    """A prompt cold, cold again, and then hit twice with another request in between."""
    tokens, salt = harness.prompt(910, 2 * B + 50), driving.salt()
    cold, again = (engine.run([tokens], salt=s)[0] for s in (driving.salt(), salt))
    first = engine.run([tokens], salt=salt)[0]
    engine.run([harness.prompt(911, 90)], salt=driving.salt())
    second = engine.run([tokens], salt=salt)[0]
    named = {"cold": cold, "again": again, "first": first, "second": second}
    return {name: plain(result) for name, result in named.items()}


def poisoned(engine: Any) -> dict[str, Any]:
    """A prompt cold before and after every slot was filled with NaN, and once more."""
    tokens = harness.prompt(920, 60)
    before = engine.run([tokens], salt=driving.salt())[0]
    driving.fill_slots(engine, math.nan)
    after = [engine.run([tokens], salt=driving.salt())[0] for _ in range(2)]
    return {"before": plain(before), "after": [plain(result) for result in after]}


def _merged_prefills(engine: Any) -> str:
    try:
        engine.run([harness.prompt(930 + i, 100) for i in range(4)], max_tokens=2)
    except AssertionError as error:
        import traceback

        return traceback.extract_tb(error.__traceback__)[-1].name
    return "no error"


def _work(folder: Path) -> dict[str, Any]:
    harness.activate()
    import tiny_models

    model = tiny_models.write(tiny_models.DENSE, folder)
    found: dict[str, Any] = {}
    with harness.start(model, enable_prefix_caching=False) as engine:
        scheduler = type(engine.scheduler)
        found["uncached"] = {
            "scheduler": f"{scheduler.__module__}.{scheduler.__qualname__}",
            "answers": uncached_answers(engine),
            "padding block": engine.runner._PAD_BLOCK_ID,
        }
    merging = {"VLLM_PROMPT_BS_BUCKET_MAX": "4"}
    with harness.start(model, env=merging, max_num_batched_tokens=512) as engine:
        found["platform"] = type(engine.worker).__module__
        found["hits"] = hits(engine)
        found["poisoned"] = poisoned(engine)
        found["merged prefills"] = _merged_prefills(engine)
    with harness.start(model, env={"VLLM_COMPACT_GDN": "0"}, max_num_batched_tokens=512) as engine:
        found["non-compact hits"] = hits(engine)
    spawned = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    with harness.start(model, env=spawned) as engine:
        (sizes,) = engine.llm.collective_rpc(child.live_sizes)
        found["spawned"] = sizes | {"own process": sizes["pid"] != os.getpid()}
        found["spawned hits"] = hits(engine)
    return found


if __name__ == "__main__":
    child.main(_work)
