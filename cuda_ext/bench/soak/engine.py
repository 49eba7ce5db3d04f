"""The two processes of a soak, each with vLLM's engine in it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from cuda_ext.bench.faults import lost_rows
from cuda_ext.bench.soak import load
from cuda_ext.bench.soak.checks import Sample, Tally, Usual, growth

NEARLY_ALIKE = 2e-4
"""Log-probabilities that two ways to compute the same in fp32 may put in either order
(tests/replay/engine/replay_engine.py, `TOLERANCE`)."""
WITH_LOGPROBS = 8
"""One request in so many asks for them."""
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
        pool: blocks, as a share of what `concurrency` requests of mean length hold.
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
        pick = load.random_prompts if self.random else load.copy_prompts
        return pick(**self.prompts)


def _start(job: Job, *, drafts: bool) -> Any:
    from vllm import LLM

    prompts = job.set_of_prompts()
    options: dict[str, Any] = {
        "model": job.model,
        "skip_tokenizer_init": True,
        "max_model_len": max(len(p.tokens) + p.answer for p in prompts) + 64,
        "max_num_seqs": job.concurrency,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "seed": 0,
        **job.options,
    }
    mine = {"gdn_prefill_backend": "triton", "gaudi_ext": {"replay": "on"}}
    options["additional_config"] = mine | options.get("additional_config", {})
    if drafts:
        options["speculative_config"] = dict(job.speculative)
    return LLM(**options)


def known_answers(job: Job) -> dict[str, Any]:
    """What the engine says without drafts.

    Returns:
        `answers`, by prompt, where exact as far as they are clear; and unless exact, `again`, the
        answers in another batch composition.
    """
    from vllm import SamplingParams

    llm = _start(job, drafts=False)
    prompts = job.set_of_prompts()

    def ask(chosen: Sequence[load.Prompt]) -> list[Any]:
        sampling = [
            SamplingParams(
                temperature=0.0,
                max_tokens=prompt.answer,
                logprobs=2 if job.exact else None,
                ignore_eos=True,
                detokenize=False,
            )
            for prompt in chosen
        ]
        texts: Any = [{"prompt_token_ids": list(prompt.tokens)} for prompt in chosen]
        return [out.outputs[0] for out in llm.generate(texts, sampling, use_tqdm=False)]

    answers = ask(prompts)
    half = -(-len(prompts) // 2)
    again = [] if job.exact else ask(prompts[:half]) + ask(prompts[half:])
    llm.llm_engine.engine_core.shutdown()
    if job.exact:
        return {"answers": [_clear(answer) for answer in answers]}
    return {
        "answers": [list(answer.token_ids) for answer in answers],
        "again": [list(answer.token_ids) for answer in again],
    }


def _clear(answer: Any) -> list[int]:
    """Tokens before the first one that is not clearly the likeliest."""
    tokens = []
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        others = [other.logprob for number, other in entry.items() if number != token]
        if entry[token].logprob - max(others) < NEARLY_ALIKE:
            break
        tokens.append(token)
    return tokens


@dataclass
class _Running:
    request: load.Request
    tokens: list[int] = field(default_factory=list)


class Soak:
    """The load on one engine.

    Args:
        llm: `vllm.LLM`, its core in this process.
        job: the job.
        answers: by prompt, what is known of its answer.
        usual: of the engine without drafts; None where answers are exact.
    """

    def __init__(
        self, llm: Any, job: Job, answers: Sequence[Sequence[int]], usual: Usual | None
    ) -> None:
        self._engine = llm.llm_engine
        self._llm, self._job, self._answers, self._usual = llm, job, answers, usual
        self._prompts = job.set_of_prompts()
        self._requests = load.requests([len(a) for a in answers], job.aborts, job.seed)
        self._running: dict[str, _Running] = {}
        self.tally = Tally()
        self.samples: list[Sample] = []
        self.added = self.aborted = self.steps = self.most_running = 0
        core = self._engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._pool = core.scheduler.kv_cache_manager.block_pool
        self._keep_pool_small()

    def _keep_pool_small(self) -> None:
        """Take blocks away, so that requests must be preempted."""
        groups = [
            None if hasattr(group.kv_cache_spec, "mamba_type") else group.kv_cache_spec.block_size
            for group in self._scheduler.kv_cache_config.kv_cache_groups
        ]
        sizes = [
            load.blocks_needed(len(prompt.tokens) + len(answer) // 2, groups)
            for prompt, answer in zip(self._prompts, self._answers, strict=True)
        ]
        mean = sum(sizes) / len(sizes)
        largest = max(load.blocks_needed(len(p.tokens) + p.answer, groups) for p in self._prompts)
        free = self._pool.get_num_free_blocks()
        wanted = max(int(self._job.pool * self._job.concurrency * mean), largest + 2)
        if wanted > free:
            raise RuntimeError(
                f"the pool has {free} blocks, {wanted} are wanted: raise kv_cache_memory_bytes or "
                "num_gpu_blocks_override"
            )
        self._taken = self._pool.get_new_blocks(free - wanted) if free > wanted else []
        self.groups, self.blocks = groups, wanted

    @property
    def free_blocks(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def run(self, say: Callable[[str], None]) -> None:
        """Load for the job's minutes, then let what is there finish.

        Args:
            say: is given a line a sample.
        """
        job, fault = self._job, self._job.fault
        begin = time.monotonic()
        end, due = begin + 60 * job.minutes, begin + job.every
        while True:
            more = time.monotonic() < end and (job.most is None or self.added < job.most)
            while more and len(self._running) < job.concurrency:
                self._add(next(self._requests))
                more = job.most is None or self.added < job.most
            if not self._engine.has_unfinished_requests():
                break
            self._step()
            if more and due <= time.monotonic():
                due += job.every
                self.samples.append(self._sample(time.monotonic() - begin))
                say(json.dumps(asdict(self.samples[-1]) | {"wrong": self.tally.wrong}))
                if fault == "leaked-block" and self._pool.get_num_free_blocks():
                    self._pool.get_new_blocks(1)
                    fault = None
        # With asynchronous scheduling an aborted request's last step may still be on its way.
        for _ in range(8):
            self._engine.step()

    def _add(self, request: load.Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        asks = self.added % WITH_LOGPROBS == 0
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=request.tokens,
            logprobs=0 if asks else None,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": list(self._prompts[request.prompt].tokens)}
        self._engine.add_request(request.name, prompt, sampling)
        self._running[request.name] = _Running(request)
        self.added += 1

    def _step(self) -> None:
        self.steps += 1
        aborts = []
        for output in self._engine.step():
            running = self._running.get(output.request_id)
            if running is None:
                continue
            part, request = output.outputs[0], running.request
            running.tokens += part.token_ids
            if part.logprobs:
                self.tally.look_at_logprobs(
                    [
                        entry[token].logprob
                        for token, entry in zip(part.token_ids, part.logprobs, strict=True)
                    ]
                )
            if output.finished:
                self._look(running, asked=request.tokens)
            elif request.abort_after is not None and len(running.tokens) > request.abort_after:
                aborts.append(request.name)
        self.most_running = max(self.most_running, len(self._scheduler.running))
        if aborts:
            self._engine.abort_request(aborts)
            for name in aborts:
                self.aborted += 1
                self._look(self._running[name], asked=None)

    def _look(self, running: _Running, asked: int | None) -> None:
        request = running.request
        del self._running[request.name]
        if self._usual is None:
            self.tally.look(
                request.name, running.tokens, self._answers[request.prompt], asked=asked
            )
        else:
            self.tally.look_at_words(
                request.name,
                running.tokens,
                self._prompts[request.prompt].truth,
                asked=asked,
                usual=self._usual.by_prompt[request.prompt],
            )

    def _sample(self, seconds: float) -> Sample:
        cuda = torch.cuda.is_available()
        return Sample(
            seconds=round(seconds, 1),
            resident=psutil.Process().memory_info().rss,
            allocated=torch.cuda.memory_allocated() if cuda else 0,
            reserved=torch.cuda.memory_reserved() if cuda else 0,
            free_blocks=self.free_blocks,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            finished=self.tally.checked - self.tally.aborted,
        )


def _counters(llm: Any) -> dict[str, float]:
    names = {
        "vllm:spec_decode_num_drafts": "drafted",
        "vllm:spec_decode_num_accepted_tokens": "accepted",
        "vllm:num_preemptions": "preempted",
    }
    found = dict.fromkeys(names.values(), 0.0)
    for metric in llm.get_metrics():
        if metric.name in names:
            found[names[metric.name]] += metric.value
    return found


def serve(job: Job, answers: Sequence[Sequence[int]], usual: Usual | None) -> dict[str, Any]:
    """Run the load in this process; what `checks.problems` reads, with `tally` and `samples`."""
    with lost_rows() if job.fault == "lost-row" else nullcontext():
        return _serve(job, answers, usual)


def _serve(job: Job, answers: Sequence[Sequence[int]], usual: Usual | None) -> dict[str, Any]:
    begin = time.monotonic()
    llm = _start(job, drafts=True)
    started = time.monotonic() - begin
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    context = runner.vllm_config.compilation_config.static_forward_context
    layers = {type(layer).__name__ for layer in context.values() if hasattr(layer, "mamba_type")}
    config = llm.llm_engine.vllm_config
    soak = Soak(llm, job, answers, usual)
    print(
        f"started in {started:.1f} s; {', '.join(layers)}; {type(runner).__module__}; "
        f"{soak.blocks} blocks for groups {soak.groups}",
        flush=True,
    )
    before, free = _counters(llm), soak.free_blocks
    begin = time.monotonic()
    soak.run(lambda line: print(line, flush=True))
    seconds = time.monotonic() - begin
    after, free_after = _counters(llm), soak.free_blocks
    llm.llm_engine.engine_core.shutdown()
    counted = {name: after[name] - before[name] for name in after}
    steps = counted["drafted"]
    return {
        "layers": ", ".join(sorted(layers)),
        "runner": type(runner).__module__,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "seconds_to_start": round(started, 1),
        "seconds": round(seconds, 1),
        "steps": soak.steps,
        "added": soak.added,
        "finished": soak.tally.checked - soak.tally.aborted,
        "aborted": soak.aborted,
        "preempted": counted["preempted"],
        "accepted": counted["accepted"],
        "drafting": bool(job.speculative),
        "acceptance_length": round(1 + counted["accepted"] / steps, 3) if steps else None,
        "output_tok_s": round(soak.tally.tokens / seconds, 1),
        "most_running": soak.most_running,
        "pool_blocks": soak.blocks,
        "tokens_of_a_block_by_group": soak.groups,
        "free_blocks_before": free,
        "free_blocks_after": free_after,
        "growth_mib": {k: round(v, 2) for k, v in growth(soak.samples).items()},
        "tally": asdict(soak.tally),
        "samples": [asdict(sample) for sample in soak.samples],
    }


def main(told: Mapping[str, Any]) -> None:
    """The work of a child: `told["what"]` is `answers` or `serve`."""
    job = Job(**told["job"])
    if told["what"] == "answers":
        found = known_answers(job)
    else:
        usual = Usual(**told["usual"]) if told["usual"] else None
        found = serve(job, json.loads(Path(told["answers"]).read_text())["answers"], usual)
    path = Path(told["result"])
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.rename(path)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
