"""Prefill chunks against the loop in float64: from our pages, into our pages, and nowhere else."""

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
    heads_for,
    make_step,
    same_bits,
    states,
)
from torch import Tensor

from cuda_ext.ops import chunk, reference
from cuda_ext.ops.chunk import ChunkRows, ChunkRule, portable_rule, replay_chunks, vllm_rule
from cuda_ext.ops.conv_update import conv_update
from cuda_ext.ops.reference import Pages, StepRows
from cuda_ext.ops.replay import replay_decode
from cuda_ext.ring import GdnHeads

# T_max is 16: R = 32, L = 18. Just over T_max (and shorter than the window), around the blocks of
# vLLM's kernels; at the first token, just after it, in the midst; windows and rings that wrap.
LENGTHS = [
    Request(0, 17, 0),
    Request(1, 18, 1),
    Request(16, 63, 40),
    Request(0, 64, 1000),
    Request(1, 65, 33),
    Request(16, 130, 16),
    Request(0, 17, 35),
    Request(2, 19, 3),
]
RING_ROWS = Request(2, 3, 9)

# RMS of a rounding to b bits of mantissa, relative: 2^-b / sqrt(3) at most, about 0.72 of that for
# evenly spread mantissas; 1.6e-3 for bfloat16 (b = 8), once for each output.
#
# vLLM's kernels keep the state and all sums in float32 and give bfloat16 operands to each product.
# Rounded on the way to an output are the normalised q and k, the inverse, w, u, what each row adds,
# the state, the products of q and k, and the output: 9 roundings, in quadrature 3 * 1.6e-3, and one
# fewer or two for a state. The rest, up to 2, is for the solve, which multiplies errors by the
# inverse of a matrix near the unit. In float16, eight times finer, Triton's interpreter gives
# 4.5e-4, which is 3.6e-3 here. A row whose terms cancel may be worse by itself: ROW_ERROR.
VLLM_ERROR, ROW_ERROR = 1e-2, 4


def tolerance(kernels: Kernels) -> tuple[float, float]:
    """Of outputs and states, as a ratio of RMS."""
    if not kernels.portable:
        return VLLM_ERROR, VLLM_ERROR
    # The state sees what is rounded to bfloat16 before, on both sides; but where the convolution's
    # last float32 digit differs, that rounding falls the other way now and then.
    return (4e-3, 3e-4) if kernels.real else (1e-5, 1e-5)


def rule_for(kernels: Kernels, heads: GdnHeads) -> ChunkRule:
    """Ours where Triton is asked for; vLLM's kernels beside the CUDA kernel, as a server has it."""
    if kernels.portable:
        return portable_rule(heads)
    ops = pytest.importorskip(
        "vllm.third_party.flash_linear_attention.ops", reason="needs vLLM's chunk kernels"
    )
    return vllm_rule(heads, ops.chunk_gated_delta_rule)


def chunk_rows(step: Step) -> ChunkRows:
    """The plan of the step's chunks; the step must have some."""
    chosen = [i for i, request in enumerate(step.requests) if request.rows > step.max_rows]
    device = step.qkv.device
    parts = [step.part(i) for i in chosen]
    lengths = [part.stop - part.start for part in parts]
    tokens = torch.cat([torch.arange(part.start, part.stop) for part in parts]).to(device)
    together = bool((tokens.diff() == 1).all())
    at = torch.tensor(chosen, device=device)
    return ChunkRows(
        slot=step.rows.slot[at],
        base=step.rows.base[at],
        start=step.rows.start[at],
        first=torch.tensor([part.start for part in parts], dtype=torch.int32, device=device),
        packed=torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32),
        tokens=sum(lengths),
        longest=max(lengths),
        offset=parts[0].start if together else None,
        token_index=None if together else tokens,
    )


def run(kernels: Kernels, step: Step, chunks: ChunkRows | None = None) -> None:
    replay_chunks(
        step.pages,
        step.weights,
        step.qkv,
        step.a,
        step.b,
        chunk_rows(step) if chunks is None else chunks,
        step.max_rows,
        step.out,
        rule_for(kernels, step.heads),
    )


