"""vLLM's Gated DeltaNet layer, served from one state and a short ring of inputs.

Stands in for `QwenGatedDeltaNetAttention` (vllm/model_executor/layers/mamba/gdn/), of which it
replaces what the state looks like and what the core of a step does; projections, norm and weights
stay vLLM's. A step reads where its rows lie from the group's plan (cuda_ext/backend/), folds the
rows that earlier steps left pending into the state, and computes its own rows from it
(cuda_ext/ops/). Rejected drafts need no undoing: the next step's position says which rows count.

Where ReplaySSM is not active every method is vLLM's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.platforms import current_platform

from cuda_ext.activation import active, torch_dtypes
from cuda_ext.backend.chunk_plan import chunks_at_once
from cuda_ext.backend.replay_attn import PackedReplayBackend, ReplayBackend, ReplayMetadata
from cuda_ext.compat.page_binding import WatchedPages
from cuda_ext.layers.steps import Inputs, ReferenceSteps, Steps, layer_pages
from cuda_ext.ops.reference import Weights
from cuda_ext.packing import asks_to_pack, settled_layout
from cuda_ext.refusals import refuse
from cuda_ext.ring import GdnHeads, PageLayout
from cuda_ext.startup import announce
from vllm_gaudi_ext.problems import Problem

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.kv_cache_interface import KVCacheSpec


class PlainWeight(UnquantizedLinearMethod):
    """Leaves the convolution's weight as it was loaded.

    On a CPU with AVX512-BF16 vLLM packs it for a kernel that is not used here, and which has no
    fp32 form, so that no Qwen3.5 loads in fp32 (`dispatch_cpu_unquantized_gemm`, vLLM 0.31.0).
    """

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Does nothing: the convolution is not run as a linear layer."""


