"""One ReplaySSM step of a Gated DeltaNet layer in plain torch: the ground truth, and the CPU path.

Two forms of one recurrence. `loop` goes token by token as the formulas are written; every other
form and every kernel is compared with it. `block` solves `rows` tokens at once (the UT form) and
serves. `replay_step` does what a layer does with its pages: folds the rows accepted since the last
step into the state, computes the new rows from it, and keeps their raw inputs, so that the next
step can fold those that were accepted. It stands in for the body of
`QwenGatedDeltaNetAttention._forward_core` (vLLM 0.31.0) between projections and gated norm.

Per value head h, which shares key head h // (HV // H), with S [V, K]:
S = exp(g) S; d = beta (v - S k); S = S + d k^T; o = S q (Gated Delta Networks, arXiv:2412.06464).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from cuda_ext.ring import GdnHeads

L2_EPS = 1e-6
Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def conv_rows(
    history: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Causal depthwise convolution of the rows of one request, and its activation.

    Where rows and weights are both of 16 bits, each product is rounded to them before it is summed:
    vLLM's causal_conv1d_fn does so, and a prompt shall be read as it is there.

    Args:
        history: [W - 1, C], inputs of the positions just before `rows`, oldest first.
        rows: [T, C], inputs.
        weight: [C, W]; tap W - 1 meets the newest input.
        bias: [C], or None.
        activation: "silu", its other name "swish", or None.
        dtype: of the sums; by default float32, or float64 where `rows` are.

    Returns:
        [T, C] in `dtype`.

    Raises:
        ValueError: the activation is none of these.
    """
    if activation not in ("silu", "swish", None):
        raise ValueError(f"conv activation {activation!r} is none of 'silu', 'swish', None")
    dtype = dtype or _at_least_float32(rows)
    products = torch.promote_types(rows.dtype, weight.dtype)
    if products.itemsize > 2:
        products = dtype
    count, taps = len(rows), weight.shape[1]
    inputs = torch.cat((history.to(rows.dtype), rows)).to(products)
    weight = weight.to(products)
    result = torch.zeros(rows.shape, dtype=dtype, device=rows.device)
    if bias is not None:
        result += bias.to(dtype)
    for tap in range(taps):
        result += inputs[tap : tap + count] * weight[:, tap]
    return functional.silu(result) if activation else result


def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Decay and write strength from the raw gate inputs.

    Args:
        a, b: [T, HV], outputs of the gate projections.
        A_log, dt_bias: [HV], weights.

    Returns:
        g [T, HV], logarithm of the decay, -exp(A_log) * softplus(a + dt_bias) <= 0; and
        beta [T, HV], sigmoid(b). Both float32, or float64 where `a` is.
    """
    dtype = _at_least_float32(a)
    rate = functional.softplus(a.to(dtype) + dt_bias.to(dtype))
    return rate * -A_log.to(dtype).exp(), b.to(dtype).sigmoid()


def _unit(rows: Tensor) -> Tensor:
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + L2_EPS)


def normalise(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q and k [..., K] with length 1 (eps inside the root), q then scaled by K ** -0.5."""
    return _unit(q) * q.shape[-1] ** -0.5, _unit(k)


