"""What the demo's files share: where results lie, the options of its engines, and how it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
BUILD = TESTS.parent / "build"
GAUDI_RESULT = BUILD / "demo.json"
REPLAY_RESULT = BUILD / "demo-replay.json"

OK, FAILED, LEFT_OUT = "ok", "FAILED", "left out"
"""How a flow ends: the `status` in its file, and in its last line."""


class DemoFailure(Exception):
    """The demo can't go on; the text says why."""


class LeftOut(Exception):
    """This flow can't run on this machine, for a reason that is excused; the text says why."""


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
"""Options of the Gaudi flow's served engine and of its stock one, by the names of `vllm.LLM`."""

REPLAY_ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    # One rounding for every batch shape: in bf16 a batch with drafts rounds otherwise than one
    # without, and a near tie of two tokens would go the other way.
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 8,
    # Longer prompts are computed in chunks, beside requests that decode.
    "max_num_batched_tokens": 256,
    "limit_mm_per_prompt": {"image": 0, "video": 0},
    "seed": 0,
}
"""Options that both arms of the ReplaySSM flow share."""
