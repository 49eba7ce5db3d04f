"""The worker seam: vllm-gaudi's HPUWorker with our model runner, and proof that all is active."""

from __future__ import annotations

from typing import Any

from vllm_gaudi.v1.worker.hpu_worker import HPUWorker

from vllm_gaudi_ext import activation, versions
from vllm_gaudi_ext.compat.runner_class import runner_class
from vllm_gaudi_ext.runner import GaudiExtModelRunner


class GaudiExtWorker(HPUWorker):
    """HPUWorker whose model runner keeps GDN checkpoints in attention pages."""

    def init_device(self) -> None:
        versions.require_tested_versions()
        with runner_class(GaudiExtModelRunner):
            super().init_device()
        activation.prove(self.vllm_config, self, self.model_runner)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with runner_class(GaudiExtModelRunner):
            super().load_model(*args, **kwargs)
        activation.prove(self.vllm_config, self, self.model_runner)

    def get_kv_cache_spec(self) -> Any:
        """The KV-cache specs, refused here already where they can't be served.

        vLLM asserts some of the same conditions before it initialises the KV cache, one at a time
        and without naming the flag.
        """
        specs = super().get_kv_cache_spec()
        self.model_runner.refuse_specs(specs)
        return specs

    def sleep(self, level: int = 1) -> None:
        """Frees the KV cache; the views into it must go first, or they would keep it alive."""
        self.model_runner.drop_checkpoint_views()
        super().sleep(level)
