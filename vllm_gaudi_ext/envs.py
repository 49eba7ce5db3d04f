"""Every environment variable this package reads; nothing else in it reads os.environ.

Our own variables stand in `environment_variables`, are read lazily (each access sees the value of
that moment), and are merged into vLLM's table of known variables by `plugin.register_general`, so
that vLLM does not warn about names it has never heard of. Variables that belong to vLLM or to
vllm-gaudi are read by the functions below and never written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
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


# The functions below take another mapping where a deployment's own environment is meant, as
# `gaudi-ext preflight` does with the `env` of a recipe.


def with_overrides(overrides: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with the given variables set."""
    return {**os.environ, **overrides}


def named_in_vllm_plugins(plugin: str, environment: Mapping[str, str] | None = None) -> bool:
    """Whether `VLLM_PLUGINS` names this plugin (vLLM's own variable, a comma-separated list)."""
    names = _of(environment).get("VLLM_PLUGINS")
    return names is not None and plugin in names.split(",")


def contiguous_pa(environment: Mapping[str, str] | None = None) -> bool:
    """Whether vllm-gaudi's contiguous paged attention is asked for by `VLLM_CONTIGUOUS_PA`.

    Unset means off where prefix caching is on (vllm-gaudi 0.26.0, extension/features.py).
    """
    return _of(environment).get("VLLM_CONTIGUOUS_PA", "").lower() in (*_TRUE, "t", "y")


def compact_gdn(environment: Mapping[str, str] | None = None) -> bool:
    """Whether vllm-gaudi will use compact GDN slots: `VLLM_COMPACT_GDN`, on unless switched off."""
    value = _of(environment).get("VLLM_COMPACT_GDN", "")
    return not value or value.strip().lower() in ("1", "true")


def defragmenter(environment: Mapping[str, str] | None = None) -> bool:
    """Whether `VLLM_DEFRAG` turns vllm-gaudi's KV defragmenter on.

    Unset, it follows contiguous paged attention, which is a fact of its own.
    """
    return _of(environment).get("VLLM_DEFRAG", "").lower() in (*_TRUE, "t", "y")


def fused_gdn_decode_kernel(environment: Mapping[str, str] | None = None) -> bool:
    """Whether `VLLM_GDN_DECODE_KERNEL`, vLLM's own, asks for its fused CUDA kernel by name."""
    return _of(environment).get("VLLM_GDN_DECODE_KERNEL", "").strip().lower() == "cuda"


def _of(environment: Mapping[str, str] | None) -> Mapping[str, str]:
    return os.environ if environment is None else environment
