"""The ReplaySSM flow: answers with long drafts equal answers without, from the real `vllm serve`.

Makes a tiny checkpoint of Qwen3.5's shape and a DFlash drafter, and serves it twice with vLLM's own
CPU build, `VLLM_PLUGINS=gaudi_ext` and fp32: without drafts, and with 15 drafts a step. The same
prompts go to both at the same time, greedily. Then compares: every token and logprob, what vLLM
counted as drafted and accepted, and how many requests fit, by vLLM's log, by this package's line in
it, and by `gaudi-ext plan`. The result is a table and build/demo-replay.json.

vLLM's own layer can't be the other arm: on a CPU it does not load in fp32 everywhere, and fails on
drafts of unequal length (0.31.0). Without drafts each step has one row, whose state is taken over
whole; with drafts, rejected rows have to vanish, so a row too many or too few shows.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flow
from common import BUILD, REPLAY_ENGINE, REPLAY_RESULT, DemoFailure, LeftOut
from flow import step, tick
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from chat import Answer, Client

TITLE = "ReplaySSM flow"
NAME = "tiny-qwen3.5"
START_SECONDS = 600
PLAN_SECONDS = 120
DRAFTS = 15
POOL_GIB = 1
ANSWER_TOKENS = 64
# Below, at and above the rows of a step and of a ring, and up to three chunks of prefill.
PROMPT_LENGTHS = (5, 15, 16, 17, 32, 90, 300, 600)
# Two orders of summation in fp32 differ by some 1e-5 in a logprob; a row too many or too few in the
# state by 1e-2 and more.
TOLERANCE = 1e-3
ACTIVE = "ReplaySSM is active"


@dataclass(frozen=True)
class Pair:
    """One prompt's answers from the two arms, compared.

    Args:
        prompt_tokens: its length.
        first_difference: index of the first token that differs; None where all are equal.
        logprob_difference: the largest, as far as both had the same text before.
    """

    prompt_tokens: int
    first_difference: int | None
    logprob_difference: float

    def problems(self) -> Iterator[str]:
        """What is wrong with it, in words."""
        if self.first_difference is not None:
            yield (
                f"prompt of {self.prompt_tokens} tokens: token {self.first_difference + 1} of the "
                "answer with drafts is another than without"
            )
        elif not self.logprob_difference <= TOLERANCE:
            yield (
                f"prompt of {self.prompt_tokens} tokens: logprobs with and without drafts differ "
                f"by {self.logprob_difference:g}, more than {TOLERANCE:g}"
            )


@dataclass(frozen=True)
class Speculation:
    """What vLLM counted over one arm's answers.

    Args:
        steps: verifications of one request's drafts.
        drafted, accepted: draft tokens.
        requests: answers.
    """

    steps: int
    drafted: int
    accepted: int
    requests: int

    @property
    def folds(self) -> int:
        """Verifications that found rows to fold: all but each request's first.

        A verification leaves at least one accepted row in the ring, and the next one folds it.
        """
        return max(0, self.steps - self.requests)

    @property
    def tokens_a_step(self) -> float:
        """Tokens that one verification gave on average: the accepted ones and the next."""
        return 1 + self.accepted / self.steps if self.steps else 1.0

    def problems(self) -> Iterator[str]:
        """Why the answers with drafts prove nothing, in words."""
        if not self.accepted:
            yield f"none of {self.drafted} drafts was accepted"
        elif self.accepted >= self.drafted:
            yield f"all of {self.drafted} drafts were accepted, so none had to be undone"
        if not self.folds:
            yield f"no fold happened in {self.steps} verifications of {self.requests} requests"


@dataclass(frozen=True)
class Fit:
    """What the arm with drafts says of its memory, and others of the same.

    Args:
        copies_saved: states that each request has less of in each layer.
        tokens: length of a request.
        replay, stock: requests that fit, with ReplaySSM and as vLLM would have it.
        engine: vLLM's own figure for the first, as its log has it: not rounded.
        planned_replay, planned_stock: by `gaudi-ext plan`, from the checkpoints' configs alone.
    """

    copies_saved: int
    tokens: int
    replay: int
    stock: int
    engine: float
    planned_replay: int
    planned_stock: int

    def problems(self) -> Iterator[str]:
        """What does not agree, in words."""
        if self.copies_saved != DRAFTS:
            yield f"{self.copies_saved} copies saved, not {DRAFTS}"
        if not self.replay > self.stock:
            yield f"{self.replay} requests fit with ReplaySSM, and {self.stock} without"
        if self.replay != int(self.engine):
            yield f"{self.replay} requests fit by gaudi_ext's line, {self.engine} by vLLM's own"
        if (self.planned_replay, self.planned_stock) != (self.replay, self.stock):
            yield (
                f"{self.replay} requests fit and {self.stock} without ReplaySSM, by gaudi_ext's "
                f"line; {self.planned_replay} and {self.planned_stock} by gaudi-ext plan"
            )


def compare(length: int, without: Answer, drafted: Answer) -> Pair:
    """The answers to a prompt of `length` tokens."""
    pairs = enumerate(zip(without.tokens, drafted.tokens, strict=True))
    first = next((index for index, (mine, other) in pairs if mine != other), None)
    return Pair(length, first, without.difference(drafted))


def read_fit(line: str, log: str, plan: Mapping[str, Any]) -> Fit:
    """Reads `Fit` off the package's line, vLLM's log and the plan's JSON.

    Raises:
        DemoFailure: one of them does not say it.
    """
    saved = re.search(r"(\d+) copies saved", line)
    fits = re.search(r"(\d+) requests of (\d+) tokens fit where (\d+) did", line)
    engine = re.search(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x", log)
    if not saved or not fits or not engine:
        raise DemoFailure(f"no copies saved or requests that fit in {line!r} and vLLM's log")
    tokens = int(fits[2])
    if int(engine[1].replace(",", "")) != tokens:
        raise DemoFailure(f"vLLM's log speaks of requests of {engine[1]} tokens, not {tokens}")
    return Fit(
        copies_saved=int(saved[1]),
        tokens=tokens,
        replay=int(fits[1]),
        stock=int(fits[3]),
        engine=float(engine[2]),
        planned_replay=plan["replay"]["capacity"]["requests"],
        planned_stock=plan["native"]["capacity"]["requests"],
    )


def server_environment() -> dict[str, str]:
    """The environment for `vllm serve` on vLLM's own CPU backend."""
    result = dict(os.environ)
    # Whatever the shell says, this is about two processes of vLLM's CPU backend with this package.
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V2_MODEL_RUNNER"):
        result.pop(name, None)
    return result | {
        "VLLM_PLUGINS": "gaudi_ext",
        # The start-up lines of vLLM and of this package are at level INFO.
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_CPU_KVCACHE_SPACE": str(POOL_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # The tensors are tiny: a second thread costs more than it brings.
        "OMP_NUM_THREADS": "1",
    }


