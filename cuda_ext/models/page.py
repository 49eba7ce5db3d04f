"""The page that a model class tells vLLM: ours where ReplaySSM is active, else vLLM's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cuda_ext.layers.gdn_replay  # noqa: F401  registers the out-of-tree layer
from cuda_ext.activation import active_layout, torch_dtypes
from cuda_ext.startup import note_block_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ReplayPage:
    """Mixed in before a vLLM model class with GDN layers (`IsHybrid`)."""

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> Any:
        """Shapes of the states of a page, in page order (cuda_ext/ring.py)."""
        layout = active_layout(vllm_config)
        if layout is None:
            return super().get_mamba_state_shape_from_config(vllm_config)  # type: ignore[misc]
        # vLLM asks while it aligns the block size, and only then.
        note_block_size(vllm_config.cache_config)
        return layout.shapes

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> Any:
        """torch dtypes of those states."""
        layout = active_layout(vllm_config)
        if layout is None:
            return super().get_mamba_state_dtype_from_config(vllm_config)  # type: ignore[misc]
        return torch_dtypes(layout)
