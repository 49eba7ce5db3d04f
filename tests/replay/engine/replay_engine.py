"""Starts the real vLLM engine with ReplaySSM, drives it step by step, and looks into it.

On a GPU where there is one, else vLLM's engine for CPUs. `activate()` must come before the first
import of vllm. One engine at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import oracle_drafter
import tiny_models
import torch

ENVIRONMENT = {
    "VLLM_PLUGINS": "gaudi_ext",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # GiB; vLLM would take a good half of the machine's memory.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Binding each engine to the first cores would put two test processes on the same ones.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    # The tensors are tiny: a second thread costs more than it brings.
    "OMP_NUM_THREADS": "1",
    # The drafter `ngram` starts Numba's threads, by the same library as torch's, which then has as
    # many for the rest of the process; vLLM asks Numba for one.
    "NUMBA_NUM_THREADS": "1",
}
"""What the engine process needs; a value that is already set wins, but for the first two."""

ON_GPU = torch.cuda.is_available()
GPU_ENVIRONMENT = {
    # vLLM's attention in Triton would else round float32 to TF32.
    "TRITON_F32_DEFAULT": "ieee",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}

TOLERANCE = 1e-4
"""Largest log-probability difference between two ways to compute the same tokens in fp32.

Two orders of summation differ by about 2**-24 of the largest term for the square root of each of
some hundred additions, through four layers: seen as at most 2e-5 in a thousand tokens. A state with
one row too many or too few differs by 1e-2 and more (test_replay_planted_faults.py).
"""

_TEXT = dict(tiny_models.CPU_DENSE.text)
SMALL = dataclasses.replace(
    tiny_models.CPU_DENSE,
    name="tiny-replay",
    # 4 KiB of K and V a token in fp32, so that a page of 400 to 600 KiB is a block of some 100 to
    # 150 tokens, and a request of ordinary length outgrows its blocks.
    text=_TEXT
    | {
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rope_parameters": _TEXT["rope_parameters"] | {"mrope_section": [8, 4, 4]},
    },
    # Tokens that repeat would say little about the state.
    echo=0.0,
)
"""The dense Qwen3.5 of most tests."""

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 64,
    "limit_mm_per_prompt": {"image": 0, "video": 0},
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "seed": 0,
}
"""What an engine gets unless told otherwise."""

GPU_OPTIONS: dict[str, Any] = {
    # FlashAttention knows no float32.
    "attention_config": {"backend": "TRITON_ATTN"},
    # Several test processes share the card, and what one frees while another profiles is no fault.
    "gpu_memory_utilization": 0.08,
    "kv_cache_memory_bytes": 2 << 30,
}

WITHOUT_DRAFTS: dict[str, Any] = {"additional_config": {"gaudi_ext": {"replay": "on"}}}


def oracle(drafts: int, texts: Path) -> dict[str, Any]:
    """Options of an engine with D drafts of an oracle that reads `texts`."""
    return {
        "speculative_config": oracle_drafter.speculative_config(drafts),
        "additional_config": oracle_drafter.additional_config(texts),
    }


def activate() -> None:
    """Set this process up."""
    wanted = ENVIRONMENT | (GPU_ENVIRONMENT if ON_GPU else {}) | dict(os.environ)
    for name in ("VLLM_PLUGINS", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        wanted[name] = ENVIRONMENT[name]
    os.environ.update(wanted)
    # torch has read OMP_NUM_THREADS already where it was imported before.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def environment(plugins: str | None) -> dict[str, str]:
    """The environment of a child process with an engine of its own in it.

    Args:
        plugins: `VLLM_PLUGINS`; None leaves it unset.
    """
    here = Path(__file__).resolve().parent
    result = ENVIRONMENT | dict(os.environ)
    result.pop("VLLM_PLUGINS", None)
    if plugins is not None:
        result["VLLM_PLUGINS"] = plugins
    path = [str(here), str(here.parent.parent / "engines")]
    path += filter(None, [result.get("PYTHONPATH")])
    return result | {"PYTHONPATH": os.pathsep.join(path)}


class Engine:
    """One running `vllm.LLM`, its core in this process.

    Args:
        model: a folder from `tiny_models.write`.
        options: arguments of `vllm.LLM`, over `OPTIONS`.
    """

    def __init__(self, model: Path, **options: Any) -> None:
        from vllm import LLM

        options = OPTIONS | (GPU_OPTIONS if ON_GPU else {}) | options
        if ON_GPU:
            # FlashInfer's chunk kernels know no float32 either, and need not be installed.
            mine = options.get("additional_config", {})
            options["additional_config"] = {"gdn_prefill_backend": "triton"} | mine
        else:
            _keep_kernel_overrides()
        try:
            self.llm: Any = LLM(model=str(model), **options)
        except BaseException:
            _clean_process()
            raise

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def runner(self) -> Any:
        core = self.llm.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner

    @property
    def dirty(self) -> bool:
        """Whether a test that failed in the middle left requests."""
        return bool(self.llm.llm_engine.has_unfinished_requests())

    @property
    def drafter(self) -> Any:
        return self.runner.drafter

    @property
    def config(self) -> Any:
        return self.llm.llm_engine.vllm_config

    @property
    def drafts(self) -> int:
        speculative = self.config.speculative_config
        return speculative.num_speculative_tokens if speculative else 0

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def attention_block(self) -> int:
        """B of the attention layers."""
        (tokens,) = {
            group.kv_cache_spec.block_size
            for group in self.scheduler.kv_cache_config.kv_cache_groups
            if not hasattr(group.kv_cache_spec, "mamba_type")
        }
        return tokens

    def gdn_layers(self) -> list[Any]:
        """The model's GDN layers."""
        context = self.runner.vllm_config.compilation_config.static_forward_context
        return [layer for layer in context.values() if hasattr(layer, "mamba_type")]

    def run(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int | Sequence[int]
    ) -> list[harness.Result]:
        """Run prompts of token ids together, greedily, to exactly `max_tokens` tokens each."""
        counts = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        requests = Requests(self)
        for number, (tokens, count) in enumerate(zip(prompts, counts, strict=True)):
            requests.add(str(number), tokens, count)
        requests.drain()
        return [requests.result(str(number)) for number in range(len(prompts))]

    def shutdown(self) -> None:
        """Stop the engine, so that another can start."""
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        _clean_process()


