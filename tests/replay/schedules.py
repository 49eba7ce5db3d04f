"""What vLLM's scheduler may ask of a slot, on plain ints; and a page that remembers its tokens.

The model is of vLLM's side alone and knows no cursor: a request has tokens that are known and
tokens that are computed, a step computes some of the rest and of the drafts, and the drafts that
are refused are not counted as computed (`Scheduler.schedule` and `update_from_output`,
vllm/v1/core/sched/scheduler.py, 0.31.0). A token is named by its request and position, a refused
draft by a name of its own, so that a page can tell what it was fed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

Token = tuple[object, ...]
STALE: Token = ("left by another owner",)


@dataclass(frozen=True)
class Row:
    """One request's rows of a step.

    Args:
        uid: of the request.
        slot: its page.
        seq_len: tokens of the request once the step is done, drafts counted in.
        tokens: those fed, from position `seq_len - len(tokens)` on.
    """

    uid: int
    slot: int
    seq_len: int
    tokens: tuple[Token, ...]

    @property
    def start(self) -> int:
        return self.seq_len - len(self.tokens)

    @property
    def before(self) -> list[Token]:
        """The request's tokens before the step: what its state must have seen by then."""
        return [(self.uid, position) for position in range(self.start)]


@dataclass
class Request:
    """A request.

    Args:
        uid: its number.
        length: tokens after which it is done.
        known: tokens of the prompt, and sampled since.
        computed: tokens of which the state may be asked for.
        drafts: proposed for the next step.
        slot: its page while it runs.
    """

    uid: int
    length: int
    known: int
    computed: int = 0
    drafts: int = 0
    slot: int | None = None


@dataclass
class Schedule:
    """Random steps of several requests.

    Args:
        rng: source of all choices.
        max_rows: T_max; a step drafts at most one token less.
        slots: pages, without the null one.
        budget: tokens of a step.
        prompt: most tokens of a prompt.
    """

    rng: random.Random
    max_rows: int
    slots: int = 4
    budget: int = 40
    prompt: int = 90
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    _uids: int = 0

    def __post_init__(self) -> None:
        self.free = list(range(1, self.slots + 1))

    def steps(self, count: int) -> Iterator[list[Row]]:
        """The batches of `count` steps, each in an order of its own; some are empty."""
        for _ in range(count):
            self._come_and_go()
            batch = [row for row in map(self._scheduled, self._served()) if row is not None]
            self.rng.shuffle(batch)
            yield batch

    def _come_and_go(self) -> None:
        rng = self.rng
        if rng.random() < 0.5 and len(self.waiting) < 3:
            prompt = rng.choice((1, self.max_rows, self.max_rows + 1, rng.randint(1, self.prompt)))
            self._uids += 1
            self.waiting.append(Request(self._uids, prompt + rng.randint(1, 60), prompt))
        for request in list(self.running):
            if rng.random() < 0.04:
                self._release(request)
                # A request that is taken back keeps what it has sampled, and computes it anew.
                request.computed = request.drafts = 0
                self.waiting.insert(0, request)
                self.seen.add("preempted")
            elif rng.random() < 0.01:
                self._release(request)
                self.seen.add("aborted")
        while self.waiting and self.free and rng.random() < 0.8:
            request = self.waiting.pop(0)
            request.slot = self.free.pop()
            self.running.append(request)

    def _release(self, request: Request) -> None:
        assert request.slot is not None
        self.running.remove(request)
        # To the end, from where the next owner takes it.
        self.free.append(request.slot)
        request.slot = None

    def _served(self) -> Iterator[tuple[Request, int]]:
        """Requests of the step with their tokens; one may be passed over."""
        left = self.budget
        for request in list(self.running):
            wish = request.known + request.drafts - request.computed
            if self.rng.random() < 0.2:
                wish = min(wish, self.rng.randint(1, 2 * self.max_rows))
            count = min(wish, left)
            if count and self.rng.random() < 0.95:
                left -= count
                yield request, count

    def _scheduled(self, served: tuple[Request, int]) -> Row | None:
        """The row of one request, and what comes of it."""
        request, count = served
        rng, start, known = self.rng, request.computed, request.known
        assert request.slot is not None
        drafted = max(start + count - known, 0)
        good = rng.choice((0, drafted, rng.randint(0, drafted)))
        tokens: list[Token] = [
            (request.uid, p) if p < known + good else (request.uid, p, "refused")
            for p in range(start, start + count)
        ]
        row = Row(request.uid, request.slot, start + count, tuple(tokens))
        self._note(request, count, drafted, good)
        request.computed += count - (drafted - good)
        request.drafts = 0
        if start + count >= known:
            request.known += good + 1
            if request.known >= request.length:
                self._release(request)
            elif self.max_rows > 1 and rng.random() < 0.8:
                most = self.max_rows - 1
                request.drafts = rng.choice((most, rng.randint(1, most)))
        return row

    def _note(self, request: Request, count: int, drafted: int, good: int) -> None:
        """Remember which kinds of rows there were, so that a test can ask for them."""
        if count > self.max_rows:
            self.seen.add("long chunk")
        elif request.computed + count < request.known:
            self.seen.add("short chunk")
        elif request.computed + 1 < request.known:
            self.seen.add("short end of a prompt")
        elif not drafted:
            self.seen.add("no drafts")
        else:
            self.seen.add("all accepted" if good == drafted else "some refused")
        if request.computed == 0 and request.uid != self._uids:
            self.seen.add("from 0")


@dataclass
class Page:
    """A slot: the tokens that its state has seen, its ring and its conv window.

    Args:
        ring_rows: R.
        columns: L, of the conv window.
    """

    ring_rows: int
    columns: int
    state: list[Token] = field(default_factory=lambda: [STALE])

    def __post_init__(self) -> None:
        self.ring: list[Token] = [STALE] * self.ring_rows
        self.window: list[Token] = [STALE] * self.columns

    def step(self, row: Row, base: int, start: int, chunk: bool, history: int) -> None:
        """What a layer does with a plan (cuda_ext/ops/reference.py), on names of tokens.

        Args:
            row: what is fed.
            base, start, chunk: the plan.
            history: inputs before the first new row that the convolution reads.

        Raises:
            AssertionError: a row is read that is not the request's, or one that is still needed is
                overwritten.
        """
        count = len(row.tokens)
        seen = list(self.state) if base else []
        seen += [self.ring[position % self.ring_rows] for position in range(base, start)]
        assert seen == row.before, f"state of {row}: base={base}, start={start}, saw {seen}"
        reads = range(max(start - history, 0), start)
        inputs = [self.window[position % self.columns] for position in reads]
        assert inputs == row.before[len(row.before) - len(inputs) :], f"conv inputs of {row}"
        if chunk:
            self.state = seen + list(row.tokens)
        else:
            pending = {position % self.ring_rows for position in range(base, start)}
            new = [position % self.ring_rows for position in range(start, start + count)]
            assert not pending & set(new), f"{row} overwrites rows that wait to be folded"
            assert len(set(new)) == count, f"{row} does not fit the ring"
            if start > base:
                self.state = seen
            for place, token in zip(new, row.tokens, strict=True):
                self.ring[place] = token
        kept = min(count, self.columns)
        for position, token in zip(
            range(start + count - kept, start + count), row.tokens[count - kept :], strict=True
        ):
            self.window[position % self.columns] = token
