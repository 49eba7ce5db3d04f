"""What is active in this process: ReplaySSM for a deployment's GDN layers, or None for stock vLLM.

The model class and the layer, which the metadata builder asks in turn, both ask here, so they can't
disagree. It refuses once more what the front process refused (compat/engine_args.py): a
configuration may reach a worker that never passed through `EngineArgs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cuda_ext.facts import ARCHITECTURES, ReplayFacts, replay_facts
from cuda_ext.plugin import registration_problem
from cuda_ext.refusals import backend_of, refuse, replay_layout, replay_problems, wants_replay
from cuda_ext.ring import PageLayout
from vllm_gaudi_ext.config import read_options


@dataclass(frozen=True)
class Active:
    """A deployment whose GDN layers ReplaySSM serves.

    Args:
        facts: of the deployment, without a problem.
        page: of one GDN layer on one rank.
    """

    facts: ReplayFacts
    page: PageLayout

    @property
    def backend(self) -> str:
        """What computes a step: "kernels", or "reference"."""
        backend = backend_of(self.facts)
        assert backend is not None, self.facts
        return backend

    def chunk_kernels(self, prefill_backend: str) -> str:
        """What computes prefill chunks: "portable", or vLLM's kernels by vLLM's name for them.

        Args:
            prefill_backend: what vLLM chose ("triton", "flashinfer", "cutedsl"); none of them
                takes rows in float32.
        """
        return "portable" if self.facts.dtype == "float32" else prefill_backend


def checked_facts(vllm_config: Any) -> ReplayFacts | None:
    """The deployment's facts; None where vLLM is to be left as it is.

    With replay `off`, and for a model that has nothing to replay, no more is read than says so.

    Raises:
        RuntimeError: ReplaySSM is wanted and can't be had, with every reason.
        ValueError: an option of ours is not valid.
    """
    replay = read_options(vllm_config.additional_config).replay
    architecture = vllm_config.model_config.architecture
    if replay == "off" or (replay == "auto" and architecture not in ARCHITECTURES):
        return None
    facts = replay_facts(vllm_config)
    found = replay_problems(facts)
    if wants_replay(facts) and (problem := registration_problem(architecture)) is not None:
        found.append(problem)
    refuse(found)
    return facts


def active(vllm_config: Any) -> Active | None:
    """What serves the GDN layers of a deployment; None where vLLM's own layer is to serve.

    It reads the deployment anew at each call, so a caller that asks twice should keep the answer.

    Args:
        vllm_config: a vllm.config.VllmConfig. For a draft model it is the draft's own.

    Raises:
        RuntimeError, ValueError: as `checked_facts`.
    """
    facts = checked_facts(vllm_config)
    if facts is None or not wants_replay(facts):
        return None
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return Active(facts, replay_layout(facts, conv_dim_first=is_conv_state_dim_first()))


def active_layout(vllm_config: Any) -> PageLayout | None:
    """The page of one GDN layer on one rank; None where vLLM's own layer is to serve.

    Args:
        vllm_config: as for `active`.

    Raises:
        RuntimeError, ValueError: as `checked_facts`.
    """
    found = active(vllm_config)
    return None if found is None else found.page


def torch_dtypes(layout: PageLayout) -> tuple[Any, ...]:
    """torch dtypes of the page's states, in page order."""
    import torch

    return tuple(getattr(torch, name) for name in layout.dtypes)
