"""The ways to run the kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kernels:
    """One way to run.

    Args:
        device: of the tensors.
        portable: the Triton kernels, even where the CUDA kernel could serve.
        real: shapes and dtypes of real models, which the CUDA kernel asks for.
    """

    device: str
    portable: bool
    real: bool


FORMS = {
    "interpreted": Kernels("cpu", portable=True, real=False),
    "triton": Kernels("cuda", portable=True, real=False),
    "triton-real": Kernels("cuda", portable=True, real=True),
    "cuda": Kernels("cuda", portable=False, real=True),
}
