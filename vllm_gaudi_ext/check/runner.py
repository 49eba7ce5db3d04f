"""Plays the scenarios against a server and collects what `verdict.py` judges."""

from __future__ import annotations

import asyncio
import datetime
import math
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from vllm_gaudi_ext.check.answer import Answer, Prompt
from vllm_gaudi_ext.check.client import (
    Client,
    Connection,
    Introduction,
    ServerTrouble,
    base_url,
)
from vllm_gaudi_ext.check.scenarios import (
    SCENARIO_NAMES,
    Ask,
    Batch,
    PlanOptions,
    Play,
    PromptMaker,
    Role,
    Scenario,
    learn_block,
    plan,
    probe,
)
from vllm_gaudi_ext.check.verdict import (
    PLAIN_BLOCK,
    CaseResult,
    CheckReport,
    Cuts,
    Observation,
    Verdict,
    judge,
    shared_tokens,
)
from vllm_gaudi_ext.version import __version__

# Called with requests done, requests planned (None while B is unknown), and what is going on.
Progress = Callable[[int, "int | None", str], None]

LONGEST_PROBE = 16_385
# No server has smaller blocks; hits of a finer step are a fault, not a block.
LEAST_BLOCK = 8
# After so many scenarios in a row without an answer, the server is taken to be gone.
PATIENCE = 2

Count = Annotated[int, Field(ge=1)]


