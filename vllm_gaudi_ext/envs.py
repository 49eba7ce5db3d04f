"""Every environment variable this package reads; nothing else in it reads os.environ.

Our own variables stand in `environment_variables`, are read lazily (each access sees the value of
that moment), and are merged into vLLM's table of known variables by `plugin.register_general`, so
that vLLM does not warn about names it has never heard of. Variables that belong to vLLM or to
vllm-gaudi are read by the functions below and never written.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    VLLM_GAUDI_EXT_ALLOW_UNTESTED_VERSIONS: bool = False

_TRUE = ("1", "true", "yes", "on")


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in _TRUE


environment_variables: dict[str, Callable[[], Any]] = {
    # Start with versions of vLLM or vllm-gaudi that this package was not tested with. For people
    # who are testing such a version: nothing promises that a hit equals a cold run there.
    "VLLM_GAUDI_EXT_ALLOW_UNTESTED_VERSIONS": lambda: _flag(
        "VLLM_GAUDI_EXT_ALLOW_UNTESTED_VERSIONS"
    ),
}


def __getattr__(name: str) -> Any:
    if name in environment_variables:
        return environment_variables[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *environment_variables]


def named_in_vllm_plugins(plugin: str) -> bool:
    """Whether `VLLM_PLUGINS` names this plugin (vLLM's own variable, a comma-separated list)."""
    names = os.environ.get("VLLM_PLUGINS")
    return names is not None and plugin in names.split(",")


def contiguous_pa() -> bool:
    """Whether vllm-gaudi's contiguous paged attention is asked for by `VLLM_CONTIGUOUS_PA`.

    Unset means off where prefix caching is on (vllm-gaudi 0.26.0, extension/features.py).
    """
    return os.environ.get("VLLM_CONTIGUOUS_PA", "").lower() in (*_TRUE, "t", "y")


def compact_gdn() -> bool:
    """Whether vllm-gaudi will use compact GDN slots: `VLLM_COMPACT_GDN`, on unless switched off."""
    value = os.environ.get("VLLM_COMPACT_GDN", "")
    return not value or value.strip().lower() in ("1", "true")