def _keep_kernel_overrides() -> None:
    """Let vLLM 0.31.0 register its CPU forms of Triton kernels once in a process, not per engine.

    It asks every global of every module for an attribute then, and stumbles over one of llvmlite,
    which a drafter imports with numba.
    """
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher

    if dispatcher._registry:
        current_platform.register_triton_kernel_overrides = lambda: None


def _clean_process() -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    gc.collect()


class Requests:
    """Adds requests by hand and steps the engine, for tests of exact schedules."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._llm_engine = engine.llm.llm_engine
        self._outputs: dict[str, Any] = {}
        self.finished: set[str] = set()

    def add(self, name: str, tokens: Sequence[int], max_tokens: int) -> None:
        from vllm import SamplingParams

        self._llm_engine.add_request(
            name,
            {"prompt_token_ids": list(tokens)},
            SamplingParams(
                temperature=0.0,
                max_tokens=max_tokens,
                logprobs=0,
                ignore_eos=True,
                detokenize=False,
            ),
        )

    @property
    def unfinished(self) -> bool:
        return bool(self._llm_engine.has_unfinished_requests())

    def step(self) -> None:
        for output in self._llm_engine.step():
            self._outputs[output.request_id] = output
            if output.finished:
                self.finished.add(output.request_id)

    def drain(self, most: int = 3000) -> None:
        """Steps until nothing is left to do."""
        for _ in range(most):
            if not self.unfinished:
                return
            self.step()
        raise AssertionError(f"not done after {most} steps")

    def abort(self, name: str) -> None:
        self._llm_engine.abort_request([name])

    def result(self, name: str) -> harness.Result:
        """Tokens and log-probabilities so far."""
        completion = self._outputs[name].outputs[0]
        tokens = tuple(completion.token_ids)
        chosen = zip(tokens, completion.logprobs, strict=True)
        return harness.Result(tokens, tuple(entry[token].logprob for token, entry in chosen), 0)


def first(result: harness.Result, count: int) -> harness.Result:
    """The first `count` tokens of a result."""
    return harness.Result(result.tokens[:count], result.logprobs[:count], result.cached_tokens)


@dataclass(frozen=True)
class Row:
    """One request in one step, as planned."""

    slot: int
    base: int
    start: int
    rows: int

    @property
    def pending(self) -> int:
        return self.start - self.base


@dataclass
class Plans:
    """The plans of all steps, in one KV group; the others differ in their slots only.

    Args:
        max_rows: T_max.
        ring_rows: R.
    """

    max_rows: int
    ring_rows: int
    steps: list[list[Row]] = field(default_factory=list)

    def is_chunk(self, row: Row) -> bool:
        return row.rows > self.max_rows

    def wraps(self, row: Row) -> bool:
        """Whether rows that are read or written lie on both ends of the ring."""
        ring = self.ring_rows
        read = row.base % ring + row.pending > ring
        return read or (not self.is_chunk(row) and row.start % ring + row.rows > ring)

    def reached(self) -> Counter[str]:
        """How often each path was taken."""
        found: Counter[str] = Counter(steps=len(self.steps))
        used: set[int] = set()
        drafted: set[int] = set()
        verified: dict[int, int] = {}
        had_drafts = False
        for step in self.steps:
            chunks = [row for row in step if self.is_chunk(row)]
            decoding = [row for row in step if row.start and not self.is_chunk(row)]
            drafting = [row for row in decoding if row.rows > 1]
            found["mixed batches"] += bool(chunks and drafting)
            found["ragged batches"] += len({row.rows for row in decoding}) > 1
            found["batches without drafts after some"] += bool(
                had_drafts and decoding and not chunks and all(r.rows == 1 for r in decoding)
            )
            had_drafts = bool(drafting)
            for row in step:
                if row.start == 0:
                    found["slots used again"] += row.slot in used
                    drafted.discard(row.slot)
                    verified.pop(row.slot, None)
                used.add(row.slot)
                if row.slot in verified:
                    found["drafts accepted"] += row.pending - 1
                    found["drafts rejected"] += verified[row.slot] - row.pending
                found["folds"] += row.pending > 0
                found["chunks that fold first"] += row in chunks and row.pending > 0
                found["later chunks"] += row in chunks and row.start > 0
                found["all rows pending"] += row.pending == self.max_rows
                found["wraps"] += self.wraps(row)
                bare = row.rows == 1 and row.start > 0
                found["rows without drafts after some"] += bare and row.slot in drafted
                found["prompts of ring rows"] += row.start == 0 and row not in chunks
                if row in drafting:
                    drafted.add(row.slot)
                    verified[row.slot] = row.rows
                else:
                    drafted.discard(row.slot)
                    verified.pop(row.slot, None)
        return found


@contextlib.contextmanager
def planned(engine: Engine) -> Iterator[Plans]:
    """Records the plan of every step while it is open."""
    from cuda_ext.backend.step_plan import StepPlanner
    from cuda_ext.ring import ring_rows

    plan = StepPlanner.plan
    seen: dict[int, list[list[Row]]] = {}
    plans = Plans(engine.drafts + 1, ring_rows(engine.drafts))

    def recorded(self: Any, *args: Any) -> Any:
        rows = plan(self, *args)
        columns = (rows.slot, rows.base, rows.start, rows.row_start.diff())
        step = [Row(*values) for values in zip(*(c.tolist() for c in columns), strict=True)]
        seen.setdefault(id(self), []).append([row for row in step if row.slot])
        return rows

    StepPlanner.plan = recorded
    try:
        yield plans
    finally:
        StepPlanner.plan = plan
    groups = list(seen.values())
    without_slots = [
        [[dataclasses.replace(row, slot=0) for row in step] for step in steps] for steps in groups
    ]
    assert all(steps == without_slots[0] for steps in without_slots), "KV groups differ"
    plans.steps += groups[0] if groups else []


@dataclass
class Preemptions:
    """Requests preempted, counted in the schedules."""

    count: int = 0


@contextlib.contextmanager
def preemptions(engine: Engine) -> Iterator[Preemptions]:
    """Counts while it is open, those of a forced reset too."""
    scheduler = engine.scheduler
    preempt = scheduler._preempt_request
    seen = Preemptions()

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.count += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counted
    try:
        yield seen
    finally:
        del scheduler._preempt_request


def reset_running(engine: Engine) -> bool:
    """Preempt every running request, as `LLM.reset_prefix_cache(reset_running_requests=True)`."""
    return bool(engine.scheduler.reset_prefix_cache(reset_running_requests=True))


def free_blocks(engine: Engine) -> list[int]:
    """Blocks that no request holds."""
    return [b.block_id for b in engine.pool.blocks if b.ref_cnt == 0 and not b.is_null]


def page_views(engine: Engine) -> list[torch.Tensor]:
    """The six states of every GDN layer, [blocks, ...] each."""
    views = [view for layer in engine.gdn_layers() for view in layer.kv_cache]
    assert len(views) == 6 * len(engine.gdn_layers())
    return views


def fill(engine: Engine, blocks: Sequence[int], value: float) -> None:
    """Overwrites all states of all GDN layers in `blocks`."""
    views = page_views(engine)
    index = torch.tensor(blocks, dtype=torch.long, device=views[0].device)
    for view in views:
        view[index] = value


def null_page(engine: Engine) -> list[torch.Tensor]:
    """A copy of block 0, of every state of every layer."""
    return [view[0].clone() for view in page_views(engine)]


def assert_equal(
    results: Mapping[str, harness.Result], expected: Mapping[str, harness.Result]
) -> float:
    """Each result is the beginning of what is expected; gives the largest distance."""
    worst = 0.0
    for name, result in results.items():
        want = expected[name]
        count = len(result.tokens)
        assert result.tokens == want.tokens[:count], (
            f"{name}: token {_first_difference(result.tokens, want.tokens)} of {count} differs"
        )
        for mine, theirs in zip(result.logprobs, want.logprobs, strict=False):
            worst = max(worst, abs(mine - theirs))
        assert worst <= TOLERANCE, f"{name}: a log-probability differs by {worst}"
    return worst


def _first_difference(mine: Sequence[int], theirs: Sequence[int]) -> int:
    return next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)
