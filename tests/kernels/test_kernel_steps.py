"""A layer's step by the kernels equals the reference's, for ring rows and chunks in one batch."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from forms import Kernels
from steps import Request, Step, make_step, same_bits, states

pytest.importorskip("vllm", reason="the layer's seams are vLLM's")

from cuda_ext.backend.chunk_plan import plan_chunks
from cuda_ext.backend.chunk_rows import chunk_rows
from cuda_ext.backend.replay_attn import ReplayMetadata
from cuda_ext.layers import kernel_steps
from cuda_ext.layers.kernel_steps import KernelSteps
from cuda_ext.layers.steps import Inputs, ReferenceSteps
from cuda_ext.ops import chunk as chunks
from cuda_ext.ops import reference, replay
from cuda_ext.ring import GdnHeads, PageLayout, replay_layout

MAX_ROWS = 4
BATCHES = {
    "ring rows": [Request(2, 4, 9), Request(0, 1, 0), Request(4, 3, 31)],
    "chunks last": [Request(3, 4, 12), Request(0, 9, 0), Request(1, 5, 17)],
    "chunks first": [Request(0, 21, 0), Request(4, 4, 40)],
    "chunks apart": [Request(0, 6, 0), Request(2, 2, 9), Request(4, 7, 33), Request(1, 1, 5)],
    "several calls": [Request(0, 6, 0), Request(1, 5, 9), Request(2, 9, 33), Request(0, 3, 0)],
    "padding": [Request(1, 4, 8), Request(0, 6, 0), Request(0, 4, 0, slot=0)],
}


def metadata_of(step: Step) -> ReplayMetadata:
    """As the builder makes it (cuda_ext/backend/replay_attn.py)."""
    lens = [request.rows for request in step.requests]
    # Two in a call, so that some steps take several calls.
    plans = plan_chunks(step.rows.row_start.tolist(), step.max_rows, 2)
    return ReplayMetadata(
        **dict.fromkeys(
            (
                "num_prefills",
                "num_prefill_tokens",
                "num_decodes",
                "num_decode_tokens",
                "num_spec_decodes",
                "num_spec_decode_tokens",
                "num_actual_tokens",
            ),
            0,
        ),
        rows=step.rows,
        max_rows=step.max_rows,
        step_rows=max((rows for rows in lens if rows <= step.max_rows), default=0),
        chunks=[chunk_rows(plan, step.rows, "portable") for plan in plans],
    )


def steps_of(step: Step) -> KernelSteps:
    return KernelSteps(step.heads, None, "portable")


def layout_of(step: Step) -> PageLayout:
    name = str(step.pages.k.dtype).removeprefix("torch.")
    return replay_layout(
        step.heads,
        step.max_rows - 1,
        conv_dtype=name,
        ssm_dtype=str(step.pages.ssm.dtype).removeprefix("torch."),
        input_dtype=name,
    )


def inputs_of(step: Step) -> Inputs:
    return Inputs(step.qkv, step.a, step.b)


def run(steps: Any, step: Step) -> Step:
    steps.run(step.pages, step.weights, inputs_of(step), metadata_of(step), step.out)
    return step


SHARDS = {
    "4B and 35B": (16, 32),
    "4B and 35B, TP 2": (8, 16),
    "4B and 35B, TP 4": (4, 8),
    "4B and 35B, TP 8": (2, 4),
    "27B, TP 2": (8, 24),
    "27B, TP 8": (2, 6),
    "122B, TP 8": (2, 8),
}
"""Key and value heads of a rank."""


@pytest.mark.parametrize("name", BATCHES)
def test_step_equals_the_reference(kernels: Kernels, name: str) -> None:
    step_equals_the_reference(kernels, make_step(kernels, BATCHES[name], MAX_ROWS))


@pytest.mark.parametrize("shard", SHARDS)
def test_step_of_a_shard_equals_the_reference(kernels: Kernels, shard: str) -> None:
    size = 128 if kernels.real else 16
    heads = GdnHeads(*SHARDS[shard], size, size, 4)
    requests = [Request(3, 4, 12), Request(0, 5, 0)]
    step_equals_the_reference(kernels, make_step(kernels, requests, MAX_ROWS, heads=heads))


def step_equals_the_reference(kernels: Kernels, step: Step) -> None:
    expected = run(ReferenceSteps(step.heads), step.again())
    found = run(steps_of(step), step.again())
    tolerance = 2e-2 if kernels.real else 1e-4
    torch.testing.assert_close(
        found.out, expected.out, rtol=tolerance, atol=tolerance, equal_nan=True
    )
    theirs = states(expected.pages)
    for state, tensor in states(found.pages).items():
        exact = state == "conv"
        torch.testing.assert_close(
            tensor,
            theirs[state],
            rtol=0 if exact else tolerance,
            atol=0 if exact else tolerance,
            equal_nan=True,
            msg=lambda text, state=state: f"{state}: {text}",
        )


def packed(step: Step) -> tuple[Step, torch.Tensor]:
    """The step on pages in blocks of all layers, its own in the third of five places of a block.

    All else in the buffer is NaN in every dtype of a page.
    """
    layout = layout_of(step)
    slots, own = step.pages.ssm.shape[0], layout.nbytes
    buffer = torch.full((slots, 5 * own), 0xFF, dtype=torch.uint8, device=step.qkv.device)
    views = {}
    for state in layout.states:
        at = 2 * own + state.offset
        view = buffer[:, at : at + state.nbytes].view(getattr(torch, state.dtype))
        views[state.name] = view.unflatten(1, state.shape)
        assert views[state.name].data_ptr() % 16 == 0
        views[state.name].copy_(getattr(step.pages, state.name))
    return dataclasses.replace(step, pages=reference.Pages(**views)), buffer


@pytest.mark.parametrize("name", BATCHES)
def test_pages_in_blocks_of_all_layers(kernels: Kernels, name: str) -> None:
    """As vLLM packs them (cuda_ext/packing.py): the same bits, and nothing outside of the page."""
    step = make_step(kernels, BATCHES[name], MAX_ROWS)
    alone = run(steps_of(step), step.again())
    found, buffer = packed(step.again())
    assert not found.pages.ssm.is_contiguous()
    run(steps_of(found), found)
    assert same_bits(found.out, alone.out)
    for state, tensor in states(found.pages).items():
        assert same_bits(tensor, getattr(alone.pages, state)), state
    own = layout_of(step).nbytes
    assert (buffer[:, : 2 * own] == 0xFF).all()
    assert (buffer[:, 3 * own :] == 0xFF).all()


@pytest.mark.parametrize("requests", [1, 3, 64])
@pytest.mark.parametrize("tokens", [3, 40, 200])
def test_rehearsal_runs_each_launch_and_the_largest_chunks(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, requests: int, tokens: int
) -> None:
    """On any number of rows, down to fewer than make a chunk; outputs are zeros again."""
    step = make_step(kernels, [Request(0, tokens, 0)], MAX_ROWS)
    decoded: set[tuple[int, int]] = set()
    chunked: list[list[int]] = []

    def decode(*args: Any, step_rows: int) -> None:
        decoded.add((args[5].slot.shape[0], step_rows))
        replay.replay_decode(*args, step_rows=step_rows)

    def chunk(*args: Any) -> None:
        chunked.append(args[5].packed.diff().tolist())
        chunks.replay_chunks(*args)

    monkeypatch.setattr(kernel_steps, "replay_decode", decode)
    monkeypatch.setattr(kernel_steps, "replay_chunks", chunk)
    out = torch.full_like(step.out, 7.0)
    steps_of(step).rehearse(layout_of(step), step.weights, inputs_of(step), out, MAX_ROWS, requests)
    assert decoded == {(n, rows) for n in {1, requests} for rows in range(1, MAX_ROWS + 1)}
    largest = kernel_steps.largest_step(tokens, MAX_ROWS, requests)
    small = [[kernel_steps.FIRST_CHUNK]] if tokens >= kernel_steps.FIRST_CHUNK else []
    assert chunked == small + ([largest] if largest else [])
    assert bool(largest) == (tokens > MAX_ROWS)
    assert not out.any()


@pytest.mark.parametrize("max_rows", [1, 4, 16, 32])
@pytest.mark.parametrize("tokens", [1, 33, 64, 65, 129, 150, 200, 300])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_no_step_takes_more_scratch_than_the_largest(
    max_rows: int, tokens: int, chunks: int
) -> None:
    """Blocks that vLLM's kernels take a state for, against the most of all ways to fill a step."""
    found = kernel_steps.largest_step(tokens, max_rows, chunks)
    assert sum(found) <= tokens
    assert all(rows > max_rows for rows in found)
    count = min(chunks, tokens // (max_rows + 1))
    assert len(found) == count

    @functools.cache
    def most(count: int, rows: int) -> int:
        if count == 0:
            return 0
        return max(
            -(-first // kernel_steps.CHUNK_BLOCK) + most(count - 1, rows - first)
            for first in range(max_rows + 1, rows - (count - 1) * (max_rows + 1) + 1)
        )

    blocks = sum(-(-rows // kernel_steps.CHUNK_BLOCK) for rows in found)
    assert blocks == most(count, tokens)
