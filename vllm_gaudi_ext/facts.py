"""Reads what the refusals need out of vLLM's configuration objects; decides nothing."""

from __future__ import annotations

from typing import Any

from vllm_gaudi_ext import envs
from vllm_gaudi_ext.gdn.refusals import ServingFacts

# Opt-in prefix features of vLLM by the attribute that turns them on, in whichever release has it.
MAMBA_OPT_INS = ("enable_mamba_fine_grained_prefix_cache",)
_GDN_BLOCK_TYPES = ("gdn_attention", "linear_attention")

# By name, so that nothing here imports vllm-gaudi; platform.py puts them into the configuration.
WORKER = "vllm_gaudi_ext.worker.GaudiExtWorker"
SCHEDULER = "vllm_gaudi_ext.scheduler.GdnScheduler"
ASYNC_SCHEDULER = "vllm_gaudi_ext.scheduler.GdnAsyncScheduler"


def foreign_worker(worker: object) -> str | None:
    """The configured worker class where it is not ours and will not become it, else None."""
    return None if worker in ("auto", WORKER) else str(worker)


def foreign_scheduler(scheduler: object) -> str | None:
    """The configured scheduler class where it is not ours and will not become it, else None."""
    return None if scheduler in (None, SCHEDULER, ASYNC_SCHEDULER) else str(scheduler)


def is_gdn_hybrid(vllm_config: Any) -> bool:
    """Whether the model has layers that vllm-gaudi serves with GDN slots.

    The rule is that of vllm-gaudi 0.26.0's model runner (`num_gdn`), Granite's exception included:
    transformers 5 calls its Mamba2 layers linear_attention.
    """
    model = vllm_config.model_config
    if model is None or not model.is_hybrid:
        return False
    if getattr(model.hf_config, "model_type", None) == "granitemoehybrid":
        return False
    parallel = vllm_config.parallel_config
    return any(model.get_num_layers_by_block_type(parallel, t) > 0 for t in _GDN_BLOCK_TYPES)


def caches_gdn_prefixes(vllm_config: Any) -> bool:
    """Whether this package has work to do: a GDN hybrid with prefix caching on."""
    return bool(vllm_config.cache_config.enable_prefix_caching) and is_gdn_hybrid(vllm_config)


def cached_by_default(model_config: Any) -> bool:
    """Whether vLLM turns prefix caching on for this model when nobody says anything.

    vLLM 0.26.0 leaves it off for hybrid models (engine/arg_utils.py,
    `_set_default_chunked_prefill_and_prefix_caching_args`); later releases turn it on.
    """
    return bool(model_config.is_prefix_caching_supported and not model_config.is_hybrid)


def serving_facts(
    vllm_config: Any,
    *,
    compact_gdn: bool | None = None,
    contiguous_pa: bool | None = None,
    defragmenter: bool | None = None,
    block_tokens: int | None = None,
    mamba_cache_mode: str | None = None,
    foreign_worker: str | None = None,
    foreign_scheduler: str | None = None,
) -> ServingFacts:
    """The facts of a vLLM configuration (vllm.config.VllmConfig of 0.26).

    What is left None is taken from the environment, or is not known yet.
    """
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
    transfer = vllm_config.kv_transfer_config
    budget = scheduler.max_num_batched_tokens
    if (scheduled := getattr(scheduler, "max_num_scheduled_tokens", None)) is not None:
        budget = min(budget, scheduled)
    offload = cache.kv_offloading_backend if cache.kv_offloading_size is not None else None
    opt_ins = [n for n in MAMBA_OPT_INS if getattr(cache, n, None)]
    return ServingFacts(
        contiguous_pa=envs.contiguous_pa() if contiguous_pa is None else contiguous_pa,
        compact_gdn=envs.compact_gdn() if compact_gdn is None else compact_gdn,
        speculative=None if speculative is None else str(speculative.method),
        defragmenter=envs.defragmenter() if defragmenter is None else defragmenter,
        prefix_match_unit=getattr(cache, "prefix_match_unit", None),
        mamba_opt_ins=opt_ins,
        kv_connector=None if transfer is None else str(transfer.kv_connector),
        kv_offload=None if offload is None else str(offload),
        pipeline_parallel=parallel.pipeline_parallel_size,
        context_parallel=max(
            getattr(parallel, "decode_context_parallel_size", 1),
            getattr(parallel, "prefill_context_parallel_size", 1),
        ),
        pooling=vllm_config.model_config.runner_type == "pooling",
        max_num_batched_tokens=budget,
        max_num_seqs=scheduler.max_num_seqs,
        long_prefill_token_threshold=getattr(scheduler, "long_prefill_token_threshold", 0),
        disable_chunked_mm_input=bool(scheduler.disable_chunked_mm_input),
        foreign_worker=foreign_worker,
        foreign_scheduler=foreign_scheduler,
        block_tokens=block_tokens,
        mamba_cache_mode=mamba_cache_mode,
    )
