"""Lets the emulated engine compute in fp32, so that two ways to a state differ by 1e-6 and no more.

vllm-gaudi serves bf16 only: its platform overwrites the model's dtype, and its runner has no name
for an fp32 KV cache. In bf16, chunks and single steps differ by 0.06 and more in a log-probability,
which hides small faults and flips near ties. Both changes act only on engines that are started with
dtype="float32", and only in this process.
"""

from __future__ import annotations

from typing import Any

TOLERANCE = 1e-4
"""Largest log-probability difference between two ways to compute the same tokens.

Chunks and single decode steps sum in different orders: about 2**-24 of the largest term for each of
a few hundred additions, through four layers, which was seen as at most 5e-6. A stale state differs
by 1e-2 to 1 (seen when a restore is left out), so the bound lies a factor of 20 from either side.
"""


def allow() -> None:
    """Patch this process, once."""
    import vllm.platforms

    # Resolved first: importing vllm-gaudi's platform by hand would find it half initialised.
    assert vllm.platforms.current_platform is not None
    import torch
    from vllm_gaudi.platform import HpuPlatform
    from vllm_gaudi.v1.worker import hpu_model_runner

    if getattr(HpuPlatform, "_keeps_fp32", False):
        return
    hpu_model_runner.HPU_TORCH_DTYPE_TO_STR_DTYPE[torch.float32] = "auto"
    stock = HpuPlatform.check_and_update_config.__func__

    def keeping(cls: type, vllm_config: Any) -> None:
        model = vllm_config.model_config
        asked = None if model is None else model.dtype
        stock(cls, vllm_config)
        if asked is torch.float32:
            model.dtype = asked

    HpuPlatform.check_and_update_config = classmethod(keeping)
    HpuPlatform._keeps_fp32 = True
