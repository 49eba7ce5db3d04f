"""Runs a script of this folder in a process of its own, with the engine's environment.

The script is called with two arguments: a folder for tiny checkpoints, and the file into which it
writes its result as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

HERE = Path(__file__).resolve().parent


def run(script: str, plugins: str | None, seconds: float = 600) -> Any:
    """The result that a script of this folder wrote.

    Args:
        script: the file's name.
        plugins: `VLLM_PLUGINS`; None leaves it unset, so that vLLM loads whatever is installed.
        seconds: the longest that it may take.

    Raises:
        AssertionError: it failed; the end of what it printed is in the message.
    """
    env = harness.environment()
    env.pop("VLLM_PLUGINS", None)
    if plugins is not None:
        env["VLLM_PLUGINS"] = plugins
    path = [str(HERE), str(HERE.parent / "engines"), env["PYTHONPATH"]]
    env["PYTHONPATH"] = ":".join(path)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        done = subprocess.run(
            [sys.executable, str(HERE / script), folder, str(result)],
            env=env,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, f"{script} ended in {done.returncode}:\n{done.stderr[-6000:]}"
        return json.loads(result.read_text())


def main(work: Any) -> None:
    """The other side: calls `work(models folder)` and writes what it gives."""
    folder, result = sys.argv[1:]
    Path(result).write_text(json.dumps(work(Path(folder))))


def live_sizes(worker: Any) -> dict[str, Any]:
    """What the engine core holds right now, asked from inside of it (`collective_rpc`).

    vLLM runs a lone worker in the engine core's own process, so the core is a caller of this.
    """
    import os

    frame: Any = sys._getframe()
    while frame is not None and not hasattr(frame.f_locals.get("self"), "scheduler"):
        frame = frame.f_back
    assert frame is not None, "this does not run inside the engine core"
    scheduler = frame.f_locals["self"].scheduler
    cache = scheduler.cache_config
    # A function is called with vLLM's wrapper around the worker.
    worker = getattr(worker, "worker", worker)
    return {
        "pid": os.getpid(),
        "block tokens": scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
        "block_size": cache.block_size,
        "mamba_block_size": cache.mamba_block_size,
        "mamba_page_size_padded": cache.mamba_page_size_padded,
        "worker shares it": worker.vllm_config.cache_config is cache,
        "scheduler": type(scheduler).__name__,
        "worker": type(worker).__name__,
        "runner": type(worker.model_runner).__name__,
    }
