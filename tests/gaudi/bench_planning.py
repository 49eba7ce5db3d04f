"""How long planning takes in a step of 256 requests: a benchmark to run by hand, not a test.

    python tests/environments/environment.py gaudi -- python tests/gaudi/bench_planning.py

Drives the real runner on the emulated device, and times what this package adds to a step on the
host: the plan itself, and the whole of `_update_states` beyond the parent's.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "engines"))
os.environ["VLLM_PLUGINS"] = "gaudi_ext"

import harness

harness.activate()

import driving  # noqa: E402  (imports torch, which the emulation must see first)
import tiny_models  # noqa: E402

REQUESTS = 256
PROMPT = 20


def timed(owner: Any, name: str, seconds: list[float]) -> Any:
    """Times a method that takes a scheduler output, in the steps that all requests run in."""
    inner = getattr(owner, name)

    def call(step: Any) -> Any:
        began = time.perf_counter()
        try:
            return inner(step)
        finally:
            if len(step.num_scheduled_tokens) == REQUESTS:
                seconds.append(time.perf_counter() - began)

    return driving.replaced(owner, name, call)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_models.write(driving.small_model(), Path(folder))
        options: dict[str, Any] = {
            "max_num_seqs": REQUESTS,
            "max_num_batched_tokens": 8192,
            "num_gpu_blocks_override": 4096,
            "async_scheduling": True,
        }
        with harness.start(model, **options) as engine:
            tokens = driving.block_tokens(engine)
            plain: list[float] = []
            whole: list[float] = []
            # Each request crosses a boundary once in the run, many of them in the same step.
            prompts = [harness.prompt(i, tokens - PROMPT) for i in range(REQUESTS)]
            with (
                timed(engine.runner, "_plan", plain),
                timed(engine.runner, "_update_states", whole),
            ):
                engine.run(prompts, max_tokens=2 * PROMPT, salt=driving.salt())
            *ordinary, boundary = sorted(plain)
            print(f"requests: {REQUESTS}, B: {tokens}, steps timed: {len(plain)}")
            print(f"plan, decode step: median {statistics.median(ordinary) * 1e6:.0f} us")
            print(f"plan, most requests on a boundary: {boundary * 1e6:.0f} us")
            print(f"_update_states, all of it: median {statistics.median(whole) * 1e6:.0f} us")


if __name__ == "__main__":
    main()
