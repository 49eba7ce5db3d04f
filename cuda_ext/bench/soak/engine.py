"""The two processes of a soak, each with vLLM's engine in it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from cuda_ext.bench.faults import lost_rows
from cuda_ext.bench.soak import load
from cuda_ext.bench.soak.checks import Sample, Tally, Usual, growth, in_vain
from cuda_ext.bench.soak.job import Job

NEARLY_ALIKE = 2e-4
"""Log-probabilities that two ways to compute the same in fp32 may put in either order
(tests/replay/engine/replay_engine.py, `TOLERANCE`)."""
WITH_LOGPROBS = 8
"""One request in so many asks for them."""
DRAWS = 4096
"""Requests of the load by which the pool is measured."""


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
        self._requests = self._draw()
        self._running: dict[str, _Running] = {}
        self.tally = Tally()
        self.samples: list[Sample] = []
        self.ended_early: list[str] = []
        self.added = self.aborted = self.steps = self.most_running = 0
        self.aborted_unanswered = self.aborted_preempted = 0
        self._loaded_steps = self._ran = self._used = 0
        core = self._engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._pool = core.scheduler.kv_cache_manager.block_pool
        self._keep_pool_small()

    def _draw(self) -> Iterator[load.Request]:
        return load.requests([len(a) for a in self._answers], self._job.aborts, self._job.seed)

    def _keep_pool_small(self) -> None:
        """Take blocks away, so that requests must be preempted."""
        job = self._job
        groups = [
            None if hasattr(group.kv_cache_spec, "mamba_type") else group.kv_cache_spec.block_size
            for group in self._scheduler.kv_cache_config.kv_cache_groups
        ]
        ahead = load.tokens_ahead(
            self._scheduler.num_spec_tokens,
            self._scheduler.num_lookahead_tokens,
            asynchronous=self._engine.vllm_config.scheduler_config.async_scheduling,
        )
        lengths = [len(prompt.tokens) for prompt in self._prompts]
        mean = load.mean_blocks(lengths, islice(self._draw(), DRAWS), groups, ahead)
        largest = max(
            load.blocks_needed(len(p.tokens) + p.answer + ahead, groups) for p in self._prompts
        )
        free = self._pool.get_num_free_blocks()
        wanted = load.pool_blocks(job.pool, job.concurrency, mean, largest)
        if wanted > free:
            raise RuntimeError(
                f"the pool has {free} blocks, {wanted} are wanted: raise kv_cache_memory_bytes or "
                "num_gpu_blocks_override in --options"
            )
        self._taken = self._pool.get_new_blocks(free - wanted) if free > wanted else []
        self.groups, self.blocks, self.mean_blocks = groups, wanted, mean
        self.least_free = wanted
        self._counted = _counters(self._llm)

    @property
    def free_blocks(self) -> int:
        """Of the pool, at this moment."""
        return int(self._pool.get_num_free_blocks())

    def figures(self) -> dict[str, Any]:
        """What `checks.problems` and `checks.in_vain` read of the load so far."""
        now, steps = _counters(self._llm), max(1, self._loaded_steps)
        return {
            **{name: now[name] - self._counted[name] for name in now},
            "drafting": bool(self._job.speculative),
            "concurrency": self._job.concurrency,
            "added": self.added,
            "answers": self.tally.checked,
            "finished": self.tally.checked - self.tally.aborted,
            "aborted": self.aborted,
            "aborted_unanswered": self.aborted_unanswered,
            "aborted_preempted": self.aborted_preempted,
            "most_running": self.most_running,
            "mean_running": round(self._ran / steps, 2),
            "pool": self._job.pool,
            "pool_blocks": self.blocks,
            "mean_blocks_in_use": round(self._used / steps, 1),
            "least_free_blocks": self.least_free,
            "ended_early": self.ended_early,
        }

    def run(self, say: Callable[[str], None]) -> None:
        """Load for the job's minutes, then let what is there finish.

        Where it is in vain, the load ends there, and what is there is aborted.

        Args:
            say: is given a line a sample.
        """
        job, fault = self._job, self._job.fault
        begin = time.monotonic()
        end, due = begin + 60 * job.minutes, begin + job.every
        while True:
            more = time.monotonic() < end and not self.ended_early
            more &= job.most is None or self.added < job.most
            while more and len(self._running) < job.concurrency:
                self._add(next(self._requests))
                more = job.most is None or self.added < job.most
            if not self._engine.has_unfinished_requests():
                break
            self._step()
            if not more:
                continue
            self._loaded_steps += 1
            self._ran += len(self._scheduler.running)
            self._used += self.blocks - self.free_blocks
            if due <= time.monotonic():
                due += job.every
                seconds = time.monotonic() - begin
                figures = self.figures()
                self.samples.append(self._sample(seconds, figures))
                say(json.dumps(asdict(self.samples[-1]) | {"wrong": self.tally.wrong}))
                self.ended_early = in_vain(figures, seconds / (end - begin), len(self.samples))
                if self.ended_early:
                    self._abort(list(self._running))
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
        self.least_free = min(self.least_free, self.free_blocks)
        preempted = [name for name in self._preempted() if name not in aborts]
        self.aborted_preempted += len(preempted)
        self._abort(aborts + preempted)
        unanswered = [
            name
            for name, running in self._running.items()
            if running.request.abort_after == load.AT_ONCE
        ]
        self._abort(unanswered)

    def _preempted(self) -> list[str]:
        """Of those that are to be aborted at some time, whoever was preempted and waits again."""
        found = []
        for waiting in self._scheduler.waiting:
            # vLLM 0.31 puts random characters behind the name.
            name = waiting.request_id
            name = name if name in self._running else name.rpartition("-")[0]
            running = self._running.get(name)
            if running is None or running.request.abort_after is None:
                continue
            if waiting.status.name == "PREEMPTED":
                found.append(name)
        return found

    def _abort(self, names: Sequence[str]) -> None:
        if names:
            self._engine.abort_request(list(names))
        for name in names:
            self.aborted += 1
            self.aborted_unanswered += not self._running[name].tokens
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

    def _sample(self, seconds: float, figures: Mapping[str, Any]) -> Sample:
        cuda = torch.cuda.is_available()
        return Sample(
            seconds=round(seconds, 1),
            resident=psutil.Process().memory_info().rss,
            allocated=torch.cuda.memory_allocated() if cuda else 0,
            reserved=torch.cuda.memory_reserved() if cuda else 0,
            free_blocks=self.free_blocks,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            finished=figures["finished"],
            preempted=int(figures["preempted"]),
            accepted=int(figures["accepted"]),
        )


def _counters(llm: Any) -> dict[str, float]:
    names = {
        "vllm:spec_decode_num_drafts": "drafted",
        "vllm:spec_decode_num_draft_tokens": "proposed",
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
        f"{soak.blocks} blocks for groups {soak.groups}; a request holds {soak.mean_blocks:.2f} on "
        "average",
        flush=True,
    )
    free = soak.free_blocks
    begin = time.monotonic()
    soak.run(lambda line: print(line, flush=True))
    seconds = time.monotonic() - begin
    figures, free_after = soak.figures(), soak.free_blocks
    llm.llm_engine.engine_core.shutdown()
    drafted = figures["drafted"]
    return {
        "layers": ", ".join(sorted(layers)),
        "runner": type(runner).__module__,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "seconds_to_start": round(started, 1),
        "seconds": round(seconds, 1),
        "steps": soak.steps,
        **figures,
        "acceptance_length": round(1 + figures["accepted"] / drafted, 3) if drafted else None,
        "output_tok_s": round(soak.tally.tokens / seconds, 1),
        "mean_blocks_of_a_request": round(soak.mean_blocks, 3),
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
