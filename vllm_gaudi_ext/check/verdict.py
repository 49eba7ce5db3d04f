"""What the answers mean: pure, with no network.

Two answers are compared token by token as long as their tokens agree, since from the first other
token on they continue different texts. At each place the logprobs of every label that both name are
compared; the largest difference is that place's difference, in nats. A difference counts once it
exceeds what the server shows without any cache:

- `alone`: one cold run repeated, one request at a time;
- `together`: the same cold runs sent at once, so in other batches;
- `prefill_decode`: half of a cold answer prefilled instead of decoded.

Where a hit computes exactly what the cold run computed (same cuts of the prompt, state made by
prefill), only `alone` is granted. Where cuts may differ or decoding made the state, equality of
bits is not to be had from any server, and `prefill_decode` is granted too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from vllm_gaudi_ext.check.answer import Answer, Prompt
from vllm_gaudi_ext.check.scenarios import Ask, Role

# The largest of a few samples lies below the largest of many.
NOISE_MARGIN = 2.0
# A server whose own repeats differ by more than this many nats can hide any fault.
NOISE_CAP = 0.5
# Blocks up to this size belong to models without recurrent state (vLLM's attention blocks are 16
# to 64 tokens; a GDN hybrid's are 128 or more). Such servers cut a hit's prompt anywhere.
PLAIN_BLOCK = 64

Cuts = Literal["auto", "same", "any"]


class Verdict(str, Enum):
    """One word for a case; `words` says it to a person."""

    EQUAL = "equal"
    EQUAL_WITHIN_NOISE = "equal-within-noise"
    EQUAL_WITHIN_ROUNDING = "equal-within-rounding"
    DIFFERENT = "different"
    IMPOSSIBLE_HIT = "impossible-hit"
    NOT_FINITE = "not-finite"
    NEVER_CACHED = "never-cached"
    NO_HIT = "no-hit"
    CACHING_OFF = "caching-off"
    CACHED_TOKENS_NOT_REPORTED = "cached-tokens-not-reported"
    LOGPROBS_NOT_OFFERED = "logprobs-not-offered"
    SALT_IGNORED = "salt-ignored"
    TOO_NOISY = "too-noisy"
    FAILED = "failed"
    LEFT_OUT = "left-out"

    @property
    def words(self) -> str:
        """The verdict as a phrase."""
        return _WORDS[self]

    @property
    def passed(self) -> bool:
        """A hit was compared with a cold run and equals it."""
        return self in _PASSED

    @property
    def is_difference(self) -> bool:
        """The server answers a hit differently, or claims a hit that cannot be."""
        return self in _DIFFERENCES

    @property
    def is_gap(self) -> bool:
        """Something that should have been checked was not."""
        return self in _GAPS


_WORDS = {
    Verdict.EQUAL: "equal",
    Verdict.EQUAL_WITHIN_NOISE: "equal within the server's own noise",
    Verdict.EQUAL_WITHIN_ROUNDING: "equal within prefill-against-decode noise",
    Verdict.DIFFERENT: "different",
    Verdict.IMPOSSIBLE_HIT: "impossible hit",
    Verdict.NOT_FINITE: "not finite",
    Verdict.NEVER_CACHED: "never cached",
    Verdict.NO_HIT: "no hit",
    Verdict.CACHING_OFF: "caching off",
    Verdict.CACHED_TOKENS_NOT_REPORTED: "cached_tokens not reported",
    Verdict.LOGPROBS_NOT_OFFERED: "logprobs not offered",
    Verdict.SALT_IGNORED: "cache_salt ignored",
    Verdict.TOO_NOISY: "too noisy to tell",
    Verdict.FAILED: "could not run",
    Verdict.LEFT_OUT: "left out (prompt too long for the server)",
}
_PASSED = {Verdict.EQUAL, Verdict.EQUAL_WITHIN_NOISE, Verdict.EQUAL_WITHIN_ROUNDING}
_DIFFERENCES = {Verdict.DIFFERENT, Verdict.IMPOSSIBLE_HIT, Verdict.NOT_FINITE}
_GAPS = {
    Verdict.CACHING_OFF,
    Verdict.CACHED_TOKENS_NOT_REPORTED,
    Verdict.LOGPROBS_NOT_OFFERED,
    Verdict.SALT_IGNORED,
    Verdict.TOO_NOISY,
    Verdict.FAILED,
}
# A case with several hits gets the first of these that one of its hits got.
_WORST_FIRST = (
    Verdict.IMPOSSIBLE_HIT,
    Verdict.NOT_FINITE,
    Verdict.DIFFERENT,
    Verdict.FAILED,
    Verdict.SALT_IGNORED,
    Verdict.TOO_NOISY,
    Verdict.LOGPROBS_NOT_OFFERED,
    Verdict.CACHED_TOKENS_NOT_REPORTED,
    Verdict.EQUAL_WITHIN_ROUNDING,
    Verdict.EQUAL_WITHIN_NOISE,
    Verdict.EQUAL,
    Verdict.NO_HIT,
    Verdict.NEVER_CACHED,
)


class Noise(BaseModel):
    """The server's own differences without a cache, in nats; None where not measured."""

    model_config = ConfigDict(frozen=True)

    alone: float | None = Field(default=None, description="cold runs repeated one at a time")
    together: float | None = Field(default=None, description="cold runs sent at once")
    prefill_decode: float | None = Field(
        default=None, description="an answer prefilled, not decoded"
    )

    def granted(self, *, together: bool, rounding: bool) -> float:
        """The largest difference that does not count, in nats."""
        floors = [self.alone]
        if together:
            floors.append(self.together)
        bound = NOISE_MARGIN * max((f for f in floors if f is not None), default=0.0)
        if rounding and self.prefill_decode is not None:
            bound = max(bound, min(NOISE_MARGIN * self.prefill_decode, NOISE_CAP))
        return bound

    def hides_faults(self, *, together: bool) -> bool:
        """Repeats of a cold run differ by more than a verdict can stand."""
        floors = (self.alone, self.together if together else None)
        return max((f for f in floors if f is not None), default=0.0) > NOISE_CAP


