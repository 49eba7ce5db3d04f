"""What computes the core of a GDN layer's step: the torch reference here, or the kernels.

A layer has one of them for its life. Both take the layer's pages and weights at each call, since
vLLM binds pages anew and loads weights anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from cuda_ext.ops import reference
from cuda_ext.ops.reference import Pages, Weights
from cuda_ext.ring import GdnHeads, PageLayout

if TYPE_CHECKING:
    from cuda_ext.backend.replay_attn import ReplayMetadata


@dataclass(frozen=True)
class Inputs:
    """What a layer's projections give the core of a step, in the dtype of the model.

    Args:
        qkv: [tokens, C], inputs of the convolution in the order q, k, v.
        a, b: [tokens, HV], raw gate inputs.
    """

    qkv: Tensor
    a: Tensor
    b: Tensor


class Steps(Protocol):
    """The core of a step, in place on pages and outputs."""

    def run(
        self,
        pages: Pages,
        weights: Weights,
        inputs: Inputs,
        metadata: ReplayMetadata,
        out: Tensor,
    ) -> None:
        """Convolution and recurrence of all rows of a step; see `reference.replay_step`.

        Args:
            pages: of the layer; written.
            weights: of the layer.
            inputs: of the step's rows.
            metadata: the plan of the step.
            out: [tokens, HV, V], zeros; written for every row of a request.
        """

    def rehearse(
        self,
        layout: PageLayout,
        weights: Weights,
        inputs: Inputs,
        out: Tensor,
        max_rows: int,
        requests: int,
    ) -> None:
        """Run every kernel once on spare pages, with as much scratch as any step can take.

        vLLM's profiling run has no pages; what is compiled and allocated here is neither compiled
        while a graph is captured nor missing from the memory that profiling counts.

        Args:
            layout: of the layer's page.
            weights: of the layer.
            inputs: of the profiling run, with as many rows as a step can have.
            out: likewise; zeros again afterwards.
            max_rows: T_max.
            requests: N at most.
        """


class ReferenceSteps:
    """Plain torch, on any device; waits for the device, so not in graphs."""

    def __init__(self, heads: GdnHeads) -> None:
        self._heads = heads

    def run(
        self,
        pages: Pages,
        weights: Weights,
        inputs: Inputs,
        metadata: ReplayMetadata,
        out: Tensor,
    ) -> None:
        """See `Steps`."""
        rows, max_rows = metadata.rows, metadata.max_rows
        qkv, a, b = inputs.qkv, inputs.a, inputs.b
        reference.replay_step(pages, weights, self._heads, qkv, a, b, rows, max_rows, out)

    def rehearse(
        self,
        layout: PageLayout,
        weights: Weights,
        inputs: Inputs,
        out: Tensor,
        max_rows: int,
        requests: int,
    ) -> None:
        """There is nothing to compile."""


def layer_pages(states: Sequence[Tensor]) -> Pages:
    """The pages of a layer, with its conv window as [slots, columns, channels].

    Args:
        states: as vLLM binds them, in page order.
    """
    conv, *others = states
    return Pages(conv.transpose(-1, -2) if is_conv_state_dim_first() else conv, *others)
