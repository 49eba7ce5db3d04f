"""The soak's load on a stand-in for vLLM's engine that counts blocks, and the size of its pool."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import random
import sys
from collections import deque
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cuda_ext.bench.soak import checks, load
from cuda_ext.bench.soak.job import Job

pytest.importorskip("torch")
pytest.importorskip("psutil")

from cuda_ext.bench.soak import engine

DRAFTS = 7
STEP_S = 0.05
JOB = Job(
    model="model",
    prompts={"count": 8, "lengths": (3074, 3074), "answers": (3072, 3072), "seed": 5},
    random=True,
    options={"dtype": "float32"},
    speculative={"method": "mtp", "num_speculative_tokens": DRAFTS},
    concurrency=48,
    minutes=2.5,
    aborts=0.05,
    pool=0.9,
    every=2,
    seed=1,
)
SHAPES: dict[str, tuple[Job, list[int | None]]] = {
    "one length": (JOB, [None, None, 656]),
    "many lengths": (
        dataclasses.replace(
            JOB, prompts=JOB.prompts | {"lengths": (122, 2402), "answers": (120, 2400)}
        ),
        [None, 656, None],
    ),
    "small blocks": (
        dataclasses.replace(
            JOB, prompts=JOB.prompts | {"lengths": (85, 127), "answers": (40, 48)}, concurrency=16
        ),
        [None, None, None, 128],
    ),
    "two attention groups": (
        dataclasses.replace(JOB, prompts=JOB.prompts | {"answers": (600, 600)}),
        [None, 656, 656],
    ),
}


def known(job: Job) -> list[list[int]]:
    """Answers that tell their prompts apart."""
    return [
        [(number + at) % 251 for at in range(prompt.answer)]
        for number, prompt in enumerate(job.set_of_prompts())
    ]


class Status(enum.Enum):
    WAITING, PREEMPTED = range(2)


@dataclasses.dataclass
class Served:
    """A request in the stand-in."""

    name: str
    prompt: int
    answer: list[int]
    sampling: Any
    done: int = 0
    blocks: int = 0
    status: Status = Status.WAITING

    @property
    def request_id(self) -> str:
        return f"{self.name}-0a1b2c3d"


class Engine:
    """`vllm.LLM` as far as `Soak` sees it: first come, first served, and the newest preempted.

    A whole prompt is computed in one step, and a decode step gives 1 to D + 1 tokens.

    Args:
        job: whose prompts come.
        groups: see `load.blocks_needed`.
        accepts: whether drafts ever are.
        rejects: whether drafts ever are not.
        at_once: requests that run at a time.

    Attributes:
        ran, held: requests that ran in each step and the blocks that they held, added up.
    """

    def __init__(
        self,
        job: Job,
        groups: Sequence[int | None],
        *,
        accepts: bool = True,
        rejects: bool = True,
        at_once: int = 10**6,
    ) -> None:
        self.now = 0.0
        self.ran = self.held = 0
        self.free = 10**6
        self.running: list[Served] = []
        self.waiting: deque[Served] = deque()
        self.counts = dict.fromkeys(
            ("num_preemptions", *(f"spec_decode_num_{n}" for n in COUNTED)), 0
        )
        self._groups, self._accepts, self._rejects = groups, accepts, rejects
        self._at_once = at_once
        self._source = random.Random(3)
        answers = known(job)
        self._texts = {p.tokens: answers[n] for n, p in enumerate(job.set_of_prompts())}
        # What Soak reaches for.
        self.num_spec_tokens = self.num_lookahead_tokens = DRAFTS
        specs = [
            SimpleNamespace(mamba_type="gdn") if b is None else SimpleNamespace(block_size=b)
            for b in groups
        ]
        self.kv_cache_config = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs]
        )
        self.kv_cache_manager = SimpleNamespace(block_pool=self)
        self.llm_engine = self
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self))
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False))

    def get_num_free_blocks(self) -> int:
        return self.free

    def get_new_blocks(self, count: int) -> list[int]:
        assert count <= self.free
        self.free -= count
        return [0] * count

    def get_metrics(self) -> list[Any]:
        return [SimpleNamespace(name=f"vllm:{n}", value=v) for n, v in self.counts.items()]

    def add_request(self, name: str, prompt: Any, sampling: Any) -> None:
        tokens = tuple(prompt["prompt_token_ids"])
        self.waiting.append(Served(name, len(tokens), self._texts[tokens], sampling))

    def abort_request(self, names: Sequence[str]) -> None:
        for served in [s for s in (*self.running, *self.waiting) if s.name in names]:
            self._leave(served)

    def has_unfinished_requests(self) -> bool:
        return bool(self.running or self.waiting)

    def step(self) -> list[Any]:
        self.now += STEP_S
        decoded, before = [], self.counts["num_preemptions"]
        for served in list(self.running):
            if served not in self.running:
                break
            if self._grow(served, 2 * DRAFTS):
                decoded.append(served)
        prefilled = []
        while self.waiting and self.counts["num_preemptions"] == before:
            served = self.waiting[0]
            if len(self.running) >= self._at_once or not self._take(served, DRAFTS):
                break
            self.running.append(self.waiting.popleft())
            prefilled.append(served)
        self.ran += len(self.running)
        self.held += sum(served.blocks for served in self.running)
        drafted = [self._say(served, self._accepted()) for served in decoded]
        return drafted + [self._say(served, 0) for served in prefilled]

    def _accepted(self) -> int:
        right = self._source.randint(0, DRAFTS) if self._rejects else DRAFTS
        right = right if self._accepts else 0
        for name, count in zip(COUNTED, (1, DRAFTS, right), strict=True):
            self.counts[f"spec_decode_num_{name}"] += count
        return right

    def _take(self, served: Served, ahead: int) -> bool:
        wanted = load.blocks_needed(served.prompt + served.done + ahead, self._groups)
        more = max(0, wanted - served.blocks)
        if more > self.free:
            return False
        served.blocks, self.free = served.blocks + more, self.free - more
        return True

    def _grow(self, served: Served, ahead: int) -> bool:
        while not self._take(served, ahead):
            newest = self.running[-1]
            self.counts["num_preemptions"] += 1
            self._leave(newest)
            newest.status = Status.PREEMPTED
            self.waiting.appendleft(newest)
            if newest is served:
                return False
        return True

    def _leave(self, served: Served) -> None:
        (self.running if served in self.running else self.waiting).remove(served)
        self.free, served.blocks = self.free + served.blocks, 0

    def _say(self, served: Served, right: int) -> Any:
        end = min(served.done + 1 + right, served.sampling.max_tokens)
        tokens, served.done = served.answer[served.done : end], end
        if finished := end == served.sampling.max_tokens:
            self._leave(served)
        asks = served.sampling.logprobs is not None
        logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in tokens] if asks else None
        return SimpleNamespace(
            request_id=served.name,
            outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)],
            finished=finished,
        )


COUNTED = ("drafts", "draft_tokens", "accepted_tokens")


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sampling parameters are only carried."""
    kinds = SimpleNamespace(DELTA="delta")
    for name, holds in {
        "vllm": {"SamplingParams": SimpleNamespace},
        "vllm.sampling_params": {"RequestOutputKind": kinds},
    }.items():
        module = ModuleType(name)
        vars(module).update(holds)
        monkeypatch.setitem(sys.modules, name, module)