def exactly(step: Step, slot: Tensor | None = None) -> Step:
    """The step on the CPU by the loop, its states and outputs in float64, its rows as they are."""

    def cpu(values: object) -> dict[str, object]:
        return {
            name: value.cpu() if isinstance(value, Tensor) else value
            for name, value in vars(values).items()
        }

    copy = step.again()
    pages = cpu(copy.pages)
    rows = StepRows(**cpu(copy.rows))  # type: ignore[arg-type]
    done = dataclasses.replace(
        copy,
        pages=Pages(**{**pages, "ssm": pages["ssm"].double()}),  # type: ignore[attr-defined]
        weights=reference.Weights(**cpu(copy.weights)),  # type: ignore[arg-type]
        rows=rows if slot is None else dataclasses.replace(rows, slot=slot),
        out=copy.out.double().cpu(),
    )
    inputs = (x.cpu() for x in (step.qkv, step.a, step.b))
    reference.replay_step(
        done.pages,
        done.weights,
        step.heads,
        *inputs,
        done.rows,
        step.max_rows,
        done.out,
        rule=reference.loop,
    )
    return done


def check_outputs(kernels: Kernels, step: Step, exact: Step, i: int) -> None:
    part, request, allowed = step.part(i), step.requests[i], tolerance(kernels)[0]
    found, wanted = step.out[part].cpu(), exact.out[part]
    for t in range(request.rows):
        wrong = error(found[t], wanted[t])
        row = allowed if kernels.portable else allowed * ROW_ERROR
        assert wrong < row, f"{request}: first bad row is {t}, by {wrong:.2g}"
    assert error(found, wanted) < allowed, request


def check(kernels: Kernels, step: Step, before: Step, state_error: float | None = None) -> None:
    """The chunks' outputs, states and windows right, and every other byte as it was."""
    chunks = [i for i, request in enumerate(step.requests) if request.rows > step.max_rows]
    slot = before.rows.slot.cpu().clone()
    for i, request in enumerate(step.requests):
        if request.rows <= step.max_rows:
            slot[i] = 0
    exact = exactly(before, slot)
    left = before.again()
    for i in chunks:
        request = step.requests[i]
        check_outputs(kernels, step, exact, i)
        left.out[step.part(i)] = step.out[step.part(i)]
        if request.slot != 0:
            found = step.pages.ssm[request.slot]
            wrong = error(found.cpu(), exact.pages.ssm[request.slot])
            assert wrong < (state_error or tolerance(kernels)[1]), (request, wrong)
            left.pages.ssm[request.slot] = found
    assert same_bits(step.out, left.out), "an output of another request was written"
    assert same_bits(step.pages.conv.cpu(), exact.pages.conv), "the window"
    for name, tensor in states(step.pages).items():
        if name != "conv":
            assert same_bits(tensor, getattr(left.pages, name)), f"{name} was written elsewhere"


def with_neighbours(step: Step) -> Step:
    """7.0 in every other page that is no request's: written NaN would not show among NaN."""
    owned = {request.slot for request in step.requests}
    for tensor in states(step.pages).values():
        for slot in range(0, len(tensor), 2):
            if slot not in owned:
                tensor[slot] = 7.0
    return step


def make(kernels: Kernels, requests: list[Request], max_rows: int = 16, **given: object) -> Step:
    return with_neighbours(make_step(kernels, requests, max_rows, **given))  # type: ignore[arg-type]


def test_chunks_of_every_length(kernels: Kernels) -> None:
    step = make(kernels, LENGTHS)
    assert step.pages.ssm[step.requests[0].slot].isnan().all()
    before = step.again()
    run(kernels, step)
    check(kernels, step, before)


@pytest.mark.parametrize("max_rows", [1, 2])
def test_windows_that_hold_hardly_more_than_the_history(kernels: Kernels, max_rows: int) -> None:
    requests = [Request(p, t, s) for p, t, s in ((0, 3, 0), (1, 4, 1), (1, 3, 7), (0, 37, 64))]
    if max_rows == 1:
        requests += [Request(0, 2, 0), Request(1, 2, 1), Request(1, 2, 34)]
    step = make(kernels, requests, max_rows)
    before = step.again()
    run(kernels, step)
    check(kernels, step, before)


@pytest.mark.parametrize(
    "requests",
    [
        [LENGTHS[3]],
        [RING_ROWS, LENGTHS[1]],
        [RING_ROWS, LENGTHS[0], LENGTHS[2], LENGTHS[1], RING_ROWS],
        [LENGTHS[1], RING_ROWS, LENGTHS[2], LENGTHS[0]],
        [LENGTHS[0], Request(0, 0, 0), LENGTHS[6]],
    ],
    ids=["one", "one behind", "three together", "apart", "an idle one between"],
)
def test_chunks_anywhere_in_a_batch(kernels: Kernels, requests: list[Request]) -> None:
    step = make(kernels, requests)
    before = step.again()
    run(kernels, step)
    check(kernels, step, before)


