"""`torch.ops.hpu`: the one device operator that an unquantised Qwen3.5 MoE needs.

The operators that vllm-gaudi looks for and can do without (`block_softmax_adjustment`,
`softmax_fa2`, ...) are left undefined on purpose: it then takes its plain torch path.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}
_library: torch.library.Library | None = None


def mixture_of_experts(
    hidden_states: torch.Tensor,
    expert_routing_table: torch.Tensor,
    router_weights: torch.Tensor,
    w12: list[torch.Tensor],
    w3: list[torch.Tensor],
    permuted_weights: bool,
    activation: str,
    experts_min: int,
    experts_max: int,
    chunk_size: int = 0,
    total_experts: int = 0,
) -> torch.Tensor:
    """The weighted sum of each token's chosen experts among `experts_min..experts_max`.

    Args:
        hidden_states: [T, H].
        expert_routing_table: [T, top_k], expert numbers; experts outside the range add nothing.
        router_weights: [T, top_k].
        w12: for each expert of the range, gate and up projection stacked, [2 * I, H].
        w3: for each expert of the range, the down projection, [H, I].
        permuted_weights: must be True (rows are output features).
        activation: "silu", "gelu" or "relu".
        chunk_size, total_experts: tuning of the device kernel; without effect here.

    Returns:
        [T, H], in the dtype of `hidden_states`.
    """
    if not permuted_weights or activation not in _ACTIVATIONS:
        raise NotImplementedError(
            f"emulated mixture_of_experts: {permuted_weights=!r}, {activation=!r}"
        )
    # fp32 sums, and every expert on every token: slow, but with shapes that depend on no value.
    result = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert, gate_up, down in zip(range(experts_min, experts_max + 1), w12, w3, strict=True):
        gate, up = F.linear(hidden_states, gate_up).chunk(2, dim=-1)
        output = F.linear(_ACTIVATIONS[activation](gate) * up, down)
        share = (router_weights * (expert_routing_table == expert)).sum(-1, keepdim=True)
        result += share.float() * output.float()
    return result.to(hidden_states.dtype)


def define() -> None:
    """Define the operators; repeats do nothing."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("hpu", "FRAGMENT")
    _library.define(
        "mixture_of_experts(Tensor hidden_states, Tensor expert_routing_table, "
        "Tensor router_weights, Tensor[] w12, Tensor[] w3, bool permuted_weights, str activation, "
        "int experts_min, int experts_max, int chunk_size=0, int total_experts=0) -> Tensor"
    )
    _library.impl("mixture_of_experts", mixture_of_experts, "CompositeExplicitAutograd")
