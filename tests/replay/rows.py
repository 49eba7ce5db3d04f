"""Random inputs of a Gated DeltaNet layer, poisoned pages, and the oracle's answer for a request.

Tolerances, for every comparison with the oracle. An error is the RMS of the difference over the RMS
of the oracle's answer. Rounding each of n additions to a unit u moves a sum by about sqrt(n) * u,
and one step of the recurrence multiplies older errors by at most one (a decay <= 1 times
I - beta k k^T with beta <= 1 and |k| = 1), so errors of earlier rows add up no faster than those of
one long sum. The longest chain to an element has `rows` steps of a dot over K, the window's W taps,
and the rows of a block: fewer than rows * (K + W + 64) additions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from math import log, sqrt

import torch
from torch import Tensor

from cuda_ext.ops.reference import Pages, StepRows, Weights, gates, loop
from cuda_ext.ring import GdnHeads, ring_rows

STALE = 7.0
NAN = float("nan")
BLOCK_ROWS = 64


def tolerance(dtype: torch.dtype, rows: int, heads: GdnHeads) -> float:
    """RMS error that `rows` steps in `dtype` may have; see the module's docstring."""
    adds = rows * (heads.key_dim + heads.conv_kernel + BLOCK_ROWS)
    return torch.finfo(dtype).eps / 2 * sqrt(adds)


def stored(dtype: torch.dtype, times: int = 1) -> float:
    """RMS error of a value rounded to `dtype` when it is stored, `times` in a chain."""
    return torch.finfo(dtype).eps / 2 * sqrt(times)


def assert_close(name: str, got: Tensor, want: Tensor, limit: float, first: int = 0) -> None:
    """RMS ratio of [rows, ...] below `limit`; names the first row that is off, from `first` on."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    got, want = got.double(), want.double()
    finite = got.isfinite().flatten(1).all(1) if len(got) else torch.ones(0, dtype=torch.bool)
    assert finite.all(), f"{name}: not finite in row {first + finite.int().argmin().item()}"
    error = (got - want).square().flatten(1).mean(1)
    scale = want.square().mean()
    ratio = (error.mean() / scale).sqrt().item() if scale else error.sum().sqrt().item()
    if ratio > limit:
        bad = (error > limit**2 * scale).int().argmax().item()
        raise AssertionError(
            f"{name}: RMS error {ratio:.2e} is above {limit:.2e}; first bad row {first + bad}, "
            f"largest difference {(got - want).abs().max().item():.2e}"
        )


def int_bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes, so that NaN equals NaN and -0.0 differs from 0.0."""
    return tensor.contiguous().view(torch.uint8)


def ints(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


@dataclass(frozen=True)
class Stream:
    """Inputs of the rows of one request: qkv [n, C], a and b [n, HV]."""

    qkv: Tensor
    a: Tensor
    b: Tensor

    def __len__(self) -> int:
        return len(self.qkv)

    def __getitem__(self, part: slice) -> Stream:
        return Stream(self.qkv[part], self.a[part], self.b[part])


def joined(streams: Iterable[Stream]) -> Stream:
    parts = list(streams)
    return Stream(*(torch.cat([getattr(s, f.name) for s in parts]) for f in fields(Stream)))


def random_stream(
    heads: GdnHeads,
    count: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> Stream:
    def normal(width: int) -> Tensor:
        values = torch.randn(count, width, generator=generator, dtype=torch.float64)
        return (scale * values).to(dtype)

    HV = heads.value_heads
    return Stream(normal(heads.conv_channels), normal(HV), normal(HV))


def random_weights(heads: GdnHeads, generator: torch.Generator, bias: bool = True) -> Weights:
    """Gates from 0.01 (the first head, which remembers hundreds of rows) to 10 (the last)."""
    C, HV = heads.conv_channels, heads.value_heads
    conv = torch.randn(C, heads.conv_kernel, generator=generator) / heads.conv_kernel**0.5
    return Weights(
        conv_weight=conv,
        conv_bias=torch.randn(C, generator=generator) if bias else None,
        A_log=torch.linspace(log(0.01), log(10), HV),
        dt_bias=torch.randn(HV, generator=generator) / 4,
        activation="silu",
    )


def poisoned_pages(
    heads: GdnHeads,
    drafts: int,
    slots: int,
    poison: float,
    dtype: torch.dtype = torch.float32,
    ssm_dtype: torch.dtype = torch.float32,
    conv_dim_first: bool = False,
) -> Pages:
    """Pages full of `poison`; with `conv_dim_first` the window's memory is [slots, C, L]."""
    R, L = ring_rows(drafts), heads.conv_kernel - 1 + drafts
    H, HV, C = heads.key_heads, heads.value_heads, heads.conv_channels

    def full(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.full((slots, *shape), poison, dtype=dtype)

    return Pages(
        conv=full(C, L).transpose(1, 2) if conv_dim_first else full(L, C),
        ssm=full(HV, heads.value_dim, heads.key_dim, dtype=ssm_dtype),
        k=full(R, H, heads.key_dim),
        v=full(R, HV, heads.value_dim),
        a=full(R, HV),
        b=full(R, HV),
    )


def snapshot(pages: Pages) -> Pages:
    return replace(pages, **{f.name: getattr(pages, f.name).clone() for f in fields(Pages)})


def step_rows(requests: Iterable[tuple[int, int, int, int]]) -> StepRows:
    """The int32 buffers of a step for (slot, base, start, T) of each request."""
    slots, bases, starts, counts = zip(*requests, strict=True)
    row_start = [0]
    for count in counts:
        row_start.append(row_start[-1] + count)
    return StepRows(ints(slots), ints(bases), ints(starts), ints(row_start))


def oracle_rows(
    weights: Weights, heads: GdnHeads, stream: Stream, ring_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, g and beta of a request's rows from its first token on, in float64.

    The convolution is torch's own, over the whole request with zeros before it.
    """
    H, HV, K, V = heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim
    taps = weights.conv_weight.double()
    bias = None if weights.conv_bias is None else weights.conv_bias.double()
    padded = torch.nn.functional.pad(stream.qkv.double().t(), (heads.conv_kernel - 1, 0))
    mixed = torch.nn.functional.conv1d(padded[None], taps[:, None], bias, groups=len(taps))[0].t()
    if weights.activation:
        mixed = mixed * mixed.sigmoid()
    mixed = mixed.to(ring_dtype).double()
    q, k, v = mixed.split((H * K, H * K, HV * V), 1)
    g, beta = gates(stream.a.double(), stream.b.double(), weights.A_log, weights.dt_bias)
    count = len(stream)
    return q.view(count, H, K), k.view(count, H, K), v.view(count, HV, V), g, beta


def oracle(
    weights: Weights, heads: GdnHeads, stream: Stream, ring_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Outputs [n, HV, V] and last state [HV, V, K] of one float64 loop over a request's rows."""
    zero = torch.zeros(heads.value_heads, heads.value_dim, heads.key_dim, dtype=torch.float64)
    return loop(zero, *oracle_rows(weights, heads, stream, ring_dtype))
