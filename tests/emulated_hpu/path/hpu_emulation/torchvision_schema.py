"""Lets PyPI's torchvision be imported beside a CPU build of torch.

PyPI's torchvision wheel is a CUDA build. Its C++ extension does not load into a CPU torch, so the
operator `torchvision::nms` is never defined; `torchvision._meta_registrations` then attaches a
meta kernel to it at import and fails with "operator torchvision::nms does not exist". transformers
imports torchvision wherever it is installed, so vLLM would fail as a whole. Declaring the two
schemas is enough: nothing here calls them, and a call still fails (no kernel is given).

The emulated device installs it, and so does the `cpu` environment, which has a copy of this file
in its site-packages (tests/environments/environment.py). Importing it imports no torch.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

_OPERATORS = ("nms", "qnms")
# torchvision tries to load its C++ extension in this module, and uses the operators in later ones.
_EXTENSION = "torchvision.extension"
_library: Any = None


def declare_missing_schemas() -> None:
    """Declare `torchvision::nms` and `::qnms`, each only where no extension defined it."""
    global _library
    import torch

    missing = [name for name in _OPERATORS if not hasattr(torch.ops.torchvision, name)]
    if not missing:
        return
    # FRAGMENT, because a torchvision extension that does load later must be able to own the name.
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for name in missing:
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class _AfterExtension(importlib.abc.MetaPathFinder):
    """Declares the schemas as soon as torchvision has tried to load its extension.

    Not before: an extension that does load, beside a CUDA build of torch, defines them itself, and
    a second definition is an error.
    """

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _EXTENSION:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(_EXTENSION)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            declare_missing_schemas()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Arrange that torchvision can be imported in this process; once is enough."""
    if _EXTENSION in sys.modules:
        declare_missing_schemas()
    elif not any(isinstance(finder, _AfterExtension) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterExtension())
