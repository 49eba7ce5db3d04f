"""One arm's engine in a process of its own, driven by lines of JSON: the in-process mode.

    python -m cuda_ext.bench.serve.engine JOB.json

The parent (child.py) sets the environment, writes commands to stdin and reads events from stdout:
`point`, `gate`, `profile`, `warm_up`, `sleep`, `wake`, `stop`. Each gets `progress` events and one
of `done` or `failed`. vLLM logs to stdout, so that is turned to stderr before vLLM is imported. The
engine is vLLM's own `LLMEngine`, its flags parsed by vLLM's own parser from a file as `vllm serve`
takes it.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from cuda_ext.bench import faults
from cuda_ext.bench.serve import load as loads
from cuda_ext.bench.serve import profile as profiles
from cuda_ext.bench.serve.config import Gate, Load
from cuda_ext.bench.serve.load import Point, Request
from cuda_ext.bench.serve.measure import EngineFigures, Record, Run

FIT_TOKENS = 8192
PROGRESS_S = 1.0
FAULTS = (1, 16)
"""Of what folds a row is lost; the first must be seen, the rest say how fine the gate sees."""
CUTS = {"cut early": 0.5, "cut late": 0.75}
"""Compositions of the gate's prompts, and the part of them that the first step takes."""
QUIET_STEPS = 6
"""Steps in which no request gets its first token, after which none is thought to be prefilled."""
LAST_STEP = 2000


class Watch:
    """A stat logger of vLLM's (`StatLoggerBase`), which keeps what a point asks for."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Before a point."""
        self.running = self.waiting = self.running_max = self.waiting_max = 0
        self.usage_max = 0.0
        self.preemptions = self.drafts = self.accepted = 0

    def figures(self) -> EngineFigures:
        """Since the reset."""
        return EngineFigures(
            running_max=self.running_max,
            waiting_max=self.waiting_max,
            kv_usage_max=self.usage_max,
            preemptions=self.preemptions,
            drafts=self.drafts,
            accepted=self.accepted,
        )

    def record(
        self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, **__: Any
    ) -> None:
        """vLLM calls this once a step."""
        if scheduler_stats is not None:
            self.running = scheduler_stats.num_running_reqs
            # Two queues: whoever waits for something else than room has its own.
            skipped = scheduler_stats.num_skipped_waiting_reqs
            self.waiting = scheduler_stats.num_waiting_reqs + skipped
            self.running_max = max(self.running_max, self.running)
            self.waiting_max = max(self.waiting_max, self.waiting)
            self.usage_max = max(self.usage_max, scheduler_stats.kv_cache_usage)
            drafts = scheduler_stats.spec_decoding_stats
            if drafts is not None:
                self.drafts += drafts.num_drafts
                self.accepted += drafts.num_accepted_tokens
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def log(self) -> None:
        """Nothing to say."""

    def record_sleep_state(self, *_: Any, **__: Any) -> None:
        """Nothing to keep."""


def pool_bytes(cache: Any) -> int:
    """Bytes of the pool: a block holds a page of every layer of the largest group.

    Args:
        cache: a vllm.v1.kv_cache_interface.KVCacheConfig. Its tensors' sizes are those of the
            allocations that they share (since 0.31.0), so their sum is something else.
    """
    return int(cache.num_blocks) * max(map(_block_bytes, cache.kv_cache_groups))


def _block_bytes(group: Any) -> int:
    spec = group.kv_cache_spec
    # Specs of several kinds in one group come with the page of all layers.
    layers = 1 if hasattr(spec, "kv_cache_specs") else len(group.layer_names)
    return int(spec.page_size_bytes) * layers


def group_of(group: Any) -> dict[str, Any]:
    """One group of layers that share blocks: kinds of layers, how many, and bytes of a block."""
    spec = group.kv_cache_spec
    specs = getattr(spec, "kv_cache_specs", {"": spec}).values()
    return {
        "kinds": sorted({type(one).__name__ for one in specs}),
        "layers": len(group.layer_names),
        "block_tokens": spec.block_size,
        "block_bytes": _block_bytes(group),
    }


