"""What every test folder shares: the engine harness on the path, and one skip with its reason."""

from __future__ import annotations

import os
import sys
from importlib import util
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "engines"))

MISSING = [name for name in ("vllm", "vllm_gaudi") if util.find_spec(name) is None]
# make test says here why its engine environment could not be made.
REASON = os.environ.get("GAUDI_ENV_MISSING") or (
    f"engine tests need {' and '.join(MISSING)}, not installed here"
)
ENGINE_FOLDER = Path(__file__).resolve().parent / "gaudi"


class WithoutEngine(pytest.Module):
    """A module of engine tests where there is no engine: its imports would fail."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(REASON, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> object:
    if MISSING and ENGINE_FOLDER in module_path.parents:
        return WithoutEngine.from_parent(parent, path=module_path)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not MISSING:
        return
    skip = pytest.mark.skip(reason=REASON)
    for item in items:
        if item.get_closest_marker("engine"):
            item.add_marker(skip)