class ReplayGatedDeltaNetAttention(WatchedPages, QwenGatedDeltaNetAttention):
    """A GDN layer with ReplaySSM, or vLLM's own where that is not active.

    Attributes:
        replay: the layer's page; None where vLLM's own layer serves, and there are no others.
        replay_backend: what computes its steps, "kernels" or "reference".
        chunk_kernels: what computes its prefill chunks, see `Active.chunk_kernels`.
        chunks_at_once: chunks of a call of those.
    """

    replay: PageLayout | None = None
    _rehearsed = False

    def __init__(self, config: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        # Before vLLM's own constructor, which asks methods below.
        found = active(vllm_config)
        self.replay = None if found is None else found.page
        self._vllm_config = vllm_config
        super().__init__(config, vllm_config, *args, **kwargs)
        if found is None:
            return
        self.replay_backend = found.backend
        self.chunk_kernels = found.chunk_kernels(self.gdn_prefill_backend)
        heads = GdnHeads(
            self.num_k_heads,
            self.num_v_heads,
            self.head_k_dim,
            self.head_v_dim,
            self.conv_kernel_size,
        ).shard(self.tp_size)
        self.chunks_at_once = chunks_at_once(heads)
        self._steps = self._make_steps(heads)
        if current_platform.is_cpu():
            # vLLM's CPU path calls its own core by an operator of its own; this one ends in
            # `_forward_core` on every platform.
            self._forward_method = self.forward_cuda
            self.conv1d.quant_method = PlainWeight()

    def _make_steps(self, heads: GdnHeads) -> Steps:
        if self.replay_backend == "reference":
            return ReferenceSteps(heads)
        # Needs Triton, which a CPU has no use for.
        from cuda_ext.layers.kernel_steps import KernelSteps

        return KernelSteps(heads, self.chunk_gated_delta_rule, self.chunk_kernels)

    def get_state_shape(self) -> Any:
        """Shapes of the page's states, in page order (cuda_ext/ring.py)."""
        if self.replay is None:
            return super().get_state_shape()
        return self.replay.shapes

    def get_state_dtype(self) -> Any:
        """torch dtypes of those states."""
        if self.replay is None:
            return super().get_state_dtype()
        return torch_dtypes(self.replay)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """vLLM's spec, without blocks for the states of drafts, and bare where blocks are packed.

        Raises:
            RuntimeError: vLLM's page is smaller than ours, as when another out-of-tree model class
                told it another state.
        """
        if self.replay is None:
            return super().get_kv_cache_spec(vllm_config)
        padded = vllm_config.cache_config.mamba_page_size_padded
        if padded is not None and padded < self.replay.nbytes:
            refuse(
                [
                    Problem(
                        f"a page of {self.replay.nbytes} bytes is needed for the state and ring "
                        f"of {self.prefix}, and vLLM made one of {padded} bytes",
                        "remove --block-size, --mamba-block-size, and other plugins that "
                        "register this model",
                    )
                ]
            )
        spec = super().get_kv_cache_spec(vllm_config)
        if settled_layout(vllm_config) is not None:
            padded = None
        return replace(spec, num_speculative_blocks=0, page_size_padded=padded)

    def pages_bound(self, views: Sequence[torch.Tensor]) -> None:
        """Say once what the pool holds."""
        if self.replay is not None:
            announce(self._vllm_config, self.prefix, self.replay, views[1].shape[0])

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend whose builder plans the step."""
        if self.replay is None:
            return super().get_attn_backend()
        return PackedReplayBackend if asks_to_pack(self._vllm_config) else ReplayBackend

    def _fused_gdn_decode_unsupported_reason(self, vllm_config: VllmConfig) -> str | None:
        if self.replay is None:
            return super()._fused_gdn_decode_unsupported_reason(vllm_config)
        return "ReplaySSM keeps one state, and that kernel writes one for each row"

    def _forward_core(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> Any:
        """Convolution and recurrence of one step, in place.

        Args:
            mixed_qkv: [tokens, C], the projection of q, k and v before the convolution.
            b, a: [tokens, HV], gate inputs.
            core_attn_out: [tokens, HV, V], zeros; written for every row of a request.

        Raises:
            RuntimeError: a slot's position does not fit its ring, which would be a wrong answer.
                The kernels can't raise, and answer NaN.
        """
        if self.replay is None:
            return super()._forward_core(mixed_qkv, b, a, core_attn_out)
        inputs = Inputs(mixed_qkv, a, b)
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, dict):
            metadata = metadata.get(self.prefix)
        if metadata is None:
            self._rehearse(inputs, core_attn_out)
            return None
        assert isinstance(metadata, ReplayMetadata), type(metadata)
        pages = layer_pages(self.kv_cache)
        self._steps.run(pages, self._weights(), inputs, metadata, core_attn_out)
        return None

    def _rehearse(self, inputs: Inputs, out: torch.Tensor) -> None:
        """In vLLM's profiling run, before there is a cache."""
        if self._rehearsed or current_platform.is_cpu():
            return
        self._rehearsed = True
        # Layers run one after the other in one memory, and are compiled for the same shapes.
        if self.prefix == next(iter(gdn_layers(self._vllm_config))):
            assert self.replay is not None
            self._steps.rehearse(
                self.replay,
                self._weights(),
                inputs,
                out,
                self._vllm_config.num_speculative_tokens + 1,
                self._vllm_config.scheduler_config.max_num_seqs,
            )

    def _weights(self) -> Weights:
        weight = self.conv1d.weight
        return Weights(
            conv_weight=weight.view(weight.size(0), weight.size(-1)),
            conv_bias=self.conv1d.bias,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            activation=self.activation,
        )


def gdn_layers(vllm_config: VllmConfig) -> dict[str, QwenGatedDeltaNetAttention]:
    """The GDN layers of this process by name, ours and vLLM's own."""
    layers = vllm_config.compilation_config.static_forward_context
    return {n: v for n, v in layers.items() if isinstance(v, QwenGatedDeltaNetAttention)}


def register() -> None:
    """Make vLLM build this class for its own; once in a process."""
    from vllm.model_executor import custom_op

    name = QwenGatedDeltaNetAttention.__name__
    found = custom_op.op_registry_oot.get(name)
    if found is None:
        PluggableLayer.register_oot(ReplayGatedDeltaNetAttention, name=name)
    elif found is not ReplayGatedDeltaNetAttention:
        raise RuntimeError(
            f"gaudi_ext: {name} is already replaced by {found.__module__}.{found.__qualname__}: "
            "take the other plugin out of VLLM_PLUGINS"
        )


register()