def serve(
    monkeypatch: pytest.MonkeyPatch, job: Job, llm: Engine
) -> tuple[engine.Soak, dict[str, Any], list[str]]:
    """The load on the stand-in, by its clock; with its figures and the gate's problems."""
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: llm.now))
    soak = engine.Soak(llm, job, known(job), None)
    free = soak.free_blocks
    lines: list[str] = []
    soak.run(lines.append)
    assert len(lines) == len(soak.samples) > 0
    assert json.loads(lines[-1])["preempted"] == soak.samples[-1].preempted
    figures = soak.figures() | {
        "layers": "ReplayGatedDeltaNetAttention",
        "free_blocks_before": free,
        "free_blocks_after": soak.free_blocks,
        "growth_mib": dict.fromkeys(checks.growth(soak.samples), 0.0),
    }
    return soak, figures, checks.problems(figures, soak.tally, None)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_mean_over_a_life_is_what_requests_in_flight_hold(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for all; else the pool would say how many run."""
    job, groups = SHAPES[shape]
    monkeypatch.setattr(engine, "in_vain", lambda *given: [])
    llm = Engine(job, groups)
    soak, figures, _ = serve(monkeypatch, dataclasses.replace(job, pool=3.0), llm)
    assert figures["preempted"] == 0
    assert llm.held / llm.ran == pytest.approx(soak.mean_blocks, rel=0.025)
    # What the result says is met between two steps, where those that finished have left.
    between = figures["mean_blocks_in_use"] / figures["mean_running"]
    assert between == pytest.approx(soak.mean_blocks, rel=0.04)


@pytest.mark.parametrize(("shape", "pool"), [*((s, 0.9) for s in SHAPES), ("one length", 0.97)])
def test_a_share_below_one_runs_short_and_still_goes_on(
    shape: str, pool: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that held 0.95 of what requests hold at their end preempted none in ten minutes."""
    job, groups = SHAPES[shape]
    job = dataclasses.replace(job, pool=pool)
    soak, figures, problems = serve(monkeypatch, job, Engine(job, groups))
    assert problems == []
    assert soak.samples[len(soak.samples) // 4].preempted > 0
    assert 0.7 * pool * job.concurrency < figures["mean_running"] < 1.03 * pool * job.concurrency
    assert figures["preempted"] < figures["finished"]
    assert figures["aborted_preempted"] > 0
    assert 0 < figures["aborted_unanswered"] < figures["aborted"]


def test_a_pool_with_room_for_all_ends_the_run_early(monkeypatch: pytest.MonkeyPatch) -> None:
    job, groups = SHAPES["one length"]
    llm = Engine(job, groups)
    soak, figures, problems = serve(monkeypatch, dataclasses.replace(job, pool=1.3), llm)
    assert checks.EARLY * 60 * job.minutes <= llm.now < 1.5 * checks.EARLY * 60 * job.minutes
    assert len(problems) == 1
    part = llm.now / 60 / job.minutes
    left = figures["least_free_blocks"]
    assert 0 < left < figures["pool_blocks"]
    assert problems[0] == (
        f"ended after {part:.0%} of the time: no request was preempted: --pool 1.3 left {left} of "
        f"{soak.blocks} blocks free at the least: lower it"
    )
    assert soak.added == soak.tally.checked
    assert not llm.has_unfinished_requests()


def test_drafts_that_are_never_accepted_end_the_run_early(monkeypatch: pytest.MonkeyPatch) -> None:
    job, groups = SHAPES["small blocks"]
    llm = Engine(job, groups, accepts=False)
    _, _, problems = serve(monkeypatch, job, llm)
    assert llm.now < 1.5 * checks.EARLY * 60 * job.minutes
    assert len(problems) == 1
    assert "of the time: 0 drafts were accepted in " in problems[0]


def test_no_draft_asked_for_none_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    job, groups = SHAPES["small blocks"]
    job = dataclasses.replace(job, speculative={})
    _, _, problems = serve(monkeypatch, job, Engine(job, groups, accepts=False))
    assert problems == []


def test_drafts_that_are_all_accepted_are_no_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    job, groups = SHAPES["small blocks"]
    _, _, problems = serve(monkeypatch, job, Engine(job, groups, rejects=False))
    assert len(problems) == 1
    assert "drafts was refused" in problems[0]


def test_requests_that_run_one_by_one_are_no_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    job, groups = SHAPES["small blocks"]
    llm = Engine(job, groups, at_once=1)
    monkeypatch.setattr(engine, "in_vain", lambda *given: [])
    _, figures, problems = serve(monkeypatch, job, llm)
    assert figures["mean_running"] <= 1
    assert any("requests ran at a time on average, and 7.2 must" in p for p in problems)


def test_a_block_that_leaks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    job, groups = SHAPES["small blocks"]
    job = dataclasses.replace(job, fault="leaked-block")
    _, _, problems = serve(monkeypatch, job, Engine(job, groups))
    assert len(problems) == 1
    assert "blocks were free before the load" in problems[0]


def test_a_wrong_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    job, groups = SHAPES["small blocks"]
    llm = Engine(job, groups)
    next(iter(llm._texts.values()))[20] += 1
    _, _, problems = serve(monkeypatch, job, llm)
    assert len(problems) == 1
    assert "token 20 of " in problems[0]


@pytest.mark.parametrize("groups", [[None, 5], [4, None, 7], [None]])
@pytest.mark.parametrize("ahead", [0, 1, 14])
def test_the_mean_is_the_sum_over_lives(groups: list[int | None], ahead: int) -> None:
    prompts = [3, 5, 21]
    some = [
        load.Request("a", 0, 9, None),
        load.Request("b", 2, 30, 11),
        load.Request("c", 1, 8, 0),
        load.Request("d", 1, 17, None),
    ]
    assert [request.end for request in some] == [9, 12, 1, 17]
    held = [
        load.blocks_needed(prompts[request.prompt] + at + ahead, groups)
        for request in some
        for at in range(request.end)
    ]
    assert load.mean_blocks(prompts, some, groups, ahead) == sum(held) / (9 + 12 + 1 + 17)


def test_the_mean_is_what_an_h200_saw() -> None:
    """Of 2,432 blocks 209.7 were free on average, 254.2 requests running (2026-11-30)."""
    some = itertools.islice(load.requests([3072] * 32, 0.05, 2_000_000), 4096)
    ahead = load.tokens_ahead(7, 7, asynchronous=True)
    mean = load.mean_blocks([3074] * 32, some, [None, None, 656], ahead)
    assert mean * 254.2 == pytest.approx(2432 - 209.7, rel=0.01)
    # The old pool, 0.95 of what they hold with half of the longest answer, had room for all.
    old = int(0.95 * 256 * load.blocks_needed(3074 + 1536, [None, None, 656]))
    assert old == 2432 > 256 * mean


def test_tokens_ahead_are_drafts_lookahead_and_the_step_before() -> None:
    assert load.tokens_ahead(7, 7, asynchronous=False) == 14
    assert load.tokens_ahead(7, 7, asynchronous=True) == 22
    assert load.tokens_ahead(15, 16, asynchronous=True) == 47
    assert load.tokens_ahead(0, 0, asynchronous=False) == 0
    assert load.tokens_ahead(0, 0, asynchronous=True) == 1


def test_a_pool_is_a_share_but_enough_for_the_largest() -> None:
    assert load.pool_blocks(0.9, 256, 8.75, 12) == 2016
    assert load.pool_blocks(0.1, 10, 5.0, 12) == 12 + load.SPARE_BLOCKS
    with pytest.raises(ValueError, match=r"up to 12 blocks, and 2 hold 10 on .*--concurrency"):
        load.pool_blocks(0.9, 2, 5.0, 12)
