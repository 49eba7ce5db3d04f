"""The Gaudi flow: a chat that grows turn by turn, against the real `vllm serve`, cold and cached.

Makes a tiny checkpoint of Qwen3.5's shape, serves it on the emulated device with this package and
prefix caching, and sends each turn's prompt twice: cold (a cache salt of its own) and in the
session (one salt, so that it hits what the turns before left). Then compares: what the server says
it took from the cache, every logprob, the time to the first token; and the size of the block pool
with that of the stock engine without caching. The result is a table and build/demo.json.
Where vllm-gaudi can't be had, the flow is left out, with the reason.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flow
from common import BUILD, ENGINE, GAUDI_RESULT, DemoFailure, LeftOut
from flow import step, tick
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from chat import Answer, Client

TITLE = "Gaudi flow"
START_SECONDS = 600
POOL_SECONDS = 600

TURNS = 6
# The answer after this turn fills a block, so the checkpoint that the next turn hits is made by
# decode; all others are made by prefill.
TURN_BEFORE_DECODED_BLOCK = 5
# Logprobs, for a state that decode made: one token at a time rounds otherwise in bf16 than a chunk
# does. On this model that moves this turn's logprobs by 0.13, and the state of another turn, which
# the stock engine resumes from, by 0.8.
DECODE_TOLERANCE = 0.3


@dataclass(frozen=True)
class Turn:
    """A turn's two runs, compared. Seconds are to the first token; lengths are in tokens."""

    turn: int
    prompt_tokens: int
    cached_tokens: int
    expected_cached_tokens: int
    cold_cached_tokens: int
    checkpoint: str  # "-", "prefill" or "decode": what made the state that the turn began with
    cold_seconds: float
    cached_seconds: float
    logprob_difference: float
    same_tokens: bool

    def problems(self) -> Iterator[str]:
        """What is wrong with it, in words."""
        if self.cold_cached_tokens:
            yield f"turn {self.turn}: the cold run took {self.cold_cached_tokens} cached tokens"
        if self.cached_tokens != self.expected_cached_tokens:
            yield (
                f"turn {self.turn}: {self.cached_tokens} cached tokens, "
                f"not {self.expected_cached_tokens}"
            )
        if self.checkpoint == "decode":
            if not self.logprob_difference <= DECODE_TOLERANCE:
                yield (
                    f"turn {self.turn}: logprobs differ by {self.logprob_difference:g}, "
                    f"more than {DECODE_TOLERANCE}"
                )
        elif self.logprob_difference != 0 or not self.same_tokens:
            same = "the same" if self.same_tokens else "other"
            yield (
                f"turn {self.turn}: cold and cached gave {same} tokens and logprobs that differ "
                f"by {self.logprob_difference:g}; equal bits were due"
            )


def serve_command(model: Path, port: int) -> list[str]:
    """The server of this flow, with prefix caching."""
    flags = ("--enable-prefix-caching", "--enable-prompt-tokens-details")
    return flow.serve_command(model, port, "tiny-qwen3.5", ENGINE, *flags)


def server_environment() -> dict[str, str]:
    import harness

    # The start-up line of the package is at level INFO.
    plugin = {"VLLM_PLUGINS": "gaudi_ext", "VLLM_LOGGING_LEVEL": "INFO"}
    return harness.environment(plugin)


def chat(client: Client, block_tokens: int, console: Console) -> list[Turn]:
    """The session: each turn's prompt cold and cached, and the answer into the next prompt."""
    from chat import ANSWER_TOKENS, message_of
    from tiny_models import TURN_END

    session = secrets.token_hex(8)
    join = [TURN_END, *client.tokenize("\n")]
    history: list[int] = []
    computed = 0
    decoded_boundary = 0
    turns = []
    for number in range(1, TURNS + 1):
        # Half a block past the boundary, so that prefill computes the boundary, or close before
        # it, so that the answer does.
        spare = ANSWER_TOKENS // 2
        target = number * block_tokens + block_tokens // 2
        if number == TURN_BEFORE_DECODED_BLOCK:
            target = (number + 1) * block_tokens - 2
            spare = ANSWER_TOKENS - 4
        prefix = [*history, *join] if history else []
        prompt = prefix + message_of(client, number, target - len(prefix))
        if not target - spare <= len(prompt) <= target:
            raise DemoFailure(f"turn {number} has {len(prompt)} tokens, not about {target}")
        expected = computed // block_tokens * block_tokens
        with step(console, f"turn {number} of {TURNS}, {len(prompt)} tokens, cold and cached"):
            cold = client.answer(prompt, secrets.token_hex(8))
            cached = client.answer(prompt, session)
        made_by = "prefill" if expected else "-"
        if expected and expected == decoded_boundary:
            made_by = "decode"
        turns.append(_compare(number, len(prompt), expected, made_by, cold, cached))
        # The last token of an answer is not computed: no later one needed it.
        computed = len(prompt) + ANSWER_TOKENS - 1
        boundary = computed // block_tokens * block_tokens
        decoded_boundary = boundary if boundary > len(prompt) else 0
        history = [*prompt, *cached.tokens]
    return turns


