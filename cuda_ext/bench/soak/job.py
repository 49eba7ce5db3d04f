"""What both processes of a soak are told, and which jobs would prove nothing. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cuda_ext.bench.soak import load
from cuda_ext.bench.soak.checks import LEAST_SAMPLES

FAULTS = ("lost-row", "leaked-block")
"""To see the gate red: a row lost in each fold, and a block that never comes back."""


@dataclass(frozen=True)
class Job:
    """What both processes are told.

    Args:
        model: folder of the checkpoint.
        prompts: arguments of `load.copy_prompts`, or with `random` true of `load.random_prompts`.
        random: the kind of prompts.
        options: further arguments of `vllm.LLM`.
        speculative: vLLM's `speculative_config`.
        concurrency: requests in the engine at any time.
        minutes: of load.
        aborts: share of the requests.
        pool: blocks, as a share of what `concurrency` requests hold on average over their lives
            (`load.mean_blocks`).
        every: seconds from sample to sample; 0 for a sample after each step.
        seed: of the load.
        fault: one of `FAULTS`, to see the gate red.
        most: requests; None for as many as the minutes hold.
    """

    model: str
    prompts: Mapping[str, Any]
    random: bool
    options: Mapping[str, Any]
    speculative: Mapping[str, Any]
    concurrency: int
    minutes: float
    aborts: float
    pool: float
    every: float
    seed: int
    fault: str | None = None
    most: int | None = None

    @property
    def exact(self) -> bool:
        """Whether answers must be equal token by token."""
        return bool(self.options.get("dtype") == "float32")

    def set_of_prompts(self) -> list[load.Prompt]:
        """The prompts of all requests, the same in both processes."""
        pick = load.random_prompts if self.random else load.copy_prompts
        return pick(**self.prompts)


def refusals(job: Job) -> list[str]:
    """Why the gate can't be green whatever is served; nothing where it can."""
    found = []
    if job.concurrency < 2:
        found.append(f"--concurrency {job.concurrency}: 2 at least, or none is preempted")
    if not 0 < job.pool < 1:
        found.append(
            f"--pool {job.pool}: between 0 and 1; with 1 and more there is room for all, and no "
            "request is preempted"
        )
    if not 0 < job.aborts < 1:
        found.append(
            f"--aborts {job.aborts}: between 0 and 1, since some must be aborted and some finished"
        )
    samples = 60 * job.minutes / job.every if job.every else float("inf")
    if samples <= LEAST_SAMPLES:
        found.append(
            f"--minutes {job.minutes:g} with --every {job.every:g}: {samples:.1f} samples, and "
            f"growth of memory is judged by more than {LEAST_SAMPLES}"
        )
    return found
