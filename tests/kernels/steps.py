"""Steps to run the kernels on: poisoned pages with just the rows that a step may read."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from forms import Kernels
from torch import Tensor

from cuda_ext.ops import reference
from cuda_ext.ops.reference import Pages, StepRows, Weights
from cuda_ext.ring import GdnHeads, ring_rows

SMALL = GdnHeads(key_heads=1, value_heads=2, key_dim=16, value_dim=16, conv_kernel=4)
ODD = GdnHeads(key_heads=2, value_heads=6, key_dim=24, value_dim=40, conv_kernel=4)
REAL = GdnHeads(key_heads=2, value_heads=4, key_dim=128, value_dim=128, conv_kernel=4)


@dataclass(frozen=True)
class Request:
    """P pending and T new rows that start at a position; slot 0 is the null page."""

    pending: int
    rows: int
    start: int
    slot: int = -1

    @property
    def base(self) -> int:
        return self.start - self.pending


@dataclass(frozen=True)
class Step:
    """All that a step of a layer is given."""

    heads: GdnHeads
    requests: tuple[Request, ...]
    max_rows: int
    pages: Pages
    weights: Weights
    qkv: Tensor
    a: Tensor
    b: Tensor
    rows: StepRows
    out: Tensor

    def again(self) -> Step:
        """The same step on copies of what it writes."""
        pages = Pages(**{name: tensor.clone() for name, tensor in states(self.pages).items()})
        return dataclasses.replace(self, pages=pages, out=self.out.clone())

    def part(self, i: int) -> slice:
        """Rows of request i in the batch."""
        first = sum(request.rows for request in self.requests[:i])
        return slice(first, first + self.requests[i].rows)


def states(pages: Pages) -> dict[str, Tensor]:
    return {field.name: getattr(pages, field.name) for field in dataclasses.fields(pages)}


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Equal bit for bit, NaN with NaN."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.equal(x.contiguous().view(integers), y.contiguous().view(integers))


def error(found: Tensor, wanted: Tensor) -> float:
    """RMS error over the RMS of what is wanted; NaN never passes."""
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


def heads_for(kernels: Kernels, small: GdnHeads = SMALL) -> GdnHeads:
    return REAL if kernels.real else small


def row_dtype(kernels: Kernels) -> torch.dtype:
    return torch.bfloat16 if kernels.real else torch.float32


def make_weights(
    heads: GdnHeads,
    generator: torch.Generator,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Weights:
    """As vLLM keeps them: A_log in float32, all others in the model's dtype."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return Weights(
        conv_weight=(normal(heads.conv_channels, heads.conv_kernel) * 0.5).to(dtype),
        conv_bias=(normal(heads.conv_channels) * 0.1).to(dtype) if bias else None,
        A_log=torch.rand(heads.value_heads, generator=generator) * 2 - 1,
        dt_bias=(torch.rand(heads.value_heads, generator=generator) - 1).to(dtype),
    )


