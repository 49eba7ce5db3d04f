# mypy: disable-error-code="no-untyped-def, import-not-found"
# Triton gives the arguments of its kernels types of its own, and is absent where the linter runs.
"""Fold the pending rows of each request into its state, and verify the new ones against it.

The second launch of a layer's step, after the convolution (conv_update.py) has put the new rows
into the rings. It stands in for `fused_sigmoid_gating_delta_rule_update` (vLLM 0.31.0,
third_party/flash_linear_attention/ops/fused_sigmoid_gating.py), which writes a state for every row.

Three kernels, one result. `fold_verify.cu` serves the shapes of real models on NVIDIA: the state is
read once, meets all rows, and is written once. A Triton kernel that goes row by row serves steps of
one row; another, in blocks of 16 rows with the state advanced on chip, whatever shapes and dtypes
are left. In Triton's interpreter both are tested on a machine without a GPU.

The algebra of a block of rows i with state S [V, K] before it, raw gates g and beta, k and q after
l2norm, G_i = g_0 + .. + g_i, D_ij = exp(g_{j+1} + .. + g_i) for j <= i (Gated Delta Networks,
arXiv:2412.06464, section 3.3; the UT form of DeltaNet, arXiv:2406.06484):

    L = tril(diag(beta) (K K^T o D), -1),  M = (I + L)^-1 diag(beta)
    d = (v - exp(G) S k) M^T                          what each row adds to the state
    o = exp(G) S q + d (Q K^T o D)^T                  what each row reads
    S' = exp(G_last) S + (d o D_last) K               the state after the block
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_ext.ops import launch
from cuda_ext.ops.cuda_module import Kernel, compile_source
from cuda_ext.ops.reference import L2_EPS, Pages, StepRows, Weights

EPS = tl.constexpr(L2_EPS)
LARGEST_SOFTPLUS = tl.constexpr(20.0)
RECURRENT_ROWS, RECURRENT_PENDING = 1, 2
"""Longest step, and most pending rows, that are taken row by row: 24 us at 16 requests on an H200,
where the blocks take 26; with 10 pending rows it is 49 against 27."""


@triton.jit
def _gates(a, b, A_log, dt_bias, mask):
    """g and beta in fp32 from raw inputs; rows outside `mask` neither decay nor write."""
    x = a.to(tl.float32) + dt_bias
    small = tl.minimum(x, LARGEST_SOFTPLUS)
    softplus = tl.where(x > LARGEST_SOFTPLUS, x, tl.log(1.0 + tl.exp(small)))
    g = tl.where(mask, -tl.exp(A_log) * softplus, 0.0)
    beta = tl.where(mask, tl.sigmoid(b.to(tl.float32)), 0.0)
    return g, beta


@triton.jit
def _unit_inverse(lower):
    """(I + L)^-1 of a strictly lower [16, 16]: its 4x4 diagonal blocks first, then the rest, each
    nilpotent. Powers of all of L at once would cancel where keys resemble each other."""
    i = tl.arange(0, 16)
    near = (i[:, None] // 4) == (i[None, :] // 4)
    unit = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    inside = tl.where(near, lower, 0.0)
    series = unit + tl.dot(inside, inside, input_precision="tf32x3")
    blocks = series - tl.dot(inside, series, input_precision="tf32x3")
    rest = tl.dot(blocks, tl.where(near, 0.0, lower), input_precision="tf32x3")
    twice = tl.dot(rest, rest, input_precision="tf32x3")
    result = blocks + tl.dot(twice, blocks, input_precision="tf32x3")
    return result - tl.dot(rest, result, input_precision="tf32x3")


@triton.jit
def _block(state, k, v, g, beta):
    """One block of rows against the state before it.

    state [BV, K] fp32, k [16, K] raw, v [BV, 16] fp32, g and beta [16]. Returns d [BV, 16], the
    l2norm factors of k [16], D [16, 16] with zeros above the diagonal, and exp(G) [16].
    """
    i = tl.arange(0, 16)
    k = k.to(tl.float32)
    norm = tl.rsqrt(tl.sum(k * k, 1) + EPS)
    below = i[:, None] > i[None, :]
    # Sums between two rows: a difference of running sums would cancel after a strong gate.
    spans = tl.cumsum(tl.where(below, g[:, None], 0.0), 0)
    decay = tl.where(i[:, None] >= i[None, :], tl.exp(spans), 0.0)
    since = tl.exp(tl.cumsum(g, 0))
    products = tl.dot(k, tl.trans(k), input_precision="tf32x3") * norm[:, None] * norm[None, :]
    solve = _unit_inverse(tl.where(below, products * decay * beta[:, None], 0.0)) * beta[None, :]
    read = tl.dot(state, tl.trans(k), input_precision="tf32x3")
    wanted = v - read * (norm * since)[None, :]
    d = tl.dot(wanted, tl.trans(solve), input_precision="tf32x3")
    return d, norm, decay, since


@triton.jit
def _advance(state, k, d, norm, decay, since):
    """The state after the block; the last row's D and exp(G) are the block's."""
    i = tl.arange(0, 16)
    kept = tl.sum(tl.where(i[:, None] == 15, decay, 0.0), 0) * norm
    carried = tl.sum(tl.where(i == 15, since, 0.0), 0)
    added = tl.dot(d * kept[None, :], k.to(tl.float32), input_precision="tf32x3")
    return state * carried + added


@triton.jit
def _fill(out, first, rows, value, o_h, o_v, mask_v, out_stride, V: tl.constexpr):
    for t in range(0, rows):
        p_o = out + (first + t) * out_stride + o_h * V + o_v
        tl.store(p_o, tl.full(o_v.shape, value, out.dtype.element_ty), mask=mask_v)


@triton.jit
def _request(slots, bases, starts, row_start):
    """First row in the batch, T, slot, base and P of a program's request."""
    i_n = tl.program_id(2)
    first = tl.load(row_start + i_n).to(tl.int64)
    rows = (tl.load(row_start + i_n + 1) - first).to(tl.int32)
    base = tl.load(bases + i_n)
    return first, rows, tl.load(slots + i_n).to(tl.int64), base, tl.load(starts + i_n) - base


