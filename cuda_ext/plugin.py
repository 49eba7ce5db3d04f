"""What `VLLM_PLUGINS=gaudi_ext` registers with vLLM where no HPU stack is there.

Model classes by name, which vLLM imports when it needs one, and the checks that run where the
engine's configuration is made. Importing one of the model classes replaces the layer.

vLLM logs and swallows an exception of a plugin, and would then serve without it; so a failure here
ends the process.
"""

from __future__ import annotations

from cuda_ext.facts import ARCHITECTURES


class PluginFailure(SystemExit):
    """ReplaySSM could not be registered; vLLM's plugin loader lets this through."""


def register() -> None:
    """Register everything; a second call changes nothing.

    Raises:
        PluginFailure: vLLM lacks what this package extends.
    """
    try:
        _register()
    except Exception as error:
        from vllm_gaudi_ext import versions

        problem = versions.replay_version_problem(versions.installed_vllm())
        raise PluginFailure(
            f"gaudi_ext refuses to start: it can't be registered with this vLLM "
            f"({type(error).__name__}: {error}). "
            + (str(problem) if problem else "Take gaudi_ext out of VLLM_PLUGINS to serve without")
        ) from error


def _register() -> None:
    from vllm.model_executor.models import ModelRegistry

    from cuda_ext.compat import engine_args

    known = ModelRegistry.get_supported_archs()
    for architecture, module in ARCHITECTURES.items():
        if architecture in known:
            ModelRegistry.register_model(architecture, f"{module}:{architecture}")
    engine_args.install()
