"""Starts the real vLLM engine on the emulated device, and runs prompts of token ids through it.

`activate()` must come before the first import of vllm in the process: vLLM and vllm-gaudi read
most variables at import. `start()` then gives an `Engine`; several may follow one another in one
process, one at a time.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_models import FIRST_PLAIN, LAST_PLAIN

DEVICE_FOLDER = Path(__file__).resolve().parent.parent / "emulated_hpu" / "path"

ENVIRONMENT = {
    "VLLM_USE_FAKE_HPU": "1",
    "VLLM_SKIP_WARMUP": "true",
    # true makes vllm-gaudi switch prefix caching off.
    "VLLM_CONTIGUOUS_PA": "false",
    "VLLM_PROMPT_USE_FUSEDSDPA": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # The tensors are tiny: a second thread costs more than it brings, and on a machine that runs
    # several engines at once the threads' busy-waiting slows every one of them tenfold.
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""What every engine process of the tests needs; a value that is already set wins."""


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a child process: this process's, `ENVIRONMENT`, and then `extra`."""
    result = ENVIRONMENT | dict(os.environ)
    # Set by `activate` for this process; a child runs its engine core where vLLM would put it.
    result.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    entries = [entry for entry in result.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if str(DEVICE_FOLDER) not in entries:
        entries.insert(0, str(DEVICE_FOLDER))
    return result | {"PYTHONPATH": os.pathsep.join(entries)} | dict(extra or {})


def activate(*, in_process: bool = True) -> None:
    """Set this process up for engines on the emulated device.

    Args:
        in_process: run the engine core in this process rather than in a spawned one. Default: True.

    Raises:
        RuntimeError: vllm was imported before and the emulation was not on then.
    """
    if "vllm" in sys.modules and "habana_frameworks" not in sys.modules:
        raise RuntimeError("harness.activate() must come before the first import of vllm")
    os.environ.update(environment())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    if str(DEVICE_FOLDER) not in sys.path:
        sys.path.insert(0, str(DEVICE_FOLDER))
    import habana_frameworks.torch  # noqa: F401 - installs device "hpu"
    import torch

    # torch has read OMP_NUM_THREADS already where it was imported before.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@dataclass(frozen=True)
class Result:
    """What one request gave: its tokens, the log-probability of each, and what the cache saved."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int

    def distance(self, other: Result) -> float:
        """The largest difference of log-probabilities; infinity where the tokens differ."""
        if self.tokens != other.tokens:
            return float("inf")
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return max((abs(mine - theirs) for mine, theirs in pairs), default=0.0)


def prompt(seed: int, length: int) -> list[int]:
    """`length` token ids of plain text that depend on `seed` alone; a longer one extends it."""
    source = random.Random(seed)
    return [source.randint(FIRST_PLAIN, LAST_PLAIN) for _ in range(length)]


class Engine:
    """One running `vllm.LLM`; made by `start`."""

    def __init__(self, model: Path, options: Mapping[str, Any], env: Mapping[str, str]) -> None:
        # vllm-gaudi writes variables of its own while an engine starts (VLLM_COMPACT_GDN, ...),
        # which the next engine must not find.
        self._environment = dict(os.environ)
        os.environ.update(env)
        started = time.perf_counter()
        try:
            from vllm import LLM

            self.llm: Any = LLM(model=str(model), **options)
        except BaseException:
            self.llm = None
            self._reset_process()
            raise
        self.start_seconds = time.perf_counter() - started

    @property
    def core(self) -> Any:
        """The `EngineCore`; in-process engines only."""
        client = self.llm.llm_engine.engine_core
        if not hasattr(client, "engine_core"):
            raise RuntimeError("the engine core of this engine lives in another process")
        return client.engine_core

    @property
    def scheduler(self) -> Any:
        """The scheduler; in-process engines only."""
        return self.core.scheduler

    @property
    def worker(self) -> Any:
        """The HPUWorker; in-process engines only."""
        return self.core.model_executor.driver_worker.worker

    @property
    def runner(self) -> Any:
        """The HPUModelRunner; in-process engines only."""
        return self.worker.model_runner

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int | Sequence[int] = 8,
        salt: str | None = None,
        logprobs: bool = True,
    ) -> list[Result]:
        """Run prompts of token ids together, greedily, to exactly `max_tokens` tokens each.

        Args:
            prompts: token ids, one sequence a request, submitted in this order.
            max_tokens: for all requests, or one a request. Default: 8.
            salt: requests share cached blocks only within one salt. Default: none.
            logprobs: without them `Result.logprobs` is empty, and vllm-gaudi's step does not wait
                for the device. Default: True.
        """
        from vllm import SamplingParams

        counts = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
        inputs: list[Any] = [
            {"prompt_token_ids": list(tokens)} | ({"cache_salt": salt} if salt else {})
            for tokens in prompts
        ]
        common: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "detokenize": False}
        common["logprobs"] = 1 if logprobs else None
        params = [SamplingParams(max_tokens=count, **common) for count in counts]
        results = []
        for output in self.llm.generate(inputs, params, use_tqdm=False):
            completion = output.outputs[0]
            tokens = tuple(completion.token_ids)
            chosen = zip(tokens, completion.logprobs, strict=True) if logprobs else ()
            values = tuple(entry[token].logprob for token, entry in chosen)
            results.append(Result(tokens, values, output.num_cached_tokens or 0))
        return results

    def warm_up(self) -> int:
        """Run vllm-gaudi's warm-up over all buckets; returns the number of buckets.

        Before any request: a finished one keeps its GDN slot until the next step, and warm-up
        fills every slot.

        vllm-gaudi v0.26.0 warms up by itself only where it compiles, and on a fake device it cannot
        start that way (`enforce_eager=False` ends in an AttributeError, `compile_config`).
        """
        runner = self.runner
        before = len(runner.graphed_buckets)
        buckets = runner.bucketing_manager
        runner.warmup_graphs(buckets.prompt_buckets, True, runner.kv_caches)
        runner.warmup_graphs(buckets.decode_buckets, False, runner.kv_caches)
        return len(runner.graphed_buckets) - before

    def shutdown(self) -> None:
        """Stop the engine and undo what it left in the process, so that another can start."""
        if self.llm is None:
            return
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        self._reset_process()

    def _reset_process(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
        from vllm.model_executor.layers import rotary_embedding
        from vllm_gaudi.extension.bucketing.common import HPUBucketingManager
        from vllm_gaudi.extension.runtime import clear_config

        # EngineCore.shutdown does this too, but is not reached where the start failed.
        cleanup_dist_env_and_memory()
        # vllm-gaudi keeps both for the process, and with them this engine's settings.
        HPUBucketingManager.deactivate()
        clear_config()
        # vLLM shares rotary modules between models, and vllm-gaudi keeps tensors of a step in them.
        rotary_embedding._ROPE_DICT.clear()
        gc.collect()


OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 1024,
    "num_gpu_blocks_override": 40,
    "limit_mm_per_prompt": {"image": 0, "video": 0},
    "disable_log_stats": True,
    "seed": 0,
}
"""What `start` gives to `vllm.LLM` unless told otherwise."""


@contextlib.contextmanager
def start(model: Path, *, env: Mapping[str, str] | None = None, **options: Any) -> Iterator[Engine]:
    """An engine for `model` (a folder from `tiny_models.write`), shut down at the end.

    One at a time: a second engine in the process would share torch.distributed state.

    Args:
        env: variables for this engine alone; those that are read when a module is imported have
            an effect only in the first engine of the process.
        options: arguments of `vllm.LLM`, over `OPTIONS`. Prefix caching is on unless told.
    """
    engine = Engine(model, OPTIONS | {"enable_prefix_caching": True} | options, env or {})
    try:
        yield engine
    finally:
        engine.shutdown()