@triton.jit
def _load_state(p_s, mask, base):
    """The state at `base` in fp32; zeros without a read at 0."""
    b_s = tl.zeros(p_s.shape, tl.float32)
    if base > 0:
        b_s += tl.load(p_s, mask=mask, other=0.0).to(tl.float32)
    return b_s


@triton.jit
def _ring_rows(p_k, p_v, p_a, p_b, row, mask, mask_k, mask_v, log_rate, bias, HK, HV, HVV):
    """k [16, K] raw, v [BV, 16] in fp32, g and beta [16] of 16 ring rows."""
    b_k = tl.load(p_k + row[:, None] * HK, mask=mask[:, None] & mask_k[None, :], other=0.0)
    p_v += row[None, :] * HVV
    b_v = tl.load(p_v, mask=mask[None, :] & mask_v[:, None], other=0.0).to(tl.float32)
    b_a = tl.load(p_a + row * HV, mask=mask, other=0.0)
    b_b = tl.load(p_b + row * HV, mask=mask, other=0.0)
    g, beta = _gates(b_a, b_b, log_rate, bias, mask)
    return b_k, b_v, g, beta


@triton.jit
def _block_kernel(
    state,
    k_ring,
    v_ring,
    a_ring,
    b_ring,
    q,
    out,
    A_log,
    dt_bias,
    slots,
    bases,
    starts,
    row_start,
    state_stride,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    q_stride,
    out_stride,
    scale,
    R,
    max_rows,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Grid (V / BV, HV, N). See `fold_verify` for the tensors."""
    i_h = tl.program_id(1).to(tl.int64)
    i_k = i_h // (HV // H)
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    mask_v = o_v < V
    first, rows, slot, base, pending = _request(slots, bases, starts, row_start)
    if slot == 0:
        _fill(out, first, rows, 0.0, i_h, o_v, mask_v, out_stride, V)
    if (slot != 0) & (rows > 0) & (rows <= max_rows):
        if (base < 0) | (pending < 0) | (pending + rows > R):
            # No answer is better than a wrong one that looks right.
            _fill(out, first, rows, float("nan"), i_h, o_v, mask_v, out_stride, V)
        else:
            o_k, i = tl.arange(0, BK), tl.arange(0, 16)
            mask_k = o_k < K
            mask_s = mask_v[:, None] & mask_k[None, :]
            log_rate = tl.load(A_log + i_h).to(tl.float32)
            bias = tl.load(dt_bias + i_h).to(tl.float32)
            p_k = k_ring + slot * k_stride + i_k * K + o_k[None, :]
            p_v = v_ring + slot * v_stride + i_h * V + o_v[:, None]
            p_a, p_b = a_ring + slot * a_stride + i_h, b_ring + slot * b_stride + i_h
            p_s = state + slot * state_stride + i_h * V * K + o_v[:, None] * K + o_k[None, :]
            b_s = _load_state(p_s, mask_s, base)

            for j in range(0, pending, 16):
                mask = j + i < pending
                row = ((base + j + i) % R).to(tl.int64)
                b_k, b_v, g, beta = _ring_rows(
                    p_k, p_v, p_a, p_b, row, mask, mask_k, mask_v, log_rate, bias, H * K, HV, HV * V
                )
                d, norm, decay, since = _block(b_s, b_k, b_v, g, beta)
                b_s = _advance(b_s, b_k, d, norm, decay, since)
            if pending > 0:
                tl.store(p_s, b_s.to(state.dtype.element_ty), mask=mask_s)

            for t in range(0, rows, 16):
                mask = t + i < rows
                row = ((base + pending + t + i) % R).to(tl.int64)
                b_k, b_v, g, beta = _ring_rows(
                    p_k, p_v, p_a, p_b, row, mask, mask_k, mask_v, log_rate, bias, H * K, HV, HV * V
                )
                p_q = q + (first + t + i)[:, None] * q_stride + i_k * K + o_k[None, :]
                b_q = tl.load(p_q, mask=mask[:, None] & mask_k[None, :], other=0.0).to(tl.float32)
                d, norm, decay, since = _block(b_s, b_k, b_v, g, beta)
                q_norm = tl.rsqrt(tl.sum(b_q * b_q, 1) + EPS) * scale
                k_t = tl.trans(b_k.to(tl.float32))
                seen = tl.dot(b_q, k_t, input_precision="tf32x3") * decay
                seen = seen * q_norm[:, None] * norm[None, :]
                read = tl.dot(b_s, tl.trans(b_q), input_precision="tf32x3")
                b_o = read * (q_norm * since)[None, :]
                b_o += tl.dot(d, tl.trans(seen), input_precision="tf32x3")
                p_o = out + (first + t + i)[None, :] * out_stride + i_h * V + o_v[:, None]
                tl.store(p_o, b_o.to(out.dtype.element_ty), mask=mask[None, :] & mask_v[:, None])
                if t + 16 < rows:
                    b_s = _advance(b_s, b_k, d, norm, decay, since)


@triton.jit
def _recurrent_kernel(
    state,
    k_ring,
    v_ring,
    a_ring,
    b_ring,
    q,
    out,
    A_log,
    dt_bias,
    slots,
    bases,
    starts,
    row_start,
    state_stride,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    q_stride,
    out_stride,
    scale,
    R,
    max_rows,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """The recurrence as written, a row at a time. Grid (V / BV, HV, N), as `_block_kernel`."""
    i_h = tl.program_id(1).to(tl.int64)
    i_k = i_h // (HV // H)
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    mask_v = o_v < V
    first, rows, slot, base, pending = _request(slots, bases, starts, row_start)
    if slot == 0:
        _fill(out, first, rows, 0.0, i_h, o_v, mask_v, out_stride, V)
    if (slot != 0) & (rows > 0) & (rows <= max_rows):
        if (base < 0) | (pending < 0) | (pending + rows > R):
            _fill(out, first, rows, float("nan"), i_h, o_v, mask_v, out_stride, V)
        else:
            o_k = tl.arange(0, BK)
            mask_k = o_k < K
            mask_s = mask_v[:, None] & mask_k[None, :]
            log_rate = tl.load(A_log + i_h).to(tl.float32)
            bias = tl.load(dt_bias + i_h).to(tl.float32)
            p_k = k_ring + slot * k_stride + i_k * K + o_k
            p_v = v_ring + slot * v_stride + i_h * V + o_v
            p_a, p_b = a_ring + slot * a_stride + i_h, b_ring + slot * b_stride + i_h
            p_s = state + slot * state_stride + i_h * V * K + o_v[:, None] * K + o_k[None, :]
            b_s = _load_state(p_s, mask_s, base)

            for j in range(0, pending + rows):
                row = ((base + j) % R).to(tl.int64)
                b_k = tl.load(p_k + row * (H * K), mask=mask_k, other=0.0).to(tl.float32)
                b_v = tl.load(p_v + row * (HV * V), mask=mask_v, other=0.0).to(tl.float32)
                g, beta = _gates(
                    tl.load(p_a + row * HV), tl.load(p_b + row * HV), log_rate, bias, True
                )
                b_k = b_k * tl.rsqrt(tl.sum(b_k * b_k, 0) + EPS)
                b_s = b_s * tl.exp(g)
                d = beta * (b_v - tl.sum(b_s * b_k[None, :], 1))
                b_s = b_s + d[:, None] * b_k[None, :]
                if j == pending - 1:
                    tl.store(p_s, b_s.to(state.dtype.element_ty), mask=mask_s)
                if j >= pending:
                    t = first + (j - pending)
                    b_q = tl.load(q + t * q_stride + i_k * K + o_k, mask=mask_k, other=0.0)
                    b_q = b_q.to(tl.float32)
                    b_q = b_q * (tl.rsqrt(tl.sum(b_q * b_q, 0) + EPS) * scale)
                    b_o = tl.sum(b_s * b_q[None, :], 1)
                    p_o = out + t * out_stride + i_h * V + o_v
                    tl.store(p_o, b_o.to(out.dtype.element_ty), mask=mask_v)


_STRIDED = ("state", "k_ring", "v_ring", "a_ring", "b_ring", "q", "out")
_POINTERS = (*_STRIDED, "A_log", "dt_bias", "slot", "base", "start", "row_start")
_STRIDES = tuple(f"{name}_stride" for name in _STRIDED)


class _Arguments(ctypes.Structure):
    """`Args` of fold_verify.cu, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_longlong) for name in _STRIDES),
        ("max_rows", ctypes.c_int),
        ("tiles", ctypes.c_int),
        ("scale", ctypes.c_float),
    ]


