"""What is sent, and in which order: pure, with no network and no clock.

A scenario is a generator. It yields batches of `Ask` (a batch goes out together) and receives the
batch's answers, since a growing chat and a decode-made checkpoint are built from answers. Lengths
are in tokens; B is the server's block. Each scenario holds one or more cases; a case is one prompt,
or one family of prompts, that is asked cold and again on a hit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from vllm_gaudi_ext.check.answer import Answer, Prompt

# Short words that common tokenizers hold as one token after a space. They are the vocabulary
# where a server takes text only, and the text whose token ids are drawn from otherwise.
COMMON_TEXT = (
    "the and for that with this from have not are but you all can one our out who get his has "
    "had her how man new now old see two way day may say she use did its let put too any big end "
    "far few got him own run set six ten try yes air art bad bed box car cut dog eat eye fit fly "
    "hot ice job key law leg lie low map mix oil pay red sea sit sky sun tax tea top war win"
)
WORDS = tuple(COMMON_TEXT.split())

Batch = list["Ask"]
Play = Generator[Batch, list[Answer], None]


class Role(str, Enum):
    """Why a request is sent."""

    COLD = "cold"  # own salt: the reference, and a repeat of it
    SEED = "seed"  # first of its chain: computes what later requests hit
    HIT = "hit"  # expected to start from the cache


@dataclass(frozen=True)
class Ask:
    """One request.

    Args:
        case: the case that it belongs to.
        role: see `Role`.
        prompt: the units to send.
        chain: requests of one chain share a cache salt; None is an own salt, so a cold run.
        answer_tokens: tokens to generate.
        prefilled: the chain's blocks were prefilled from one seed, one request at a time. Where
            such a hit also ends on the prompt's last whole block, vLLM's aligned split cuts the
            cold run at the same places, whatever the token budget.
        decoded: spans (start, end) of the prompt that an earlier answer of the chain decoded.
        tail_of_seed: if set, the prompt holds this many tokens of the seed's own answer, and the
            reference is the rest of that answer: an uncached run with the same cuts.
    """

    case: str
    role: Role
    prompt: Prompt
    chain: str | None
    answer_tokens: int
    prefilled: bool = False
    decoded: tuple[tuple[int, int], ...] = ()
    tail_of_seed: int | None = None


@dataclass(frozen=True)
class Scenario:
    """A named play.

    Args:
        name: as `--scenario` takes it; several plays may share one.
        requests: how many requests the play sends.
        tokens: the most tokens, prompt and answer, that one request needs.
        play: starts the generator.
        first_case: the name that stands for the play when it could not run.
    """

    name: str
    requests: int
    tokens: int
    play: Callable[[], Play]
    first_case: str


class PromptMaker:
    """Makes prompts of an exact number of tokens out of a pool of units.

    Args:
        pool: units to draw from, at least 16 different ones.
        seed: equal seeds give equal prompts.
        overhead: tokens that the server adds to each prompt of its own (a BOS token).
        tokens_per_unit: 1.0 where a unit is exactly one token; else lengths are approximate.

    Raises:
        ValueError: the pool is too small.
    """

    def __init__(
        self, pool: Sequence[int], seed: int, overhead: int = 0, tokens_per_unit: float = 1.0
    ) -> None:
        self._pool = tuple(dict.fromkeys(pool))
        if len(self._pool) < 16:
            raise ValueError(f"a pool of {len(self._pool)} units is too small; 16 are needed")
        self._seed = seed
        self._overhead = overhead
        self._tokens_per_unit = tokens_per_unit

    def fresh(self, label: str, tokens: int) -> Prompt:
        """A prompt of `tokens` tokens; another label gives an unrelated one."""
        return self._draw(label, self._units(tokens - self._overhead))

    def suffix(self, label: str, place: int, tokens: int) -> Prompt:
        """`tokens` tokens to append. Different places of one label differ in their first unit."""
        units = self._units(tokens)
        first = random.Random(f"{self._seed}:{label}").sample(self._pool, len(self._pool))
        return (first[place % len(first)], *self._draw(f"{label}:{place}", units - 1))

    def cut(self, prompt: Prompt, tokens: int) -> Prompt:
        """The first `tokens` tokens of a prompt that `fresh` made."""
        return prompt[: self._units(tokens - self._overhead)]

    def _units(self, tokens: int) -> int:
        return max(1, int(tokens / self._tokens_per_unit))

    def _draw(self, label: str, units: int) -> Prompt:
        return tuple(random.Random(f"{self._seed}:{label}").choices(self._pool, k=units))


@dataclass(frozen=True)
class PlanOptions:
    """What shapes the plan. All counts are of tokens or requests.

    Args:
        blocks: prompts of up to this many blocks at the boundaries.
        answer_tokens: tokens that each request generates.
        concurrency: requests that a batch holds.
        suffixes: lengths of the divergent suffixes.
        turns: turns of the growing chat.
        repeats: how often the exact repeat is sent.
        follows_answers: an answer can be put back into a later prompt.
        rebuilds_answers: answers come with token ids, so that a prompt can end inside of one.
    """

    blocks: int = 3
    answer_tokens: int = 16
    concurrency: int = 4
    suffixes: tuple[int, ...] = (40, 376, 1296)
    turns: int = 4
    repeats: int = 10
    follows_answers: bool = True
    rebuilds_answers: bool = True


def learn_block(limit: int, first: int = 1025) -> Generator[int, int, int | None]:
    """Find B from the cached tokens of exact repeats.

    Yields prompt lengths and receives the cached tokens of a repeat of that prompt. A hit ends on
    the prompt's last whole block, or one block earlier under speculative decoding, so B is the step
    between lengths on both sides of a boundary. No length is a multiple of B, since vLLM's aligned
    split may leave nothing to hit for a prompt of exactly k*B tokens.

    Args:
        limit: the longest prompt that the server takes.
        first: the first length to try.

    Returns:
        B in tokens, or None where nothing up to the limit was cached.
    """
    longest = limit if limit % 2 else limit - 1
    tokens = min(first, longest)
    cached = yield tokens
    while cached <= 0 and tokens < longest:
        tokens = min(2 * tokens - 1, longest)
        cached = yield tokens
    if cached <= 0:
        return None
    # The step is B, or 2*B where speculative decoding gives one block back.
    step = cached - (yield cached - 1)
    halfway = cached + step // 2 - 1
    if halfway >= tokens:
        return step
    below = yield halfway
    return cached - below if 0 < below < cached else step


def probe(maker: PromptMaker, tokens: int, answer_tokens: int) -> Play:
    """Send one prompt twice on one chain: what `learn_block` asks for."""
    case = f"repeat of {tokens} tokens"
    prompt = maker.fresh(case, tokens)
    for role in (Role.SEED, Role.HIT):
        yield [Ask(case, role, prompt, case, answer_tokens, prefilled=True)]


def plan(
    block: int, maker: PromptMaker, options: PlanOptions, limit: int | None
) -> tuple[list[Scenario], list[Scenario]]:
    """The scenarios that fit the server, and those that do not.

    Args:
        block: B in tokens.
        maker: makes the prompts.
        options: see `PlanOptions`.
        limit: the server's longest sequence in tokens, prompt and answer; None if unknown.
    """
    every = list(_every(block, maker, options))
    fits = [s for s in every if limit is None or s.tokens <= limit]
    left_out = [s for s in every if limit is not None and s.tokens > limit]
    return fits, left_out


SCENARIO_NAMES = (
    "noise",
    "boundary",
    "repeat",
    "a-b-a",
    "divergent",
    "short-after-long",
    "chat",
    "decode-made",
    "concurrent",
)


def _every(b: int, maker: PromptMaker, o: PlanOptions) -> Iterator[Scenario]:
    t = o.answer_tokens
    half = b + max(1, b // 2)

    yield Scenario(
        "noise",
        requests=3 + o.concurrency + (1 if o.rebuilds_answers else 0),
        tokens=half + t,
        play=lambda: _noise(maker, half, o),
        first_case="noise",
    )
    for k in range(1, o.blocks + 1):
        for offset in (-1, 0, 1):
            tokens = k * b + offset
            case = f"{k}*B{offset:+d}" if offset else f"{k}*B"
            if tokens < 1:
                continue
            yield Scenario(
                "boundary",
                requests=4,
                tokens=tokens + t,
                play=_bind(_boundary, maker, case, tokens, t),
                first_case=case,
            )
    yield Scenario(
        "repeat",
        requests=1 + o.repeats,
        tokens=2 * b + b // 2 + t,
        play=lambda: _repeat(maker, 2 * b + b // 2, o),
        first_case=f"{o.repeats} times the same",
    )
    yield Scenario(
        "a-b-a",
        requests=8,
        tokens=2 * b + b // 2 + t,
        play=lambda: _a_b_a(maker, b, t),
        first_case="A-B-A, nothing shared",
    )
    yield Scenario(
        "a-b-a",
        requests=6,
        tokens=2 * b + b // 2 + t,
        play=lambda: _a_b_a_shared(maker, b, t),
        first_case="A-B-A, a prefix shared",
    )
    for label, prefix in (("B", b), ("1.5*B", half), ("2*B", 2 * b)):
        # A short first suffix keeps the shared prefix's last boundary the seed's last cut.
        first = max(1, min(40, b // 2 - 1))
        yield Scenario(
            "divergent",
            requests=1 + 2 * (len(o.suffixes) + 1),
            tokens=prefix + max(first, *o.suffixes) + t,
            play=_bind(_divergent, maker, label, prefix, first, o),
            first_case=f"shared {label}, other suffix",
        )
    yield Scenario(
        "short-after-long",
        requests=1 + 2 * 3,
        tokens=o.blocks * b + b // 2 + t,
        play=lambda: _short_after_long(maker, b, o),
        first_case="short after long",
    )
    yield Scenario(
        "chat",
        requests=2 * o.turns,
        tokens=half + (o.turns - 1) * (t + max(1, b // 2)) + t,
        play=lambda: _chat(maker, b, half, o),
        first_case="chat",
    )
    if o.rebuilds_answers and t >= 4:
        for k in range(1, o.blocks + 1):
            if k * b - t // 2 < 1:
                continue
            yield Scenario(
                "decode-made",
                requests=3,
                tokens=k * b + 1 + t,
                play=_bind(_decode_made, maker, b, k, t),
                first_case=f"decoded across {k}*B",
            )
    yield Scenario(
        "concurrent",
        requests=1 + 3 * o.concurrency,
        tokens=2 * b + max(1, b // 4) + o.concurrency * max(1, b // (4 * o.concurrency)) + t,
        play=lambda: _concurrent(maker, b, o),
        first_case="concurrent, other suffixes",
    )
    yield Scenario(
        "concurrent",
        requests=2 + o.concurrency,
        tokens=2 * b + b // 2 + t,
        play=lambda: _concurrent_same(maker, b, o),
        first_case="concurrent, the same",
    )


def _bind(play: Callable[..., Play], *args: object) -> Callable[[], Play]:
    return lambda: play(*args)


def _noise(maker: PromptMaker, tokens: int, o: PlanOptions) -> Play:
    """Cold runs only: alone, together, and once with half of the answer prefilled."""
    t = o.answer_tokens
    prompt = maker.fresh("noise", tokens)
    cold = Ask("noise", Role.COLD, prompt, None, t)
    [first] = yield [Ask("noise", Role.SEED, prompt, "noise", t, prefilled=True)]
    yield [cold]
    yield [cold]
    if o.rebuilds_answers:
        kept = max(1, t // 2)
        longer = prompt + first.units()[:kept]
        yield [Ask("noise", Role.COLD, longer, None, max(1, t - kept), tail_of_seed=kept)]
    yield [cold] * o.concurrency


def _boundary(maker: PromptMaker, case: str, tokens: int, t: int) -> Play:
    prompt = maker.fresh(case, tokens)
    yield [Ask(case, Role.COLD, prompt, None, t)]
    for role in (Role.SEED, Role.HIT, Role.HIT):
        yield [Ask(case, role, prompt, case, t, prefilled=True)]


def _repeat(maker: PromptMaker, tokens: int, o: PlanOptions) -> Play:
    case = f"{o.repeats} times the same"
    prompt = maker.fresh(case, tokens)
    yield [Ask(case, Role.COLD, prompt, None, o.answer_tokens)]
    for i in range(o.repeats):
        role = Role.HIT if i else Role.SEED
        yield [Ask(case, role, prompt, case, o.answer_tokens, prefilled=True)]


def _a_b_a(maker: PromptMaker, b: int, t: int) -> Play:
    """Two sessions that share nothing take turns, so each hit finds the other's leavings."""
    case = "A-B-A, nothing shared"
    tokens = {"A": 2 * b + b // 2, "B": b + max(1, b // 3)}
    prompts = {name: maker.fresh(f"{case}:{name}", n) for name, n in tokens.items()}
    for name, prompt in prompts.items():
        yield [Ask(f"{case} ({name})", Role.COLD, prompt, None, t)]
    for name, role in zip("ABABAB", [Role.SEED] * 2 + [Role.HIT] * 4, strict=True):
        yield [Ask(f"{case} ({name})", role, prompts[name], f"{case}:{name}", t, prefilled=True)]


def _a_b_a_shared(maker: PromptMaker, b: int, t: int) -> Play:
    """Two sessions with one prefix: B continues from A's blocks, then A comes back."""
    case = "A-B-A, a prefix shared"
    prefix = maker.fresh(case, 2 * b)
    tokens = 2 * b + max(1, b // 2)
    prompts = {n: prefix + maker.suffix(case, i, tokens - 2 * b) for i, n in enumerate("AB")}
    for name, prompt in prompts.items():
        yield [Ask(f"{case} ({name})", Role.COLD, prompt, None, t)]
    for name, role in zip("ABAB", [Role.SEED] + [Role.HIT] * 3, strict=True):
        yield [Ask(f"{case} ({name})", role, prompts[name], case, t, prefilled=True)]


def _divergent(
    maker: PromptMaker, label: str, prefix_tokens: int, first: int, o: PlanOptions
) -> Play:
    case = f"shared {label}, other suffix"
    prefix = maker.fresh(case, prefix_tokens)
    t = o.answer_tokens
    seed = prefix + maker.suffix(case, 0, first)
    yield [Ask(f"{case} {o.suffixes[0]}", Role.SEED, seed, case, t, prefilled=True)]
    # The longest comes twice: a block that was found by its place alone would be hit then.
    names = [f"{case} {n}" for n in o.suffixes]
    lengths = [*o.suffixes, max(o.suffixes)]
    for i, (name, n) in enumerate(
        zip([*names, f"{case} {lengths[-1]} again"], lengths, strict=True)
    ):
        prompt = prefix + maker.suffix(case, i + 1, n)
        yield [Ask(name, Role.COLD, prompt, None, t)]
        yield [Ask(name, Role.HIT, prompt, case, t, prefilled=True)]


def _short_after_long(maker: PromptMaker, b: int, o: PlanOptions) -> Play:
    case = "short after long"
    t = o.answer_tokens
    prompt = maker.fresh(case, o.blocks * b + b // 2)
    lengths = (b + 1, b + max(1, b // 2), max(b + 1, (o.blocks - 1) * b + 1))
    yield [
        Ask(f"{case}: {lengths[0]}", Role.SEED, prompt, case, t, prefilled=True),
    ]
    for tokens in lengths:
        short = maker.cut(prompt, tokens)
        yield [Ask(f"{case}: {tokens}", Role.COLD, short, None, t)]
        yield [Ask(f"{case}: {tokens}", Role.HIT, short, case, t, prefilled=True)]


def _chat(maker: PromptMaker, b: int, first: int, o: PlanOptions) -> Play:
    t = o.answer_tokens
    prompt = maker.fresh("chat", first)
    tokens = first
    decoded: tuple[tuple[int, int], ...] = ()
    for turn in range(1, o.turns + 1):
        case = f"chat turn {turn}"
        role = Role.HIT if turn > 1 else Role.SEED
        yield [Ask(case, Role.COLD, prompt, None, t)]
        [answer] = yield [Ask(case, role, prompt, "chat", t, decoded=decoded)]
        user = maker.suffix("chat", turn, max(1, b // 2))
        if o.follows_answers:
            decoded = (*decoded, (tokens, tokens + t))
            prompt += answer.units()
            tokens += t
        prompt += user
        tokens += max(1, b // 2)


def _decode_made(maker: PromptMaker, b: int, k: int, t: int) -> Play:
    """Let decoding fill block k, then start from it with one more token.

    The reference is the rest of the same uncached answer: it went on from the very state that the
    hit starts from. A cold prefill of the same tokens says how far prefill and decode differ.
    """
    case = f"decoded across {k}*B"
    start = k * b - t // 2
    kept = t // 2 + 1
    prompt = maker.fresh(case, start)
    [answer] = yield [Ask(case, Role.SEED, prompt, case, t)]
    longer = prompt + answer.units()[:kept]
    rest = max(1, t - kept)
    yield [Ask(case, Role.COLD, longer, None, rest, tail_of_seed=kept)]
    span = ((start, start + t),)
    yield [Ask(case, Role.HIT, longer, case, rest, decoded=span, tail_of_seed=kept)]


def _concurrent(maker: PromptMaker, b: int, o: PlanOptions) -> Play:
    case = "concurrent, other suffixes"
    t = o.answer_tokens
    prefix = maker.fresh(case, 2 * b)
    seed = prefix + maker.suffix(case, 0, max(1, b // 4))
    # Unequal lengths, so that a state handed to the wrong row of a batch shows.
    prompts = [
        prefix + maker.suffix(case, i, max(1, b // 4) + i * max(1, b // (4 * o.concurrency)))
        for i in range(1, o.concurrency + 1)
    ]
    yield [Ask(case, Role.SEED, seed, case, t)]
    for prompt in prompts:
        yield [Ask(case, Role.COLD, prompt, None, t)]
    yield [Ask(case, Role.COLD, prompt, None, t) for prompt in prompts]
    yield [Ask(case, Role.HIT, prompt, case, t) for prompt in prompts]


def _concurrent_same(maker: PromptMaker, b: int, o: PlanOptions) -> Play:
    case = "concurrent, the same"
    t = o.answer_tokens
    tokens = 2 * b + b // 2
    prompt = maker.fresh(case, tokens)
    yield [Ask(case, Role.COLD, prompt, None, t)]
    yield [Ask(case, Role.SEED, prompt, case, t, prefilled=True)]
    yield [Ask(case, Role.HIT, prompt, case, t)] * o.concurrency
