"""What a step is spent on: kernels of a device by kind, from the events of a profiler.

Plain data here; the engine (engine.py) brings a load to a steady state and records.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

TOP = 15
NAME_CHARACTERS = 110


@dataclass(frozen=True)
class Event:
    """One kernel, copy or fill on the device.

    Args:
        name: of the kernel.
        start_ns, duration_ns: on the device's clock.
    """

    name: str
    start_ns: int
    duration_ns: int


CATEGORIES: tuple[tuple[str, str], ...] = (
    # The first that is found in a name stands; torch.compile's names hold those of what they fuse.
    ("norm, activation, elementwise", r"^triton_(poi|per|red|tem|for)_"),
    (
        "KV cache, metadata, copies",
        r"memcpy|memset|reshape_and_cache|slot_mapping|block_table|_prepare_|prepare_varlen"
        r"|_post_update|_update_draft_inputs|_combine_sampled|_zero_kv|_expand_idx"
        r"|copy_and_expand|_get_num_sampled|_apply_write|_shift_input|precompute_slot"
        r"|_seq_lens_kernel|concat_and_cache",
    ),
    (
        "GDN recurrence",
        r"fold_verify|fused_recurrent_gated_delta|fused_sigmoid_gating_delta"
        r"|^_block_kernel|^_recurrent_kernel",
    ),
    (
        "GDN conv, plan",
        r"causal_conv1d|^_conv_kernel|^_plan_kernel|^_chunk_conv_kernel|gdn_gating",
    ),
    (
        "GDN chunks",
        r"chunk_fwd_kernel_o|chunk_gated_delta|chunk_scaled_dot|solve_tril|merge_16x16"
        r"|recompute_w_u|chunk_local_cumsum|_fused_post_conv|l2norm_fwd"
        r"|^_chunk_(start|rule|commit)_kernel|_gather_initial_states|_scatter_states",
    ),
    ("attention", r"flash|fmha|unified_attention|reduce_segments|merge_attn|paged_attention"),
    ("MoE", r"moe|topk_?gating|count_and_sort_expert|expert"),
    (
        "sampling, rejection",
        r"sampl|gumbel|rejection|topk|topp|top_p|argmax|arg_?min|softmax|logprob|_ranks_"
        r"|bincount|penalt|temperature|min_p|sort|cunn_|reject|draft",
    ),
    ("matmul", r"gemm|nvjet|cutlass|xmma|split_?k|gemv|cublas|matmul|dot_kernel"),
    (
        "norm, activation, elementwise",
        r"norm|act_and_mul|silu|elementwise|rotary|reduce_kernel|vectorized|cat_?array|copy|fill"
        r"|index|gather|scatter|scan|cumsum|distribution|arange",
    ),
)
OTHER = "other"
NAMES = (*dict.fromkeys(name for name, _ in CATEGORIES), OTHER)
_COMPILED = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in CATEGORIES]
_LAUNCHES = re.compile(r"^(cudaGraphLaunch|cudaLaunchKernel|cuLaunchKernel|cudaMemcpyAsync)")


def category(name: str) -> str:
    """The kind of a kernel, one of `NAMES`."""
    return next((kind for kind, pattern in _COMPILED if pattern.search(name)), OTHER)


def busy_ns(events: Iterable[Event]) -> int:
    """Nanoseconds in which at least one event runs; streams may overlap."""
    busy, end = 0, -1
    for event in sorted(events, key=lambda event: event.start_ns):
        stop = event.start_ns + event.duration_ns
        if stop > end:
            busy += stop - max(event.start_ns, end)
            end = stop
    return busy


def summarise(
    events: Sequence[Event], host: Iterable[str], steps: int, wall_ms: float
) -> dict[str, Any]:
    """The figures of some steps, each a step's.

    Args:
        events: of the device.
        host: names of the host's calls.
        steps: how many were recorded.
        wall_ms: of a step without the profiler.

    Returns:
        `wall_ms`, `busy_ms`, `idle_ms` (what is between them), `kernels` and `launches` counted,
        `ms` by category, and `top`: the longest kernels with name, category, ms and count.
    """
    kinds: defaultdict[str, int] = defaultdict(int)
    names: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for event in events:
        kinds[category(event.name)] += event.duration_ns
        names[event.name][0] += event.duration_ns
        names[event.name][1] += 1
    launches = Counter(found.group() for name in host if (found := _LAUNCHES.match(name)))

    def ms(nanoseconds: float) -> float:
        return round(nanoseconds / 1e6 / steps, 4)

    busy = ms(busy_ns(events))
    longest = sorted(names.items(), key=lambda item: -item[1][0])[:TOP]
    return {
        "steps": steps,
        "wall_ms": round(wall_ms, 4),
        "busy_ms": busy,
        "idle_ms": round(max(0.0, wall_ms - busy), 4),
        "kernels": round(len(events) / steps, 1),
        "launches": {name: round(count / steps, 1) for name, count in sorted(launches.items())},
        "ms": {name: ms(kinds[name]) for name in NAMES if kinds[name]},
        "top": [
            {
                "name": name[:NAME_CHARACTERS],
                "category": category(name),
                "ms": ms(taken),
                "count": round(count / steps, 1),
            }
            for name, (taken, count) in longest
        ],
    }
