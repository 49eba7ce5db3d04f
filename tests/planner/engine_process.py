"""Runs a Python process that can import the installed vLLM on a machine without an accelerator."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
EMULATED_DEVICE = HERE.parent / "emulated_hpu" / "path"
REPOSITORY = HERE.parent.parent

# The stock vllm-gaudi, without this package's own platform: the planner is compared with it.
STOCK_PLUGINS = ("hpu", "01.hpu_custom_utils", "02.hpu_custom_ops", "03.hpu_custom_models")


def run_with_vllm(
    arguments: Sequence[str], timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Runs `python *arguments` with the emulated device on its path."""
    path = [str(EMULATED_DEVICE), str(HERE), str(REPOSITORY)]
    path += [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_USE_FAKE_HPU": "1",
        "VLLM_PLUGINS": ",".join(STOCK_PLUGINS),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
