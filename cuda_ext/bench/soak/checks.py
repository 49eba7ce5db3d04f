"""The gate of a soak: what was served, which answers are wrong, and whether memory grows.

* Every request that was not aborted has its whole answer; of those that were, what came is checked.
* `exact` (fp32): every token is that of the engine without drafts, which is ReplaySSM's too, since
  vLLM's own layer takes no fp32; tests/replay/engine/ holds that one against transformers. Where
  two tokens are nearly alike, either would be right, and the known answer ends before.
* `words` (bf16, copy task): roundings change a word now and then, so word errors are counted
  against the truth. The share may be what the engine without drafts has, in the worse of two batch
  compositions, plus the share of words in which the two differ, plus what so few words may not
  have shown (`UNSEEN`): `Usual.allowed`. Where that is above `task.MAY_ERR`, there is no soak. No
  answer may be ruined, `RUINED` of its words wrong beyond the more that either of those has wrong
  in it.
* No log-probability is NaN or infinite. Requests were preempted and aborted, and as many finished
  as are sent at a time, which ran side by side (`RUNNING`); drafts were accepted, one an answer at
  least, and refused. What does not happen in the first `EARLY` of the time ends the run
  (`in_vain`).
* All blocks are free at the end, and no figure of memory grows (`GROWTH`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from cuda_ext.bench.copy_task import task

MIB = 2**20
GROWTH = {"allocated": 4, "reserved": 256, "resident": 256}
"""MiB from the second quarter of the samples to the last one, medians. `allocated` holds what the
engine keeps between two steps, which is fixed; the other two grow by whole pieces that the
allocators keep for prompts of another length, fewer and fewer. A state of one request that is lost
with each abort would be more within a minute."""
LEAST_SAMPLES = 8
EARLY = 0.2
"""Share of the time after which a run ends that would be red for what has not happened in it."""
EARLY_SAMPLES = 4
KNOWN = 0.5
"""Share of the fixed set's tokens that must be clear where answers are exact."""
RUNNING = 0.5
"""Of the requests that the pool has room for, how many must run on average."""
RUINED = 0.25
UNSEEN = 24
"""Words of the fixed set. Where an event was not seen once, up to three are likely enough (rule of
three, 95 %), and one wrong tag spoils half of a class's 16 words or fewer."""


@dataclass(frozen=True)
class Sample:
    """The engine between two steps.

    Args:
        seconds: since the load began.
        resident: memory of the process, bytes.
        allocated, reserved: by torch on the GPU, bytes; 0 without one.
        free_blocks: of the pool.
        running, waiting: requests.
        finished: requests so far.
        preempted: requests so far, each time counted; by vLLM's counter, which hears of it with
            the request's next output, and never where it is aborted before.
        accepted: drafts so far.
    """

    seconds: float
    resident: int
    allocated: int
    reserved: int
    free_blocks: int
    running: int
    waiting: int
    finished: int
    preempted: int
    accepted: int


@dataclass
class Tally:
    """Answers that were looked at.

    Args:
        checked: answers, `aborted` of them cut short.
        tokens: compared.
        wrong: answers that differ (`exact`) or are ruined (`words`).
        short: answers of another length than was asked for.
        first_wrong: of the first wrong one, what to look at.
        words, word_errors: of `words`.
        not_finite, logprobs: log-probabilities that are NaN or infinite, and all that were seen.
    """

    checked: int = 0
    aborted: int = 0
    tokens: int = 0
    wrong: int = 0
    short: int = 0
    first_wrong: str | None = None
    words: int = 0
    word_errors: int = 0
    not_finite: int = 0
    logprobs: int = 0

    def look(
        self, name: str, found: Sequence[int], wanted: Sequence[int], *, asked: int | None
    ) -> None:
        """Compare one answer, token by token.

        Args:
            name: of the request.
            found: its tokens.
            wanted: what is known of the right answer, at least as long.
            asked: tokens it should have; None for an aborted one.
        """
        self._count(found, asked)
        if list(found) == list(wanted[: len(found)]):
            return
        if len(found) > len(wanted) and list(found[: len(wanted)]) == list(wanted):
            self._wrong(f"{name}: {len(found)} tokens, and only {len(wanted)} are known")
            return
        at = next(i for i, pair in enumerate(zip(found, wanted, strict=False)) if len({*pair}) > 1)
        self._wrong(f"{name}: token {at} of {len(found)} is {found[at]}, not {wanted[at]}")

    def look_at_words(
        self,
        name: str,
        found: Sequence[int],
        truth: Sequence[int],
        *,
        asked: int | None,
        usual: int,
    ) -> None:
        """Count the word errors of one answer, its last word left out if it was cut.

        Args:
            name, found, asked: see `look`.
            truth: the right answer.
            usual: word errors that an engine without drafts has in the whole answer.
        """
        self._count(found, asked)
        whole = task.whole_words(found)
        words = whole // task.WORD_TOKENS
        errors = task.word_errors(found[:whole], truth[:whole])
        self.words, self.word_errors = self.words + words, self.word_errors + errors
        if errors - usual > max(2, RUINED * words):
            self._wrong(f"{name}: {errors} of {words} words are wrong")

    def look_at_logprobs(self, values: Sequence[float]) -> None:
        """Count those that are NaN or infinite."""
        self.logprobs += len(values)
        self.not_finite += sum(not abs(value) < float("inf") for value in values)

    def _count(self, found: Sequence[int], asked: int | None) -> None:
        self.checked += 1
        self.aborted += asked is None
        self.short += asked is not None and len(found) != asked
        self.tokens += len(found)

    def _wrong(self, what: str) -> None:
        self.wrong += 1
        self.first_wrong = self.first_wrong or what


