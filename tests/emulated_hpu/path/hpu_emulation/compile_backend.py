"""The torch.compile backend "hpu_backend", which runs what it is given.

vLLM decorates functions with it at import, so the name must exist; TORCHDYNAMO_DISABLE keeps
torch from capturing anything, so that every call is eager and visible to `hpu_emulation.rules`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

NAME = "hpu_backend"


def register() -> None:
    """Switch capture off in this process and its children, and register the backend's name."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    import torch._dynamo

    if NAME not in torch._dynamo.list_backends(exclude_tags=None):
        torch._dynamo.register_backend(run_as_given, name=NAME)


def run_as_given(graph: Any, example_inputs: Any, **options: object) -> Callable[..., Any]:
    """The graph's own `forward`."""
    return graph.forward
