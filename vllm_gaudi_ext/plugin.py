"""The entry points that vLLM finds: what is registered where, and nothing heavy imported.

Both entry points are called `gaudi_ext`, since vLLM filters every plugin group by the names in
`VLLM_PLUGINS`. That filter also hides vllm-gaudi's own entry points, so this module calls them:
its platform registration once (each call of it wraps `vllm.plugins.load_general_plugins` again),
and its general plugins in the order of their names, as vllm-gaudi numbers them.
vLLM calls a platform entry point twice in each process, and swallows what the first call raises;
the worker therefore proves at start-up that every piece is active (see activation.py).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata, util

from vllm_gaudi_ext import envs

PLUGIN = "gaudi_ext"
PLATFORM = "vllm_gaudi_ext.platform.GaudiExtPlatform"
_GENERAL_GROUP = "vllm.general_plugins"
_UPSTREAM = "vllm_gaudi"

_platform_chained = False
_general_chained: list[str] = []


def hpu_stack_present() -> bool:
    """Whether vllm-gaudi and the Habana framework can be found, without importing either."""
    return all(util.find_spec(name) is not None for name in (_UPSTREAM, "habana_frameworks"))


def _serves_here() -> bool:
    return envs.named_in_vllm_plugins(PLUGIN) and hpu_stack_present()


def register_platform() -> str | None:
    """Entry point of `vllm.platform_plugins`.

    Returns:
        The platform's qualified name, or None where `VLLM_PLUGINS` does not name this plugin or no
        HPU stack is there: then vLLM goes on as if this package were not installed.
    """
    global _platform_chained
    if not _serves_here():
        return None
    from vllm_gaudi_ext import versions

    if versions.version_problems():
        # vLLM would swallow an exception here and start on some other platform. The import of the
        # platform class raises the same problems where vLLM lets them through.
        return PLATFORM
    if not _platform_chained:
        import vllm_gaudi

        vllm_gaudi.register()
        _platform_chained = True
    return PLATFORM


def register_general() -> None:
    """Entry point of `vllm.general_plugins`: our variables, and what this machine is served with.

    With an HPU stack those are vllm-gaudi's general plugins, else ReplaySSM (cuda_ext/plugin.py).
    Where `VLLM_PLUGINS` does not name this plugin vLLM stays as it is, and only refuses an engine
    that asks for ReplaySSM all the same.

    Raises:
        RuntimeError: ReplaySSM can't be registered with this vLLM.
    """
    if not envs.named_in_vllm_plugins(PLUGIN):
        from cuda_ext.compat import engine_args

        engine_args.install_unnamed()
        return
    _merge_variables()
    if not hpu_stack_present():
        from cuda_ext import plugin as replay_plugin

        replay_plugin.register()
        return
    for entry in upstream_general_plugins():
        if entry.name not in _general_chained:
            register: Callable[[], None] = entry.load()
            register()
            _general_chained.append(entry.name)


def upstream_general_plugins() -> list[metadata.EntryPoint]:
    """vllm-gaudi's general plugins, sorted by name (it prefixes the names with their order)."""
    entries = metadata.entry_points(group=_GENERAL_GROUP)
    return sorted(
        (entry for entry in entries if entry.module.split(".")[0] == _UPSTREAM),
        key=lambda entry: entry.name,
    )


def missing_general_plugins() -> list[str]:
    """Names of vllm-gaudi's general plugins that have not run in this process."""
    return [e.name for e in upstream_general_plugins() if e.name not in _general_chained]


def _merge_variables() -> None:
    from vllm import envs as vllm_envs

    vllm_envs.environment_variables.update(envs.environment_variables)
