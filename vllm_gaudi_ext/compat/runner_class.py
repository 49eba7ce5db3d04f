"""Makes vllm-gaudi's worker build our model runner.

Target: the module global `HPUModelRunner` of `vllm_gaudi.v1.worker.hpu_worker` (0.26.0), which
`HPUWorker.init_device` and `HPUWorker.load_model` look up by name. Why: the worker offers no hook
for the class. How: the global is swapped for the length of a call and put back, so that nobody else
sees it. Remove when the worker takes its runner class from an attribute or a method.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_gaudi.v1.worker import hpu_worker


@contextmanager
def runner_class(cls: type) -> Iterator[None]:
    """While this is open, `HPUWorker` builds `cls`.

    Raises:
        RuntimeError: the worker module has no such global, or `cls` is not a subclass of it.
    """
    original = getattr(hpu_worker, "HPUModelRunner", None)
    if original is None or not issubclass(cls, original):
        raise RuntimeError(
            "vllm_gaudi.v1.worker.hpu_worker.HPUModelRunner is "
            f"{original!r}, which {cls.__qualname__} does not extend: this vllm-gaudi differs from "
            "the tested one"
        )
    hpu_worker.HPUModelRunner = cls
    try:
        yield
    finally:
        hpu_worker.HPUModelRunner = original