def test_grouped_heads_of_odd_sizes_with_bias_and_no_activation(kernels: Kernels) -> None:
    step = make(kernels, LENGTHS[:2], heads=heads_for(kernels, ODD), bias=True)
    step = dataclasses.replace(step, weights=dataclasses.replace(step.weights, activation=None))
    before = step.again()
    run(kernels, step)
    check(kernels, step, before)


def test_state_in_bfloat16_is_rounded_once(kernels: Kernels) -> None:
    """Pending rows are folded on the way, and no rounding of theirs may come between."""
    step = make(kernels, LENGTHS[1:4], ssm_dtype=torch.bfloat16)
    before = step.again()
    run(kernels, step)
    # As for the fold (test_fold_verify.py): Triton's interpreter cuts off, which is twice as bad.
    rounding = 2e-3 if kernels.device == "cuda" else 4e-3
    check(kernels, step, before, state_error=rounding + (0 if kernels.portable else VLLM_ERROR))


def test_a_window_with_channels_first(kernels: Kernels) -> None:
    step = make(kernels, LENGTHS[:3])
    before = step.again()
    memory = step.pages.conv.transpose(1, 2).contiguous()
    pages = dataclasses.replace(step.pages, conv=memory.transpose(1, 2))
    step = dataclasses.replace(step, pages=pages)
    run(kernels, step)
    check(kernels, step, before)


def test_inputs_may_be_columns_of_a_wider_tensor(kernels: Kernels) -> None:
    step = make(kernels, [RING_ROWS, *LENGTHS[:3]])
    before = step.again()
    channels, heads = step.qkv.shape[1], step.a.shape[1]
    wide = torch.cat((step.qkv, step.qkv * 7), 1)
    gates = torch.cat((step.b, step.a), 1)
    step = dataclasses.replace(step, qkv=wide[:, :channels], b=gates[:, :heads], a=gates[:, heads:])
    run(kernels, step)
    check(kernels, step, before)


def test_chunks_of_the_null_page_give_zeros(kernels: Kernels) -> None:
    """A dummy run's rows may hold anything."""
    step = make(kernels, [Request(0, 20, 0, slot=0), LENGTHS[1], LENGTHS[0]], bias=True)
    dummy = dataclasses.replace(step.requests[2], slot=0, start=5)
    step = dataclasses.replace(step, requests=(*step.requests[:2], dummy))
    step.rows.slot[2], step.rows.start[2] = 0, 5
    for i in (0, 2):
        for tensor in (step.qkv, step.a, step.b):
            tensor[step.part(i)] = float("nan")
    before = step.again()
    run(kernels, step)
    for i in (0, 2):
        rows = step.out[step.part(i)]
        assert torch.equal(rows, torch.zeros_like(rows)), i
    # Rows of NaN would make the reference's zeros doubtful: it is given others.
    for i in (0, 2):
        for tensor in (before.qkv, before.a, before.b):
            tensor[before.part(i)] = 1.0
    check(kernels, step, before)


@pytest.mark.parametrize(
    ("base", "start"),
    [(9, 8), (-1, 3), (1, 34), (0, 33)],
    ids=["backward", "negative", "too many", "never folded"],
)
def test_a_plan_that_cannot_be_right_gives_nan(kernels: Kernels, base: int, start: int) -> None:
    step = make(kernels, [Request(1, 20, 10), Request(2, 37, 10)])
    step.rows.base[0], step.rows.start[0] = base, start
    slot = step.requests[0].slot
    for tensor in states(step.pages).values():
        # Poison that the wrong plan reads would give the NaN that is asked for.
        tensor[slot] = tensor[slot].nan_to_num(nan=1.0)
    step.out.zero_()
    before = step.again()
    run(kernels, step)
    assert step.out[step.part(0)].isnan().all()
    for name, tensor in states(step.pages).items():
        assert same_bits(tensor[slot], getattr(before.pages, name)[slot]), name
    before.rows.base[0], before.rows.start[0] = 9, 10
    exact = exactly(before)
    check_outputs(kernels, step, exact, 1)
    other = step.requests[1].slot
    assert same_bits(step.pages.conv[other].cpu(), exact.pages.conv[other])


