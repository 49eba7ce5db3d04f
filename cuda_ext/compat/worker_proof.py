"""Added to vLLM's workers as `worker_extension_cls` where ReplaySSM is to be active.

Why: a worker on another node, or one that lost `VLLM_PLUGINS`, would build vLLM's own layers while
the front process has already turned prefix caching off and counted memory for ours. vLLM imports
this module in each worker by its name, so a node without this package fails there, and the import
proves that the plugin is registered in that process. It adds one call to `collective_rpc`.

vLLM's public option; a class that the operator named keeps its place, and then only the layers
prove themselves (`announce` in cuda_ext/startup.py).
"""

from __future__ import annotations

from typing import Any

from cuda_ext import plugin

plugin.prove_registered()


class ReplayWorkerExtension:
    """What `collective_rpc` can ask of a worker."""

    def gaudi_ext_replay_layers(self) -> dict[str, bool]:
        """Each GDN layer of this worker by name, and whether ReplaySSM serves it."""
        from cuda_ext.layers.gdn_replay import gdn_layers

        config: Any = self.vllm_config  # type: ignore[attr-defined]
        layers = gdn_layers(config)
        return {name: getattr(layer, "replay", None) is not None for name, layer in layers.items()}
