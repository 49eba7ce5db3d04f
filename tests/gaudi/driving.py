"""Ways to drive an in-process engine step by step, to look into it, and to poison its memory."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import harness
import torch

SENTINEL = 7.0
_salts = itertools.count()


def salt() -> str:
    """A cache salt that no test has used before."""
    return f"salt-{next(_salts)}"


def block_tokens(engine: Any) -> int:
    """B, as the scheduler's KV-cache config has it."""
    return engine.scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size


def states(engine: Any) -> list[torch.Tensor]:
    """The conv and recurrent state tensors, [S, ...] each, once a layer position."""
    layers = engine.runner.vllm_config.compilation_config.static_forward_context
    seen: dict[int, torch.Tensor] = {}
    for group in engine.runner.kv_cache_config.kv_cache_groups:
        if type(group.kv_cache_spec).__name__ == "MambaSpec":
            for name in group.layer_names:
                for tensor in layers[name].kv_cache[:2]:
                    seen[tensor.data_ptr()] = tensor
    return list(seen.values())


def pages(engine: Any) -> list[torch.Tensor]:
    """K and V of every attention layer, [(N*r + 1) * 128, heads, head dim] each."""
    layers = engine.runner.vllm_config.compilation_config.static_forward_context
    found = []
    for group in engine.runner.kv_cache_config.kv_cache_groups:
        if type(group.kv_cache_spec).__name__ == "FullAttentionSpec":
            for name in group.layer_names:
                found += layers[name].kv_cache[:2]
    return found


def fill_slots(engine: Any, value: float) -> None:
    """Overwrites every slot, the reserved ones included."""
    for tensor in states(engine):
        tensor.fill_(value)


def fill_free_pages(engine: Any, value: float) -> int:
    """Overwrites the pages of every block that is free and holds no cached content.

    Returns:
        The number of blocks filled.
    """
    pool = engine.scheduler.kv_cache_manager.block_pool
    tokens = block_tokens(engine)
    free = [
        b.block_id for b in pool.blocks if b.ref_cnt == 0 and b.block_hash is None and not b.is_null
    ]
    for tensor in pages(engine):
        for block in free:
            tensor[block * tokens : (block + 1) * tokens].fill_(value)
    return len(free)


def free_slots(engine: Any) -> int:
    return len(engine.runner._gdn_slot_free_list)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of one object while open; may be nested."""
    own = vars(owner)
    before = own.get(name)
    had = name in own
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@dataclass
class Schedule:
    """What the scheduler asked for, step by step, as the runner got it."""

    steps: list[Any] = field(default_factory=list)

    def chunks(self) -> dict[str, list[tuple[int, int]]]:
        """Per request: (tokens computed before, tokens scheduled) of each step."""
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for step in self.steps:
            computed = {r.req_id: r.num_computed_tokens for r in step.scheduled_new_reqs}
            cached = step.scheduled_cached_reqs
            computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            for request, scheduled in step.num_scheduled_tokens.items():
                found[request].append((computed[request], scheduled))
        return found

    @property
    def preempted(self) -> int:
        return sum(len(step.preempted_req_ids or ()) for step in self.steps)

    @property
    def resumed(self) -> list[tuple[str, int]]:
        """(request, tokens at which it resumed), 0 for from the start."""
        found = []
        for step in self.steps:
            cached = step.scheduled_cached_reqs
            for request, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if request in cached.resumed_req_ids:
                    found.append((request, computed))
        return found

    @property
    def hits(self) -> int:
        return sum(r.num_computed_tokens > 0 for s in self.steps for r in s.scheduled_new_reqs)


@contextlib.contextmanager
def watched(engine: Any) -> Iterator[Schedule]:
    """Records every scheduler output while it is open."""
    seen = Schedule()
    schedule = engine.scheduler.schedule

    def recorded(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        seen.steps.append(output)
        return output

    with replaced(engine.scheduler, "schedule", recorded):
        yield seen


class Requests:
    """Adds requests to an in-process engine by hand and steps it, for tests of exact schedules."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.llm_engine = engine.llm.llm_engine
        self.outputs: dict[str, Any] = {}
        self.finished: set[str] = set()

    def add(
        self,
        name: str,
        tokens: Sequence[int],
        max_tokens: int,
        salt: str | None = None,
        allowed: Sequence[int] | None = None,
        **params: Any,
    ) -> None:
        from vllm import SamplingParams

        inputs: dict[str, Any] = {"prompt_token_ids": list(tokens)}
        if salt:
            inputs["cache_salt"] = salt
        priority = params.pop("priority", 0)
        sampling = SamplingParams(
            temperature=params.pop("temperature", 0.0),
            max_tokens=max_tokens,
            logprobs=1,
            ignore_eos=True,
            detokenize=False,
            allowed_token_ids=None if allowed is None else list(allowed),
            **params,
        )
        self.llm_engine.add_request(name, inputs, sampling, priority=priority)

    def step(self) -> list[str]:
        """One engine step; the names of requests that finished in it."""
        done = []
        for output in self.llm_engine.step():
            self.outputs[output.request_id] = output
            if output.finished:
                self.finished.add(output.request_id)
                done.append(output.request_id)
        return done

    def drain(self, most: int = 2000) -> None:
        """Steps until nothing is left to do."""
        for _ in range(most):
            if not self.llm_engine.has_unfinished_requests():
                return
            self.step()
        raise AssertionError(f"not done after {most} steps")

    def abort(self, name: str) -> None:
        self.llm_engine.abort_request([name])

    def result(self, name: str) -> harness.Result:
        output = self.outputs[name]
        completion = output.outputs[0]
        tokens = tuple(completion.token_ids)
        logprobs = tuple(
            entry[token].logprob
            for token, entry in zip(tokens, completion.logprobs or (), strict=True)
        )
        return harness.Result(tokens, logprobs, output.num_cached_tokens or 0)


