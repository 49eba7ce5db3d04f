"""A layer's step by the kernels equals the reference's, for ring rows and chunks in one batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forms import Kernels
from steps import Request, Step, make_step, states

pytest.importorskip("vllm", reason="the layer's seams are vLLM's")

from cuda_ext.backend.chunk_plan import plan_chunks
from cuda_ext.backend.chunk_rows import chunk_rows
from cuda_ext.backend.replay_attn import ReplayMetadata
from cuda_ext.layers.kernel_steps import KernelSteps
from cuda_ext.layers.steps import ReferenceSteps
from cuda_ext.ring import PageLayout, replay_layout

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


def kernel_steps(step: Step) -> KernelSteps:
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


def run(steps: Any, step: Step) -> Step:
    steps.run(step.pages, step.weights, step.qkv, step.a, step.b, metadata_of(step), step.out)
    return step


@pytest.mark.parametrize("name", BATCHES)
def test_step_equals_the_reference(kernels: Kernels, name: str) -> None:
    step = make_step(kernels, BATCHES[name], MAX_ROWS)
    expected = run(ReferenceSteps(step.heads), step.again())
    found = run(kernel_steps(step), step.again())
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


@pytest.mark.parametrize("requests", [1, 3, 64])
def test_rehearsal_runs_on_pages_of_its_own(kernels: Kernels, requests: int) -> None:
    """On any number of rows, down to fewer than make a chunk; outputs are zeros again."""
    step = make_step(kernels, BATCHES["chunks last"], MAX_ROWS)
    before = step.again()
    for tokens in (len(step.qkv), 3):
        out = torch.zeros_like(step.out[:tokens])
        kernel_steps(step).rehearse(
            layout_of(step),
            step.weights,
            step.qkv[:tokens],
            step.a[:tokens],
            step.b[:tokens],
            out,
            MAX_ROWS,
            requests,
        )
        assert not out.any()
    for state, tensor in states(step.pages).items():
        assert torch.equal(
            tensor.view(torch.uint8), states(before.pages)[state].view(torch.uint8)
        ), state
