"""Fold and verify against the loop in float64 over the rows that lie in the rings."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from forms import Kernels
from steps import (
    ODD,
    Request,
    Step,
    error,
    fill_new_rows,
    heads_for,
    make_step,
    same_bits,
    states,
    wanted,
)
from torch import Tensor

from cuda_ext.ops.fold_verify import fold_verify
from cuda_ext.ring import GdnHeads

# Tails and full blocks of both kinds of rows, with rings that wrap inside either.
LONG = [
    Request(0, 1, 70),
    Request(1, 1, 64),
    Request(15, 1, 66),
    Request(16, 15, 200),
    Request(17, 16, 130),
    Request(31, 17, 81),
    Request(32, 32, 95),
    Request(0, 32, 127),
    Request(1, 31, 64),
    Request(10, 16, 51),
    Request(16, 17, 1_000_003),
]
SHORT = [Request(0, 1, 9), Request(1, 2, 32), Request(2, 1, 33), Request(2, 2, 63)]
DRAFTS_15 = [Request(p, t, 40 + 7 * p) for p, t in ((0, 16), (16, 16), (10, 16), (9, 7), (1, 1))]

STATE_ERROR = 2e-6
STATE_ERROR_CUDA = 2.0**-20
"""Of a folded state. Two bfloat16 pieces of d would leave a rounding of half a unit of 8 bits of
what 8 bits leave: 2^-18 at most, 2^-18.6 = 2.4e-6 RMS. Three leave less than float32 itself, whose
2^-25 RMS comes in from the gates, the sums and the state some times over. Between lies 2^-20."""

CANCELLED_ERROR = 0.5
"""Of what a state's last digits alone make, in columns that cancel but for u 2^-18, |u| < 1 evenly:
2^-18.8 RMS. Two pieces lose 2^-18.6 of each of the two columns, 1.6 times that; of the folded state
as a whole it is no more than float32's own error. Three lose only what float32 sums of the columns
do, 2^-24 at a time: 0.03 of it in outputs, in states up to 0.3 where sums are cut off."""


def state_error(kernels: Kernels) -> float:
    return STATE_ERROR if kernels.portable else STATE_ERROR_CUDA


def run(kernels: Kernels, step: Step, q: Tensor) -> None:
    fold_verify(
        step.pages, step.weights, q, step.rows, step.max_rows, step.out, portable=kernels.portable
    )


def check(step: Step, before: Step, q: Tensor, state_error: float = STATE_ERROR) -> None:
    """Outputs and states right; states without pending rows, and all else, as they were."""
    tolerance = 4e-3 if step.out.dtype is torch.bfloat16 else 5e-6
    left = {name: tensor.clone() for name, tensor in states(before.pages).items()}
    for i, request in enumerate(step.requests):
        if request.slot == 0 or not 0 < request.rows <= step.max_rows:
            continue
        out, state = wanted(before, q, i)
        found = step.out[step.part(i)].cpu()
        for t in range(request.rows):
            assert error(found[t], out[t]) < tolerance, f"{request}: first bad row is {t}"
        if request.pending:
            left["ssm"][request.slot] = step.pages.ssm[request.slot]
            folded = step.pages.ssm[request.slot].cpu()
            assert error(folded, state) < state_error, request
    for name, tensor in states(step.pages).items():
        assert same_bits(tensor, left[name]), f"{name} was written where it must not be"


@pytest.mark.parametrize(
    ("requests", "max_rows"),
    [(LONG, 32), (SHORT, 2), (DRAFTS_15, 16), ([Request(1, 1, 7), Request(0, 1, 3)], 1)],
    ids=["32 rows", "2 rows", "16 rows", "1 row"],
)
def test_outputs_and_states_are_those_of_the_loop(
    kernels: Kernels, requests: list[Request], max_rows: int
) -> None:
    step = make_step(kernels, requests, max_rows)
    q = fill_new_rows(step)
    before = step.again()
    run(kernels, step, q)
    check(step, before, q, state_error(kernels))


def test_grouped_heads_of_odd_sizes(kernels: Kernels) -> None:
    step = make_step(kernels, DRAFTS_15[1:4], 16, heads=heads_for(kernels, ODD))
    q = fill_new_rows(step)
    before = step.again()
    run(kernels, step, q)
    check(step, before, q)


@pytest.mark.parametrize("max_rows", [2, 16])
def test_state_in_bfloat16_is_rounded_once(kernels: Kernels, max_rows: int) -> None:
    requests = SHORT if max_rows == 2 else DRAFTS_15
    step = make_step(kernels, requests, max_rows, ssm_dtype=torch.bfloat16)
    q = fill_new_rows(step)
    before = step.again()
    run(kernels, step, q)
    # Half a unit of eight bits at most, evenly: 2^-8 / sqrt(3) times 0.72 for the spread of
    # mantissas. Triton's interpreter cuts off instead, which is twice that.
    check(step, before, q, state_error=2e-3 if kernels.device == "cuda" else 4e-3)


@pytest.mark.parametrize("max_rows", [2, 16])
def test_a_fresh_request_never_reads_its_slot(kernels: Kernels, max_rows: int) -> None:
    """Base 0 is the zero state; the page holds the NaN of an earlier owner."""
    requests = [Request(0, max_rows, 0), Request(max_rows, 1, max_rows), Request(1, 1, 1)]
    step = make_step(kernels, requests, max_rows)
    assert step.pages.ssm.isnan().all()
    q = fill_new_rows(step)
    before = step.again()
    run(kernels, step, q)
    check(step, before, q, state_error(kernels))
    assert not step.pages.ssm[step.requests[1].slot].isnan().any()


@pytest.mark.parametrize(
    ("likeness", "gate"),
    [(0.0, 100.0), (0.95, -6.0), (0.95, 1.0)],
    ids=["strong gates", "alike keys, weak gates", "alike keys"],
)
def test_hard_rows(kernels: Kernels, likeness: float, gate: float) -> None:
    """Keys that resemble each other make the solve's matrix far from the unit; a strong gate among
    weak ones must not cost their digits."""
    step = make_step(kernels, DRAFTS_15[:3], 16)
    q = fill_new_rows(step)
    generator = torch.Generator().manual_seed(3)
    alike = torch.randn(step.pages.k.shape[2:], generator=generator).to(q.device)
    mixed = step.pages.k.float() * (1 - likeness) + alike * likeness
    step.pages.k.copy_(mixed.to(step.pages.k.dtype))
    step.pages.b.add_(3.0)
    scale = torch.rand(step.pages.a.shape, generator=generator).to(q.device) < 0.2
    step.pages.a.copy_(torch.where(scale, torch.full_like(step.pages.a, gate), step.pages.a - 4))
    before = step.again()
    run(kernels, step, q)
    check(step, before, q)


def test_large_states_keep_their_relative_error(kernels: Kernels) -> None:
    step = make_step(kernels, DRAFTS_15[1:3], 16)
    q = fill_new_rows(step)
    step.pages.ssm.mul_(2e4)
    before = step.again()
    run(kernels, step, q)
    check(step, before, q)


@pytest.mark.parametrize("max_rows", [1, 4, 17])
def test_every_digit_of_the_state_counts(kernels: Kernels, max_rows: int) -> None:
    """Two neighbouring columns of the state cancel but for the last of float32's digits, rows are
    the same in both, and values are zero: d, outputs and what the fold does along a key are made
    of those digits."""
    requests = [Request(1, 1, 70)] if max_rows == 1 else [Request(3, max_rows, 70)]
    step = make_step(kernels, requests, max_rows)
    q = fill_new_rows(step)
    generator = torch.Generator().manual_seed(5)
    ssm, slot = step.pages.ssm, step.requests[0].slot
    column = ssm[slot, :, :, 0::2]
    digits = (torch.rand(column.shape, generator=generator) * 2 - 1).to(q.device)
    ssm[slot, :, :, 1::2] = -column * (1 + digits * 2.0**-18)
    for rows in (step.pages.k, q):
        rows.copy_(rows.bfloat16())  # in tf32 as well they are exact
        rows[..., 1::2] = rows[..., 0::2]
    for rows in (step.pages.v, step.pages.b):
        rows[slot] = rows[slot].isnan() * rows[slot]  # zero, NaN where it was
    before = step.again()
    run(kernels, step, q)
    out, state = wanted(before, q, 0)
    assert error(step.out.cpu(), out) < CANCELLED_ERROR
    request, heads = step.requests[0], step.heads
    key = before.pages.k[slot, (request.start - 1) % before.pages.k.shape[1]].double().cpu()
    key = key.repeat_interleave(heads.value_heads // heads.key_heads, 0)
    along = (torch.einsum("hvk,hk->hv", x.double().cpu(), key) for x in (ssm[slot], state))
    assert error(*along) < CANCELLED_ERROR


def test_requests_that_are_not_ours(kernels: Kernels) -> None:
    """Slot 0 gives zeros; no rows, nothing; a prefill chunk is left to its own path."""
    requests = [Request(0, 3, 5, slot=0), Request(2, 0, 9), Request(2, 5, 9), Request(1, 2, 6)]
    step = make_step(kernels, requests, 4)
    q = fill_new_rows(step)
    before = step.again()
    run(kernels, step, q)
    assert torch.equal(step.out[step.part(0)], torch.zeros_like(step.out[step.part(0)]))
    assert step.out[step.part(2)].isnan().all()
    assert not step.out[step.part(3)].isnan().any()
    for request in step.requests[:3]:
        assert same_bits(step.pages.ssm[request.slot], before.pages.ssm[request.slot]), request


@pytest.mark.parametrize(
    ("base", "start"), [(9, 8), (-1, 3), (1, 31)], ids=["backward", "negative", "too many"]
)
def test_a_plan_that_cannot_be_right_gives_nan(kernels: Kernels, base: int, start: int) -> None:
    step = make_step(kernels, [Request(1, 3, 10), Request(2, 2, 10)], 4)
    q = fill_new_rows(step)
    step.rows.base[0], step.rows.start[0] = base, start
    before = step.again()
    run(kernels, step, q)
    assert step.out[step.part(0)].isnan().all()
    assert not step.out[step.part(1)].isnan().any()
    assert same_bits(step.pages.ssm[step.requests[0].slot], before.pages.ssm[step.requests[0].slot])


def test_the_same_bits_each_run_in_any_company(kernels: Kernels) -> None:
    """Results depend on neither the run, nor the order of the batch, nor the other requests."""
    step = make_step(kernels, DRAFTS_15, 16)
    q = fill_new_rows(step)
    first, second = step.again(), step.again()
    run(kernels, first, q)
    run(kernels, second, q)
    assert same_bits(first.out, second.out)
    assert same_bits(first.pages.ssm, second.pages.ssm)

    order = [3, 0, 4]
    tokens = torch.cat([torch.arange(step.part(i).start, step.part(i).stop) for i in order])
    tokens = tokens.to(q.device)
    chosen = [step.requests[i] for i in order]
    ends = torch.tensor([0, *(r.rows for r in chosen)]).cumsum(0).to(torch.int32)
    third = step.again()
    rows = dataclasses.replace(
        step.rows,
        slot=step.rows.slot[order].contiguous(),
        base=step.rows.base[order].contiguous(),
        start=step.rows.start[order].contiguous(),
        row_start=ends.to(q.device),
    )
    third = dataclasses.replace(
        third, requests=tuple(chosen), rows=rows, out=step.out[tokens].clone()
    )
    run(kernels, third, q[tokens].contiguous())
    assert same_bits(third.out, first.out[tokens])
    for request in chosen:
        assert same_bits(third.pages.ssm[request.slot], first.pages.ssm[request.slot])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    ("max_rows", "rows", "pending"),
    [(8, 8, 8), (16, 16, 16), (17, 17, 15), (32, 32, 32)],
    ids=["one block", "two blocks", "two blocks, both of new rows", "four blocks"],
)
def test_thread_blocks_that_go_through_several_tiles(
    max_rows: int, rows: int, pending: int
) -> None:
    """A batch of more tiles than the device holds at once, with requests between them that do
    nothing, start fresh, or are no request of ours."""
    kernels = Kernels("cuda", portable=False, real=True)
    count = torch.cuda.get_device_properties(0).multi_processor_count
    # A thread block's next tile must be of another head, or one could be taken for the other.
    value_heads = next(heads for heads in (5, 7, 9, 11) if count % heads)
    requests = []
    for i in range(count):
        old, new, start = 7 * i % (pending + 1), 1 + 5 * i % rows, 50 + 13 * i
        kinds = {
            2: Request(old, max_rows + 1, start),
            4: Request(old, new, start, slot=0),
            5: Request(old, new, old),
            7: Request(old, 0, start),
        }
        requests.append(kinds.get(i % 9, Request(old, new, start)))
    step = make_step(kernels, requests, max_rows, heads=GdnHeads(1, value_heads, 128, 128, 4))
    q = fill_new_rows(step)
    before, second = step.again(), step.again()
    for each in (step, second):
        fold_verify(
            each.pages,
            each.weights,
            q,
            each.rows,
            max_rows,
            each.out,
            step_rows=rows,
            max_pending=pending,
        )
    assert same_bits(second.out, step.out)
    check(step, before, q, STATE_ERROR_CUDA)
    for i, request in enumerate(step.requests):
        found = step.out[step.part(i)]
        if request.slot == 0:
            assert torch.equal(found, torch.zeros_like(found)), request
        elif request.rows > max_rows:
            assert found.isnan().all(), request