class CheckOptions(BaseModel):
    """Everything that `run_check` can be told. Counts are of tokens unless named otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    model: str | None = Field(default=None, description="model to ask; the server's first if None")
    api_key: str | None = Field(default=None, repr=False)
    headers: tuple[tuple[str, str], ...] = Field(default=(), repr=False)
    block_tokens: Annotated[int, Field(ge=1, le=1 << 20)] | None = Field(
        default=None, description="B; learned from cached_tokens if None"
    )
    blocks: Annotated[int, Field(ge=1, le=64)] = Field(
        default=3, description="boundaries up to k*B"
    )
    answer_tokens: Annotated[int, Field(ge=1, le=4096)] = 16
    suffixes: tuple[Count, ...] = Field(default=(40, 376, 1296), min_length=1, max_length=12)
    turns: Annotated[int, Field(ge=2, le=64)] = Field(default=4, description="turns of the chat")
    repeats: Annotated[int, Field(ge=2, le=1000)] = Field(default=10, description="exact repeats")
    scenarios: tuple[str, ...] = Field(default=(), description="names to play; all if empty")
    cuts: Cuts = "auto"
    concurrency: Annotated[int, Field(ge=1, le=256)] = Field(
        default=4, description="requests in flight"
    )
    timeout: Annotated[float, Field(gt=0, le=86_400)] = Field(default=120.0, description="seconds")
    retries: Annotated[int, Field(ge=0, le=20)] = 3
    max_prompt_tokens: Annotated[int, Field(ge=16)] | None = Field(
        default=None, description="no longer prompt is sent, whatever the server takes"
    )
    max_answer_bytes: Annotated[int, Field(ge=1024)] = 8 << 20
    ca_file: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None
    insecure: bool = False
    use_proxies: bool = True
    seed: int = Field(default=0, description="equal seeds give equal prompts")

    @field_validator("scenarios")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [n for n in names if n not in SCENARIO_NAMES]
        if unknown:
            known = ", ".join(SCENARIO_NAMES)
            raise ValueError(f"no scenario named {', '.join(map(repr, unknown))}; known: {known}")
        return names


@dataclass
class Run:
    """A report, and the requests that it rests on (which the report leaves out)."""

    report: CheckReport
    observations: list[Observation] = field(default_factory=list)


def run_check(
    url: str, options: CheckOptions | None = None, progress: Progress | None = None
) -> CheckReport:
    """Check a running server; see `run_check_in_full`."""
    return run_check_in_full(url, options, progress).report


def run_check_in_full(
    url: str, options: CheckOptions | None = None, progress: Progress | None = None
) -> Run:
    """Check a running server.

    A server that cannot be reached, or misbehaves, is no exception but a case "the server" with
    the verdict "failed".

    Args:
        url: of an OpenAI-compatible server, with or without /v1.
        options: see `CheckOptions`.
        progress: see `Progress`.

    Raises:
        ValueError: the URL, the key or a TLS file is unusable.
        RuntimeError: called inside a running event loop; use a thread.
    """
    options = options or CheckOptions()
    connection = Connection(
        url=url,
        api_key=options.api_key,
        headers=options.headers,
        timeout=options.timeout,
        retries=options.retries,
        concurrency=options.concurrency,
        max_answer_bytes=options.max_answer_bytes,
        ca_file=options.ca_file,
        client_cert=options.client_cert,
        client_key=options.client_key,
        insecure=options.insecure,
        use_proxies=options.use_proxies,
    )
    base_url(url)
    return asyncio.run(_run(connection, options, progress or (lambda *_: None)))


async def _run(connection: Connection, options: CheckOptions, progress: Progress) -> Run:
    started = datetime.datetime.now(datetime.timezone.utc)
    clock = time.monotonic()
    async with Client(connection, options.model) as client:
        session = _Session(client, options, progress)
        try:
            await session.play_everything()
        except ServerTrouble as e:
            session.server_cases.append(
                CaseResult(
                    case="the server", scenario="server", verdict=Verdict.FAILED, detail=str(e)
                )
            )
        cases, noise = judge(
            session.observations,
            session.block,
            block_given=options.block_tokens is not None,
            cuts=options.cuts,
            left_out=session.left_out,
        )
        report = CheckReport(
            url=client.root,
            model=client.model,
            started=started.isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - clock, 3),
            requests=client.requests,
            retries=client.retries,
            version=__version__,
            block_tokens=session.block,
            block_source=session.block_source,
            prompts_as=session.prompts_as,
            noise=noise,
            cases=(*session.server_cases, *cases),
            notes=tuple(session.notes),
        )
        return Run(report, session.observations)


class _Session:
    """One run's state: salts, what was sent on each chain, and the observations."""

    def __init__(self, client: Client, options: CheckOptions, progress: Progress) -> None:
        self._client = client
        self._o = options
        self._progress = progress
        self._salts: dict[tuple[int, str], str] = defaultdict(lambda: secrets.token_urlsafe(32))
        self._sent: dict[tuple[int, str], list[Prompt]] = defaultdict(list)
        self._done = 0
        self._planned: int | None = None
        self._plays = 0
        self.observations: list[Observation] = []
        self.server_cases: list[CaseResult] = []
        self.left_out: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self.block: int | None = options.block_tokens
        self.block_source: Literal["learned", "given"] | None = (
            None if options.block_tokens is None else "given"
        )
        self.prompts_as: Literal["token ids", "text"] | None = None

    async def play_everything(self) -> None:
        self._progress(0, None, "asking for the model")
        limit = await self._client.find_model()
        if self._o.max_prompt_tokens is not None:
            own = self._o.max_prompt_tokens + self._o.answer_tokens
            limit = own if limit is None else min(own, limit)
        self._intro = await self._client.introduce()
        self._note_dialect(self._intro)
        maker = PromptMaker(
            self._intro.pool,
            self._o.seed,
            overhead=self._intro.overhead,
            tokens_per_unit=self._intro.tokens_per_unit,
        )
        if self.block is None and not await self._learn(maker, limit):
            return
        assert self.block is not None
        await self._play_plan(maker, self.block, limit)

    def _note_dialect(self, intro: Introduction) -> None:
        self.prompts_as = "token ids" if intro.dialect.token_ids else "text"
        if not intro.dialect.token_ids:
            exact = intro.tokens_per_unit == 1.0
            self.notes.append(
                "the server refuses prompts as token ids, so they are sent as text"
                + ("" if exact else "; lengths are approximate")
            )
        if not intro.dialect.extras:
            self.notes.append(
                "the server refuses vLLM's own request fields (ignore_eos, return_token_ids): "
                "answers may end early"
            )
        if not intro.dialect.logprobs:
            self.notes.append("the server refuses logprobs: only tokens are compared")
        if not intro.answers_name_tokens:
            self.notes.append(
                "answers come without token ids: the decode-made scenario and the "
                "prefill-against-decode noise are left out"
                + (", and chats grow by the user's turns only" if intro.dialect.token_ids else "")
            )

    async def _learn(self, maker: PromptMaker, limit: int | None) -> bool:
        longest = LONGEST_PROBE if limit is None else limit - self._o.answer_tokens
        longest = min(longest, self._o.max_prompt_tokens or longest)
        if longest < 3:
            raise ServerTrouble(f"the server takes {limit} tokens; nothing fits in that")
        search = learn_block(longest)
        tokens = next(search)
        while True:
            self._progress(self._done, None, f"learning B: {tokens:,} tokens twice")
            before = len(self.observations)
            ok = await self._play("probe", probe(maker, tokens, self._o.answer_tokens))
            if not ok:
                trouble = self.observations[-1].trouble
                hint = " (--max-prompt-tokens)" if limit is None else ""
                raise ServerTrouble(f"while learning the block size: {trouble}{hint}")
            hit = self.observations[-1].answer
            assert hit is not None
            assert len(self.observations) == before + 2
            try:
                tokens = search.send(hit.cached_tokens or 0)
            except StopIteration as e:
                self.block = e.value
                break
        if self.block is None:
            return False
        self.block_source = "learned"
        if self.block <= PLAIN_BLOCK and self._o.cuts == "auto":
            self.notes.append(
                f"B = {self.block} is too small for a GDN hybrid, so a hit may be cut elsewhere "
                "than a cold run: prefill-against-decode noise is granted (--cuts same to refuse)"
            )
        return True

    async def _play_plan(self, maker: PromptMaker, block: int, limit: int | None) -> None:
        options = PlanOptions(
            blocks=self._o.blocks,
            answer_tokens=self._o.answer_tokens,
            concurrency=self._o.concurrency,
            suffixes=self._o.suffixes,
            turns=self._o.turns,
            repeats=self._o.repeats,
            follows_answers=self._intro.answers_name_tokens or not self._intro.dialect.token_ids,
            rebuilds_answers=self._intro.answers_name_tokens,
        )
        wanted = set(self._o.scenarios or SCENARIO_NAMES) | {"noise"}
        before = len(self.observations)
        while True:
            fits, left_out = plan(block, maker, options, limit)
            fits = [s for s in fits if s.name in wanted]
            self.left_out = [(s.name, s.first_case) for s in left_out if s.name in wanted]
            self._planned = self._done + sum(s.requests for s in fits)
            smaller = await self._play_all(fits, block)
            if smaller is None:
                break
            # The prompts stood at the wrong places, so what they gave is not reported.
            self.notes.append(
                f"B was learned as {block}, but a later hit was a multiple of {smaller}: "
                f"started again with B = {smaller}"
            )
            self.block = block = smaller
            del self.observations[before:]
        self._check_block(block)

    async def _play_all(self, scenarios: Sequence[Scenario], block: int) -> int | None:
        """Play them; stops early with a smaller B where a hit shows that B was learned wrong."""
        in_a_row = 0
        for i, scenario in enumerate(scenarios):
            ok = await self._play(scenario.name, scenario.play())
            in_a_row = 0 if ok else in_a_row + 1
            if in_a_row >= PATIENCE:
                self._give_up(scenarios[i + 1 :])
                break
            smaller = self._smaller_block(block)
            if smaller is not None:
                return smaller
        return None

    def _smaller_block(self, block: int) -> int | None:
        """The step of all hits where it is less than the learned B, yet may be a block."""
        if self.block_source != "learned":
            return None
        answers = [o.answer for o in self.observations if o.answer is not None]
        step = math.gcd(block, *(a.cached_tokens or 0 for a in answers))
        return step if LEAST_BLOCK <= step < block else None

    def _give_up(self, rest: Sequence[Scenario]) -> None:
        if rest:
            self.notes.append(
                f"stopped after {PATIENCE} scenarios in a row without an answer; "
                f"{len(rest)} were not played"
            )

    def _check_block(self, block: int) -> None:
        """Say so where B was given too small: a prompt of B+1 tokens then finds no block."""
        hits = [o for o in self.observations if o.ask.role is Role.HIT and o.answer is not None]
        cached = {o.answer.cached_tokens or 0 for o in hits if o.answer is not None}
        step = math.gcd(*cached)
        missed = any(
            o.ask.case == "1*B+1" and o.answer is not None and o.answer.cached_tokens == 0
            for o in hits
        )
        if missed and step > block:
            self.notes.append(
                f"every hit was a multiple of {step} tokens: B may be {step}, not {block}"
            )

    async def _play(self, name: str, play: Play) -> bool:
        """Play to the end, or to the first request without an answer; True at the end."""
        self._plays += 1
        try:
            batch = next(play)
            while True:
                answers = await self._batch(name, batch)
                if any(a is None for a in answers):
                    play.close()
                    return False
                batch = play.send([a for a in answers if a is not None])
        except StopIteration:
            return True

    async def _batch(self, name: str, batch: Batch) -> list[Answer | None]:
        self._progress(self._done, self._planned, batch[0].case)
        shared = [self._shared(ask, batch, i) for i, ask in enumerate(batch)]
        results = await asyncio.gather(*(self._ask(ask) for ask in batch))
        answers: list[Answer | None] = []
        for ask, n, result in zip(batch, shared, results, strict=True):
            trouble = str(result) if isinstance(result, ServerTrouble) else ""
            answer = None if isinstance(result, ServerTrouble) else result
            self.observations.append(Observation(name, ask, answer, trouble, len(batch), n))
            answers.append(answer)
            if answer is not None and ask.chain is not None:
                self._sent[self._plays, ask.chain].append(ask.prompt + answer.units())
        self._done += len(batch)
        self._progress(self._done, self._planned, batch[0].case)
        return answers

    async def _ask(self, ask: Ask) -> Answer | ServerTrouble:
        salt = None if ask.chain is None else self._salts[self._plays, ask.chain]
        try:
            return await self._client.complete(
                ask.prompt, ask.answer_tokens, salt, self._intro.dialect
            )
        except ServerTrouble as e:
            return e

    def _shared(self, ask: Ask, batch: Batch, place: int) -> int | None:
        """Tokens of the prompt that its chain may hold; None where units are not tokens."""
        if ask.chain is None or not self._intro.dialect.token_ids:
            return None
        others = [x.prompt for i, x in enumerate(batch) if i != place and x.chain == ask.chain]
        earlier = self._sent[self._plays, ask.chain]
        return shared_tokens(ask.prompt, [*earlier, *others]) + self._intro.overhead
