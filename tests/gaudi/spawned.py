"""This package's engine with its core in a spawned process, as `vllm serve` runs it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import child
import driving
import harness
import stock


def _work(folder: Path) -> dict[str, Any]:
    harness.activate(in_process=False)
    import tiny_models

    found: dict[str, Any] = {}
    model = tiny_models.write(tiny_models.DENSE, folder)
    env = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    with harness.start(model, env=env, max_num_batched_tokens=512) as engine:
        (sizes,) = engine.llm.collective_rpc(child.live_sizes)
        found["hits"] = stock.hits(engine)
        prompt, salt = harness.prompt(950, 3 * stock.B), driving.salt()
        runs = [engine.run([prompt], max_tokens=4, salt=salt)[0] for _ in range(2)]
        found["whole blocks"] = [stock.plain(run) for run in runs]
        (later,) = engine.llm.collective_rpc(child.live_sizes)
    return found | {"sizes": sizes, "sizes later": later, "parent": os.getpid()}


if __name__ == "__main__":
    child.main(_work)