def arms(drafter: Path) -> dict[str, dict[str, Any]]:
    """Options that only one arm has, by its name."""
    speculative = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": DRAFTS}
    return {
        "without drafts": {"additional_config": {"gaudi_ext": {"replay": "on"}}},
        f"DFlash, {DRAFTS} drafts": {"speculative_config": speculative},
    }


def answers(client: Client, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """The answers to all prompts, sent at the same time."""
    salt = secrets.token_hex(8)
    with ThreadPoolExecutor(len(prompts)) as pool:
        sent = [pool.submit(client.answer, prompt, salt, ANSWER_TOKENS) for prompt in prompts]
        return [one.result() for one in sent]


def run_arm(
    name: str, model: Path, options: Mapping[str, Any], console: Console
) -> tuple[list[Answer], Speculation, dict[str, Any]]:
    """Serve one arm and ask it everything; its answers, counters, and what there is to say."""
    import harness
    import httpx
    from chat import ANSWER_SECONDS, Client
    from free_ports import free_ports
    from server import serving

    port, log = free_ports(), BUILD / f"demo-replay-{'drafts' if 'DFlash' in name else 'none'}.log"
    flags = ("--enable-prompt-tokens-details",)
    command = flow.serve_command(model, port, NAME, REPLAY_ENGINE | options, *flags)
    said: dict[str, Any] = {"name": name, "server_command": command, "log": str(log)}
    with serving(command, port, log, server_environment()) as server:
        with step(console, f"vllm serve, VLLM_PLUGINS=gaudi_ext, {name}"):
            seconds = server.wait_until_healthy(START_SECONDS, tick(console))
        said["start_seconds"] = round(seconds, 1)
        said["start_up_line"] = flow.start_up_line(log, ACTIVE)
        console.print(said["start_up_line"], style="dim", highlight=False)
        prompts = [harness.prompt(number, count) for number, count in enumerate(PROMPT_LENGTHS)]
        limits = httpx.Limits(max_connections=len(prompts))
        with httpx.Client(
            base_url=server.url, timeout=ANSWER_SECONDS, trust_env=False, limits=limits
        ) as http:
            client = Client(http)
            started = time.monotonic()
            with step(console, f"{len(prompts)} prompts at the same time, {name}"):
                found = answers(client, prompts)
            said["answer_seconds"] = round(time.monotonic() - started, 1)
        counted = server.counters("vllm:spec_decode_num_")
    speculation = Speculation(
        steps=int(counted["drafts"]),
        drafted=int(counted["draft_tokens"]),
        accepted=int(counted["accepted_tokens"]),
        requests=len(prompts),
    )
    said |= asdict(speculation)
    return found, speculation, said


def plan(model: Path, drafter: Path) -> dict[str, Any]:
    """What `gaudi-ext plan --json` says of the arm with drafts."""
    command = [str(Path(sys.executable).with_name("gaudi-ext")), "plan", str(model)]
    command += ["--drafter", str(drafter), "--drafts", str(DRAFTS), "--json"]
    values = {
        "platform": "cpu",
        "pool-gib": POOL_GIB,
        "tokens": REPLAY_ENGINE["max_model_len"],
        "dtype": REPLAY_ENGINE["dtype"],
    }
    for name, value in values.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PLAN_SECONDS, check=False
    )
    if done.returncode != 0:
        raise DemoFailure(f"gaudi-ext plan ended with code {done.returncode}: {done.stderr[-300:]}")
    return dict(json.loads(done.stdout))


