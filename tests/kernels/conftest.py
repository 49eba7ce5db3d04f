"""Where the kernels run: compiled on a GPU, else in Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import sys
from importlib import util
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from forms import FORMS, Kernels

MISSING = [name for name in ("torch", "triton") if util.find_spec(name) is None]
if MISSING:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str | None:
    if not MISSING:
        return None
    return f"tests/kernels: left out, {' and '.join(MISSING)} not installed here"


def _prepare() -> bool:
    """Import the kernels in the form that can run here; whether that is on a GPU."""
    import torch

    if torch.cuda.is_available():
        return True
    loaded = sys.modules.get("triton")
    # Triton looks at the variable when a function is decorated, its own library's among them.
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton
        import triton.experimental.gluon  # else imported by the first launch, with the same check

        if loaded is not None and isinstance(triton.language.sum, triton.JITFunction):
            raise pytest.UsageError(
                "Triton was imported before tests/kernels could ask for its interpreter: run "
                "pytest tests/kernels by itself"
            )
        import cuda_ext.ops.chunk
        import cuda_ext.ops.cursor
        import cuda_ext.ops.replay  # noqa: F401
    finally:
        del os.environ["TRITON_INTERPRET"]
    return False


ON_GPU = False if MISSING else _prepare()


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.cuda] if form.device == "cuda" else [])
        for name, form in FORMS.items()
    ]
)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    form = FORMS[request.param]
    if form.device == "cuda" and not ON_GPU:
        pytest.skip("needs an NVIDIA GPU")
    if form.device == "cpu" and ON_GPU:
        pytest.skip("Triton compiles for the GPU here, and does not interpret")
    return form
