"""What every test folder shares: the engine harness on the path, and one skip with its reason."""

from __future__ import annotations

import sys
from importlib import util
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "engines"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in ("vllm", "vllm_gaudi") if util.find_spec(name) is None]
    if not missing:
        return
    skip = pytest.mark.skip(reason=f"engine tests need {' and '.join(missing)}, not installed here")
    for item in items:
        if item.get_closest_marker("engine"):
            item.add_marker(skip)