def run(console: Console, result: dict[str, Any]) -> list[str]:
    """The flow itself. Fills `result` as it goes, and returns every problem, in words."""
    if missing := os.environ.get("CPU_ENV_MISSING"):
        raise LeftOut(missing)
    import tiny_models

    with step(console, "tiny checkpoint of Qwen3.5's shape, and a DFlash drafter"):
        model = tiny_models.write(tiny_models.CPU_DENSE_VISION, BUILD / "models")
        drafter = tiny_models.write(tiny_models.DFLASH, BUILD / "models")
    found: list[list[Answer]] = []
    result["arms"] = []
    for name, options in arms(drafter).items():
        given, speculation, said = run_arm(name, model, options, console)
        found.append(given)
        result["arms"].append(said)
    without, drafted = result["arms"]
    pairs = [compare(*three) for three in zip(PROMPT_LENGTHS, *found, strict=True)]
    log = Path(drafted["log"]).read_text(errors="replace")
    fit = read_fit(drafted["start_up_line"], log, plan(model, drafter))
    result["pairs"] = [asdict(pair) for pair in pairs]
    result["speculation"] = asdict(speculation) | {
        "folds_at_least": speculation.folds,
        "tokens_a_step": speculation.tokens_a_step,
    }
    result["fit"] = asdict(fit)
    console.print(_table(pairs))
    for line in _summary(speculation, fit, without, drafted):
        console.print(line, highlight=False)
    problems = [problem for pair in pairs for problem in pair.problems()]
    problems += [*speculation.problems(), *fit.problems()]
    if without["steps"]:
        problems.append(f"the arm without drafts verified drafts {without['steps']} times")
    return problems


def _summary(
    speculation: Speculation, fit: Fit, without: Mapping[str, Any], drafted: Mapping[str, Any]
) -> Iterator[str]:
    yield (
        f"acceptance: {speculation.accepted} of {speculation.drafted} drafts in "
        f"{speculation.steps} verifications, {speculation.tokens_a_step:.2f} tokens each; accepted "
        f"rows were folded into the state at least {speculation.folds} times"
    )
    yield (
        f"copies of the state saved: {fit.copies_saved} in each request and layer; requests of "
        f"{fit.tokens} tokens that fit into {POOL_GIB} GiB: {fit.replay}, and {fit.stock} with a "
        f"state for each draft (vLLM's log: {fit.engine:.2f}; gaudi-ext plan: "
        f"{fit.planned_replay} and {fit.planned_stock})"
    )
    yield (
        f"start-up {without['start_seconds']} and {drafted['start_seconds']} s; answers after "
        f"{without['answer_seconds']} and {drafted['answer_seconds']} s, by the reference in plain "
        "torch, whose speed says nothing of a GPU"
    )


def _table(pairs: Sequence[Pair]) -> Table:
    table = Table(title=f"Answers of {ANSWER_TOKENS} tokens, with {DRAFTS} drafts and without")
    for column in ("prompt tokens", "tokens", "largest logprob difference"):
        table.add_column(column, justify="right")
    for pair in pairs:
        first = pair.first_difference
        same = "equal" if first is None else f"differ from token {first + 1}"
        table.add_row(str(pair.prompt_tokens), same, f"{pair.logprob_difference:.1e}")
    return table


if __name__ == "__main__":
    sys.exit(flow.main(TITLE, REPLAY_RESULT, "vLLM's CPU backend", run))
