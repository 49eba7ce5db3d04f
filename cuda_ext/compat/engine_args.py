"""Replaced: `EngineArgs._set_default_chunked_prefill_and_prefix_caching_args` and
`EngineArgs.create_engine_config` (vllm/engine/arg_utils.py), in 0.26.0, 0.31.0 and 0.33.0.

Why: vLLM turns prefix caching on by default for hybrid models, and once the configuration is made
nobody can tell that default from `--enable-prefix-caching`. ReplaySSM does not save states at block
boundaries yet, so the default is turned off and the wish is refused; the difference is there only
while the default is set. And a refusal belongs in the process that the operator started, before a
worker loads a model; vLLM has no hook for a plugin there.

Both call the replaced method. Until: the first goes when ReplaySSM supports prefix caching; the
second when vLLM lets a plugin check a configuration.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from vllm_gaudi_ext.config import read_options
from vllm_gaudi_ext.log import logger_for

_MARK = "_gaudi_ext_replay"
_SET_DEFAULTS = "_set_default_chunked_prefill_and_prefix_caching_args"
_CREATE = "create_engine_config"


def install() -> None:
    """Replace both methods; a second call changes nothing.

    Raises:
        AttributeError, TypeError: this vLLM has other methods.
    """
    from vllm.engine.arg_utils import EngineArgs

    _replace(EngineArgs, _SET_DEFAULTS, ("self", "model_config"), _defaults)
    _replace(EngineArgs, _CREATE, ("self",), _checked_config)


def _replace(owner: type, name: str, leading: tuple[str, ...], wrap: Any) -> None:
    method = getattr(owner, name)
    if hasattr(method, _MARK):
        return
    names = tuple(inspect.signature(method).parameters)
    if names[: len(leading)] != leading:
        raise TypeError(f"{owner.__name__}.{name} takes {names}, not first {leading}")
    replacement = functools.wraps(method)(wrap(method))
    setattr(replacement, _MARK, method)
    setattr(owner, name, replacement)


def _defaults(method: Any) -> Any:
    def set_defaults(self: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        if self.enable_prefix_caching is None and _will_replay(self, model_config):
            self.enable_prefix_caching = False
            logger_for(__name__).info(
                "gaudi_ext: prefix caching, which vLLM turns on by default for this model, is off "
                "because ReplaySSM is active; replay 'off' brings it back."
            )
        return method(self, model_config, *args, **kwargs)

    return set_defaults


def _will_replay(args: Any, model_config: Any) -> bool:
    """Whether ReplaySSM will be active, from what is known before the configuration is made."""
    from cuda_ext.facts import ARCHITECTURES

    replay = read_options(args.additional_config).replay
    if replay == "off" or model_config.architecture not in ARCHITECTURES:
        return False
    return replay == "on" or bool(args.speculative_config)


def _checked_config(method: Any) -> Any:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A misspelt option is told before anything is loaded for it.
        read_options(self.additional_config)
        config = method(self, *args, **kwargs)
        from cuda_ext.activation import checked_facts

        if config.model_config is not None:
            checked_facts(config)
        return config

    return create_engine_config
