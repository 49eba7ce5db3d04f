"""A layer's steps one after another, with drafts accepted at random."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from forms import Kernels
from steps import SMALL, Request, Step, error, heads_for, make_step, same_bits, states
from torch import Tensor

from cuda_ext.ops import reference
from cuda_ext.ops.conv_update import conv_update
from cuda_ext.ops.replay import replay_decode


def decode(kernels: Kernels, step: Step, **known: int) -> None:
    replay_decode(
        step.pages,
        step.weights,
        step.qkv,
        step.a,
        step.b,
        step.rows,
        step.max_rows,
        step.out,
        portable=kernels.portable,
        **known,
    )


def next_step(kernels: Kernels, step: Step, rows: list[int], starts: list[int], seed: int) -> Step:
    """New inputs for the same requests on the same pages; every row before the new ones' start is
    accepted, and the state covers what the last step folded."""
    requests = [
        Request(start - before.start, count, start, before.slot)
        for before, count, start in zip(step.requests, rows, starts, strict=True)
    ]
    fresh = make_step(kernels, requests, step.max_rows, heads=step.heads, seed=seed)
    return dataclasses.replace(fresh, pages=step.pages, weights=step.weights)


@pytest.mark.parametrize("max_rows", [1, 4, 17])
def test_steps_of_random_acceptance_are_those_of_the_reference(
    kernels: Kernels, max_rows: int
) -> None:
    """Against the loop over rows in float64, whose inputs are the kernel's own roundings."""
    steps = 40 if kernels.device == "cuda" else 7
    generator = torch.Generator().manual_seed(max_rows)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    step = make_step(kernels, [Request(0, draw(1, max_rows), 0), Request(0, max_rows, 0)], max_rows)
    count = len(step.requests)
    exact = [torch.zeros(step.pages.ssm.shape[1:], dtype=torch.float64) for _ in range(count)]
    A_log, dt_bias = (x.double().cpu() for x in (step.weights.A_log, step.weights.dt_bias))
    tolerance = 4e-3 if step.out.dtype is torch.bfloat16 else 1e-5
    for number in range(steps):
        copy = step.again()
        q = conv_update(
            copy.pages, step.weights, step.qkv, step.a, step.b, step.rows, max_rows
        ).double()
        decode(kernels, step)
        for i, request in enumerate(step.requests):
            at = torch.arange(request.base, request.start + request.rows)
            rings = (step.pages.k, step.pages.v, step.pages.a, step.pages.b)
            k, v, a, b = (
                ring[request.slot, (at % ring.shape[1]).to(ring.device)].double().cpu()
                for ring in rings
            )
            g, beta = reference.gates(a, b, A_log, dt_bias)
            p = request.pending
            _, exact[i] = reference.loop(exact[i], k[:p], k[:p], v[:p], g[:p], beta[:p])
            out, _ = reference.loop(exact[i], q[step.part(i)].cpu(), k[p:], v[p:], g[p:], beta[p:])
            assert error(step.out[step.part(i)].cpu(), out) < tolerance, (number, request)
            if p:
                found = step.pages.ssm[request.slot].cpu()
                assert error(found, exact[i]) < 1e-5, (number, request)
        starts = [r.start + draw(1, r.rows) for r in step.requests]
        step = next_step(
            kernels, step, [draw(1, max_rows) for _ in starts], starts, seed=100 + number
        )


def test_one_step_is_the_reference_step(kernels: Kernels) -> None:
    """With rows in float32 nothing is rounded, and whole pages can be compared."""
    if kernels.real:
        pytest.skip("the pages of real models round their rows")
    requests = [Request(3, 4, 9), Request(0, 2, 0), Request(4, 1, 1001), Request(0, 3, 5, slot=0)]
    step = make_step(kernels, requests, 4, heads=SMALL)
    exact = step.again()
    pages = {name: tensor.double().cpu() for name, tensor in states(exact.pages).items()}
    weights = {
        name: value.double().cpu() if isinstance(value, Tensor) else value
        for name, value in vars(step.weights).items()
    }
    out = exact.out.double().cpu()
    reference.replay_step(
        reference.Pages(**pages),
        reference.Weights(**weights),
        step.heads,
        *(x.double().cpu() for x in (step.qkv, step.a, step.b)),
        reference.StepRows(*(x.cpu() for x in vars(step.rows).values())),
        step.max_rows,
        out,
        rule=reference.loop,
    )
    decode(kernels, step)
    assert error(step.out.cpu(), out) < 2e-6
    for name, tensor in states(step.pages).items():
        found, want = tensor.double().cpu(), pages[name]
        assert torch.equal(found.isnan(), want.isnan()), name
        assert error(found.nan_to_num(), want.nan_to_num()) < 2e-6, name


