"""When the emulation may run, and how a process gets it. Needs no torch.

Two things must both be true: the folder that holds this package is named in PYTHONPATH, and
VLLM_USE_FAKE_HPU is set to something other than 0 (the variable that vllm-gaudi itself reads to
skip what only a device can do). PYTHONPATH rather than `sys.path` is asked, because spawned engine
processes inherit the former and not the latter: half a set-up would fail later and less clearly.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parent.parent
"""The folder to put on PYTHONPATH."""

SWITCH = "VLLM_USE_FAKE_HPU"


def why_inactive() -> str | None:
    """The reason why the emulation may not run in this process, or None where it may."""
    value = os.environ.get(SWITCH, "0")
    if value == "0":
        return f"{SWITCH} is {value!r}; set it to 1 for tests that run without a Gaudi device"
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if not any(Path(entry).resolve() == FOLDER for entry in entries):
        return f"PYTHONPATH does not name {str(FOLDER)!r}; it has {entries!r}"
    return None


def require_active(module: str) -> None:
    """Raise ImportError, with the reason, unless the emulation may run."""
    reason = why_inactive()
    if reason is not None:
        raise ImportError(
            f"{module} here is a CPU emulation for tests and is switched off: {reason}"
        )


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Imports `habana_frameworks.torch` as soon as `torch` itself has been imported."""

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            importlib.import_module("habana_frameworks.torch")

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def follow_torch() -> None:
    """Arrange that this process has the emulated device as soon as it has torch.

    A spawned engine imports vllm, and with it transformers and torchvision, before vLLM loads any
    platform plugin, so waiting for vllm-gaudi to import `habana_frameworks` would be too late.
    Importing torch right away would be simple, but would cost seconds in every helper process.
    """
    if "torch" in sys.modules:
        importlib.import_module("habana_frameworks.torch")
    elif not any(isinstance(finder, _AfterTorch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTorch())
