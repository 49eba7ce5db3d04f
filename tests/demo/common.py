"""What the demo's files share: the options of its two engines, and its one exception."""

from __future__ import annotations

from typing import Any


class DemoFailure(Exception):
    """The demo can't go on; the text says why."""


ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 4096,
    "max_num_seqs": 4,
    # One block of 384 tokens and a decode token for each running request, in units of 128: so
    # every prefill, cold or cached, is computed block by block, and equal cuts give equal bits.
    "max_num_batched_tokens": 512,
    "limit_mm_per_prompt": {"image": 0, "video": 0},
    "seed": 0,
}
"""Options of the served engine and of the stock one, by the names that `vllm.LLM` gives them."""
