# mypy: disable-error-code="no-untyped-def, import-not-found"
# Triton gives the arguments of its kernels types of its own, and is absent where the linter runs.
"""The convolution of a decode step, and the raw rows that it leaves in the page.

The first launch of a layer's step. It stands in for `causal_conv1d_update` (vLLM 0.31.0,
model_executor/layers/mamba/ops/causal_conv1d.py), whose window rolls by the number of accepted
tokens; here a column belongs to a position, so that a rejected row is overwritten by the next one
at its position and nothing has to be rolled. The new rows of k, v, a and b go straight into the
rings, from where fold_verify.py takes them together with the pending ones; only q needs a buffer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_ext.ops import launch
from cuda_ext.ops.reference import Pages, StepRows, Weights


@triton.jit
def _conv_kernel(
    qkv,
    a,
    b,
    weight,
    bias,
    conv,
    k_ring,
    v_ring,
    a_ring,
    b_ring,
    q,
    slots,
    starts,
    row_start,
    qkv_stride,
    a_row_stride,
    b_row_stride,
    conv_stride,
    conv_column,
    conv_channel,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    q_stride,
    L,
    R,
    max_rows,
    HK: tl.constexpr,
    HV: tl.constexpr,
    HVV: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (C / BC + 1, N): blocks of channels, then one program for the gate inputs."""
    i_c, i_n = tl.program_id(0), tl.program_id(1)
    first = tl.load(row_start + i_n).to(tl.int64)
    rows = (tl.load(row_start + i_n + 1) - first).to(tl.int32)
    slot = tl.load(slots + i_n).to(tl.int64)
    start = tl.load(starts + i_n)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if (slot != 0) & (rows > 0) & (rows <= max_rows):
        i = tl.arange(0, BT)
        if i_c == (2 * HK + HVV) // BC:
            o_h = tl.arange(0, BH)
            for t in range(0, rows, BT):
                mask = (t + i < rows)[:, None] & (o_h < HV)[None, :]
                token = (first + t + i)[:, None]
                row = ((start + t + i) % R).to(tl.int64)[:, None]
                b_a = tl.load(a + token * a_row_stride + o_h[None, :], mask=mask)
                b_b = tl.load(b + token * b_row_stride + o_h[None, :], mask=mask)
                p_a = a_ring + slot * a_stride + row * HV + o_h[None, :]
                p_b = b_ring + slot * b_stride + row * HV + o_h[None, :]
                tl.store(p_a, b_a.to(a_ring.dtype.element_ty), mask=mask)
                tl.store(p_b, b_b.to(b_ring.dtype.element_ty), mask=mask)
        else:
            o_c = (i_c * BC + tl.arange(0, BC)).to(tl.int64)
            p_conv = conv + slot * conv_stride + o_c[None, :] * conv_channel
            for t in range(0, rows, BT):
                b_y = tl.zeros([BT, BC], tl.float32)
                if HAS_BIAS:
                    b_y += tl.load(bias + o_c).to(tl.float32)[None, :]
                # Products in the dtype of the rows and the oldest tap first, as vLLM's kernels have
                # them, so that a prompt's rows come out with the same bits.
                for tap in tl.static_range(TAPS):
                    # Rows of this step lie in qkv, older ones in the window, none before token 0.
                    o_t = t + i - (TAPS - 1 - tap)
                    in_step = (o_t >= 0) & (t + i < rows)
                    in_window = (o_t < 0) & (start + o_t >= 0) & (t + i < rows)
                    column = tl.where(in_window, (start + o_t) % L, 0).to(tl.int64)
                    p_x = qkv + (first + o_t)[:, None] * qkv_stride + o_c[None, :]
                    b_x = tl.load(p_x, mask=in_step[:, None], other=0.0)
                    if tap < TAPS - 1:
                        p_w = p_conv + column[:, None] * conv_column
                        b_w = tl.load(p_w, mask=in_window[:, None], other=0.0)
                        b_x += b_w.to(qkv.dtype.element_ty)
                    b_tap = tl.load(weight + o_c * TAPS + tap)
                    b_y += (b_x * b_tap[None, :]).to(tl.float32)
                # The window's oldest columns are read above and may be overwritten below.
                tl.debug_barrier()
                mask = (t + i < rows)[:, None]
                token = (first + t + i)[:, None]
                b_x = tl.load(qkv + token * qkv_stride + o_c[None, :], mask=mask)
                column = ((start + t + i) % L).to(tl.int64)[:, None]
                p_w = p_conv + column * conv_column
                tl.store(p_w, b_x.to(conv.dtype.element_ty), mask=mask)
                if SILU:
                    b_y = b_y / (1.0 + tl.exp(-b_y))
                row = ((start + t + i) % R).to(tl.int64)[:, None]
                if i_c * BC < HK:
                    p_y = q + token * q_stride + o_c[None, :]
                    tl.store(p_y, b_y.to(q.dtype.element_ty), mask=mask)
                elif i_c * BC < 2 * HK:
                    p_y = k_ring + slot * k_stride + row * HK + (o_c - HK)[None, :]
                    tl.store(p_y, b_y.to(k_ring.dtype.element_ty), mask=mask)
                else:
                    p_y = v_ring + slot * v_stride + row * HVV + (o_c - 2 * HK)[None, :]
                    tl.store(p_y, b_y.to(v_ring.dtype.element_ty), mask=mask)