def loop(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence token by token: the oracle, never optimised.

    Args:
        state: [HV, V, K], float64 or float32; all arithmetic is in this dtype.
        q, k: [T, H, K], after the convolution, not normalised.
        v: [T, HV, V].
        g: [T, HV], logarithm of the decay.
        beta: [T, HV].

    Returns:
        o [T, HV, V] and the state after the last row, both in the dtype of `state`, which itself
        stays as it was.
    """
    q, k, v, g, beta = (x.to(state.dtype) for x in (q, k, v, g, beta))
    q, k = normalise(q, k)
    group = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1)
    outputs = torch.empty_like(v)
    for t in range(len(v)):
        state = state * g[t].exp()[:, None, None]
        d = beta[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
        state = state + torch.einsum("hv,hk->hvk", d, k[t])
        outputs[t] = torch.einsum("hvk,hk->hv", state, q[t])
    return outputs, state


def _solve_block(
    state: Tensor, q: Tensor | None, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One block of T rows: state [HV, V, K], q and k [H, T, K] normalised, v [HV, V, T],
    g and beta [HV, T]; gives o [HV, V, T], of no rows without q, and the new state.

    With D_ij = exp(g_{j+1} + .. + g_i) for i >= j, G_i = g_1 + .. + g_i and d as columns:
    d (I + tril(diag(beta) (K K^T o D), -1))^T = (v - exp(G) (S K^T)) diag(beta),
    o = exp(G) (S Q^T) + d (tril(Q K^T) o D)^T, S' = exp(G_T) S + (d o D_T) K.
    """
    value_heads, value_dim, key_dim = state.shape
    heads, rows = k.shape[:2]
    per_key_head = state.reshape(heads, -1, key_dim)
    both = k if q is None else torch.cat((k, q), 1)
    read = torch.bmm(per_key_head, both.mT).view(value_heads, value_dim, -1)
    # Key heads stay unrepeated in every product; only [rows, rows] is spread over value heads.
    products = torch.bmm(both, k.mT).repeat_interleave(value_heads // heads, 0)

    # Sums of the gates between two rows. A difference of running sums would cancel: after a strong
    # gate, weak ones would lose the digits that the strong one takes.
    spans = g[:, :, None].expand(-1, -1, rows).tril(-1).cumsum(1)
    decay = spans.exp().tril()
    since_start = g.cumsum(1).exp()[:, None]

    # A unit triangular solve reads neither the diagonal nor what lies beyond it.
    mixing = products[:, :rows] * decay * beta[:, :, None]
    wanted = (v - read[..., :rows] * since_start) * beta[:, None]
    d = torch.linalg.solve_triangular(mixing.mT, wanted, upper=True, left=False, unitriangular=True)

    outputs = read[..., rows:]
    if q is not None:
        outputs = torch.baddbmm(read[..., rows:] * since_start, d, (products[:, rows:] * decay).mT)
    kept = (d * decay[:, -1:]).reshape(heads, -1, rows)
    carried = (state * since_start[..., -1:]).reshape(heads, -1, key_dim)
    return outputs, torch.baddbmm(carried, kept, k).view_as(state)


def block(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    rows: int = 64,
) -> tuple[Tensor, Tensor]:
    """What `loop` returns, from a triangular solve of `rows` tokens at a time.

    Args:
        state, q, k, v, g, beta: as for `loop`.
        rows: tokens of a block.

    Returns:
        o [T, HV, V] and the state after the last row, both in the dtype of `state`, which itself
        stays as it was.
    """
    q, k, v, g, beta = (x.to(state.dtype) for x in (q, k, v, g, beta))
    q, k = normalise(q, k)
    q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.permute(1, 2, 0)
    g, beta = g.t(), beta.t()
    outputs = state.new_empty(g.shape[1], *state.shape[:2])
    for first in range(0, g.shape[1], rows):
        part = slice(first, first + rows)
        o, state = _solve_block(
            state, q[:, part], k[:, part], v[..., part], g[:, part], beta[:, part]
        )
        outputs[part] = o.permute(2, 0, 1)
    return outputs, state


def fold(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: int = 64) -> Tensor:
    """The state that `block` returns, without its outputs.

    Args:
        state, k, v, g, beta: as for `loop`.
        rows: tokens of a block.

    Returns:
        [HV, V, K] in the dtype of `state`, which itself stays as it was.
    """
    k, v, g, beta = (x.to(state.dtype) for x in (k, v, g, beta))
    k, v, g, beta = _unit(k).transpose(0, 1), v.permute(1, 2, 0), g.t(), beta.t()
    for first in range(0, g.shape[1], rows):
        part = slice(first, first + rows)
        state = _solve_block(state, None, k[:, part], v[..., part], g[:, part], beta[:, part])[1]
    return state


@dataclass(frozen=True)
class Pages:
    """The pages of one layer, each state as a view over all slots (`ring.replay_layout`).

    Args:
        conv: [slots, L, C], inputs of the convolution; column of position p is p mod L. A view
            with this order of dimensions, whichever the memory has.
        ssm: [slots, HV, V, K], float32 or bfloat16 (float64 in tests).
        k: [slots, R, H, K], after the convolution, not normalised; row of position p is p mod R.
        v: [slots, R, HV, V].
        a, b: [slots, R, HV], raw gate inputs.
    """

    conv: Tensor
    ssm: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class Weights:
    """What a layer's recurrence needs of its weights, on this rank.

    Args:
        conv_weight: [C, W].
        conv_bias: [C], or None.
        A_log, dt_bias: [HV].
        activation: of the convolution, as for `conv_rows`.
    """

    conv_weight: Tensor
    conv_bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    activation: str | None = "silu"


@dataclass(frozen=True)
class StepRows:
    """The requests of a step, planned once per KV group; integer tensors.

    Args:
        slot: [N], page of the request; 0 is the null page.
        base: [N], tokens folded into the state; at 0 the state is zero and is not read.
        start: [N], position of the request's first new row.
        row_start: [N + 1], first row of each request in the batch, and the end of the last.
    """

    slot: Tensor
    base: Tensor
    start: Tensor
    row_start: Tensor


def _checked_rows(
    pages: Pages, heads: GdnHeads, rows: StepRows, max_rows: int, tokens: int
) -> list[tuple[int, int, int, int, int]]:
    """(slot, base, start, first, end) of each request, when every one can be served."""
    slots, ring = pages.k.shape[:2]
    window = pages.conv.shape[1]
    # The next step starts at least one row on, and reads W - 1 inputs back from there.
    needed = heads.conv_kernel - 1 + max_rows - 1
    if max_rows > ring or window < needed:
        raise RuntimeError(
            f"{max_rows} rows a step need a ring of as many rows and a conv window of {needed} "
            f"columns, the pages have R={ring} and {window} columns"
        )
    row_start = rows.row_start.tolist()
    requests = list(
        zip(
            rows.slot.tolist(),
            rows.base.tolist(),
            rows.start.tolist(),
            row_start[:-1],
            row_start[1:],
            strict=True,
        )
    )
    for row, (slot, base, start, first, end) in enumerate(requests):
        count, pending = end - first, start - base
        if count == 0 or slot == 0:
            continue
        if not 0 <= slot < slots:
            problem = f"the slot is outside the {slots} pages"
        elif not 0 <= first < end <= tokens:
            problem = f"rows {first} to {end} are outside the {tokens} of the batch"
        elif base < 0 or not 0 <= pending <= ring:
            problem = f"{pending} pending rows do not fit the ring"
        else:
            continue
        raise RuntimeError(
            f"row {row}: {problem}: slot={slot}, base={base}, start={start}, T={count}, R={ring}"
        )
    return requests


def _take(ring: Tensor, position: int, count: int) -> Tensor:
    """`count` rows from `position` on, of a ring [rows, ...]; a view where they do not wrap."""
    first = position % len(ring)
    over = first + count - len(ring)
    if over <= 0:
        return ring[first : first + count]
    return torch.cat((ring[first:], ring[:over]))


def _put(ring: Tensor, position: int, rows: Tensor) -> None:
    """Write at most as many rows as the ring [rows, ...] has, from `position` on."""
    first = position % len(ring)
    over = first + len(rows) - len(ring)
    if over <= 0:
        ring[first : first + len(rows)] = rows
    else:
        split = len(rows) - over
        ring[first:] = rows[:split]
        ring[:over] = rows[split:]


def _history(window: Tensor, start: int, count: int) -> Tensor:
    """The `count` conv inputs before `start`; those before the first token are zeros."""
    if start >= count:
        return _take(window, start - count, count)
    zeros = window.new_zeros(count - start, window.shape[1])
    return torch.cat((zeros, _take(window, 0, start))) if start else zeros


@torch.no_grad()
def replay_step(
    pages: Pages,
    weights: Weights,
    heads: GdnHeads,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    rows: StepRows,
    max_rows: int,
    out: Tensor,
    rule: Rule = block,
) -> None:
    """One step of one layer for all its requests, in place.

    Each request first folds its pending rows [base, start) from the rings into the state. At most
    `max_rows` new rows are computed from there and their inputs appended to the rings: which of
    them were accepted shows in the next step's `start`, and nothing of theirs enters the state
    before. More rows are a prefill chunk: nobody can reject them, so the state goes on to their
    end, and of their inputs only the conv window keeps the last ones.

    The rows of q, k and v are rounded to the dtype of the rings before use, so that a fold replays
    exactly what was verified. The state is taken up to float32 at least; outputs come from it
    before it is rounded into a bfloat16 page.

    Args:
        pages: of this layer; written.
        weights: of this layer.
        heads: of this rank.
        qkv: [tokens, C], inputs of the convolution in the order q, k, v.
        a, b: [tokens, HV], raw gate inputs.
        rows: the requests of the step.
        max_rows: T_max = 1 + draft tokens of a step.
        out: [tokens, HV, V]; written from the first to the last row of each request. Rows of a
            request in slot 0 become zero, and what no request owns is left as it is.
        rule: `block`, or `loop`.

    Raises:
        RuntimeError: pending rows outside [0, R], a slot or rows outside the tensors, or a ring or
            window too short for `max_rows`; before anything is written.
    """
    H, HV, K, V = heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim
    history = heads.conv_kernel - 1
    dtype, ring_dtype = _at_least_float32(pages.ssm), pages.k.dtype
    requests = _checked_rows(pages, heads, rows, max_rows, len(qkv))
    A_log, dt_bias = weights.A_log.to(dtype), weights.dt_bias.to(dtype)
    a, b = a.to(pages.a.dtype), b.to(pages.b.dtype)
    g, beta = gates(a.to(dtype), b.to(dtype), A_log, dt_bias)

    for slot, base, start, first, end in requests:
        part, count = slice(first, end), end - first
        if count == 0:
            continue
        if slot == 0:
            out[part] = 0
            continue
        window = pages.conv[slot]
        rings = (pages.k[slot], pages.v[slot], pages.a[slot], pages.b[slot])

        state = pages.ssm[slot].to(dtype) if base else pages.ssm.new_zeros(HV, V, K, dtype=dtype)
        pending = start - base
        if pending:
            old_k, old_v, old_a, old_b = (_take(ring, base, pending) for ring in rings)
            old_g, old_beta = gates(old_a.to(dtype), old_b, A_log, dt_bias)
            if rule is block:
                state = fold(state, old_k, old_v, old_g, old_beta)
            else:
                state = rule(state, old_k, old_k, old_v, old_g, old_beta)[1]

        mixed = conv_rows(
            _history(window, start, history),
            qkv[part],
            weights.conv_weight,
            weights.conv_bias,
            weights.activation,
        ).to(ring_dtype)
        q, k, v = mixed.split((H * K, H * K, HV * V), 1)
        q, k, v = q.unflatten(1, (H, K)), k.unflatten(1, (H, K)), v.unflatten(1, (HV, V))
        outputs, after = rule(state, q, k, v, g[part], beta[part])
        out[part] = outputs

        if count > max_rows:
            pages.ssm[slot] = after
        else:
            if pending:
                pages.ssm[slot] = state
            for ring, new in zip(rings, (k, v, a[part], b[part]), strict=True):
                _put(ring, start, new)
        kept = min(count, len(window))
        _put(window, end - first + start - kept, qkv[end - kept : end])
