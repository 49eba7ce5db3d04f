"""Qwen3-Next, and Qwen3-Coder-Next, which has the same architecture."""

from __future__ import annotations

from vllm.model_executor.models import qwen3_next

from cuda_ext.models.page import ReplayPage


class Qwen3NextForCausalLM(ReplayPage, qwen3_next.Qwen3NextForCausalLM):
    """MoE, text only."""
