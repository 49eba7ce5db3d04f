"""Proves at start-up that every piece of this package is active, and names the missing one.

vLLM swallows what a plugin raises while it is loaded, and would go on without it: with the stock
scheduler, say, hits would resume from states that were never saved.
"""

from __future__ import annotations

from typing import Any

from vllm_gaudi_ext import facts, plugin


def missing_pieces(vllm_config: Any, worker: object) -> list[str]:
    """What is not active in this process, in words; empty when all is.

    Args:
        vllm_config: the worker's vllm.config.VllmConfig.
        worker: the worker that is starting.
    """
    from vllm.platforms import current_platform

    from vllm_gaudi_ext.platform import GaudiExtPlatform
    from vllm_gaudi_ext.worker import GaudiExtWorker

    missing = []
    if not isinstance(current_platform, GaudiExtPlatform):
        missing.append(f"platform (active: {_name(current_platform)})")
    if names := plugin.missing_general_plugins():
        missing.append(f"vllm-gaudi's general plugins {', '.join(names)}")
    if not isinstance(worker, GaudiExtWorker):
        missing.append(f"worker (active: {_name(worker)})")
    if facts.caches_gdn_prefixes(vllm_config):
        missing += _missing_scheduler(vllm_config.scheduler_config.scheduler_cls)
    return missing


def _missing_scheduler(scheduler_cls: object) -> list[str]:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from vllm_gaudi_ext.scheduler import GdnPrefixCaching

    cls = scheduler_cls
    if isinstance(cls, str):
        cls = resolve_obj_by_qualname(cls)
    if isinstance(cls, type) and issubclass(cls, GdnPrefixCaching):
        return []
    return [f"scheduler (configured: {scheduler_cls!r})"]


def prove(vllm_config: Any, worker: object, runner: object) -> None:
    """Raise RuntimeError that names every missing piece; return when all are active."""
    from vllm_gaudi_ext.runner import GaudiExtModelRunner

    missing = missing_pieces(vllm_config, worker)
    if not isinstance(runner, GaudiExtModelRunner):
        missing.append(f"model runner (active: {_name(runner)})")
    if missing:
        raise RuntimeError(
            f"gaudi_ext is asked for by VLLM_PLUGINS but not fully active; missing: "
            f"{'; '.join(missing)}. Look above for 'Failed to load plugin', and start with "
            f"VLLM_PLUGINS={plugin.PLUGIN}"
        )


def _name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
