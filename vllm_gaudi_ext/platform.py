"""The platform seam: vllm-gaudi's HpuPlatform, with our worker and scheduler, and B kept.

Stands in for `HpuPlatform.check_and_update_config` (vllm_gaudi/platform.py). Imported by vLLM when
it resolves the platform, so a refusal of the installed versions is raised here, where vLLM does not
swallow it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ext import versions

versions.require_tested_versions()

from vllm_gaudi.platform import HpuPlatform  # noqa: E402  (its import may fail outside the window)

from vllm_gaudi_ext import facts  # noqa: E402
from vllm_gaudi_ext.config import read_options  # noqa: E402
from vllm_gaudi_ext.gdn import refusals  # noqa: E402

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class GaudiExtPlatform(HpuPlatform):
    """HpuPlatform, where GDN hybrids with prefix caching get checkpoints in their pages."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Adds our classes, refuses what cannot be served, and keeps B through later calls.

        vLLM calls this at each `VllmConfig.__post_init__`, the last time after the KV cache and
        the scheduler were built (v1/engine/core.py, after the handshake). vllm-gaudi then resets
        the live block size to 128, and chunks would no longer end where checkpoints are made.

        Raises:
            RuntimeError: every problem of the configuration, each with the flag that mends it.
            ValueError: an option of ours in `additional_config` is not valid.
        """
        options = read_options(vllm_config.additional_config)
        cache = vllm_config.cache_config
        parallel = vllm_config.parallel_config
        caching = facts.caches_gdn_prefixes(vllm_config)
        refusals.refuse_options(refusals.option_problems(options))
        if caching:
            # Before super(): it turns caching off, or a switch on, without an error.
            refusals.refuse(refusals.config_problems(cls._facts(vllm_config)))
        if parallel.worker_cls == "auto":
            parallel.worker_cls = facts.WORKER

        kept = None
        if caching and cache.num_gpu_blocks is not None:
            kept = (cache.block_size, cache.mamba_block_size, cache.mamba_page_size_padded)
        super().check_and_update_config(vllm_config)
        if kept is not None:
            cache.block_size, cache.mamba_block_size, cache.mamba_page_size_padded = kept

        scheduler = vllm_config.scheduler_config
        if caching and facts.foreign_scheduler(scheduler.scheduler_cls) is None:
            # After super(), which may still turn asynchronous scheduling off.
            scheduler.scheduler_cls = (
                facts.ASYNC_SCHEDULER if scheduler.async_scheduling else facts.SCHEDULER
            )

    @classmethod
    def _facts(cls, vllm_config: VllmConfig) -> refusals.ServingFacts:
        return facts.serving_facts(
            vllm_config,
            foreign_worker=facts.foreign_worker(vllm_config.parallel_config.worker_cls),
            foreign_scheduler=facts.foreign_scheduler(vllm_config.scheduler_config.scheduler_cls),
        )