_C_TYPES = {torch.float32: "float", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class CudaBuild:
    """What the CUDA kernel is compiled for.

    Args:
        size: of the launch.
        key_heads, value_heads: H and HV.
        ring: R.
        state_type, rate_type, bias_type: C types of the state, of A_log and of dt_bias.
        overlap: whether it waits for its predecessor itself.
        device: index.
    """

    size: launch.CudaLaunch
    key_heads: int
    value_heads: int
    ring: int
    state_type: str
    rate_type: str
    bias_type: str
    overlap: bool
    device: int

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a thread block."""
        return self.size.shared_bytes(4 if self.state_type == "float" else 2)


@functools.cache
def compile_cuda(build: CudaBuild) -> bytes:
    """Machine code of the CUDA kernel; on the CPU alone, some seconds.

    Raises:
        CudaError: NVRTC is missing or refuses the source.
    """
    major, minor = torch.cuda.get_device_capability(build.device)
    size = build.size
    defines = {
        "NB": size.row_blocks,
        "NQ": size.new_blocks,
        "WARPS": size.warps,
        "CTAS": size.blocks_per_sm,
        "AHEAD": size.ahead,
        "KEY_HEADS": build.key_heads,
        "VALUE_HEADS": build.value_heads,
        "RING": build.ring,
        "STATE_T": build.state_type,
        "RATE_T": build.rate_type,
        "BIAS_T": build.bias_type,
        "PDL": int(build.overlap),
        "SHARED_BYTES": build.shared_bytes,
    }
    options = [f"--gpu-architecture=sm_{major}{minor}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in defines.items()]
    return compile_source(Path(__file__).with_name("fold_verify.cu"), options)


@functools.cache
def _cuda_kernel(build: CudaBuild) -> Kernel:
    with torch.cuda.device(build.device):
        return Kernel(compile_cuda(build), "fold_verify", build.shared_bytes)


@functools.cache
def _largest_launch(device: int) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a thread block may have."""
    found = torch.cuda.get_device_properties(device)
    # The driver keeps a KiB of each block's for itself.
    return found.multi_processor_count, found.shared_memory_per_multiprocessor - 1024


def check_plan(rows: StepRows) -> None:
    """Assert what the kernels take for granted of a plan."""
    count = rows.slot.shape[0]
    for name, tensor in vars(rows).items():
        expected = count + 1 if name == "row_start" else count
        found = (name, tensor.dtype, tensor.shape, tensor.stride())
        assert tensor.dtype is torch.int32, found
        assert tensor.shape == (expected,), found
        assert tensor.is_contiguous(), found


def _fits_cuda(pages: Pages, weights: Weights, q: Tensor, out: Tensor) -> bool:
    """Whether the shapes and dtypes are those that the CUDA kernel is written for."""
    rows = (pages.k, pages.v, pages.a, pages.b, q, out)
    moved_by_16_bytes = (pages.ssm, pages.v, out)
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
        and pages.ssm.shape[-2:] == (128, 128)
        and all(tensor.dtype is torch.bfloat16 for tensor in rows)
        and pages.ssm.dtype in _C_TYPES
        # vLLM keeps A_log in float32 and dt_bias in the model's dtype.
        and weights.A_log.dtype in _C_TYPES
        and weights.dt_bias.dtype in _C_TYPES
        and all(
            (tensor.data_ptr() | tensor.stride(0) * tensor.element_size()) % 16 == 0
            for tensor in moved_by_16_bytes
        )
    )