def _compare(
    number: int, length: int, expected: int, made_by: str, cold: Answer, cached: Answer
) -> Turn:
    if {length} != {cold.prompt_tokens, cached.prompt_tokens}:
        raise DemoFailure(
            f"turn {number} has {length} tokens, and the server counted "
            f"{cold.prompt_tokens} and {cached.prompt_tokens}"
        )
    return Turn(
        turn=number,
        prompt_tokens=length,
        cached_tokens=cached.cached_tokens,
        expected_cached_tokens=expected,
        cold_cached_tokens=cold.cached_tokens,
        checkpoint=made_by,
        cold_seconds=cold.first_token_seconds,
        cached_seconds=cached.first_token_seconds,
        logprob_difference=cold.difference(cached),
        same_tokens=cold.tokens == cached.tokens,
    )


def measure_stock_pool(model: Path) -> dict[str, Any]:
    """Blocks of the stock engine without caching, from an engine of its own (stock_pool.py)."""
    import harness

    log = BUILD / "demo-stock-pool.log"
    command = [sys.executable, str(Path(__file__).with_name("stock_pool.py")), str(model)]
    with log.open("w") as errors:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=POOL_SECONDS,
            env=harness.environment(),
        )
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        raise DemoFailure(f"the stock engine ended with code {done.returncode}; log: {log}")
    return dict(json.loads(lines[-1]))


def run(console: Console, result: dict[str, Any]) -> list[str]:
    """The demo itself. Fills `result` as it goes, and returns every problem, in words."""
    if missing := os.environ.get("GAUDI_ENV_MISSING"):
        raise LeftOut(missing)
    import httpx
    import tiny_models
    from chat import ANSWER_SECONDS, Client
    from free_ports import free_ports
    from server import serving

    with step(console, "tiny checkpoint of Qwen3.5's shape, with tokenizer"):
        model = tiny_models.write(tiny_models.DENSE, BUILD / "models")
    port, log = free_ports(), BUILD / "demo-server.log"
    command = serve_command(model, port)
    result["server_command"] = command
    with serving(command, port, log, server_environment()) as server:
        with step(console, "vllm serve, VLLM_PLUGINS=gaudi_ext, on the emulated device"):
            seconds = server.wait_until_healthy(START_SECONDS, tick(console))
        result["start_seconds"] = round(seconds, 1)
        result["start_up_line"] = flow.start_up_line(log, "GDN prefix caching is active")
        console.print(result["start_up_line"], style="dim", highlight=False)
        cache = server.cache_config()
        blocks, block_tokens = int(cache["num_gpu_blocks"]), int(cache["block_size"])
        result["block_tokens"] = block_tokens
        with httpx.Client(base_url=server.url, timeout=ANSWER_SECONDS, trust_env=False) as http:
            client = Client(http)
            with step(console, "first request, not counted"):
                client.answer(client.tokenize_message("Hello."), secrets.token_hex(8))
            turns = chat(client, block_tokens, console)
        result["turns"] = [asdict(turn) for turn in turns]
    with step(console, "vllm-gaudi's own engine without caching, for the size of its pool"):
        stock = measure_stock_pool(model)
    ratio = blocks * block_tokens / (stock["blocks"] * stock["block_tokens"])
    pool = {"blocks": blocks, "block_tokens": block_tokens, "stock": stock, "ratio": ratio}
    result["pool"] = pool
    console.print(_table(turns))
    console.print(
        f"block tokens B = {block_tokens}; start-up {seconds:.1f} s; KV pool {blocks} blocks, "
        f"stock without caching {stock['blocks']} of {stock['block_tokens']} tokens: "
        f"ratio {ratio:.2f} (the emulated device reports 4 GiB to both)",
        highlight=False,
    )
    problems = [problem for turn in turns for problem in turn.problems()]
    if not stock["compact_gdn"]:
        problems.append("the stock engine did not use compact GDN, so the pools don't compare")
    if ratio < 1:
        problems.append(f"the KV pool is only {ratio:.3f} of the stock engine's")
    return problems


def _table(turns: Sequence[Turn]) -> Table:
    table = Table(title="Each turn cold, and with what the turns before left in the cache")
    for column in ("turn", "prompt tokens", "cached tokens", "checkpoint by"):
        table.add_column(column, justify="right")
    for column in ("TTFT cold", "TTFT cached", "largest logprob difference"):
        table.add_column(column, justify="right")
    for turn in turns:
        table.add_row(
            str(turn.turn),
            str(turn.prompt_tokens),
            str(turn.cached_tokens),
            turn.checkpoint,
            f"{turn.cold_seconds:.2f} s",
            f"{turn.cached_seconds:.2f} s",
            f"{turn.logprob_difference:g}",
        )
    return table


if __name__ == "__main__":
    sys.exit(flow.main(TITLE, GAUDI_RESULT, "emulated HPU on a CPU", run))
