"""Qwen3.5 and Qwen3.6, dense and MoE, text and multimodal."""

from __future__ import annotations

from vllm.model_executor.models import qwen3_5

from cuda_ext.models.page import ReplayPage


class Qwen3_5ForConditionalGeneration(ReplayPage, qwen3_5.Qwen3_5ForConditionalGeneration):
    """Dense, with its vision tower."""


class Qwen3_5MoeForConditionalGeneration(ReplayPage, qwen3_5.Qwen3_5MoeForConditionalGeneration):
    """MoE, with its vision tower."""


class Qwen3_5ForCausalLM(ReplayPage, qwen3_5.Qwen3_5ForCausalLM):
    """Dense, text only. vLLM 0.26.0 has the class but does not list it as an architecture."""


class Qwen3_5MoeForCausalLM(ReplayPage, qwen3_5.Qwen3_5MoeForCausalLM):
    """MoE, text only, likewise."""