def _cuda(
    size: launch.CudaLaunch,
    pages: Pages,
    weights: Weights,
    q: Tensor,
    rows: StepRows,
    max_rows: int,
    out: Tensor,
    overlap: bool,
) -> None:
    ring, H = pages.k.shape[1:3]
    HV, V, K = pages.ssm.shape[1:]
    build = CudaBuild(
        size,
        H,
        HV,
        ring,
        _C_TYPES[pages.ssm.dtype],
        _C_TYPES[weights.A_log.dtype],
        _C_TYPES[weights.dt_bias.dtype],
        overlap,
        q.device.index,
    )
    strided = (pages.ssm, pages.k, pages.v, pages.a, pages.b, q, out)
    plan = (rows.slot, rows.base, rows.start, rows.row_start)
    pointers = (*strided, weights.A_log, weights.dt_bias, *plan)
    tiles = rows.slot.shape[0] * HV * (V // (16 * size.warps))
    arguments = _Arguments(
        *(tensor.data_ptr() for tensor in pointers),
        *(tensor.stride(0) for tensor in strided),
        max_rows,
        tiles,
        K**-0.5,
    )
    resident = size.blocks_per_sm * _largest_launch(q.device.index)[0]
    grid = (min(tiles, resident), 1, 1)
    _cuda_kernel(build).launch(grid, 32 * size.warps, arguments, overlap)


def fold_verify(
    pages: Pages,
    weights: Weights,
    q: Tensor,
    rows: StepRows,
    max_rows: int,
    out: Tensor,
    *,
    step_rows: int | None = None,
    max_pending: int | None = None,
    overlap: bool = False,
    portable: bool = False,
) -> None:
    """Fold and verify the requests of a step whose new rows are in the rings already.

    A request folds its pending rows [base, start), if it has any, and writes its state once; the
    new rows are computed from there. With base 0 the state counts as zero and is not read. A
    request in slot 0 reads nothing and gets zeros. One of more than `max_rows` rows is left to the
    prefill path. One whose plan can't be right, or whose pending and new rows exceed R, changes
    nothing and gets NaN.

    Args:
        pages: of the layer; `ssm` is written. All but the first dimension must be contiguous.
        weights: A_log and dt_bias are used.
        q: [tokens, H, K], after the convolution, not normalised.
        rows: plan of the step; int32.
        max_rows: T_max.
        out: [tokens, HV, V].
        step_rows: T of the longest request that is to be served here, where the host knows it; at
            most, and without it, `max_rows`. Requests with more rows get NaN.
        max_pending: P at most, where the host knows it better than by `max_rows`, of which no more
            can have been accepted: 1 after a step without drafts, say. Requests with more may get
            NaN.
        overlap: launch before the previous kernel on the stream, which must be the one that wrote
            the rows, has ended (compute capability 9.0 and later).
        portable: take the Triton kernels even where the CUDA kernel could serve.
    """
    requests = rows.slot.shape[0]
    if requests == 0:
        return
    check_plan(rows)
    for name, tensor in {**vars(pages), "q": q, "out": out}.items():
        assert name == "conv" or tensor[:1].is_contiguous(), (name, tensor.shape, tensor.stride())
    longest = min(step_rows or max_rows, max_rows)
    ring, H = pages.k.shape[1:3]
    HV, V, K = pages.ssm.shape[1:]
    pending = max_rows if max_pending is None else min(max_pending, max_rows)
    recurrent = longest <= RECURRENT_ROWS and pending <= RECURRENT_PENDING
    if not (recurrent or portable) and _fits_cuda(pages, weights, q, out):
        size = launch.cuda_launch(requests, HV, longest, pending)
        room = _largest_launch(q.device.index)[1]
        if size is not None and size.shared_bytes(pages.ssm.element_size()) <= room:
            _cuda(size, pages, weights, q, rows, max_rows, out, overlap)
            return
    if recurrent:
        kernel, chosen = _recurrent_kernel, launch.RECURRENT_LAUNCH
    else:
        kernel, chosen = _block_kernel, launch.block_launch(V)
    grid = (triton.cdiv(V, chosen.value_rows), HV, requests)
    kernel[grid](
        pages.ssm,
        pages.k,
        pages.v,
        pages.a,
        pages.b,
        q,
        out,
        weights.A_log,
        weights.dt_bias,
        rows.slot,
        rows.base,
        rows.start,
        rows.row_start,
        pages.ssm.stride(0),
        pages.k.stride(0),
        pages.v.stride(0),
        pages.a.stride(0),
        pages.b.stride(0),
        q.stride(0),
        out.stride(0),
        K**-0.5,
        ring,
        max_rows,
        H=H,
        HV=HV,
        K=K,
        V=V,
        BK=max(16, triton.next_power_of_2(K)),
        BV=chosen.value_rows,
        num_warps=chosen.warps,
    )