def test_as_many_pending_rows_as_the_ring_holds_are_folded(kernels: Kernels) -> None:
    step = make(kernels, [Request(32, 20, 32), Request(32, 17, 77)])
    before = step.again()
    run(kernels, step)
    check(kernels, step, before)


def test_a_chunk_without_rows_touches_nothing(kernels: Kernels) -> None:
    if not kernels.portable:
        pytest.skip("vLLM's kernels number chunks by their first block, which an empty one lacks")
    step = make(kernels, [LENGTHS[2], Request(3, 0, 9)])
    chunks = chunk_rows(step)
    chunks = dataclasses.replace(
        chunks,
        slot=step.rows.slot,
        base=step.rows.base,
        start=step.rows.start,
        first=step.rows.row_start[:2].contiguous(),
        packed=torch.cat((chunks.packed, chunks.packed[-1:])),
    )
    before = step.again()
    run(kernels, step, chunks)
    check(kernels, step, before)


def test_the_same_bits_each_run_in_any_company(kernels: Kernels) -> None:
    if not kernels.portable:
        pytest.skip("vLLM's kernels may choose other sizes for another batch")
    step = make(kernels, [LENGTHS[1], RING_ROWS, Request(16, 35, 40), LENGTHS[0]])
    first, second = step.again(), step.again()
    run(kernels, first)
    run(kernels, second)
    assert same_bits(first.out, second.out)
    assert same_bits(first.pages.ssm, second.pages.ssm)
    for i in (0, 2):
        alone = step.again()
        part, at = step.part(i), slice(i, i + 1)
        ends = torch.tensor([0, part.stop - part.start], dtype=torch.int32)
        rows = StepRows(
            step.rows.slot[at], step.rows.base[at], step.rows.start[at], ends.to(step.qkv.device)
        )
        alone = dataclasses.replace(
            alone,
            requests=(step.requests[i],),
            rows=rows,
            qkv=step.qkv[part],
            a=step.a[part],
            b=step.b[part],
            out=alone.out[part],
        )
        run(kernels, alone)
        assert same_bits(alone.out, first.out[part])
        slot = step.requests[i].slot
        assert same_bits(alone.pages.ssm[slot], first.pages.ssm[slot])


# Pending, new rows and start of three requests, step by step: prompts in one chunk and in two,
# steps with drafts behind them, and a chunk again while rows are pending, as after a preemption
# that kept the page.
LIVES = [
    [(0, 40, 0), (0, 4, 0), (0, 19, 0)],
    [(0, 21, 40), (3, 2, 3), (0, 1, 19)],
    [(0, 4, 61), (2, 4, 5), (1, 4, 20)],
    [(2, 3, 63), (1, 40, 6), (4, 4, 24)],
    [(2, 30, 65), (0, 4, 46), (4, 25, 28)],
    [(0, 4, 95), (4, 4, 50), (0, 2, 53)],
]


@pytest.mark.parametrize("ssm_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_chunks_and_steps_hand_over_to_each_other(kernels: Kernels, ssm_dtype: torch.dtype) -> None:
    """Whole lives on the same pages, beside those of the reference in float64."""
    step = exact = None
    for number, life in enumerate(LIVES):
        requests = [Request(*row, slot=slot) for row, slot in zip(life, (5, 2, 3), strict=True)]
        fresh = make(kernels, requests, 4, ssm_dtype=ssm_dtype, seed=number)
        if step is not None:
            fresh = dataclasses.replace(fresh, pages=step.pages, weights=step.weights)
        step = fresh
        before = step if exact is None else dataclasses.replace(step, pages=exact.pages)
        exact = exactly(before)
        rows = (step.qkv, step.a, step.b, step.rows, step.max_rows, step.out)
        replay_decode(step.pages, step.weights, *rows, portable=kernels.portable)
        if any(request.rows > step.max_rows for request in requests):
            run(kernels, step)
        allowed = tolerance(kernels)[0]
        if ssm_dtype is torch.bfloat16:
            # The reference rounds its state never, the pages once a step: six roundings at most,
            # of 2e-3 each, or 4e-3 in the interpreter, which all cut off the same way.
            allowed += 6**0.5 * 2e-3 if kernels.device == "cuda" else 6 * 4e-3
        for i, request in enumerate(requests):
            wrong = error(step.out[step.part(i)].cpu(), exact.out[step.part(i)])
            assert wrong < allowed, f"step {number}, {request}: {wrong:.2g}"


def convolved(step: Step) -> Tensor:
    """q, k and v [tokens, C] of the step's chunks, as its kernel gives them."""
    return chunk._convolve(step.pages, step.weights, step.qkv, step.a, step.b, chunk_rows(step))[0]


@pytest.mark.parametrize("start", [0, 2, 40])
def test_a_row_has_the_same_bits_in_a_chunk_and_in_a_step(kernels: Kernels, start: int) -> None:
    """What was decoded, a preempted request reads as a prompt."""
    rows = 20
    step = make(kernels, [Request(0, rows, start)], 32)
    chunks = dataclasses.replace(step.again(), max_rows=4)
    q = conv_update(step.pages, step.weights, step.qkv, step.a, step.b, step.rows, step.max_rows)
    at = torch.arange(start, start + rows, device=q.device) % step.pages.k.shape[1]
    slot = step.requests[0].slot
    k, v = step.pages.k[slot, at], step.pages.v[slot, at]
    decoded = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), 1)
    assert same_bits(decoded, convolved(chunks))