class CaseResult(BaseModel):
    """One case and its verdict. Holds no prompt and no answer."""

    model_config = ConfigDict(frozen=True)

    case: str
    scenario: str
    verdict: Verdict
    detail: str = ""
    prompt_tokens: int | None = Field(default=None, description="of the last hit's prompt")
    cached_tokens: tuple[int | None, ...] = Field(default=(), description="of each hit, in order")
    different_from: int | None = Field(
        default=None, description="first answer token, from 0, that differs by more than the noise"
    )
    largest_difference: float | None = Field(default=None, description="nats, hit against cold")
    granted: float | None = Field(default=None, description="nats that did not count")


class CheckReport(BaseModel):
    """All verdicts of a run, and what they rest on."""

    url: str
    model: str | None = None
    started: str = Field("", description="UTC, ISO 8601")
    seconds: float = 0.0
    requests: int = 0
    retries: int = 0
    version: str = ""
    block_tokens: int | None = None
    block_source: Literal["learned", "given"] | None = None
    prompts_as: Literal["token ids", "text"] | None = None
    noise: Noise = Noise()
    cases: tuple[CaseResult, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0: every hit equals its cold run; 1: one differs; 2: it could not be told."""
        verdicts = [c.verdict for c in self.cases]
        if any(v.is_difference for v in verdicts):
            return 1
        if any(v.is_gap for v in verdicts) or not any(v.passed for v in verdicts):
            return 2
        return 0

    @property
    def outcome(self) -> str:
        """The exit code as a phrase."""
        return ("equal", "different", "could not check")[self.exit_code]


@dataclass(frozen=True)
class Observation:
    """One request, in the order of sending.

    Args:
        scenario: name of the scenario.
        ask: the request.
        answer: what came back, or None with `trouble` set.
        trouble: why there is no answer.
        in_batch: requests that went out together.
        shared: tokens of the prompt that an earlier request of the chain had; None if unknown.
    """

    scenario: str
    ask: Ask
    answer: Answer | None
    trouble: str = ""
    in_batch: int = 1
    shared: int | None = None


@dataclass(frozen=True)
class Comparison:
    """Two answers side by side.

    Args:
        differences: nats per token, up to and with the first place where the tokens part; inf
            where the two name no common label.
        parted: that place, or None where all tokens agree.
        not_finite: the first token whose logprob is missing or not finite, or None.
        by_logprobs: False where only the tokens could be compared.
    """

    differences: tuple[float, ...]
    parted: int | None
    not_finite: int | None
    by_logprobs: bool

    @property
    def largest(self) -> float:
        """The largest difference in nats; 0 where only tokens were compared and agree."""
        return max(self.differences, default=0.0)

    def beyond(self, granted: float) -> int | None:
        """The first token that differs by more than `granted` nats, or None."""
        return next((i for i, d in enumerate(self.differences) if d > granted), None)


def shared_tokens(prompt: Prompt, earlier: Iterable[Prompt]) -> int:
    """Units that `prompt` has in common with the beginning of any earlier prompt."""
    best = 0
    for other in earlier:
        n = 0
        for a, b in zip(prompt, other, strict=False):
            if a != b:
                break
            n += 1
        best = max(best, n)
    return best


def compare(a: Answer, b: Answer) -> Comparison:
    """Compare answer `b` with the reference `a`."""
    if a.logprobs is None or b.logprobs is None:
        parted = _parting(a.labels, b.labels)
        differences = () if parted is None else (*[0.0] * parted, math.inf)
        return Comparison(differences, parted, None, by_logprobs=False)
    parted = _parting(a.labels, b.labels)
    places = min(len(a.labels), len(b.labels))
    differences_: list[float] = []
    for i in range(places if parted is None else min(parted + 1, places)):
        left, right = _place(a, i), _place(b, i)
        if left is None or right is None:
            return Comparison((*differences_, math.inf), parted, i, by_logprobs=True)
        differences_.append(_place_difference(left, a.labels[i], right, b.labels[i]))
    if parted is not None and parted >= places:
        differences_.append(math.inf)
    return Comparison(tuple(differences_), parted, None, by_logprobs=True)


def _parting(a: Sequence[str], b: Sequence[str]) -> int | None:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def _place(answer: Answer, i: int) -> dict[str, float] | None:
    """Label to logprob at token i, or None where a number is missing or not finite."""
    assert answer.logprobs is not None
    own = answer.logprobs[i]
    known = {} if answer.top is None else dict(answer.top[i])
    if own is None or not math.isfinite(own) or not all(map(math.isfinite, known.values())):
        return None
    known[answer.labels[i]] = own
    return known


def _place_difference(a: dict[str, float], own_a: str, b: dict[str, float], own_b: str) -> float:
    common = a.keys() & b.keys()
    if not common:
        return math.inf
    worst = max(abs(a[label] - b[label]) for label in common)
    # A label that the other list leaves out lies below that list's least entry.
    if own_a not in b:
        worst = max(worst, a[own_a] - min(b.values()))
    if own_b not in a:
        worst = max(worst, b[own_b] - min(a.values()))
    return worst


def judge(
    observations: Sequence[Observation],
    block: int | None,
    *,
    block_given: bool = False,
    cuts: Cuts = "auto",
    left_out: Sequence[tuple[str, str]] = (),
) -> tuple[tuple[CaseResult, ...], Noise]:
    """Turn the observations into verdicts.

    Args:
        observations: in the order of sending.
        block: B in tokens, or None where it is unknown.
        block_given: B came from the operator, so no hit at all means that caching is off.
        cuts: "auto" grants prefill-against-decode noise where cuts may differ, "any" everywhere,
            "same" only to states that decoding made.
        left_out: (scenario, case) of plays that do not fit the server.
    """
    return _Judge(observations, block, block_given, cuts).results(left_out)


@dataclass(frozen=True)
class _HitResult:
    verdict: Verdict
    detail: str = ""
    different_from: int | None = None
    largest: float | None = None
    granted: float | None = None


class _Judge:
    def __init__(
        self,
        observations: Sequence[Observation],
        block: int | None,
        block_given: bool,
        cuts: Cuts,
    ) -> None:
        self._observations = observations
        self._block = block
        self._block_given = block_given
        self._cuts = cuts
        self._cases: dict[tuple[str, str], list[Observation]] = defaultdict(list)
        for o in observations:
            self._cases[o.scenario, o.ask.case].append(o)
        # Some versions leave the field out where it is 0.
        self._reported = any(
            o.answer is not None and o.answer.cached_tokens is not None for o in observations
        )
        self._noise = self._measure_noise()
        self._chains_on_decoded: set[tuple[str, str]] = set()

    def results(self, left_out: Sequence[tuple[str, str]]) -> tuple[tuple[CaseResult, ...], Noise]:
        cases = [*self._server_wide()]
        for (scenario, case), group in self._cases.items():
            result = self._case(scenario, case, group)
            if result is not None:
                cases.append(result)
        cases += [
            CaseResult(case=case, scenario=scenario, verdict=Verdict.LEFT_OUT)
            for scenario, case in left_out
        ]
        return tuple(cases), self._noise

    def _cached(self, answer: Answer) -> int | None:
        if answer.cached_tokens is None and self._reported:
            return 0
        return answer.cached_tokens

    def _measure_noise(self) -> Noise:
        alone: list[float] = []
        together: list[float] = []
        prefill_decode: list[float] = []
        for group in self._cases.values():
            seed = _seed(group)
            firsts: dict[Prompt, Answer] = {}
            for o in group:
                if o.answer is None or o.ask.role is Role.HIT or self._cached(o.answer):
                    continue
                if o.ask.tail_of_seed is not None:
                    if seed is not None:
                        rest = seed.tail(o.ask.tail_of_seed)
                        prefill_decode += _numbers(compare(rest, o.answer))
                    continue
                first = firsts.setdefault(o.ask.prompt, o.answer)
                if first is not o.answer:
                    (together if o.in_batch > 1 else alone).extend(
                        _numbers(compare(first, o.answer))
                    )
        return Noise(
            alone=max(alone, default=None),
            together=max(together, default=None),
            prefill_decode=max(prefill_decode, default=None),
        )

    def _server_wide(self) -> Iterable[CaseResult]:
        hits = [
            o.answer for o in self._observations if o.ask.role is Role.HIT and o.answer is not None
        ]
        if not hits or any(self._cached(a) for a in hits):
            return
        if not self._reported:
            yield CaseResult(
                case="the server",
                scenario="server",
                verdict=Verdict.CACHED_TOKENS_NOT_REPORTED,
                detail="start it with --enable-prompt-tokens-details; without it nobody can tell "
                "a hit from a cold run, nor whether caching is on",
            )
            return
        longest = max((a.prompt_tokens or 0 for a in hits), default=0)
        if self._block is None or (self._block_given and longest > self._block):
            yield CaseResult(
                case="the server",
                scenario="server",
                verdict=Verdict.CACHING_OFF,
                detail=f"repeated prompts of up to {longest:,} tokens were never served from the "
                "cache: start the server with --enable-prefix-caching, or its block is longer "
                "than that",
            )

    def _case(self, scenario: str, case: str, group: Sequence[Observation]) -> CaseResult | None:
        hits = [o for o in group if o.ask.role is Role.HIT]
        trouble = next((o for o in group if o.answer is None), None)
        if trouble is not None:
            on = "a hit" if trouble.ask.role is Role.HIT else "a cold run"
            return CaseResult(
                case=case,
                scenario=scenario,
                verdict=Verdict.FAILED,
                detail=f"{on}: {trouble.trouble}",
            )
        if not hits:
            return self._noise_case(scenario, case, group)
        results = [self._hit(o, group) for o in hits]
        disagreeing = self._hits_against_each_other(hits)
        results += disagreeing
        verdict = next(v for v in _WORST_FIRST if any(r.verdict is v for r in results))
        worst = next(r for r in results if r.verdict is verdict)
        detail = worst.detail
        if disagreeing and worst is not disagreeing[0]:
            detail += "; hits of this prompt disagree with each other, too"
        compared = [r.largest for r in results if r.largest is not None]
        answers = [o.answer for o in hits if o.answer is not None]
        return CaseResult(
            case=case,
            scenario=scenario,
            verdict=verdict,
            detail=detail,
            prompt_tokens=answers[-1].prompt_tokens or len(hits[-1].ask.prompt),
            cached_tokens=tuple(self._cached(a) for a in answers),
            different_from=worst.different_from,
            largest_difference=max(compared, default=None),
            granted=worst.granted,
        )

    def _noise_case(
        self, scenario: str, case: str, group: Sequence[Observation]
    ) -> CaseResult | None:
        """A verdict on cold runs only where they rule out every other verdict."""
        warm = self._warm_cold_run(group)
        if warm is not None:
            return CaseResult(
                case=case, scenario=scenario, verdict=warm.verdict, detail=warm.detail
            )
        return None

    def _warm_cold_run(self, group: Sequence[Observation]) -> _HitResult | None:
        for o in group:
            a = o.answer
            if a is None or o.ask.role is Role.HIT or a.attempts > 1:
                continue
            if self._cached(a):
                return _HitResult(
                    Verdict.SALT_IGNORED,
                    f"a prompt with a cache_salt of its own found {a.cached_tokens} cached "
                    "tokens, so there is no cold run to compare with",
                )
        return None

    def _reference(self, o: Observation, group: Sequence[Observation]) -> Answer | None:
        seed = _seed(group)
        if o.ask.tail_of_seed is not None:
            return None if seed is None else seed.tail(o.ask.tail_of_seed)
        same = [
            x.answer
            for x in group
            if x.answer is not None and x.ask.role is Role.COLD and x.ask.prompt == o.ask.prompt
        ]
        if same:
            return same[0]
        seeds = [
            x.answer
            for x in group
            if x.answer is not None and x.ask.role is Role.SEED and x.ask.prompt == o.ask.prompt
        ]
        return seeds[0] if seeds else None

    def _hit(self, o: Observation, group: Sequence[Observation]) -> _HitResult:
        answer = o.answer
        assert answer is not None
        warm = self._warm_cold_run(group)
        if warm is not None:
            return warm
        tokens = answer.prompt_tokens or len(o.ask.prompt)
        cached = self._cached(answer)
        if cached is not None:
            impossible = self._impossible(cached, tokens, o.shared)
            if impossible:
                return _HitResult(Verdict.IMPOSSIBLE_HIT, impossible)
        reference = self._reference(o, group)
        if reference is None:
            return _HitResult(Verdict.FAILED, "the cold run that it compares with is missing")
        comparison = compare(reference, answer)
        if comparison.not_finite is not None:
            i = comparison.not_finite
            cold = _place(reference, i) is None
            return _HitResult(
                Verdict.NOT_FINITE,
                f"{'the cold run' if cold else 'the hit'} has no finite logprob at answer "
                f"token {i}",
                different_from=i,
            )
        return self._weigh(o, comparison, cached, tokens)

    def _impossible(self, cached: int, tokens: int, shared: int | None) -> str:
        if cached < 0:
            return f"{cached} cached tokens reported"
        if cached > tokens - 1:
            return (
                f"{cached} of {tokens} prompt tokens reported as cached, yet the last one must "
                "always be computed"
            )
        b = self._block
        if b is None:
            return ""
        if cached % b:
            source = "as given by --block-tokens" if self._block_given else "as learned"
            return (
                f"{cached} cached tokens are no multiple of B = {b} ({source}): a GDN state is "
                "kept at block ends only"
            )
        if shared is not None and cached > shared:
            return (
                f"{cached} tokens cached, but only the first {shared} were ever sent with this "
                "cache salt"
            )
        return ""

    def _weigh(self, o: Observation, c: Comparison, cached: int | None, tokens: int) -> _HitResult:
        b = self._block
        by_decode = self._rests_on_decode(o, cached)
        together = o.in_batch > 1
        tight = self._noise.granted(together=together, rounding=False)
        if by_decode:
            rounding = True
        elif self._cuts == "auto":
            rounding = not self._cuts_alike(o, cached, tokens)
        else:
            rounding = self._cuts == "any"
        granted = self._noise.granted(together=together, rounding=rounding)
        at = c.beyond(granted)
        made = "decoding" if by_decode else "prefill"
        if not c.by_logprobs:
            if at is not None:
                return _HitResult(Verdict.DIFFERENT, f"from answer token {at} on", at)
            return _HitResult(
                Verdict.LOGPROBS_NOT_OFFERED,
                "the tokens agree, which proves little: a GDN layer often forgives a stale state",
            )

        def found(verdict: Verdict, detail: str = "", at: int | None = None) -> _HitResult:
            return _HitResult(verdict, detail, at, c.largest, granted)

        if self._noise.hides_faults(together=together):
            return found(
                Verdict.TOO_NOISY,
                f"repeats of one cold run differ by up to {self._noise_words()}",
            )
        if at is not None:
            return found(Verdict.DIFFERENT, self._difference_words(c, at, granted, made), at)
        if cached is None:
            return found(
                Verdict.CACHED_TOKENS_NOT_REPORTED,
                "equal, but nothing proves that the cache was used",
            )
        if cached == 0:
            if b is not None and tokens <= b:
                why = "shorter than one block" if tokens < b else "exactly one block"
                return _HitResult(
                    Verdict.NEVER_CACHED,
                    f"prompt {why}: a hit needs {b:,} tokens and one more to compute",
                )
            return _HitResult(
                Verdict.NO_HIT,
                "nothing to compare: no state was kept at a block end that the two share, or it "
                "was evicted",
            )
        if c.largest == 0 and c.parted is None:
            return found(Verdict.EQUAL)
        if c.beyond(tight) is None:
            return found(
                Verdict.EQUAL_WITHIN_NOISE,
                f"repeats of a cold run differ by up to {self._noise_words()}",
            )
        why = "decoding made the state" if by_decode else "its prompt may be cut elsewhere"
        return found(
            Verdict.EQUAL_WITHIN_ROUNDING,
            f"{why}; without a cache, one text prefilled and decoded differs by up to "
            f"{self._noise.prefill_decode:.3g}",
        )

    def _rests_on_decode(self, o: Observation, cached: int | None) -> bool:
        """Whether decoding made the state that a hit starts from, or one that led to it."""
        if o.ask.chain is None:
            return False
        chain = (o.scenario, o.ask.chain)
        if cached is None:
            if o.ask.decoded:
                self._chains_on_decoded.add(chain)
        elif any(start < cached <= end for start, end in o.ask.decoded):
            self._chains_on_decoded.add(chain)
        return chain in self._chains_on_decoded

    def _cuts_alike(self, o: Observation, cached: int | None, tokens: int) -> bool:
        b = self._block
        if b is None or b <= PLAIN_BLOCK or cached is None:
            return False
        return o.ask.prefilled and o.in_batch == 1 and cached == tokens // b * b

    def _difference_words(self, c: Comparison, at: int, granted: float, made: str) -> str:
        text = f"from answer token {at} on"
        if math.isfinite(c.largest):
            text += f", by up to {c.largest:.3g}; {granted:.3g} is granted"
        if c.parted is not None:
            text += f"; another token at {c.parted}"
        if made == "decoding":
            text += "; decoding made the state"
        floor = self._noise.prefill_decode
        if floor is not None and granted < c.largest <= min(NOISE_MARGIN * floor, NOISE_CAP):
            text += (
                f" (prefill and decode of one text differ by {floor:.3g} here without a cache: if "
                "this server cuts a hit's prompt elsewhere than a cold one's, use --cuts any)"
            )
        elif floor is None:
            text += " (prefill-against-decode noise could not be measured)"
        return text

    def _noise_words(self) -> str:
        parts = []
        if self._noise.alone is not None:
            parts.append(f"{self._noise.alone:.3g} alone")
        if self._noise.together is not None:
            parts.append(f"{self._noise.together:.3g} together")
        return ", ".join(parts) or "0"

    def _hits_against_each_other(self, hits: Sequence[Observation]) -> list[_HitResult]:
        """Hits of one prompt on one block compute the same, whatever the cold run did."""
        firsts: dict[tuple[Prompt, int, bool], Observation] = {}
        found: list[_HitResult] = []
        for o in hits:
            assert o.answer is not None
            if self._noise.hides_faults(together=o.in_batch > 1):
                continue
            cached = self._cached(o.answer)
            if not cached:
                continue
            first = firsts.setdefault((o.ask.prompt, cached, o.in_batch > 1), o)
            if first is o or first.answer is None:
                continue
            granted = self._noise.granted(together=o.in_batch > 1, rounding=o.in_batch > 1)
            c = compare(first.answer, o.answer)
            at = c.beyond(granted)
            if at is not None:
                found.append(
                    _HitResult(
                        Verdict.DIFFERENT,
                        f"two hits of one prompt on the same {cached} cached tokens disagree: "
                        + self._difference_words(c, at, granted, "prefill"),
                        different_from=at,
                        largest=c.largest,
                        granted=granted,
                    )
                )
        return found


def _numbers(c: Comparison) -> list[float]:
    """A noise sample; none where logprobs were not compared, or are no numbers (a fault)."""
    return [c.largest] if c.by_logprobs and c.not_finite is None else []


def _seed(group: Sequence[Observation]) -> Answer | None:
    return next((o.answer for o in group if o.ask.role is Role.SEED and o.answer is not None), None)
