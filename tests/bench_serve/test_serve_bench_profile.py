"""What a step is spent on: kernels by kind, and the arithmetic of their times."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cuda_ext.bench.serve import report
from cuda_ext.bench.serve.profile import NAMES, OTHER, Event, busy_ns, category, summarise

KERNELS = {
    "GDN recurrence": [
        "fused_sigmoid_gating_delta_rule_update_kernel",
        "fused_recurrent_gated_delta_rule_packed_decode_kernel",
        "fold_verify",
        "_block_kernel",
        "_recurrent_kernel",
    ],
    "GDN conv, plan": [
        "_causal_conv1d_update_kernel",
        "_causal_conv1d_fwd_kernel",
        "_conv_kernel",
        "_chunk_conv_kernel",
        "_plan_kernel",
    ],
    "GDN chunks": [
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
        "chunk_fwd_kernel_o",
        "merge_16x16_to_64x64_inverse_kernel",
        "recompute_w_u_fwd_kernel",
        "_fused_post_conv_kernel",
        "_chunk_start_kernel",
        "_chunk_rule_kernel",
        "_chunk_commit_kernel",
    ],
    "attention": [
        "kernel_unified_attention",
        "reduce_segments",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<int>>>",
    ],
    "matmul": [
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128>",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16>",
        "cublasLt::splitKreduce_kernel",
    ],
    "norm, activation, elementwise": [
        "triton_red_fused_add_mean_mul_pow_rsqrt_0",
        # Named after what it fuses, though no attention is in it.
        "triton_poi_fused_gdn_attention_core_split_3",
        "void vllm::act_and_mul_kernel<c10::BFloat16>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>",
        "layer_norm_fwd_kernel",
    ],
    "sampling, rejection": [
        "_gumbel_sample_kernel",
        "_rejection_kernel",
        "_topk_log_softmax_kernel",
        "void at::native::sbtopk::gatherTopK<float>",
    ],
    "KV cache, metadata, copies": [
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>",
        "_gather_block_tables_kernel",
        "_compute_slot_mappings_kernel",
        "_prepare_dflash_inputs_kernel",
        "_update_draft_inputs_kernel",
    ],
    "MoE": [
        "fused_moe_kernel",
        "void vllm::moe::topkGating<8, 256>",
        "void vllm::moe::moe_align_block_size_kernel<int>",
    ],
    OTHER: ["ncclDevKernel_AllReduce"],
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in KERNELS.items() for name in names]
)
def test_a_kernel_has_the_kind_that_it_serves(kind: str, name: str) -> None:
    assert category(name) == kind


def test_every_kind_is_met_here() -> None:
    assert set(NAMES) == set(KERNELS)


def test_the_device_is_busy_where_any_stream_is() -> None:
    events = [Event("c", 100, 5), Event("a", 0, 10), Event("b", 5, 10), Event("d", 6, 2)]
    assert busy_ns(events) == 15 + 5
    assert busy_ns([]) == 0


def test_figures_are_of_one_step() -> None:
    ms = 1_000_000
    events = [
        Event("fold_verify", 0, 4 * ms),
        Event("nvjet_x", 4 * ms, 2 * ms),
        Event("nvjet_x", 8 * ms, 2 * ms),
    ]
    host = ["cudaGraphLaunch", "cudaLaunchKernelExC", "cudaLaunchKernel", "aten::mm"]
    found = summarise(events, host, 2, 6.5)
    assert (found["wall_ms"], found["busy_ms"], found["idle_ms"]) == (6.5, 4.0, 2.5)
    assert found["kernels"] == 1.5
    assert found["launches"] == {"cudaGraphLaunch": 0.5, "cudaLaunchKernel": 1.0}
    assert found["ms"] == {"GDN recurrence": 2.0, "matmul": 2.0}
    assert found["top"][1] == {"name": "nvjet_x", "category": "matmul", "ms": 2.0, "count": 1.0}
    # Timed without the profiler, which slows the host down: a gap is never less than none.
    assert summarise(events, [], 2, 3.0)["idle_ms"] == 0.0


def test_the_longest_kernels_are_listed_and_no_more() -> None:
    events = [Event(f"gemm_{i}", 1000 * i, 10 * i) for i in range(1, 40)]
    top = summarise(events, [], 1, 1.0)["top"]
    assert [line["name"] for line in top] == [f"gemm_{i}" for i in range(39, 24, -1)]


def test_a_table_has_a_column_for_each_profile_and_leaves_failed_ones_out() -> None:
    whole = summarise([Event("fold_verify", 0, 5_000_000)], [], 2, 6.5)
    line = whole | {"kind": "decode", "concurrency": 64, "running": 64, "tokens": 620.0}
    lines = [
        {"arm": "replay", "seconds": 3.0, **line},
        {"arm": "stock", "kind": "prefill", "concurrency": None, "error": "ValueError: no"},
    ]
    text = io.StringIO()
    Console(file=text, width=100).print(report.profile_table(lines))
    assert "decode at 64" in text.getvalue()
    assert "stock" not in text.getvalue()
    (row,) = (row for row in text.getvalue().splitlines() if "GDN recurrence" in row)
    assert "2.50" in row
    assert report.profile_line("stock", lines[1]) == "profile of stock, prefill: ValueError: no"
    assert "64 running, 620 tokens and 6.50 ms a step" in report.profile_line("replay", lines[0])
