"""The convolution's launch: each row at its position, and nothing else."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from forms import Kernels
from steps import ODD, Request, Step, error, heads_for, make_step, same_bits, states
from torch import Tensor

from cuda_ext.ops import reference
from cuda_ext.ops.conv_update import conv_update

# Rows before the first token, at it, across a wrap of ring and window, and far on.
REQUESTS = [
    Request(0, 1, 0),
    Request(1, 2, 1),
    Request(2, 15, 2),
    Request(5, 16, 40),
    Request(3, 17, 63),
    Request(9, 31, 61),
    Request(4, 32, 67),
    Request(0, 3, 1000),
]


def mixed_rows(step: Step, i: int) -> tuple[Tensor, ...]:
    """q, k and v [T, heads, dim] of request i, in float64, from inputs and window."""
    heads, request = step.heads, step.requests[i]
    history = heads.conv_kernel - 1
    window = step.pages.conv[request.slot]
    past = window.new_zeros(history, heads.conv_channels)
    for back in range(1, history + 1):
        if request.start - back >= 0:
            past[history - back] = window[(request.start - back) % len(window)]
    mixed = reference.conv_rows(
        past,
        step.qkv[step.part(i)],
        step.weights.conv_weight,
        step.weights.conv_bias,
        step.weights.activation,
        torch.float64,
    )
    H, HV, K, V = heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim
    q, k, v = mixed.split((H * K, H * K, HV * V), 1)
    return q.unflatten(1, (H, K)), k.unflatten(1, (H, K)), v.unflatten(1, (HV, V))


def run(step: Step) -> Tensor:
    return conv_update(step.pages, step.weights, step.qkv, step.a, step.b, step.rows, step.max_rows)


def rounded_alike(found: Tensor, wanted: Tensor) -> float:
    """Share of the elements that are `wanted`, rounded to the dtype of `found`, bit for bit."""
    return float((found == wanted.to(found.dtype)).double().mean())


# Sums of products that were rounded to bfloat16 are off by less than a float32's last bits, which
# decide the last bit of a bfloat16 in one of some thousands. Of products that were not, 65 % agree,
# and their error (0.0025) is too near that of the last rounding alone (0.0017) to tell them apart.
ROUNDED_ALIKE = 0.98


def check(step: Step, q: Tensor, before: Step) -> None:
    """Every new row where it belongs; every other byte of every page as it was."""
    rounded = q.dtype is torch.bfloat16
    tolerance = 3e-3 if rounded else 1e-6
    left = {name: tensor.clone() for name, tensor in states(before.pages).items()}
    for i, request in enumerate(step.requests):
        part = step.part(i)
        positions = torch.arange(request.start, request.start + request.rows, device=q.device)
        rows = dict(zip("qkv", mixed_rows(before, i), strict=True))
        assert error(q[part], rows["q"]) < tolerance, request
        alike = rounded_alike(q[part], rows["q"])
        assert not rounded or alike > ROUNDED_ALIKE, (request, alike)
        for name, ring in states(step.pages).items():
            if name == "ssm":
                continue
            at = positions % ring.shape[1]
            found = ring[request.slot, at]
            if name in "kv":
                assert error(found, rows[name]) < tolerance, (request, name)
                alike = rounded_alike(found, rows[name])
                assert not rounded or alike > ROUNDED_ALIKE, (request, name, alike)
            else:
                given = {"conv": step.qkv, "a": step.a, "b": step.b}[name]
                assert same_bits(found, given[part]), (request, name)
            left[name][request.slot, at] = found
    for name, tensor in states(step.pages).items():
        assert same_bits(tensor, left[name]), f"{name} was written where no row belongs"


def test_rows_go_to_their_positions_and_nowhere_else(kernels: Kernels) -> None:
    step = make_step(kernels, REQUESTS, 32)
    before = step.again()
    check(step, run(step), before)


@pytest.mark.parametrize("max_rows", [1, 2, 3])
def test_steps_shorter_than_the_history(kernels: Kernels, max_rows: int) -> None:
    requests = [Request(0, 1, start) for start in (0, 1, 2, 3, 7)] + [Request(0, max_rows, 33)]
    step = make_step(kernels, requests, max_rows)
    before = step.again()
    check(step, run(step), before)


def test_bias_no_activation_and_grouped_odd_heads(kernels: Kernels) -> None:
    step = make_step(kernels, REQUESTS[:5], 17, heads=heads_for(kernels, ODD), bias=True)
    step = dataclasses.replace(step, weights=dataclasses.replace(step.weights, activation=None))
    before = step.again()
    check(step, run(step), before)


def test_a_window_with_channels_first(kernels: Kernels) -> None:
    step = make_step(kernels, REQUESTS[:5], 17)
    before = step.again()
    memory = step.pages.conv.transpose(1, 2).contiguous()
    step = dataclasses.replace(
        step, pages=dataclasses.replace(step.pages, conv=memory.transpose(1, 2))
    )
    check(step, run(step), before)


def test_requests_that_do_nothing_are_left_alone(kernels: Kernels) -> None:
    requests = [Request(0, 3, 5, slot=0), Request(2, 0, 9), Request(2, 5, 9), Request(1, 2, 6)]
    step = make_step(kernels, requests, 4)
    before = step.again()
    run(step)
    for request in step.requests[:3]:
        for name, tensor in states(step.pages).items():
            kept = getattr(before.pages, name)[request.slot]
            assert same_bits(tensor[request.slot], kept), (request, name)
    assert not same_bits(step.pages.k, before.pages.k)


def test_inputs_may_be_columns_of_a_wider_tensor(kernels: Kernels) -> None:
    step = make_step(kernels, REQUESTS[:4], 16)
    before = step.again()
    channels, heads = step.qkv.shape[1], step.a.shape[1]
    wide = torch.cat((step.qkv, step.qkv * 7), 1)
    gates = torch.cat((step.b, step.a), 1)
    step = dataclasses.replace(step, qkv=wide[:, :channels], b=gates[:, :heads], a=gates[:, heads:])
    check(step, run(step), before)
