# mypy: disable-error-code="no-untyped-def, import-not-found"
# Triton gives the arguments of its kernels types of its own, and is absent where the linter runs.
"""The prefill chunks of a step: requests of more rows than can be taken back.

Stands in for the prefill branch of `QwenGatedDeltaNetAttention._forward_core` (vLLM 0.31.0): a
convolution, vLLM's own chunk kernels, and a commit into our page. A chunk starts from the page's
state with the pending rows folded in, which stays off the page; the page is written once, by the
commit, at the chunk's end. The window keeps the chunk's last inputs at their positions, the rings
nothing: no row of a chunk is pending afterwards.

Nothing here waits for the device. A chunk in slot 0 gives zeros and touches no page. One whose plan
can't be right starts from NaN, which all its outputs then are, and leaves its page as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_ext.ops import launch
from cuda_ext.ops.fold_verify import EPS, _advance, _block, _gates, _load_state, _ring_rows
from cuda_ext.ops.reference import Pages, Weights
from cuda_ext.ring import GdnHeads

CONV_ROWS, CONV_CHANNELS, STATE_ELEMENTS = 16, 128, 4096
"""Of a program of the convolution, and elements of the state of one of the commit. 32 rows take
134 registers a thread instead of 72, and leave half as many warps to wait for memory."""
RULE_LAUNCH = launch.TritonLaunch(value_rows=16, warps=4)
"""Of the kernels that keep a state on chip. At K = 128 in float32 a thread spills 0.8 KiB, with 32
value rows 7 KiB (compiled by Triton 3.6 for sm_90)."""
PLAN = ["slots", "bases", "starts", "firsts", "packed"]
"""Arguments that may be slices of one tensor: where they begin must not make a kernel anew while a
server runs."""


@dataclass(frozen=True)
class ChunkRows:
    """The prefill chunks of a step, packed one behind the other.

    Args:
        slot: [C] int32, page of each chunk's request; 0 is the null page.
        base: [C] int32, tokens folded into the state; at 0 the state is zero and is not read.
        start: [C] int32, position of the chunk's first row.
        first: [C] int32, first row of each chunk in the batch.
        packed: [C + 1] int32, first row of each chunk once packed, and the end of the last.
        tokens: packed rows.
        longest: rows of the longest chunk.
        offset: first row in the batch where the chunks lie behind one another there; else None.
        token_index: [tokens] int64, row in the batch of each packed row, where `offset` is None.
        chunk_indices, chunk_offsets: of vLLM's chunk kernels, as its metadata builder makes them
            from the host's lengths. Without them its kernels wait for the device once a step.
    """

    slot: Tensor
    base: Tensor
    start: Tensor
    first: Tensor
    packed: Tensor
    tokens: int
    longest: int
    offset: int | None
    token_index: Tensor | None = None
    chunk_indices: Tensor | None = None
    chunk_offsets: Tensor | None = None


ChunkRule: TypeAlias = Callable[
    [Weights, Tensor, Tensor, Tensor, Tensor, ChunkRows], tuple[Tensor, Tensor]
]
"""The recurrence over packed chunks, given the layer's weights and

mixed: [tokens, C], q, k and v after the convolution, not normalised; contiguous.
a, b: [tokens, HV], raw gate inputs; contiguous.
initial: [C, HV, V, K] float32, the state before each chunk; contiguous. The rule may write to it.
chunks: the chunks; `packed` and what follows it are of use here.

