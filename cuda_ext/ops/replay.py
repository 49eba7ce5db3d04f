"""A layer's decode rows on a GPU: the two launches that stand for `reference.replay_step`.

Nothing here waits for the device or reads a tensor, so that a step can be captured in a CUDA graph:
what changes from step to step lies in the buffers of the plan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_ext.ops.conv_update import conv_update
from cuda_ext.ops.fold_verify import fold_verify
from cuda_ext.ops.reference import Pages, StepRows, Weights


@torch.no_grad()
def replay_decode(
    pages: Pages,
    weights: Weights,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    rows: StepRows,
    max_rows: int,
    out: Tensor,
    *,
    step_rows: int | None = None,
    max_pending: int | None = None,
    portable: bool = False,
) -> None:
    """What `reference.replay_step` does for requests of at most `max_rows` rows, in two launches.

    Requests of more rows are prefill chunks: neither their pages nor their outputs are touched. A
    request in slot 0 gets zeros. One whose plan can't be right gets NaN, for nobody on the host
    could raise.

    Args:
        pages: of the layer; written. The rings must have 2 * max_rows rows, for the new rows are
            appended before the pending ones are folded.
        weights: of the layer.
        qkv: [tokens, C], inputs of the convolution in the order q, k, v; unit stride in C.
        a, b: [tokens, HV], raw gate inputs.
        rows: the plan of the step, int32 tensors on the device.
        max_rows: T_max = 1 + draft tokens of a step; no request has more pending rows.
        out: [tokens, HV, V], contiguous in the last two dimensions.
        step_rows: T of the longest request of at most `max_rows` rows, where the host knows it: it
            chooses the launch. A request with more of them gets NaN.
        max_pending: P of any request at most, where the host knows it; likewise.
        portable: take the Triton kernels even where the CUDA kernel could serve.

    Raises:
        ValueError: rings or window are too short for `max_rows`.
    """
    ring, window = pages.k.shape[1], pages.conv.shape[1]
    needed = weights.conv_weight.shape[1] - 2 + max_rows
    if ring < 2 * max_rows or window < needed:
        raise ValueError(
            f"{max_rows} rows a step need rings of {2 * max_rows} rows and a conv window of "
            f"{needed} columns, the pages have R={ring} and {window} columns"
        )
    overlap = qkv.is_cuda and torch.cuda.get_device_capability(qkv.device) >= (9, 0)
    q = conv_update(pages, weights, qkv, a, b, rows, max_rows, step_rows=step_rows, overlap=overlap)
    fold_verify(
        pages,
        weights,
        q,
        rows,
        max_rows,
        out,
        step_rows=step_rows,
        max_pending=max_pending,
        overlap=overlap,
        portable=portable,
    )
