"""The load as data: points, and for each the prompts and arrivals, the same in every process.

No torch and no vLLM here. The numbers come from Python's own generator with a text as seed, whose
values are the same on every machine.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cuda_ext.bench.serve.config import Gate, Load

SETTLING_TOKENS = 32
"""Of each request that is served before a point and not measured: decoding with and without
prompts beside it, so that graphs of both kinds have run."""


@dataclass(frozen=True)
class Point:
    """One load, at which both arms are measured.

    Args:
        concurrency: requests kept in flight, closed loop; None in an open loop.
        rate: requests a second, open loop; None in a closed one.
        output_tokens: of each request, exactly.
        requests: of the point.
    """

    concurrency: int | None
    rate: float | None
    output_tokens: int
    requests: int

    @property
    def label(self) -> str:
        """As an operator reads it, and the name of the point in seeds and results."""
        load = f"{self.concurrency} in flight" if self.rate is None else f"{self.rate:g} requests/s"
        return f"{load}, {self.output_tokens} out"

    def as_json(self) -> dict[str, Any]:
        """For the child process."""
        return asdict(self)


@dataclass(frozen=True)
class Request:
    """One request.

    Args:
        prompt: token ids.
        output_tokens: exactly.
        arrival_s: seconds after the start of the point; 0 in a closed loop.
    """

    prompt: list[int]
    output_tokens: int
    arrival_s: float = 0.0


def points(load: Load) -> list[Point]:
    """All points, in the order in which they are measured."""
    found = []
    if load.points:
        for place in load.points:
            concurrency, output, *waves = map(int, place.split("x"))
            count = concurrency * (waves[0] if waves else load.waves)
            found.append(Point(concurrency, None, output, count))
        return found
    for output in load.output_tokens:
        found += [Point(c, None, output, c * load.waves) for c in load.concurrency]
        found += [Point(None, rate, output, load.open_requests) for rate in load.request_rates]
    return found


def token_range(load: Load, vocabulary: int) -> range:
    """Ids that prompts are made of: without those that models reserve at both ends."""
    if load.token_ids is not None:
        return range(load.token_ids[0], min(load.token_ids[1] + 1, vocabulary))
    return range(min(10, vocabulary - 1), max(11, vocabulary * 9 // 10))


def requests(load: Load, point: Point, run: int, vocabulary: int) -> list[Request]:
    """The requests of a point; the same for both arms.

    Args:
        load: seed and lengths.
        point: what is asked.
        run: which repetition; each has its own prompts.
        vocabulary: of the model.
    """
    generator = random.Random(f"{load.seed} {run} {point.label}")
    ids = token_range(load, vocabulary)
    now, found = 0.0, []
    for _ in range(point.requests):
        prompt = generator.choices(ids, k=generator.randint(*load.prompt_tokens))
        found.append(Request(prompt, point.output_tokens, now))
        if point.rate is not None:
            now += generator.expovariate(point.rate)
    return found


def warm_up_requests(load: Load, count: int, output_tokens: int, vocabulary: int) -> list[Request]:
    """Requests whose times nobody looks at."""
    generator = random.Random(f"{load.seed} warm-up {count} {output_tokens}")
    ids = token_range(load, vocabulary)
    return [
        Request(generator.choices(ids, k=generator.randint(*load.prompt_tokens)), output_tokens)
        for _ in range(count)
    ]


def gate_prompts(load: Load, gate: Gate, vocabulary: int) -> list[list[int]]:
    """The gate's prompts, from the shortest to the longest length."""
    generator = random.Random(f"{load.seed} gate")
    ids = token_range(load, vocabulary)
    low, high = gate.prompt_tokens
    steps = max(1, gate.prompts - 1)
    lengths = [low + (high - low) * i // steps for i in range(gate.prompts)]
    return [generator.choices(ids, k=length) for length in lengths]


def filler_prompts(load: Load, lengths: Sequence[int], vocabulary: int) -> list[list[int]]:
    """Prompts that only take up room beside the gate's."""
    generator = random.Random(f"{load.seed} fillers")
    ids = token_range(load, vocabulary)
    return [generator.choices(ids, k=length) for length in lengths]


def filler_lengths(
    prompts: Sequence[int], step_tokens: int, longest: int, part: float
) -> list[int]:
    """Lengths of prompts that leave the gate's room for a part in a step, so that one is cut.

    Args:
        prompts: lengths of the gate's.
        step_tokens: of a step at most.
        longest: a prompt at most.
        part: of the gate's tokens.

    Returns:
        None of them where the gate's own prompts are more than a step.
    """
    wanted = step_tokens - int(sum(prompts) * part)
    if wanted <= 0 or sum(prompts) > step_tokens:
        return []
    count = -(-wanted // longest)
    return [wanted // count + (i < wanted % count) for i in range(count)]


def digest(given: Sequence[Request]) -> str:
    """Stands for prompts, lengths and arrivals, to prove that both arms got the same."""
    sha = hashlib.sha256()
    for request in given:
        sha.update(repr((request.prompt, request.output_tokens, request.arrival_s)).encode())
    return sha.hexdigest()[:16]