def cold(engine: Any, tokens: Sequence[int], max_tokens: int) -> harness.Result:
    """The prompt run by itself on blocks that nobody shares."""
    (result,) = engine.run([tokens], max_tokens=max_tokens, salt=salt())
    assert result.cached_tokens == 0
    return result


@contextlib.contextmanager
def forced_cuts(engine: Any, cuts: Mapping[int, int]) -> Iterator[None]:
    """While open, a prefill chunk that starts at a key of `cuts` has that many tokens.

    This makes an uncached run compute the same chunks as a cached one did.
    """
    scheduler = engine.scheduler
    split = scheduler._mamba_block_aligned_split

    def forced(request: Any, new_tokens: int, local: int = 0, external: int = 0) -> int:
        start = request.num_computed_tokens + local + external
        chosen = split(request, new_tokens, local, external)
        return min(cuts.get(start, chosen), new_tokens)

    with replaced(scheduler, "_mamba_block_aligned_split", forced):
        yield


def small_model() -> Any:
    """A quarter of the dense tiny model, for long runs; in fp32 its B is 256 tokens."""
    import dataclasses

    import tiny_models

    text = dict(tiny_models.DENSE.text) | {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
    }
    return dataclasses.replace(tiny_models.DENSE, name="tiny-small", text=text)


@dataclass
class Ledger:
    """Which blocks hold a checkpoint, by what was moved; refuses a restore of anything else."""

    held: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    saved: int = 0
    restored: int = 0
    log: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)


@contextlib.contextmanager
def ledger(engine: Any) -> Iterator[Ledger]:
    """While open, each restore must read what a save wrote last, bit for bit.

    A block loses its checkpoint when it is zeroed for attention. Checkpoints made before this was
    opened are unknown to it, so open it on an empty cache.

    Raises:
        AssertionError: inside the step that restores a block without a checkpoint, or one whose
            pages changed since.
    """
    engine.llm.reset_prefix_cache()
    checkpoints = engine.runner._checkpoints
    book = Ledger()
    save, restore, zero = checkpoints.save, checkpoints.restore, checkpoints.zero_blocks

    def page_rows(block: int) -> list[torch.Tensor]:
        return [torch.cat((page.k[block], page.v[block])).clone() for page in checkpoints.pages]

    def saving(rows: Any) -> None:
        save(rows)
        book.log.append(("save", tuple(row.block for row in rows)))
        for row in rows:
            book.held[row.block] = page_rows(row.block)
        book.saved += len(rows)

    def restoring(rows: Any) -> None:
        for row in rows:
            assert row.block in book.held, f"block {row.block} is restored without a checkpoint"
            for held, found in zip(book.held[row.block], page_rows(row.block), strict=True):
                assert torch.equal(held, found), f"the pages of block {row.block} changed"
        if rows:
            book.log.append(("restore", tuple(row.block for row in rows)))
        restore(rows)
        book.restored += len(rows)

    def zeroing(blocks: Any) -> None:
        zero(blocks)
        for block in blocks:
            book.held.pop(block, None)

    with (
        replaced(checkpoints, "save", saving),
        replaced(checkpoints, "restore", restoring),
        replaced(checkpoints, "zero_blocks", zeroing),
    ):
        yield book


def find(engine: Any, name: str) -> Any:
    """The scheduler's request that was added under this name (vLLM appends random characters)."""
    (request,) = [r for i, r in engine.scheduler.requests.items() if i.startswith(name + "-")]
    return request


@contextlib.contextmanager
def before_schedule(engine: Any, act: Any) -> Iterator[None]:
    """Calls `act(scheduler)` before each schedule; what it returns is called behind it."""
    scheduler = engine.scheduler
    schedule = scheduler.schedule

    def acted(*args: Any, **kwargs: Any) -> Any:
        behind = act(scheduler)
        try:
            return schedule(*args, **kwargs)
        finally:
            if behind is not None:
                behind()

    with replaced(scheduler, "schedule", acted):
        yield


def preempt(scheduler: Any, request: Any, *, resume_at_once: bool = False) -> Any:
    """Preempts a running request as a schedule that runs out of blocks would.

    Args:
        resume_at_once: let the same schedule resume it, which a prefix-cache reset makes happen;
            otherwise no request is admitted in this schedule, as after a preemption of its own.

    Returns:
        What to call behind the schedule, for `before_schedule`.
    """
    import time

    from vllm.v1.core.sched.interface import PauseState

    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic())
    if resume_at_once:
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        return None
    scheduler._pause_state = PauseState.PAUSED_NEW

    def unpause() -> None:
        scheduler._pause_state = PauseState.UNPAUSED

    return unpause
