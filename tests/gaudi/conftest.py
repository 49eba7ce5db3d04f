"""The real vllm-gaudi engine on the emulated device, with this package, in this process.

One engine runs at a time. `engine` gives the running one if it was started with the same options,
so tests that share options should stand together; each test uses salts of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from typing import Any

import pytest

AVAILABLE = all(util.find_spec(name) is not None for name in ("vllm", "vllm_gaudi"))

if AVAILABLE:
    import harness

    os.environ["VLLM_PLUGINS"] = "gaudi_ext"
    harness.activate()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).resolve().parent
    for item in items:
        if here in item.path.resolve().parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    """Writes a tiny checkpoint once a session and gives its folder."""
    import tiny_models

    folder = tmp_path_factory.mktemp("models")
    return lambda model: tiny_models.write(model, folder)


class Engines:
    """Starts engines one after another, and keeps the last one for whoever asks for the same."""

    def __init__(self, models: Callable[[Any], Path]) -> None:
        self._models = models
        self._key: object = None
        self._context: Any = None
        self._engine: Any = None

    def __call__(self, model: Any = None, **options: Any) -> Any:
        import tiny_models

        model = model or tiny_models.DENSE
        key = (model.name, repr(sorted(options.items())))
        if key != self._key:
            self.stop()
            if options.get("dtype") == "float32":
                import fp32

                fp32.allow()
            self._context = harness.start(self._models(model), **options)
            self._engine = self._context.__enter__()
            self._key = key
        return self._engine

    def stop(self) -> None:
        context, self._context, self._engine, self._key = self._context, None, None, None
        if context is not None:
            context.__exit__(None, None, None)


@pytest.fixture(scope="session")
def engines(models: Callable[[Any], Path]) -> Iterator[Engines]:
    """Starts an engine, or gives the running one where model and options are the same."""
    engines = Engines(models)
    yield engines
    engines.stop()