@dataclass(frozen=True)
class Usual:
    """What engines without drafts say, in two batch compositions (`words`).

    Args:
        word_error_rate: the worse of the two.
        differs: share of the words in which the two differ.
        words: of all answers.
        by_prompt: the more word errors of the two.
    """

    word_error_rate: float
    differs: float
    words: int
    by_prompt: Sequence[int]

    @property
    def allowed(self) -> float:
        """Share of words that may be wrong with drafts."""
        return self.word_error_rate + self.differs + UNSEEN / self.words

    def problem(self, words: tuple[int, int]) -> str | None:
        """Why these answers can't tell a right one from a wrong one; None where they can.

        A model of one length copies no other, and among wrong words a fault's would not show.

        Args:
            words: of a text, from and to.
        """
        if self.word_error_rate > task.MAY_ERR:
            return _can_not_copy(self.word_error_rate, words)
        if self.allowed <= task.MAY_ERR:
            return None
        room = task.MAY_ERR - self.word_error_rate - self.differs
        if room > 0:
            mend = (
                f"{self.words} words are too few to show that no more are: --count or --words for "
                f"{math.ceil(UNSEEN / room)} at least"
            )
        else:
            mend = _lengths(words)
        return (
            f"with drafts {self.allowed:.1%} of the words might be wrong and be allowed, and at "
            f"most {task.MAY_ERR:.0%} is of use: {self.word_error_rate:.1%} are without drafts, in "
            f"{self.differs:.1%} two batch compositions differ, and {UNSEEN / self.words:.1%} is "
            f"for what {self.words} words do not show; {mend}"
        )


def _lengths(words: tuple[int, int]) -> str:
    return (
        f"texts are of {words[0]} to {words[1]} words, and --words names lengths that the model "
        "was trained for"
    )


def _can_not_copy(rate: float, words: tuple[int, int]) -> str:
    return (
        f"without drafts {rate:.1%} of the words are wrong, and at most {task.MAY_ERR:.0%} are of "
        f"use; {_lengths(words)}"
    )


def exact_problem(
    answers: Sequence[Sequence[int]],
    asked: int,
    truths: Sequence[Sequence[int]],
    words: tuple[int, int] | None,
) -> str | None:
    """Why exact answers prove little; None where they prove enough.

    An engine that is wrong without drafts as with them would say the same, so where the task has
    a truth, the known answers are held against it.

    Args:
        answers: what is clear of them.
        asked: tokens of all answers, clear or not.
        truths: the right answers, where the task has them.
        words: of a text, from and to, where the task has a truth.
    """
    known = sum(len(answer) for answer in answers)
    if known < KNOWN * asked:
        return (
            f"of {asked} tokens of the answers {known} are clear, where one token is likelier than "
            f"all others, and at least {KNOWN:.0%} must be: --answers or --words for shorter ones"
        )
    if words is None:
        return None
    whole = [task.whole_words(answer) for answer in answers]
    errors = sum(
        task.word_errors(answer[:end], truth[:end])
        for answer, truth, end in zip(answers, truths, whole, strict=True)
    )
    rate = errors * task.WORD_TOKENS / max(1, sum(whole))
    return _can_not_copy(rate, words) if rate > task.MAY_ERR else None