It returns o [tokens, HV, V] and the states after the chunks [C, HV, V, K], of any float dtype.
"""


@triton.jit
def _can_be_right(base, start, R):
    """Whether the pending rows of a plan can lie in a ring."""
    return (base >= 0) & (start >= base) & (start - base <= R)


@triton.jit(do_not_specialize_on_alignment=PLAN)
def _chunk_conv_kernel(
    qkv,
    a,
    b,
    weight,
    bias,
    conv,
    mixed,
    packed_a,
    packed_b,
    slots,
    starts,
    firsts,
    packed,
    qkv_stride,
    a_stride,
    b_stride,
    conv_stride,
    conv_column,
    conv_channel,
    L,
    C: tl.constexpr,
    HV: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BH: tl.constexpr,
):
    """Grid (rows of the longest chunk / BT, C / BC + 1, chunks): the last program of a block of
    rows packs its gate inputs."""
    i_t, i_c, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    to = tl.load(packed + i_n).to(tl.int64)
    rows = (tl.load(packed + i_n + 1) - to).to(tl.int32)
    t = i_t * BT
    if t < rows:
        slot = tl.load(slots + i_n).to(tl.int64)
        start = tl.load(starts + i_n)
        i = t + tl.arange(0, BT)
        mask_t = i < rows
        read = mask_t & (slot != 0)
        row = tl.load(firsts + i_n).to(tl.int64) + i
        if i_c * BC >= C:
            o_h = tl.arange(0, BH)
            mask_h = (o_h < HV)[None, :]
            p_a = a + row[:, None] * a_stride + o_h[None, :]
            p_b = b + row[:, None] * b_stride + o_h[None, :]
            b_a = tl.load(p_a, mask=read[:, None] & mask_h, other=0.0)
            b_b = tl.load(p_b, mask=read[:, None] & mask_h, other=0.0)
            o_p = (to + i)[:, None] * HV + o_h[None, :]
            mask_p = mask_t[:, None] & mask_h
            tl.store(packed_a + o_p, b_a.to(packed_a.dtype.element_ty), mask=mask_p)
            tl.store(packed_b + o_p, b_b.to(packed_b.dtype.element_ty), mask=mask_p)
        else:
            o_c = (i_c * BC + tl.arange(0, BC)).to(tl.int64)
            mask_c = o_c < C
            p_conv = conv + slot * conv_stride + o_c[None, :] * conv_channel
            b_y = tl.zeros([BT, BC], tl.float32)
            if HAS_BIAS:
                b_y += tl.load(bias + o_c, mask=mask_c, other=0.0).to(tl.float32)[None, :]
            # As in conv_update.py, so that a row has the same bits in a chunk and in a step.
            for tap in tl.static_range(TAPS):
                # Rows of the chunk lie in qkv, older ones in the window, none before token 0.
                o_t = i - (TAPS - 1 - tap)
                in_chunk = read & (o_t >= 0)
                p_x = qkv + (row - (TAPS - 1 - tap))[:, None] * qkv_stride + o_c[None, :]
                mask = in_chunk[:, None] & mask_c[None, :]
                b_x = tl.load(p_x, mask=mask, other=0.0)
                if t < TAPS - 1 - tap:
                    in_window = read & (o_t < 0) & (start + o_t >= 0)
                    column = tl.where(in_window, (start + o_t) % L, 0).to(tl.int64)
                    p_w = p_conv + column[:, None] * conv_column
                    mask = in_window[:, None] & mask_c[None, :]
                    b_x += tl.load(p_w, mask=mask, other=0.0).to(qkv.dtype.element_ty)
                b_tap = tl.load(weight + o_c * TAPS + tap, mask=mask_c, other=0.0)
                b_y += (b_x * b_tap[None, :]).to(tl.float32)
            if SILU:
                b_y = b_y / (1.0 + tl.exp(-b_y))
            # Not even the bias: rows of zeros leave a state of zeros as it is.
            b_y = tl.where(slot != 0, b_y, 0.0)
            p_y = mixed + (to + i)[:, None] * C + o_c[None, :]
            mask = mask_t[:, None] & mask_c[None, :]
            tl.store(p_y, b_y.to(mixed.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=PLAN)
def _chunk_start_kernel(
    state,
    k_ring,
    v_ring,
    a_ring,
    b_ring,
    initial,
    A_log,
    dt_bias,
    slots,
    bases,
    starts,
    packed,
    state_stride,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    R,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """The state before each chunk. Grid (V / BV, HV, chunks)."""
    i_v, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_n = tl.program_id(2).to(tl.int64)
    i_k = i_h // (HV // H)
    slot = tl.load(slots + i_n).to(tl.int64)
    base, start = tl.load(bases + i_n), tl.load(starts + i_n)
    rows = tl.load(packed + i_n + 1) - tl.load(packed + i_n)
    o_v, o_k = i_v * BV + tl.arange(0, BV), tl.arange(0, BK)
    mask_v, mask_k = o_v < V, o_k < K
    mask_s = mask_v[:, None] & mask_k[None, :]
    o_s = i_h * V * K + o_v[:, None] * K + o_k[None, :]
    b_s = tl.zeros([BV, BK], tl.float32)
    if (slot != 0) & (rows > 0):
        if _can_be_right(base, start, R):
            b_s = _load_state(state + slot * state_stride + o_s, mask_s, base)
            i = tl.arange(0, 16)
            log_rate = tl.load(A_log + i_h).to(tl.float32)
            bias = tl.load(dt_bias + i_h).to(tl.float32)
            p_k = k_ring + slot * k_stride + i_k * K + o_k[None, :]
            p_v = v_ring + slot * v_stride + i_h * V + o_v[:, None]
            p_a, p_b = a_ring + slot * a_stride + i_h, b_ring + slot * b_stride + i_h
            for j in range(0, start - base, 16):
                mask = j + i < start - base
                row = ((base + j + i) % R).to(tl.int64)
                b_k, b_v, g, beta = _ring_rows(
                    p_k, p_v, p_a, p_b, row, mask, mask_k, mask_v, log_rate, bias, H * K, HV, HV * V
                )
                d, norm, decay, since = _block(b_s, b_k, b_v, g, beta)
                b_s = _advance(b_s, b_k, d, norm, decay, since)
        else:
            b_s += float("nan")
    tl.store(initial + i_n * (HV * V * K) + o_s, b_s, mask=mask_s)


@triton.jit(do_not_specialize_on_alignment=PLAN)
def _chunk_rule_kernel(
    mixed,
    a,
    b,
    initial,
    o,
    final,
    A_log,
    dt_bias,
    packed,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """The recurrence, 16 rows at a time with the state on chip. Grid (V / BV, HV, chunks)."""
    i_v, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_n = tl.program_id(2).to(tl.int64)
    i_k = i_h // (HV // H)
    C: tl.constexpr = 2 * H * K + HV * V
    first = tl.load(packed + i_n).to(tl.int64)
    rows = (tl.load(packed + i_n + 1) - first).to(tl.int32)
    o_v, o_k, i = i_v * BV + tl.arange(0, BV), tl.arange(0, BK), tl.arange(0, 16)
    mask_v, mask_k = o_v < V, o_k < K
    mask_s = mask_v[:, None] & mask_k[None, :]
    o_s = i_n * (HV * V * K) + i_h * V * K + o_v[:, None] * K + o_k[None, :]
    log_rate = tl.load(A_log + i_h).to(tl.float32)
    bias = tl.load(dt_bias + i_h).to(tl.float32)
    b_s = tl.load(initial + o_s, mask=mask_s, other=0.0)
    for t in range(0, rows, 16):
        mask = t + i < rows
        row = first + t + i
        mask_rk, mask_rv = mask[:, None] & mask_k[None, :], mask[None, :] & mask_v[:, None]
        p_q = mixed + row[:, None] * C + i_k * K + o_k[None, :]
        p_v = mixed + row[None, :] * C + 2 * H * K + i_h * V + o_v[:, None]
        b_q = tl.load(p_q, mask=mask_rk, other=0.0).to(tl.float32)
        b_k = tl.load(p_q + H * K, mask=mask_rk, other=0.0).to(tl.float32)
        b_v = tl.load(p_v, mask=mask_rv, other=0.0).to(tl.float32)
        b_a = tl.load(a + row * HV + i_h, mask=mask, other=0.0)
        b_b = tl.load(b + row * HV + i_h, mask=mask, other=0.0)
        g, beta = _gates(b_a, b_b, log_rate, bias, mask)
        d, norm, decay, since = _block(b_s, b_k, b_v, g, beta)
        q_norm = tl.rsqrt(tl.sum(b_q * b_q, 1) + EPS) * scale
        seen = tl.dot(b_q, tl.trans(b_k), input_precision="tf32x3") * decay
        seen = seen * q_norm[:, None] * norm[None, :]
        read = tl.dot(b_s, tl.trans(b_q), input_precision="tf32x3")
        b_o = read * (q_norm * since)[None, :]
        b_o += tl.dot(d, tl.trans(seen), input_precision="tf32x3")
        p_o = o + row[None, :] * (HV * V) + i_h * V + o_v[:, None]
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=mask_rv)
        b_s = _advance(b_s, b_k, d, norm, decay, since)
    tl.store(final + o_s, b_s, mask=mask_s)


@triton.jit(do_not_specialize_on_alignment=PLAN)
def _chunk_commit_kernel(
    final,
    qkv,
    state,
    conv,
    slots,
    bases,
    starts,
    firsts,
    packed,
    qkv_stride,
    state_stride,
    conv_stride,
    conv_column,
    conv_channel,
    L,
    R,
    C: tl.constexpr,
    STATE: tl.constexpr,
    BS: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """Grid (STATE / BS + C / BC, chunks): blocks of the state, then of the window's channels."""
    i_b, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + i_n).to(tl.int64)
    base, start = tl.load(bases + i_n), tl.load(starts + i_n)
    rows = tl.load(packed + i_n + 1) - tl.load(packed + i_n)
    if (slot != 0) & (rows > 0) & _can_be_right(base, start, R):
        state_blocks: tl.constexpr = (STATE + BS - 1) // BS
        if i_b < state_blocks:
            o_s = i_b * BS + tl.arange(0, BS)
            mask = o_s < STATE
            b_s = tl.load(final + i_n * STATE + o_s, mask=mask)
            p_s = state + slot * state_stride + o_s
            tl.store(p_s, b_s.to(state.dtype.element_ty), mask=mask)
        else:
            o_c = ((i_b - state_blocks) * BC + tl.arange(0, BC)).to(tl.int64)
            first = tl.load(firsts + i_n).to(tl.int64)
            p_x = qkv + o_c[None, :]
            p_conv = conv + slot * conv_stride + o_c[None, :] * conv_channel
            for t in range(tl.maximum(rows - L, 0), rows, BT):
                i = t + tl.arange(0, BT)
                mask_x = (i < rows)[:, None] & (o_c < C)[None, :]
                b_x = tl.load(p_x + (first + i)[:, None] * qkv_stride, mask=mask_x)
                column = ((start + i) % L).to(tl.int64)
                p_w = p_conv + column[:, None] * conv_column
                tl.store(p_w, b_x.to(conv.dtype.element_ty), mask=mask_x)