def test_a_short_window_is_refused(kernels: Kernels) -> None:
    step = make(kernels, [LENGTHS[0]])
    with pytest.raises(ValueError, match="need a conv window of 19 columns"):
        run(kernels, dataclasses.replace(step, max_rows=17), chunk_rows(step))


ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.cuda
@ON_GPU
@pytest.mark.parametrize("portable", [True, False], ids=["triton", "vllm"])
def test_the_host_waits_for_nothing(portable: bool) -> None:
    kernels = Kernels("cuda", portable, real=True)
    step = make(kernels, [LENGTHS[1], RING_ROWS, LENGTHS[2]])
    chunks = chunk_rows(step)
    if not portable:
        index = pytest.importorskip(
            "vllm.third_party.flash_linear_attention.ops.index", reason="needs vLLM's chunk kernels"
        )
        host = chunks.packed.cpu()
        chunks = dataclasses.replace(
            chunks,
            chunk_indices=index.prepare_chunk_indices(host, 64).cuda(),
            chunk_offsets=index.prepare_chunk_offsets(host, 64).cuda(),
        )
    run(kernels, step.again(), chunks)  # compiles and tunes
    before = step.again()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(kernels, step, chunks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(kernels, step, before)


@pytest.mark.cuda
@ON_GPU
def test_a_prompt_has_the_bits_of_vllms_convolution() -> None:
    """So that with the same chunk kernels behind it ReplaySSM reads a prompt as vLLM does."""
    conv1d = pytest.importorskip(
        "vllm.model_executor.layers.mamba.ops.causal_conv1d", reason="needs vLLM"
    )
    kernels = Kernels("cuda", True, real=True)
    step = make(kernels, [Request(0, rows, 0) for rows in (17, 63, 64, 65, 500)])
    count, channels = len(step.requests), step.qkv.shape[1]
    states_of_vllm = torch.zeros(
        count + 1, step.heads.conv_kernel - 1, channels, dtype=step.qkv.dtype, device="cuda"
    ).transpose(1, 2)
    theirs = conv1d.causal_conv1d_fn(
        step.qkv.transpose(0, 1),
        step.weights.conv_weight,
        step.weights.conv_bias,
        states_of_vllm,
        step.rows.row_start,
        cache_indices=torch.arange(1, count + 1, dtype=torch.int32, device="cuda"),
        has_initial_state=torch.zeros(count, dtype=torch.bool, device="cuda"),
        activation=step.weights.activation,
    ).transpose(0, 1)
    assert same_bits(convolved(step), theirs)


@pytest.mark.cuda
@ON_GPU
def test_rows_beyond_2_to_the_31_elements() -> None:
    """Rows so far apart that the offsets of the second chunk fit no 32 bits."""
    kernels = Kernels("cuda", True, real=True)
    step = make(kernels, [LENGTHS[2], LENGTHS[0]])
    before = step.again()
    apart = 1 << 25
    far = torch.empty(len(step.qkv) * apart, dtype=step.qkv.dtype, device="cuda")
    qkv = far.as_strided(step.qkv.shape, (apart, 1))
    qkv.copy_(step.qkv)
    step = dataclasses.replace(step, qkv=qkv)
    run(kernels, step)
    check(kernels, step, before)
