"""Replaced: `EngineArgs._set_default_chunked_prefill_and_prefix_caching_args` and
`EngineArgs.create_engine_config` (vllm/engine/arg_utils.py), in 0.26.0, 0.31.0 and 0.33.0.

Why: vLLM 0.31.0 and 0.33.0 turn prefix caching on by default for hybrid models (0.26.0 does not),
and once the configuration is made nobody can tell that default from `--enable-prefix-caching`.
ReplaySSM does not save states at block boundaries yet, so the default is turned off and the wish is
refused; the difference is there only while the default is set. And a refusal belongs in the process
that the operator started, before a worker loads a model; vLLM has no hook for a plugin there.

Both call the replaced method. Until: the first goes when ReplaySSM supports prefix caching; the
second when vLLM lets a plugin check a configuration.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from typing import Any

from vllm_gaudi_ext import problems
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

    _replace(EngineArgs, _CREATE, ("self",), _checked_config)
    _replace(EngineArgs, _SET_DEFAULTS, ("self", "model_config"), _defaults)


def install_unnamed() -> None:
    """Where `VLLM_PLUGINS` does not name this package: refuse an engine that asks for ReplaySSM.

    Nothing else changes, nothing is imported for it, and a vLLM with other methods is left alone:
    nobody asked for us there.
    """
    arg_utils = sys.modules.get("vllm.engine.arg_utils")
    if arg_utils is None:
        return
    with contextlib.suppress(AttributeError, TypeError):
        _replace(arg_utils.EngineArgs, _CREATE, ("self",), _refuse_unnamed)


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
        asked = self.enable_prefix_caching is not None
        result = method(self, model_config, *args, **kwargs)
        if not asked and self.enable_prefix_caching and _will_replay(self, model_config):
            self.enable_prefix_caching = False
            logger_for(__name__).info(
                "gaudi_ext: prefix caching, which vLLM turns on by default for this model, is off "
                "because ReplaySSM will be active; replay 'off' brings it back."
            )
        return result

    return set_defaults


def _will_replay(args: Any, model_config: Any) -> bool:
    """Whether ReplaySSM will be active, from what is known before the configuration is made."""
    from cuda_ext.refusals import asks_for_replay

    # The number of drafts may still be read from the drafter; there is one where there is a config.
    return asks_for_replay(
        read_options(args.additional_config).replay,
        model_config.architecture,
        drafts=bool(args.speculative_config),
    )


def _checked_config(method: Any) -> Any:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A misspelt option is told before anything is loaded for it.
        options = read_options(self.additional_config)
        config = method(self, *args, **kwargs)
        if options.replay != "off" and config.model_config is not None:
            _check(config)
        return config

    return create_engine_config


def _check(config: Any) -> None:
    from cuda_ext.activation import checked_facts
    from cuda_ext.refusals import wants_replay

    facts = checked_facts(config)
    parallel = config.parallel_config
    if facts is not None and wants_replay(facts) and not parallel.worker_extension_cls:
        # By name: the module proves something of the process that imports it.
        parallel.worker_extension_cls = "cuda_ext.compat.worker_proof.ReplayWorkerExtension"


def _refuse_unnamed(method: Any) -> Any:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if read_options(self.additional_config).replay == "on":
            from cuda_ext import refusals

            problems.refuse("serve with ReplaySSM", [refusals.not_named()])
        return method(self, *args, **kwargs)

    return create_engine_config