def _check(pages: Pages, weights: Weights, chunks: ChunkRows, tensors: dict[str, Tensor]) -> None:
    """Assert what the kernels take for granted."""
    count = chunks.slot.shape[0]
    for name in ("slot", "base", "start", "first", "packed"):
        tensor = getattr(chunks, name)
        found = (name, tensor.dtype, tensor.shape, tensor.stride())
        assert tensor.dtype is torch.int32, found
        assert tensor.shape == (count + 1 if name == "packed" else count,), found
        assert tensor.is_contiguous(), found
    for name, tensor in vars(pages).items():
        assert name == "conv" or tensor[:1].is_contiguous(), (name, tensor.shape, tensor.stride())
    assert weights.conv_weight.is_contiguous(), weights.conv_weight.stride()
    for name, tensor in tensors.items():
        assert tensor.stride(1) == 1, (name, tensor.stride())
    if chunks.offset is None:
        assert chunks.token_index is not None
        assert chunks.token_index.shape == (chunks.tokens,), chunks.token_index.shape


def _convolve(
    pages: Pages, weights: Weights, qkv: Tensor, a: Tensor, b: Tensor, chunks: ChunkRows
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [tokens, C] after the convolution, a and b [tokens, HV], packed; dtypes of the
    rings. The window is only read: other programs still need what the commit overwrites."""
    channels, taps = weights.conv_weight.shape
    HV = pages.a.shape[2]
    mixed = torch.empty(chunks.tokens, channels, dtype=pages.k.dtype, device=qkv.device)
    packed_a = torch.empty(chunks.tokens, HV, dtype=pages.a.dtype, device=qkv.device)
    packed_b = torch.empty(chunks.tokens, HV, dtype=pages.b.dtype, device=qkv.device)
    block = min(CONV_CHANNELS, triton.next_power_of_2(channels))
    grid = (
        launch.ceil_div(chunks.longest, CONV_ROWS),
        launch.ceil_div(channels, block) + 1,
        chunks.slot.shape[0],
    )
    _chunk_conv_kernel[grid](
        qkv,
        a,
        b,
        weights.conv_weight,
        weights.conv_bias,
        pages.conv,
        mixed,
        packed_a,
        packed_b,
        chunks.slot,
        chunks.start,
        chunks.first,
        chunks.packed,
        qkv.stride(0),
        a.stride(0),
        b.stride(0),
        *pages.conv.stride(),
        pages.conv.shape[1],
        C=channels,
        HV=HV,
        TAPS=taps,
        HAS_BIAS=weights.conv_bias is not None,
        SILU=weights.activation is not None,
        BT=CONV_ROWS,
        BC=block,
        BH=triton.next_power_of_2(HV),
        num_warps=4,
    )
    return mixed, packed_a, packed_b


def _start(pages: Pages, weights: Weights, chunks: ChunkRows) -> Tensor:
    """[C, HV, V, K] float32, the state before each chunk."""
    R, H = pages.k.shape[1:3]
    HV, V, K = pages.ssm.shape[1:]
    count = chunks.slot.shape[0]
    initial = torch.empty(count, HV, V, K, dtype=torch.float32, device=pages.ssm.device)
    _chunk_start_kernel[(triton.cdiv(V, RULE_LAUNCH.value_rows), HV, count)](
        pages.ssm,
        pages.k,
        pages.v,
        pages.a,
        pages.b,
        initial,
        weights.A_log,
        weights.dt_bias,
        chunks.slot,
        chunks.base,
        chunks.start,
        chunks.packed,
        pages.ssm.stride(0),
        pages.k.stride(0),
        pages.v.stride(0),
        pages.a.stride(0),
        pages.b.stride(0),
        R,
        H=H,
        HV=HV,
        K=K,
        V=V,
        BK=max(16, triton.next_power_of_2(K)),
        BV=RULE_LAUNCH.value_rows,
        num_warps=RULE_LAUNCH.warps,
    )
    return initial


def _commit(pages: Pages, qkv: Tensor, chunks: ChunkRows, final: Tensor) -> None:
    """The states after the chunks, and their last inputs, into the pages."""
    channels, elements = pages.conv.shape[2], pages.ssm[0].numel()
    block = min(CONV_CHANNELS, triton.next_power_of_2(channels))
    share = min(STATE_ELEMENTS, triton.next_power_of_2(elements))
    blocks = launch.ceil_div(elements, share) + launch.ceil_div(channels, block)
    _chunk_commit_kernel[(blocks, chunks.slot.shape[0])](
        final,
        qkv,
        pages.ssm,
        pages.conv,
        chunks.slot,
        chunks.base,
        chunks.start,
        chunks.first,
        chunks.packed,
        qkv.stride(0),
        pages.ssm.stride(0),
        *pages.conv.stride(),
        pages.conv.shape[1],
        pages.k.shape[1],
        C=channels,
        STATE=elements,
        BS=share,
        BT=16,
        BC=block,
        num_warps=4,
    )


def portable_rule(heads: GdnHeads) -> ChunkRule:
    """The recurrence in Triton, for any float dtype: vLLM's chunk kernels refuse float32.

    Blocks of 16 rows one after the other, all products as precise as float32; not tuned.

    Args:
        heads: of this rank.

    Returns:
        a `ChunkRule` whose states are float32, and outputs of the dtype of the rows.
    """
    H, HV, K, V = heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim

    def rule(
        weights: Weights, mixed: Tensor, a: Tensor, b: Tensor, initial: Tensor, chunks: ChunkRows
    ) -> tuple[Tensor, Tensor]:
        o = torch.empty(chunks.tokens, HV, V, dtype=mixed.dtype, device=mixed.device)
        # Each program reads its part before it writes it.
        final = initial
        _chunk_rule_kernel[(triton.cdiv(V, RULE_LAUNCH.value_rows), HV, len(initial))](
            mixed,
            a,
            b,
            initial,
            o,
            final,
            weights.A_log,
            weights.dt_bias,
            chunks.packed,
            K**-0.5,
            H=H,
            HV=HV,
            K=K,
            V=V,
            BK=max(16, triton.next_power_of_2(K)),
            BV=RULE_LAUNCH.value_rows,
            num_warps=RULE_LAUNCH.warps,
        )
        return o, final

    return rule


def vllm_rule(heads: GdnHeads, chunk_op: Callable[..., Any]) -> ChunkRule:
    """The recurrence by the chunk kernels that vLLM chose for the layer.

    What `_forward_core` does after the convolution: `fused_post_conv_prep`, then the kernels
    without a norm of their own (vLLM 0.26.0, 0.31.0 and 0.33.0 alike).

    Args:
        heads: of this rank.
        chunk_op: the layer's `chunk_gated_delta_rule`, or a function of that name.

    Returns:
        a `ChunkRule` for rows in bfloat16 or float16; the kernels assert that they are not float32.
    """
    from vllm.third_party.flash_linear_attention.ops import fused_post_conv_prep

    def rule(
        weights: Weights, mixed: Tensor, a: Tensor, b: Tensor, initial: Tensor, chunks: ChunkRows
    ) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = fused_post_conv_prep(
            conv_output=mixed,
            a=a,
            b=b,
            A_log=weights.A_log,
            dt_bias=weights.dt_bias,
            num_k_heads=heads.key_heads,
            head_k_dim=heads.key_dim,
            head_v_dim=heads.value_dim,
            apply_l2norm=True,
            output_g_exp=False,
        )
        o, final = chunk_op(
            q=q[None],
            k=k[None],
            v=v[None],
            g=g[None],
            beta=beta[None],
            initial_state=initial,
            output_final_state=True,
            cu_seqlens=chunks.packed,
            chunk_indices=chunks.chunk_indices,
            chunk_offsets=chunks.chunk_offsets,
            use_qk_l2norm_in_kernel=False,
        )
        return o[0], final

    return rule


@torch.no_grad()
def replay_chunks(
    pages: Pages,
    weights: Weights,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    chunks: ChunkRows,
    max_rows: int,
    out: Tensor,
    rule: ChunkRule,
) -> None:
    """What `reference.replay_step` does for requests of more than `max_rows` rows.

    No two chunks may have the same page, but for slot 0.

    Args:
        pages: of the layer; `ssm` and `conv` are written.
        weights: of the layer; conv_weight [C, W] contiguous.
        qkv: [rows of the batch, C], inputs of the convolution in the order q, k, v; unit stride
            in C.
        a, b: [rows of the batch, HV], raw gate inputs; unit stride in HV.
        chunks: the chunks of the step.
        max_rows: T_max = 1 + draft tokens of a step, of the steps that follow.
        out: [rows of the batch, HV, V]; the chunks' rows are written.
        rule: what `portable_rule` or `vllm_rule` returned.

    Raises:
        ValueError: the conv window is too short for `max_rows`.
    """
    window, needed = pages.conv.shape[1], weights.conv_weight.shape[1] - 2 + max_rows
    if window < needed:
        raise ValueError(
            f"{max_rows} rows a step need a conv window of {needed} columns, the pages have "
            f"{window} columns"
        )
    if chunks.tokens == 0:
        return
    _check(pages, weights, chunks, {"qkv": qkv, "a": a, "b": b})
    mixed, packed_a, packed_b = _convolve(pages, weights, qkv, a, b, chunks)
    initial = _start(pages, weights, chunks)
    o, final = rule(weights, mixed, packed_a, packed_b, initial, chunks)
    _commit(pages, qkv, chunks, final.contiguous())
    if chunks.offset is not None:
        out[chunks.offset : chunks.offset + chunks.tokens] = o
    else:
        out.index_copy_(0, chunks.token_index, o.to(out.dtype))