def make_step(
    kernels: Kernels,
    requests: list[Request],
    max_rows: int,
    *,
    heads: GdnHeads | None = None,
    ssm_dtype: torch.dtype = torch.float32,
    bias: bool = False,
    seed: int = 0,
) -> Step:
    """A step whose pages hold NaN wherever it must not read.

    Slots are dealt in an order of their own, with unused ones between, so that neither order nor
    neighbours can be mistaken.
    """
    heads = heads or heads_for(kernels)
    device, dtype = kernels.device, row_dtype(kernels)
    generator = torch.Generator().manual_seed(seed)
    H, HV, K, V = heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim
    R, L = ring_rows(max_rows - 1), heads.conv_kernel - 1 + max_rows - 1
    slots = 2 * len(requests) + 3
    dealt = (torch.randperm(slots - 1, generator=generator) + 1).tolist()
    requests = [
        request if request.slot >= 0 else dataclasses.replace(request, slot=dealt.pop())
        for request in requests
    ]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    nan = float("nan")
    pages = Pages(
        conv=torch.full((slots, L, heads.conv_channels), nan, dtype=dtype),
        ssm=torch.full((slots, HV, V, K), nan, dtype=ssm_dtype),
        k=torch.full((slots, R, H, K), nan, dtype=dtype),
        v=torch.full((slots, R, HV, V), nan, dtype=dtype),
        a=torch.full((slots, R, HV), nan, dtype=dtype),
        b=torch.full((slots, R, HV), nan, dtype=dtype),
    )
    for request in requests:
        if request.slot == 0:
            continue
        if request.base > 0:
            pages.ssm[request.slot] = (normal(HV, V, K) * 0.5).to(ssm_dtype)
        for ring in (pages.k, pages.v, pages.a, pages.b):
            at = torch.arange(request.base, request.start) % R
            ring[request.slot, at] = normal(len(at), *ring.shape[2:]).to(dtype)
        at = torch.arange(max(0, request.start - heads.conv_kernel + 1), request.start) % L
        pages.conv[request.slot, at] = normal(len(at), heads.conv_channels).to(dtype)
    tokens = sum(request.rows for request in requests)
    numbers = [
        [request.slot for request in requests],
        [request.base for request in requests],
        [request.start for request in requests],
        [sum(r.rows for r in requests[:i]) for i in range(len(requests) + 1)],
    ]
    weights = make_weights(heads, generator, bias, dtype)
    moved = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in vars(weights).items()
    }
    return Step(
        heads=heads,
        requests=tuple(requests),
        max_rows=max_rows,
        pages=Pages(**{name: tensor.to(device) for name, tensor in states(pages).items()}),
        weights=Weights(**moved),
        qkv=normal(tokens, heads.conv_channels).to(device, dtype),
        a=normal(tokens, HV).to(device, dtype),
        b=normal(tokens, HV).to(device, dtype),
        rows=StepRows(*(torch.tensor(x, dtype=torch.int32, device=device) for x in numbers)),
        out=torch.full((tokens, HV, V), nan, dtype=dtype, device=device),
    )


def fill_new_rows(step: Step, seed: int = 1) -> Tensor:
    """Put random new rows into the rings, as the convolution would; returns q [tokens, H, K]."""
    heads, dtype = step.heads, step.pages.k.dtype
    generator = torch.Generator().manual_seed(seed)
    for request in step.requests:
        if request.slot == 0 or request.rows > step.max_rows:
            continue
        for ring in (step.pages.k, step.pages.v, step.pages.a, step.pages.b):
            at = torch.arange(request.start, request.start + request.rows) % ring.shape[1]
            new = torch.randn(request.rows, *ring.shape[2:], generator=generator)
            ring[request.slot, at.to(ring.device)] = new.to(ring.device, dtype)
    q = torch.randn(len(step.qkv), heads.key_heads, heads.key_dim, generator=generator)
    return q.to(step.qkv.device, dtype)


def wanted(step: Step, q: Tensor, i: int) -> tuple[Tensor, Tensor]:
    """Outputs [T, HV, V] and folded state [HV, V, K] of request i, from the loop in float64 over
    what lies in the rings."""
    request, pages = step.requests[i], step.pages
    at = torch.arange(request.base, request.start + request.rows) % pages.k.shape[1]
    k, v, a, b = (
        ring[request.slot, at.to(ring.device)].double().cpu()
        for ring in (pages.k, pages.v, pages.a, pages.b)
    )
    g, beta = reference.gates(
        a, b, step.weights.A_log.double().cpu(), step.weights.dt_bias.double().cpu()
    )
    state = pages.ssm[request.slot].double().cpu()
    if request.base == 0:
        state = torch.zeros_like(state)
    old, new = slice(0, request.pending), slice(request.pending, None)
    _, state = reference.loop(state, k[old], k[old], v[old], g[old], beta[old])
    rows = q[step.part(i)].double().cpu()
    out, _ = reference.loop(state, rows, k[new], v[new], g[new], beta[new])
    return out, state