def usual(rounds: Sequence[Sequence[Sequence[int]]], truths: Sequence[Sequence[int]]) -> Usual:
    """See `Usual`; `rounds` are two sets of answers to the same prompts."""
    errors = [
        [task.word_errors(answer, truth) for answer, truth in zip(answers, truths, strict=True)]
        for answers in rounds
    ]
    words = sum(len(truth) // task.WORD_TOKENS for truth in truths)
    differ = sum(task.word_errors(a, b) for a, b in zip(*rounds, strict=True))
    return Usual(
        max(sum(line) for line in errors) / words,
        differ / words,
        words,
        [max(pair) for pair in zip(*errors, strict=True)],
    )


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """MiB by which each figure of `GROWTH` grew; nothing where there are too few samples."""
    if len(samples) < LEAST_SAMPLES:
        return {}
    quarter = len(samples) // 4
    parts = samples[quarter : 2 * quarter], samples[-quarter:]
    return {
        name: (
            median(getattr(s, name) for s in parts[1]) - median(getattr(s, name) for s in parts[0])
        )
        / MIB
        for name in GROWTH
    }


def _not_yet(found: Mapping[str, Any]) -> list[str]:
    """What has not happened and must; see `problems` for `found`."""
    problems = []
    if not found["preempted"]:
        problems.append(
            f"no request was preempted: --pool {found['pool']} left {found['least_free_blocks']} "
            f"of {found['pool_blocks']} blocks free at the least: lower it"
        )
    if found["drafting"] and found["accepted"] < found["answers"]:
        problems.append(
            f"{found['accepted']:.0f} drafts were accepted in {found['answers']} answers: "
            "--speculative for a drafter that knows the texts"
        )
    return problems


def in_vain(found: Mapping[str, Any], share: float, samples: int) -> list[str]:
    """Why to go on would end red; nothing as long as it might not.

    Args:
        found: `answers`, `concurrency`, `preempted`, `accepted`, `drafting`, `pool`,
            `pool_blocks`, `least_free_blocks`, each so far.
        share: of the time that is over.
        samples: so far.
    """
    # A request that is in its first life holds little, and has hardly met a full pool.
    if share < EARLY or samples < EARLY_SAMPLES or found["answers"] < found["concurrency"]:
        return []
    return [f"ended after {share:.0%} of the time: {problem}" for problem in _not_yet(found)]


def problems(result: Mapping[str, Any], tally: Tally, allowed_words: float | None) -> list[str]:
    """What is wrong, nothing where the gate is green.

    Args:
        result: of the serving process: `layers`, `added`, `answers`, `finished`, `aborted`,
            `aborted_unanswered`, `preempted`, `proposed` and `accepted` (drafts), `drafting`,
            `concurrency`, `mean_running`, `pool`, `pool_blocks`, `least_free_blocks`,
            `free_blocks_before`, `free_blocks_after`, `growth_mib`, and of `in_vain`
            `ended_early`.
        tally: of its answers.
        allowed_words: share of words that may be wrong; None for exact answers.
    """
    found = list(result["ended_early"])
    early = bool(found)
    if not all("Replay" in layer for layer in result["layers"].split(", ")):
        found.append(f"served by {result['layers']}")
    if tally.checked != result["added"]:
        found.append(f"{result['added']} requests were sent, {tally.checked} answers came back")
    if tally.short:
        found.append(f"{tally.short} answers have another length than was asked for")
    if tally.wrong:
        found.append(f"{tally.wrong} of {tally.checked} answers are wrong: {tally.first_wrong}")
    if allowed_words is not None and tally.word_errors > allowed_words * tally.words:
        found.append(
            f"{tally.word_errors} of {tally.words} words are wrong, "
            f"{allowed_words * tally.words:.0f} allowed"
        )
    if tally.not_finite or not tally.logprobs:
        found.append(f"{tally.not_finite} of {tally.logprobs} log-probabilities are not finite")
    if not early:
        found += _not_yet(result) + _too_little(result)
    before, after = result["free_blocks_before"], result["free_blocks_after"]
    if before != after:
        found.append(f"{before} blocks were free before the load, {after} are after it")
    for name, grown in result["growth_mib"].items():
        if grown > GROWTH[name]:
            found.append(f"{name} memory grew by {grown:.1f} MiB, {GROWTH[name]} allowed")
    return found


def _too_little(result: Mapping[str, Any]) -> list[str]:
    """Of what a whole run must have more than it has; see `problems`."""
    found = []
    concurrency, running = result["concurrency"], result["mean_running"]
    if result["finished"] < concurrency:
        found.append(
            f"{result['finished']} requests were finished, fewer than are sent at a time, "
            f"{concurrency}: raise --minutes, or lower --concurrency or --aborts"
        )
    if not result["aborted"]:
        found.append("no request was aborted: raise --aborts")
    elif not result["aborted_unanswered"]:
        found.append("no request was aborted before its first token: raise --aborts or --minutes")
    if result["drafting"] and result["proposed"] <= result["accepted"]:
        found.append(f"none of {result['proposed']:.0f} drafts was refused")
    least = RUNNING * result["pool"] * concurrency
    if running < least:
        found.append(
            f"{running:.1f} requests ran at a time on average, and {least:.1f} must: --options "
            "for a larger max_num_batched_tokens or max_num_seqs, or lower --concurrency"
        )
    if not result["growth_mib"]:
        found.append(f"fewer than {LEAST_SAMPLES} samples: growth of memory was not judged")
    return found
