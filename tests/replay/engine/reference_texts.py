"""What a model says to each prompt, by two programs that share no code.

vLLM with ReplaySSM and without drafts decodes greedily; Hugging Face transformers then reads prompt
and answer in one pass in fp32, and must find each token the likeliest. A text ends before the first
token that is not clearly so, since there either would be right. Log-probabilities are those of
transformers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import replay_engine
import torch

CHUNK = 64
DRAFTS = (1, 3, 7, 15, 24, 31)
ANSWER = 48


def filler(drafts: int) -> int:
    """Prompt length that leaves a few tokens of a budget of `CHUNK` beside 1 + D rows."""
    return CHUNK - (drafts + 1) - min(drafts + 1, 4)


def lengths(drafts: int) -> list[int]:
    """Prompts for an engine with D drafts: around its rows and chunks, and some longer ones."""
    return sorted(
        {drafts, drafts + 1, drafts + 2, CHUNK + drafts + 1, filler(drafts)}
        | {CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1}
        | {90, 150, 170, 200}
    )


LENGTHS = sorted({length for drafts in DRAFTS for length in lengths(drafts)})
"""Each is one prompt."""
SEED = 100
CLEAR = 2 * replay_engine.TOLERANCE
"""Logits that far apart keep their order where each is off by half of the tolerance."""


@dataclass(frozen=True)
class Texts:
    """Answers by the length of their prompt.

    Args:
        answers: tokens and log-probabilities.
        texts: token ids of prompt and answer, as far as they were decoded.
        worst: largest difference of log-probabilities between the two programs.
        gap: smallest distance of a token's logit from the next one's.
        file: where they are saved; None for not yet. The drafter reads it.
    """

    answers: dict[int, harness.Result]
    texts: list[list[int]]
    worst: float
    gap: float
    file: Path | None = None

    def prompt(self, length: int) -> list[int]:
        return prompt(length)


def save(found: Texts, file: Path) -> None:
    """Write to `file`, which other processes never see half."""
    content = {
        "answers": [[n, a.tokens, a.logprobs] for n, a in found.answers.items()],
        "texts": found.texts,
        "worst": found.worst,
        "gap": found.gap,
    }
    own = file.with_suffix(f".{os.getpid()}")
    own.write_text(json.dumps(content))
    own.replace(file)


def load(file: Path) -> Texts:
    """What `save` wrote."""
    content = json.loads(file.read_text())
    answers = {
        length: harness.Result(tuple(tokens), tuple(logprobs), 0)
        for length, tokens, logprobs in content["answers"]
    }
    return Texts(answers, content["texts"], content["worst"], content["gap"], file)


def prompt(length: int) -> list[int]:
    """The prompt of that length; none is the beginning of another."""
    return harness.prompt(SEED + length, length)


def make(
    engine: Any,
    model: Path,
    architecture: str,
    lengths: Sequence[int] = LENGTHS,
    answer: int = ANSWER,
) -> Texts:
    """Decode every prompt and check it.

    Args:
        engine: without drafts.
        model: folder of its checkpoint.
        architecture: name of the class in transformers.
        lengths: of the prompts.
        answer: tokens of each answer.

    Raises:
        AssertionError: the two programs differ.
    """
    import transformers

    assert not engine.drafts
    with replay_engine.planned(engine) as plans:
        results = engine.run([prompt(length) for length in lengths], max_tokens=answer)
    assert plans.reached()["folds"] > 0, "ReplaySSM was not active"
    judge = getattr(transformers, architecture).from_pretrained(str(model), dtype=torch.float32)
    answers, texts, worst, smallest = {}, [], 0.0, float("inf")
    for length, result in zip(lengths, results, strict=True):
        text = prompt(length) + list(result.tokens)
        with torch.no_grad():
            logits = judge(input_ids=torch.tensor([text[:-1]])).logits[0, length - 1 :].float()
        best = logits.topk(2)
        gaps = best.values[:, 0] - best.values[:, 1]
        unclear = (gaps < CLEAR).nonzero().flatten().tolist()
        clear = unclear[0] if unclear else answer
        assert clear >= 8, f"a prompt of {length} tokens has no clear answer: gaps {gaps.tolist()}"
        likeliest = tuple(best.indices[:clear, 0].tolist())
        assert result.tokens[:clear] == likeliest, f"prompt of {length} tokens"
        values = logits.log_softmax(-1).gather(1, torch.tensor(result.tokens)[:, None])[:clear, 0]
        answers[length] = harness.Result(likeliest, tuple(values.tolist()), 0)
        mine = torch.tensor(result.logprobs[:clear])
        worst = max(worst, float((mine - values).abs().max()))
        smallest = min(smallest, float(gaps[:clear].min()))
        texts.append(text)
    assert worst <= replay_engine.TOLERANCE, f"log-probabilities differ by {worst}"
    return Texts(answers, texts, worst, smallest)