def test_short_rings_and_windows_are_refused(kernels: Kernels) -> None:
    step = make_step(kernels, [Request(0, 1, 0)], 16)
    with pytest.raises(ValueError, match="need rings of 34 rows"):
        decode(kernels, dataclasses.replace(step, max_rows=17))
    short = dataclasses.replace(step.pages, conv=step.pages.conv[:, :17])
    with pytest.raises(ValueError, match="conv window of 18 columns"):
        decode(kernels, dataclasses.replace(step, pages=short))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("portable", [True, False], ids=["triton", "cuda"])
def test_a_captured_step_follows_its_buffers(portable: bool) -> None:
    """Captured with every request idle; replayed with a plan and inputs written since."""
    kernels = Kernels("cuda", portable, real=True)
    step = make_step(kernels, [Request(10, 16, 50), Request(16, 16, 77), Request(0, 16, 0)], 16)
    eager = step.again()
    decode(kernels, eager)
    plan = {name: tensor.clone() for name, tensor in vars(step.rows).items()}
    inputs = [x.clone() for x in (step.qkv, step.a, step.b)]
    for name in ("slot", "base", "start"):
        getattr(step.rows, name).zero_()
    for tensor in (step.qkv, step.a, step.b):
        tensor.fill_(7.0)
    before = step.again()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        decode(kernels, step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(kernels, step)
    graph.replay()
    for name, tensor in states(step.pages).items():
        assert same_bits(tensor, getattr(before.pages, name)), f"an idle step wrote {name}"
    assert torch.equal(step.out, torch.zeros_like(step.out))
    for name, tensor in plan.items():
        getattr(step.rows, name).copy_(tensor)
    for tensor, value in zip((step.qkv, step.a, step.b), inputs, strict=True):
        tensor.copy_(value)
    graph.replay()
    assert same_bits(step.out, eager.out)
    for name, tensor in states(step.pages).items():
        assert same_bits(tensor, getattr(eager.pages, name)), name


@pytest.mark.parametrize(
    ("requests", "known"),
    [
        ([Request(10, 2, 50), Request(16, 1, 77)], {"step_rows": 2}),
        ([Request(16, 1, 50), Request(1, 1, 77)], {"step_rows": 1}),
        ([Request(2, 1, 50), Request(0, 1, 77)], {"step_rows": 1, "max_pending": 2}),
    ],
    ids=["two rows", "one row", "one row, few pending"],
)
def test_what_the_host_knows_may_be_told(
    kernels: Kernels, requests: list[Request], known: dict[str, int]
) -> None:
    """It chooses the launch and changes no result by more than rounding."""
    step = make_step(kernels, requests, 17, heads=heads_for(kernels))
    told = step.again()
    decode(kernels, step)
    decode(kernels, told, **known)
    assert error(told.out, step.out) < (5e-3 if kernels.real else 2e-6)
    for request in step.requests:
        if request.pending:
            found, alone = told.pages.ssm[request.slot], step.pages.ssm[request.slot]
            assert error(found, alone) < 2e-6, request


@pytest.mark.parametrize("name", ["conv", "ssm", "k", "v", "a", "b"])
def test_pages_farther_apart_than_32_bits_can_count(kernels: Kernels, name: str) -> None:
    """The last slot begins 2^31 elements after the first."""
    if kernels.device == "cpu":
        pytest.skip("takes the memory of a large GPU")
    step = make_step(kernels, [Request(3, 4, 50, slot=6), Request(4, 2, 9, slot=1)], 4)
    near = getattr(step.pages, name)
    stride = (2**31 // (len(near) - 1) // 64 + 1) * 64
    elements = stride * (len(near) - 1) + near[0].numel()
    if elements * near.element_size() > torch.cuda.mem_get_info()[0] // 2:
        pytest.skip("takes the memory of a large GPU")
    memory = torch.empty(elements, dtype=near.dtype, device=near.device)
    far = memory.as_strided(near.shape, (stride, *near.stride()[1:]))
    far.copy_(near)
    again = step.again()
    again = dataclasses.replace(again, pages=dataclasses.replace(again.pages, **{name: far}))
    decode(kernels, step)
    decode(kernels, again)
    assert same_bits(again.out, step.out)
    for state, tensor in states(step.pages).items():
        assert same_bits(getattr(again.pages, state), tensor), state
