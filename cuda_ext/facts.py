"""What ReplaySSM must know of a deployment, as plain values read off vLLM's configuration.

One place reads vLLM's attribute names, so that the refusals and the decision can be tested without
vLLM, and preflight can fill the same facts from a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cuda_ext.ring import GdnHeads
from vllm_gaudi_ext import envs, versions
from vllm_gaudi_ext.config import ExtOptions, read_options

# Architectures whose GDN layers are vLLM's QwenGatedDeltaNetAttention, with the module of this
# package that holds the out-of-tree class of the same name.
ARCHITECTURES = {
    "Qwen3_5ForCausalLM": "cuda_ext.models.qwen3_5",
    "Qwen3_5MoeForCausalLM": "cuda_ext.models.qwen3_5",
    "Qwen3_5ForConditionalGeneration": "cuda_ext.models.qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "cuda_ext.models.qwen3_5",
    "Qwen3NextForCausalLM": "cuda_ext.models.qwen3_next",
}


@dataclass(frozen=True)
class ReplayFacts:
    """A deployment, as far as ReplaySSM goes.

    Args:
        options: what the operator asked for.
        vllm: version of vLLM; None where a file is checked on a machine without it.
        device: vLLM's name of the device type ("cpu", "cuda", "xpu", ...), but "rocm" for AMD's
            GPUs, which vLLM calls "cuda" too.
        architecture: the model's, as vLLM resolved it.
        drafts: D, draft tokens a step; 0 without speculative decoding.
        method: speculative method; None without.
        drafter_has_states: the draft model has recurrent layers of its own.
        heads: of one GDN layer over all ranks; None for another architecture.
        dtype, conv_dtype, state_dtype: dtype names of the model, the conv window and the state.
        tp, pp, dp, dcp, pcp: tensor, pipeline, data, decode-context and prefill-context parallel
            sizes.
        prefix_caching: whether prefix caching is on.
        kv_connector: name of the KV connector; None without.
        dual_batch_overlap: whether a step is split into micro-batches.
        eager: whether the model runs without graphs.
        capability: compute capability of an NVIDIA GPU; None for others and where it isn't known.
        native_replay: whether this vLLM can serve GDN layers with a replay of its own.
        native_flag: whether vLLM's own `--use-replayssm` is set.
        fused_decode_kernel: whether `VLLM_GDN_DECODE_KERNEL` asks for vLLM's fused kernel.
    """

    options: ExtOptions
    vllm: str | None
    device: str
    architecture: str
    drafts: int
    method: str | None
    drafter_has_states: bool
    heads: GdnHeads | None
    dtype: str
    conv_dtype: str
    state_dtype: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    dcp: int = 1
    pcp: int = 1
    prefix_caching: bool = False
    kv_connector: str | None = None
    dual_batch_overlap: bool = False
    eager: bool = False
    capability: tuple[int, int] | None = None
    native_replay: bool = False
    native_flag: bool = False
    fused_decode_kernel: bool = False

    @property
    def rows(self) -> int:
        """T_max, rows of a verification step."""
        return self.drafts + 1


def replay_facts(vllm_config: Any) -> ReplayFacts:
    """Read the facts off a vllm.config.VllmConfig.

    Raises:
        ValueError: our options in `additional_config` are not valid.
    """
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    connector = vllm_config.kv_transfer_config
    architecture = model.architecture
    conv_dtype, state_dtype = _state_dtypes(model, cache)
    return ReplayFacts(
        options=read_options(vllm_config.additional_config),
        vllm=versions.installed_vllm(),
        device=_device(),
        architecture=architecture,
        drafts=(speculative.num_speculative_tokens or 0) if speculative else 0,
        method=speculative.method if speculative else None,
        drafter_has_states=_has_states(speculative),
        heads=_heads(model.hf_text_config) if architecture in ARCHITECTURES else None,
        dtype=dtype_name(model.dtype),
        conv_dtype=conv_dtype,
        state_dtype=state_dtype,
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        dp=parallel.data_parallel_size,
        dcp=getattr(parallel, "decode_context_parallel_size", 1),
        pcp=getattr(parallel, "prefill_context_parallel_size", 1),
        prefix_caching=bool(cache.enable_prefix_caching),
        kv_connector=getattr(connector, "kv_connector", None),
        dual_batch_overlap=bool(
            getattr(parallel, "use_ubatching", False) or getattr(parallel, "enable_dbo", False)
        ),
        eager=bool(model.enforce_eager),
        capability=_capability(),
        native_replay=_native_replay(architecture, model),
        native_flag=bool(getattr(cache, "use_replayssm", False)),
        fused_decode_kernel=envs.fused_gdn_decode_kernel(),
    )


def _device() -> str:
    from vllm.platforms import current_platform

    return "rocm" if current_platform.is_rocm() else current_platform.device_type


def _capability() -> tuple[int, int] | None:
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return None
    # Asked of NVML, so that the front process makes no CUDA context.
    found = current_platform.get_device_capability()
    return None if found is None else (found.major, found.minor)


def dtype_name(dtype: Any) -> str:
    """`bfloat16` of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def _heads(text_config: Any) -> GdnHeads:
    return GdnHeads(
        text_config.linear_num_key_heads,
        text_config.linear_num_value_heads,
        text_config.linear_key_head_dim,
        text_config.linear_value_head_dim,
        text_config.linear_conv_kernel_dim,
    )


def _state_dtypes(model: Any, cache: Any) -> tuple[str, str]:
    """Dtype names of conv window and state, as vLLM resolves `auto`."""
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator

    conv, state = MambaStateDtypeCalculator.gated_delta_net_state_dtype(
        model.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
    )
    return dtype_name(conv), dtype_name(state)


def _has_states(speculative: Any) -> bool:
    """Whether a separate draft model keeps recurrent states.

    ngram and suffix set the target's own configuration as the drafter's, and an MTP drafter runs
    the target's attention layers only, so those are no separate model.
    """
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or draft is speculative.target_model_config:
        return False
    return bool(speculative.uses_draft_model() and draft.is_hybrid)


def _native_replay(architecture: str, model: Any) -> bool:
    """Whether vLLM says that its own class of a GDN model supports a replay."""
    if architecture not in ARCHITECTURES:
        return False
    return bool(getattr(model, "supports_replayssm", False))