def _name(value: Any) -> str | None:
    return None if value is None else str(getattr(value, "name", value))


class ArmEngine:
    """The engine of one arm.

    Args:
        flags: a YAML of flags, as `vllm serve --config` takes.
        load: seed, lengths and warm-up.
        gate: the gate's prompts.
        dummy_weights: as the config has it.
    """

    def __init__(self, flags: Path, load: Load, gate: Gate, dummy_weights: str = "vllm") -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.llm_engine import LLMEngine

        self.load, self.gate = load, gate
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm serve"))
        arguments = EngineArgs.from_cli_args(parser.parse_args(["--config", str(flags)]))
        arguments.disable_log_stats = False
        self.watch = Watch()
        self._weights: dict[str, Any] | None = None
        if arguments.load_format == "dummy":
            self._weights = {"kind": dummy_weights}
            if dummy_weights == "scaled":
                from cuda_ext.bench.serve.weights import register

                self._weights["models"] = register()
        begin = time.perf_counter()
        self.engine: Any = LLMEngine.from_engine_args(
            arguments,
            usage_context=UsageContext.OPENAI_API_SERVER,
            stat_loggers=[lambda *_: self.watch],
        )
        self.start_s = time.perf_counter() - begin
        self.config = self.engine.vllm_config
        self.vocabulary = int(self.config.model_config.get_vocab_size())
        self._number = 0

    @property
    def _core(self) -> Any:
        return self.engine.engine_core.engine_core

    def facts(self) -> dict[str, Any]:
        """What was started: layers, pool, versions, device."""
        import torch
        import vllm

        worker = self._core.model_executor.driver_worker.worker
        # The scheduler's has one layer's spec for each group, also where a group's pages differ.
        cache = worker.model_runner.kv_cache_config
        context = worker.model_runner.vllm_config.compilation_config.static_forward_context
        layers = self._gdn_layers()
        config = self.config
        fit = self.requests_that_fit(FIT_TOKENS)
        pool = pool_bytes(cache)
        speculative = config.speculative_config
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "start_s": round(self.start_s, 1),
            "vocabulary": self.vocabulary,
            "layer_classes": sorted({type(layer).__name__ for layer in layers}),
            "gdn_layers": len(layers),
            # Our subclass serves as vLLM's own layer where it has no page of ours.
            "replay_layers": self._replay_layers(),
            "model_runner": type(worker.model_runner).__module__,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "max_cudagraph_capture_size": config.compilation_config.max_cudagraph_capture_size,
            "cudagraph_capture_sizes": config.compilation_config.cudagraph_capture_sizes,
            "attention_backends": sorted(
                {
                    layer.get_attn_backend().get_name()
                    for layer in context.values()
                    if hasattr(layer, "get_attn_backend") and not hasattr(layer, "mamba_type")
                }
            ),
            "dummy_weights": self._weights,
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "drafts": speculative.num_speculative_tokens if speculative else 0,
            "kv_cache_layout": _name(getattr(config.cache_config, "kv_cache_layout", None)),
            "kv_cache_groups": [group_of(group) for group in cache.kv_cache_groups],
            "num_gpu_blocks": cache.num_blocks,
            "block_sizes": sorted({g.kv_cache_spec.block_size for g in cache.kv_cache_groups}),
            "pool_bytes": pool,
            "fit_8k": round(fit, 2),
            "bytes_per_8k_request": round(pool / fit),
        }

    def _gdn_layers(self) -> list[Any]:
        worker = self._core.model_executor.driver_worker.worker
        context = worker.model_runner.vllm_config.compilation_config.static_forward_context
        return [layer for layer in context.values() if hasattr(layer, "mamba_type")]

    def _replay_layers(self) -> int:
        return sum(getattr(layer, "replay", None) is not None for layer in self._gdn_layers())

    def requests_that_fit(self, tokens: int) -> float:
        """Requests of that length in the pool, by vLLM's own arithmetic at start-up."""
        from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

        config = copy.copy(self.config)
        config.model_config = copy.copy(self.config.model_config)
        config.model_config.max_model_len = tokens
        cache = self._core.scheduler.kv_cache_config
        return float(get_max_concurrency_for_kv_cache_config(config, cache))

    def serve(
        self,
        requests: Sequence[Request],
        concurrency: int | None,
        tick: Callable[[dict[str, Any]], None],
    ) -> tuple[list[Record], float]:
        """Serve the requests and time them.

        Args:
            requests: in order of arrival.
            concurrency: most in flight; None for no limit (open loop).
            tick: called about once a second.

        Returns:
            A record each, in order, and the seconds from the start to the last token.
        """
        waiting = deque(enumerate(requests))
        sent: dict[str, tuple[int, float]] = {}
        first: dict[int, float] = {}
        counts = [0] * len(requests)
        records: dict[int, Record] = {}
        begin = time.perf_counter()
        told = now = 0.0
        while waiting or sent:
            now = time.perf_counter() - begin
            while waiting and (concurrency is None or len(sent) < concurrency):
                number, request = waiting[0]
                if request.arrival_s > now:
                    break
                waiting.popleft()
                # In an open loop a request counts from when it was due, sent or not.
                due = now if concurrency is not None else request.arrival_s
                sent[self._send(request)] = (number, due)
                now = time.perf_counter() - begin
            if not sent:
                time.sleep(min(0.05, max(0.0, waiting[0][1].arrival_s - now)))
                continue
            outputs = self.engine.step()
            now = time.perf_counter() - begin
            for output in outputs:
                name = output.request_id.split("-")[0]
                number, due = sent[name]
                tokens = len(output.outputs[0].token_ids)
                if tokens and number not in first:
                    first[number] = now
                counts[number] += tokens
                if output.finished:
                    del sent[name]
                    reason = output.outputs[0].finish_reason
                    records[number] = Record(
                        prompt_tokens=len(requests[number].prompt),
                        asked_tokens=requests[number].output_tokens,
                        tokens=counts[number],
                        ttft_s=first.get(number, now) - due,
                        e2e_s=now - due,
                        error=None if reason == "length" else f"finished by {reason}",
                    )
            if now - told >= PROGRESS_S:
                told = now
                tick(
                    {
                        "done": len(records),
                        "of": len(requests),
                        "tokens": sum(counts),
                        "seconds": round(now, 1),
                        "running": self.watch.running,
                        "waiting": self.watch.waiting,
                    }
                )
        return [records[number] for number in range(len(requests))], now

    def _send(self, request: Request) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._number += 1
        name = str(self._number)
        self.engine.add_request(
            name,
            {"prompt_token_ids": request.prompt},
            SamplingParams(
                temperature=0.0,
                max_tokens=request.output_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            ),
        )
        return name

    def point(
        self, arm: str, point: Point, run: int, tick: Callable[[dict[str, Any]], None]
    ) -> Run:
        """Measure one point."""
        given = loads.requests(self.load, point, run, self.vocabulary)
        settling = loads.warm_up_requests(
            self.load, self.load.warm_up.before_each_point, loads.SETTLING_TOKENS, self.vocabulary
        )
        self.serve(settling, len(settling), lambda _: None)
        gc.collect()
        self.watch.reset()
        records, wall = self.serve(given, point.concurrency, tick)
        return Run(
            arm,
            point.label,
            run,
            wall,
            loads.digest(given),
            tuple(records),
            self.watch.figures(),
        )

    def warm_up(self, tick: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Serve what nobody measures."""
        wanted = self.load.warm_up
        given = loads.warm_up_requests(
            self.load, wanted.requests, wanted.output_tokens, self.vocabulary
        )
        _, wall = self.serve(given, None, tick)
        return {"seconds": round(wall, 2)}

    def gate_figures(self) -> dict[str, Any]:
        """Log-probabilities of the gate's prompts and of what is said to them.

        Returns:
            `prompts`: digest. `read`: per composition of the batch and per prompt, those of its own
            tokens from the second on: `together`, all prompts in one batch; `alone`; `in pairs`;
            `CUTS`, behind others that leave them room for a part in the first step. `decode`: per
            composition, `said` of the tokens said, as they were decoded with whatever drafts
            there are, and `read` of the same tokens at the end of a prompt. `faults`, where
            ReplaySSM serves: the same with rows lost (faults.py), each with `every` and `folds`.
        """
        prompts = loads.gate_prompts(self.load, self.gate, self.vocabulary)
        found: dict[str, Any] = {
            "prompts": loads.digest([Request(p, self.gate.output_tokens) for p in prompts]),
            "read": self._read(prompts),
            "decode": {
                "together": self._decode([prompts]),
                "alone": self._decode([[prompt] for prompt in prompts]),
            },
        }
        if self._replay_layers():
            found["faults"] = []
            for every in FAULTS:
                with faults.lost_rows(every) as folds:
                    answers = self._said([prompts])
                    spoiled = folds()
                planted = {"every": every, "folds": spoiled}
                found["faults"].append(planted | self._read_answers(prompts, answers))
        return found

    def _read(self, prompts: Sequence[list[int]]) -> dict[str, list[list[float]]]:
        pairs = [prompts[i : i + 2] for i in range(0, len(prompts), 2)]
        budget = self.config.scheduler_config.max_num_batched_tokens
        longest = self.config.model_config.max_model_len - 2

        def read(*batches: Sequence[list[int]]) -> list[list[float]]:
            scored = [one for batch in batches for one in self._score(batch, 1, prompt=True)]
            return [one["prompt"] for one in scored]

        def cut(part: float) -> list[list[float]]:
            lengths = loads.filler_lengths([len(p) for p in prompts], budget, longest, part)
            fillers = loads.filler_prompts(self.load, lengths, self.vocabulary)
            for filler in fillers:
                self._send(Request(filler, 1))
            return read(prompts)

        return {
            "together": read(prompts),
            "alone": read(*([prompt] for prompt in prompts)),
            "in pairs": read(*pairs),
            **{name: cut(part) for name, part in CUTS.items()},
        }

    def _said(self, batches: Sequence[Sequence[list[int]]]) -> list[dict[str, Any]]:
        output = self.gate.output_tokens
        return [one for batch in batches for one in self._score(batch, output, prompt=False)]

    def _decode(self, batches: Sequence[Sequence[list[int]]]) -> dict[str, Any]:
        return self._read_answers([p for batch in batches for p in batch], self._said(batches))

    def _read_answers(
        self, prompts: Sequence[list[int]], answers: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        continued = [p + list(a["tokens"]) for p, a in zip(prompts, answers, strict=True)]
        scored = self._score(continued, 1, prompt=True)
        return {
            "said": [answer["decoded"] for answer in answers],
            "read": [
                one["prompt"][len(prompt) - 1 :]
                for one, prompt in zip(scored, prompts, strict=True)
            ],
        }

    def _score(
        self, prompts: Sequence[Sequence[int]], output_tokens: int, *, prompt: bool
    ) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        names = []
        for tokens in prompts:
            self._number += 1
            names.append(str(self._number))
            self.engine.add_request(
                names[-1],
                {"prompt_token_ids": list(tokens)},
                SamplingParams(
                    temperature=0.0,
                    max_tokens=output_tokens,
                    ignore_eos=True,
                    detokenize=False,
                    logprobs=None if prompt else 0,
                    prompt_logprobs=0 if prompt else None,
                ),
            )
        outputs: dict[str, Any] = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                outputs[output.request_id.split("-")[0]] = output
        found = []
        for name, tokens in zip(names, prompts, strict=True):
            output = outputs[name]
            said = list(output.outputs[0].token_ids)
            one: dict[str, Any] = {"tokens": said}
            if prompt:
                # The first token has nothing before it.
                scored = zip(output.prompt_logprobs[1:], list(tokens)[1:], strict=True)
                one["prompt"] = [entry[token].logprob for entry, token in scored]
            else:
                scored = zip(output.outputs[0].logprobs, said, strict=True)
                one["decoded"] = [entry[token].logprob for entry, token in scored]
            found.append(one)
        return found

    def profile(
        self, concurrency: Sequence[int], steps: int, tick: Callable[[dict[str, Any]], None]
    ) -> list[dict[str, Any]]:
        """What a step is spent on: of decoding alone at each concurrency, and of prompts alone.

        Args:
            concurrency: requests that are sent; `running` says how many of them decoded.
            steps: timed without a profiler, and as many recorded with one.
            tick: called before each.

        Returns:
            For each `kind` (`decode`, `prefill`), `concurrency`, `running`, `tokens` a step, and
            the figures of `profile.summarise`; `error` where the profiler failed.
        """
        found = []
        for number, count in enumerate(concurrency):
            tick({"done": number, "of": len(concurrency) + 1})
            found.append(self._caught("decode", count, partial(self._decode_steps, count, steps)))
        tick({"done": len(concurrency), "of": len(concurrency) + 1})
        return [*found, self._caught("prefill", None, self._prefill_step)]

    def _caught(
        self, kind: str, concurrency: int | None, work: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        begin = time.perf_counter()
        told: dict[str, Any] = {"kind": kind, "concurrency": concurrency}
        try:
            told |= work()
        # Points are measured by then, and a profiler that fails must not cost them.
        except Exception as error:
            traceback.print_exc()
            told["error"] = f"{type(error).__name__}: {error}"
        finally:
            self._drop_all()
        return told | {"seconds": round(time.perf_counter() - begin, 1)}

    def _decode_steps(self, concurrency: int, steps: int) -> dict[str, Any]:
        longest = self.config.model_config.max_model_len - self.load.prompt_tokens[1] - 2
        given = loads.requests(
            self.load, Point(concurrency, None, longest, concurrency), -1, self.vocabulary
        )
        for request in given:
            self._send(request)
        started: set[str] = set()
        quiet = 0
        for _ in range(LAST_STEP):
            before = len(started)
            started |= {one.request_id for one in self.engine.step() if one.outputs[0].token_ids}
            quiet = quiet + 1 if started and len(started) == before else 0
            if quiet == QUIET_STEPS:
                break
        self.watch.reset()
        tokens = 0

        def advance() -> None:
            nonlocal tokens
            for _ in range(steps):
                tokens += sum(len(one.outputs[0].token_ids) for one in self.engine.step())

        # From one step's return to another's. The device is not waited for before and after: that
        # would drain the queue of asynchronous scheduling, and one step's time on the host would
        # look like time in which no kernel runs.
        begin = time.perf_counter()
        advance()
        wall = time.perf_counter() - begin
        a_step = round(tokens / steps, 1)
        events, host = _recorded(advance)
        return {
            "running": self.watch.running_max,
            "preemptions": self.watch.preemptions,
            "tokens": a_step,
            **profiles.summarise(events, host, steps, wall * 1e3 / steps),
        }

    def _prefill_step(self) -> dict[str, Any]:
        """One step full of prompts, with nothing decoding; timed twice, and recorded once."""
        budget = self.config.scheduler_config.max_num_batched_tokens
        longest = min(self.load.prompt_tokens[1], self.config.model_config.max_model_len - 2)
        count = -(-budget // longest)
        lengths = [budget // count] * count
        prompts = loads.filler_prompts(self.load, lengths, self.vocabulary)
        given = [Request(prompt, 1) for prompt in prompts]

        def once() -> None:
            self.serve(given, None, lambda _: None)

        once()
        wall = min(_timed(once), _timed(once))
        events, host = _recorded(once)
        return {
            "running": count,
            "tokens": sum(lengths),
            **profiles.summarise(events, host, 1, wall * 1e3),
        }

    def _drop_all(self) -> None:
        """Abort whatever the engine still has."""
        names = [str(number) for number in range(1, self._number + 1)]
        self.engine.abort_request(names)
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def sleep(self) -> None:
        """Give weights and pool back; level 1, so that the weights come back as they were."""
        import torch

        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.engine.sleep(1)

    def wake(self) -> None:
        """The inverse of `sleep`."""
        self.engine.wake_up()

    def stop(self) -> None:
        """Shut the engine down."""
        self.engine.engine_core.shutdown()


def _wait_for_device() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _timed(work: Callable[[], None]) -> float:
    """Seconds, until the device is done too."""
    _wait_for_device()
    begin = time.perf_counter()
    work()
    _wait_for_device()
    return time.perf_counter() - begin


def _recorded(work: Callable[[], None]) -> tuple[list[profiles.Event], list[str]]:
    """The device's events, and names of the host's."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    _wait_for_device()
    with profile(activities=activities) as recorder:
        work()
        _wait_for_device()
    events, host = [], []
    # The raw ones: torch's table of them takes longer to make than they took to record.
    for event in recorder.profiler.kineto_results.events():
        if event.device_type() == DeviceType.CPU:
            host.append(event.name())
        elif not event.is_user_annotation():
            events.append(profiles.Event(event.name(), event.start_ns(), event.duration_ns()))
    return events, host


def obey(command: dict[str, Any], engine: ArmEngine, tick: Callable[[dict[str, Any]], None]) -> Any:
    """Do what one command asks; gives the content of its `done`."""
    wanted = command["do"]
    begin = time.perf_counter()
    if wanted == "point":
        given = Point(**command["point"])
        return engine.point(command["arm"], given, command["run"], tick).as_json()
    if wanted == "gate":
        return engine.gate_figures()
    if wanted == "warm_up":
        return engine.warm_up(tick)
    if wanted == "profile":
        return engine.profile(command["concurrency"], command["steps"], tick)
    if wanted not in ("sleep", "wake", "stop"):
        raise ValueError(f"no command {wanted!r}")
    getattr(engine, wanted)()
    return {"seconds": round(time.perf_counter() - begin, 2)}


def _own_stdout() -> TextIO:
    """This process's stdout for events alone; whatever else prints goes to stderr."""
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return events


def main(job: Path) -> int:
    """Serve commands until `stop` or the end of stdin."""
    events = _own_stdout()

    def say(event: str, **content: Any) -> None:
        events.write(json.dumps({"event": event, **content}) + "\n")
        events.flush()

    try:
        wanted = json.loads(job.read_text())
        # All that takes long and needs no device, while the other arm may still be starting.
        import vllm.engine.arg_utils
        import vllm.v1.engine.llm_engine  # noqa: F401

        say("ready")
        engine: ArmEngine | None = None
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "start":
                engine = ArmEngine(
                    Path(wanted["flags"]),
                    Load.model_validate(wanted["load"]),
                    Gate.model_validate(wanted["gate"]),
                    wanted["dummy_weights"],
                )
                say("done", result=engine.facts())
                continue
            if engine is None:
                if command["do"] == "stop":
                    say("done", result={})
                    return 0
                raise ValueError("the engine is not started")
            done = obey(command, engine, lambda found: say("progress", **found))
            say("done", result=done)
            if command["do"] == "stop":
                return 0
    except BaseException as error:
        traceback.print_exc()
        say("failed", error=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