def conv_update(
    pages: Pages,
    weights: Weights,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    rows: StepRows,
    max_rows: int,
    *,
    step_rows: int | None = None,
    overlap: bool = False,
) -> Tensor:
    """Convolve the new rows of a step and append them to the rings and the window.

    Requests in slot 0, without rows, or with more than `max_rows` are left alone.

    Args:
        pages: of the layer; `conv`, `k`, `v`, `a` and `b` are written, each row at its position.
        weights: conv_weight [C, W] contiguous, conv_bias and activation are used.
        qkv: [tokens, C], inputs of the convolution in the order q, k, v; unit stride in C.
        a, b: [tokens, HV], raw gate inputs; unit stride in HV.
        rows: plan of the step; int32.
        max_rows: T_max; the window must have W - 2 + T_max columns and the rings 2 * T_max rows.
        step_rows: T of the longest request served here, where the host knows it.
        overlap: let the next kernel on the stream start before this one has ended.

    Returns:
        q [tokens, H, K] after the convolution; rows of requests left alone are not written.
    """
    R, H, K = pages.k.shape[1:]
    HV, V = pages.v.shape[2:]
    taps = weights.conv_weight.shape[1]
    q = torch.empty(len(qkv), H, K, dtype=pages.k.dtype, device=qkv.device)
    requests = rows.slot.shape[0]
    if requests == 0:
        return q
    assert weights.conv_weight.is_contiguous(), weights.conv_weight.stride()
    for name, tensor in (("qkv", qkv), ("a", a), ("b", b)):
        assert tensor.stride(1) == 1, (name, tensor.stride())
    longest = min(step_rows or max_rows, max_rows)
    channels = launch.conv_channels(H * K, HV * V)
    # History is read by the first rows only, so a block of rows may not be shorter than it.
    block = min(16, triton.next_power_of_2(max(longest, taps - 1)))
    _conv_kernel[((2 * H * K + HV * V) // channels + 1, requests)](
        qkv,
        a,
        b,
        weights.conv_weight,
        weights.conv_bias,
        pages.conv,
        pages.k,
        pages.v,
        pages.a,
        pages.b,
        q,
        rows.slot,
        rows.start,
        rows.row_start,
        qkv.stride(0),
        a.stride(0),
        b.stride(0),
        pages.conv.stride(0),
        pages.conv.stride(1),
        pages.conv.stride(2),
        pages.k.stride(0),
        pages.v.stride(0),
        pages.a.stride(0),
        pages.b.stride(0),
        q.stride(0),
        pages.conv.shape[1],
        R,
        max_rows,
        HK=H * K,
        HV=HV,
        HVV=HV * V,
        TAPS=taps,
        HAS_BIAS=weights.conv_bias is not None,
        SILU=weights.activation is not None,
        BT=block,
        BC=channels,
        BH=triton.next_power_of_2(HV),
        PDL=overlap,
        num_warps=4 if block > 4 else 1,
    )
    return q
