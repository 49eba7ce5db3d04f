"""Differs: where vLLM prepares what its chunk kernels want to know of a step's prompts.

0.26.0 does it in the midst of `GDNAttentionMetadataBuilder.build`, later versions in a private
method of that class (v1/attention/backends/gdn_attn.py). Both end in the same public functions of
the kernels, which are called here, from host lengths, so that nobody waits for the device.

Until: vLLM has a public function for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def chunk_metadata(
    kernels: str, packed: Tensor, packed_host: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Chunk indices and offsets, on the device of `packed`.

    Args:
        kernels: that compute the chunks, as `Active.chunk_kernels` names them.
        packed: [C + 1] int32, first row of each chunk once packed, and the end.
        packed_host: the same on the host.
    """
    if kernels in ("portable", "flashinfer"):
        return None, None
    from vllm.third_party.flash_linear_attention.ops.utils import FLA_CHUNK_SIZE

    if kernels == "cutedsl":
        from vllm.model_executor.layers.mamba.ops.gdn_chunk_cutedsl import prepare_metadata_cutedsl

        return prepare_metadata_cutedsl(packed, int(packed_host[-1]), FLA_CHUNK_SIZE)
    from vllm.third_party.flash_linear_attention.ops.index import (
        prepare_chunk_indices,
        prepare_chunk_offsets,
    )
    from vllm.utils.torch_utils import async_tensor_h2d

    indices = prepare_chunk_indices(packed_host, FLA_CHUNK_SIZE)
    offsets = prepare_chunk_offsets(packed_host, FLA_CHUNK_SIZE)
    return (
        async_tensor_h2d(indices, device=packed.device),
        async_tensor_h2d(offsets, device=packed.device),
    )
