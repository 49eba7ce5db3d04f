"""Lets PyPI's torchvision be imported beside a CPU build of torch.

PyPI's torchvision wheel is a CUDA build. Its C++ extension does not load into a CPU torch, so the
operator `torchvision::nms` is never defined; `torchvision._meta_registrations` then attaches a
meta kernel to it at import and fails with "operator torchvision::nms does not exist". transformers
imports torchvision wherever it is installed, so vLLM would fail as a whole. Declaring the two
schemas is enough: nothing here calls them, and a call still fails (no kernel is given).
"""

from __future__ import annotations

import torch

_OPERATORS = ("nms", "qnms")
_library: torch.library.Library | None = None


def declare_missing_schemas() -> None:
    """Declare `torchvision::nms` and `::qnms`, each only where no extension defined it."""
    global _library
    missing = [name for name in _OPERATORS if not hasattr(torch.ops.torchvision, name)]
    if not missing:
        return
    # FRAGMENT, because a torchvision extension that does load later must be able to own the name.
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for name in missing:
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
