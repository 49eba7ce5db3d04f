"""What `VLLM_PLUGINS=gaudi_ext` registers with vLLM where no HPU stack is there.

Model classes by name, which vLLM imports when it needs one, and the checks that run where the
engine's configuration is made. Importing one of the model classes replaces the layer.

vLLM calls this once in a process and lets an exception through, but a second engine in the same
process would then start without it. So the checks come first, and they look for the model classes
(`registration_problem`) whenever ReplaySSM is wanted.
"""

from __future__ import annotations

from cuda_ext.facts import ARCHITECTURES
from vllm_gaudi_ext.problems import Problem


def register() -> None:
    """Register everything; a second call changes nothing.

    Raises:
        RuntimeError: vLLM lacks what this package extends.
    """
    try:
        from cuda_ext.compat import engine_args

        engine_args.install()
        _register_models()
    except Exception as error:
        from vllm_gaudi_ext import versions

        # Neither replay 'off' nor the override helps where there is nothing to register with.
        problem = versions.replay_version_problem(versions.installed_vllm())
        other = f"{problem.what} -> install one of these, or take" if problem else "Take"
        raise RuntimeError(
            f"gaudi_ext refuses to start: it can't be registered with this vLLM "
            f"({type(error).__name__}: {error}). {other} gaudi_ext out of VLLM_PLUGINS to serve "
            "without it"
        ) from error


def _register_models() -> None:
    from vllm.model_executor.models import ModelRegistry

    known = ModelRegistry.get_supported_archs()
    for architecture, module in ARCHITECTURES.items():
        if architecture in known:
            ModelRegistry.register_model(architecture, f"{module}:{architecture}")


def registration_problem(architecture: str) -> Problem | None:
    """Whose model class vLLM will make for `architecture`, where it is not ours.

    A plugin that registers the same name later takes it away with no more than a warning.
    """
    from vllm.model_executor.models import ModelRegistry

    entry = ModelRegistry.models.get(architecture)
    module = getattr(entry, "module_name", None)
    if module is None and entry is not None:
        module = entry.model_cls.__module__
    if module == ARCHITECTURES[architecture]:
        return None
    return Problem(
        f"{architecture} is registered to {module or 'nobody'}, not to this package",
        "take the other plugin out of VLLM_PLUGINS, which should name gaudi_ext",
    )


def prove_registered() -> None:
    """Return where the model classes are registered in this process.

    Raises:
        RuntimeError: they are not, so vLLM's own layers would serve.
    """
    from vllm.model_executor.models import ModelRegistry

    from vllm_gaudi_ext import problems

    known = ModelRegistry.get_supported_archs()
    found = [registration_problem(name) for name in ARCHITECTURES if name in known]
    problems.refuse("serve with ReplaySSM in this process", [p for p in found if p is not None])
