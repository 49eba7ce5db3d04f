"""Run by Python at start-up: gives spawned processes and `vllm serve` the emulated device.

Python runs only the first `sitecustomize` on the path, so this one first runs the one that it
shadows, whether or not the emulation is on.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _run_shadowed() -> None:
    here = os.path.realpath(os.path.dirname(os.path.abspath(__file__)))
    others = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _emulate_where_asked() -> None:
    from hpu_emulation import activation, vllm_distribution

    if activation.why_inactive() is None:
        activation.follow_torch()
        vllm_distribution.provide()


_run_shadowed()
_emulate_where_asked()
