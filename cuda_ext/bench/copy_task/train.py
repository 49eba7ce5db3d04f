"""Trains the copy task's model in minutes: `python -m cuda_ext.bench.copy_task.train OUT`.

Words a text grow with success, from 8 to what 3,072 tokens of answer hold; how many classes a
text draws from is random, since in a short text of many classes no class comes up twice. Target
and drafter learn together, the drafter a chain of drafts as vLLM runs it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cuda_ext.bench.copy_task import model as copy_model
from cuda_ext.bench.copy_task import task

LONG_ENOUGH = 0.96
"""Share of right tokens at which the texts get longer."""
WARM_UP = 100
"""Steps in which the learning rate rises."""
DRAFTS = 4
DRAFT_WEIGHT = 0.2
GRADIENTS_MAY_DIFFER = 0.05
"""Relative RMS error. fla's tests allow 0.02 in bf16; a wrongly compiled tile is off by 0.5."""
GOOD_ENOUGH = 0.99
"""Share of right words, next token by next token. Left alone, a wrong tag makes the rest of its
class wrong, half of 16 words: 8 % of all, and score.py can use 5 % (`task.MAY_ERR`)."""
COOLING = 0.3
"""Share of the time in which the learning rate falls, at the end."""


def batch(
    rows: int, words: int, source: torch.Generator, most_classes: int = task.CLASSES
) -> tuple[Tensor, int]:
    """Random texts of `words` words each.

    Args:
        rows: texts.
        words: a text.
        source: generator on the device of the result.
        most_classes: of a text; fewer in half of the texts.

    Returns:
        Tokens [rows, T] and the index of the first answer token. T is a multiple of 64.
    """
    device = source.device

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=source, device=device)

    exponents = integers(1, most_classes.bit_length(), rows, 1)
    classes = torch.where(integers(0, 2, rows, 1) == 0, 2**exponents, most_classes)
    order = torch.rand(rows, task.CLASSES, generator=source, device=device).argsort(1)
    drawn = (torch.rand(rows, words, generator=source, device=device) * classes).long()
    kind = order.gather(1, drawn)
    letters = integers(task.FIRST_LETTER, task.VOCAB, rows, words, task.LETTERS)
    count = F.one_hot(kind, task.CLASSES).cumsum(1).gather(2, kind[..., None])
    word = torch.cat((kind[..., None] + task.FIRST_CLASS, letters), 2)
    asked = torch.cat((word, torch.full_like(count, task.END)), 2).flatten(1)
    said = torch.cat((word, count % task.TAGS + task.FIRST_TAG), 2).flatten(1)
    column = asked.new_ones(rows, 1)
    tokens = torch.cat((column * task.BOS, asked, column * task.COPY, said), 1)
    pad = -tokens.shape[1] % 64
    return F.pad(tokens, (0, pad), value=task.END_OF_TEXT), 2 + asked.shape[1]


def losses(logits: Sequence[Tensor], tokens: Tensor, first: int, words: int) -> tuple[Tensor, Any]:
    """Loss of target and drafts over the answer, and shares of right tokens.

    Returns:
        The loss, and a tensor of the shares: of all tokens, of the tags, of whole words, and of
        each draft's tokens.
    """
    end = first + words * task.WORD_TOKENS
    total, shares = torch.zeros((), device=tokens.device), []
    for j, values in enumerate(logits):
        wanted = tokens[:, first + j : end]
        given = values[:, first - 1 : end - 1 - j].float()
        loss = F.cross_entropy(given.flatten(0, 1), wanted.flatten())
        total = total + loss * (DRAFT_WEIGHT if j else 1.0)
        right = given.argmax(-1) == wanted
        shares.append(right.float().mean())
        if j == 0:
            by_word = right.unflatten(1, (words, task.WORD_TOKENS))
            shares += [by_word[..., -1].float().mean(), by_word.all(-1).float().mean()]
    return total, torch.stack(shares)


def spoiled(rule: copy_model.Rule, first: int, fault: str) -> copy_model.Rule:
    """`rule` with a fault of the recurrent state from token `first` on.

    Args:
        fault: `forget`: every 256 tokens all before is forgotten; `lost rows`: one row of 16 is
            never written.
    """

    def faulty(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any) -> Any:
        g, beta = g.clone(), beta.clone()
        if fault == "forget":
            g[:, first + 128 :: 256] = -50.0
        else:
            beta[:, first + 7 :: 16] = 0
            g[:, first + 7 :: 16] = 0
        return rule(query, key, value, g=g, beta=beta)

    return faulty


class Training:
    """One run.

    Args:
        device: `cuda` or `cpu`.
        tokens: a step.
        words: a text, in the end.
        classes: a text, at most.
        rate: largest learning rate.
        seed: of weights and texts.
        rule: `torch` leaves fla alone.
    """

    def __init__(
        self,
        device: str,
        *,
        tokens: int,
        words: int,
        classes: int,
        rate: float,
        seed: int,
        rule: str = "auto",
    ) -> None:
        torch.manual_seed(seed)
        torch.backends.cuda.matmul.allow_tf32 = True
        self.device, self.tokens, self.words, self.classes = device, tokens, words, classes
        self.rule, self.kernels = self._rule(rule)
        copy_model.use_rule(self.rule)
        self.model = copy_model.CopyModel().to(device)
        self.source = torch.Generator(device).manual_seed(seed)
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        rest = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
        self.rate = rate
        self.optimizer = torch.optim.AdamW(groups, rate, betas=(0.9, 0.98), fused=device == "cuda")
        self.step = 0

    def _rule(self, wanted: str) -> tuple[copy_model.Rule, dict[str, Any]]:
        if self.device == "cpu" or wanted == "torch":
            return copy_model.chunk_rule, {"rule": "chunked torch"}
        try:
            rule = copy_model.fla_rule()
            errors = copy_model.worst_gradient(rule)
        except Exception as problem:
            print(f"fla is not used: {type(problem).__name__}: {problem}", flush=True)
            return copy_model.chunk_rule, {"rule": "chunked torch", "fla": repr(problem)}
        print("fla against fp32:", {k: f"{v:.1e}" for k, v in errors.items()}, flush=True)
        if all(error < GRADIENTS_MAY_DIFFER for error in errors.values()):
            return rule, {"rule": "fla", "errors": errors}
        print("fla is not used: its gradients are wrong on this GPU", flush=True)
        return copy_model.chunk_rule, {"rule": "chunked torch", "errors": errors}

    def run(self, words: int, drafts: int, *, rows: int | None = None) -> tuple[Tensor, Any]:
        """Loss and shares on new texts."""
        length = 2 + 2 * words * task.WORD_TOKENS
        rows = rows or max(1, self.tokens // length)
        tokens, first = batch(rows, words, self.source, self.classes)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            logits = self.model(tokens, drafts)
        return losses(logits, tokens, first, words)

    def learn(self, words: int, warmth: float = 1.0) -> Tensor:
        """One step; gives loss and shares.

        Args:
            words: a text.
            warmth: share of the largest learning rate.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * warmth * min(1.0, (self.step + 1) / WARM_UP)
        loss, shares = self.run(words, DRAFTS)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return torch.cat((loss.detach()[None], shares))

    @torch.no_grad()
    def test(self, words: int, rows: int, fault: str | None = None) -> dict[str, float]:
        """Shares of right tokens, tags, words and drafts on new texts, next token by next token."""
        if fault:
            first = 2 + words * task.WORD_TOKENS
            copy_model.use_rule(spoiled(self.rule, first, fault))
        try:
            _, shares = self.run(words, DRAFTS, rows=rows)
        finally:
            copy_model.use_rule(self.rule)
        names = ["tokens", "tags", "words", *(f"draft {j + 1}" for j in range(DRAFTS))]
        return {n: round(x, 5) for n, x in zip(names, shares.tolist(), strict=True)}


def train(
    training: Training, minutes: float, enough: float, folder: Path, first: int = 8
) -> list[dict[str, Any]]:
    """Learn until `minutes` are over, or `COOLING` of them after `enough` of the words are right.

    The checkpoint is written again and again, so that a run that is cut short leaves one.

    Args:
        training: the run.
        minutes: at most.
        enough: share of the words, at full length.
        folder: of the checkpoint.
        first: words of the first texts.

    Returns:
        The printed lines.
    """
    begin = printed = time.monotonic()
    seconds = 60 * minutes
    end, cools = seconds, (1 - COOLING) * seconds
    words = min(first, training.words)
    lines: list[dict[str, Any]] = []
    recent: list[Tensor] = []
    while (now := time.monotonic() - begin) < end:
        # A shorter text now and then, so that what was learned first stays.
        chosen = words if training.step % 4 else max(4, words // 2)
        shares = training.learn(chosen, max(0.02, min(1.0, (end - now) / (end - cools))))
        if chosen == words:
            recent.append(shares)
        if training.step % 20 or not recent:
            continue
        loss, *values = torch.stack(recent).mean(0).tolist()
        recent = []
        if not math.isfinite(loss):
            raise RuntimeError(f"loss is {loss} at step {training.step}")
        if words == training.words and values[2] >= enough and now < cools:
            cools, end = now, now + COOLING * seconds
        longer = words < training.words and values[0] > LONG_ENOUGH
        if longer or time.monotonic() - printed > 3:
            printed = time.monotonic()
            line: dict[str, Any] = {"seconds": round(now, 1), "step": training.step}
            line |= {"words": words, "loss": round(loss, 4)}
            lines.append(line | {"right": [round(x, 4) for x in values]})
            print(json.dumps(lines[-1]), flush=True)
            training.model.save(folder)
        if longer:
            words = min(2 * words, training.words)
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 where `GOOD_ENOUGH` of the words are right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, help="folder of the checkpoint")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=32768, help="a step")
    parser.add_argument("--words", type=int, default=task.FULL_WORDS, help="a text, in the end")
    parser.add_argument("--classes", type=int, default=task.CLASSES, help="a text, at most")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--enough", type=float, default=0.999, help="share of words that are right")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="folder of a checkpoint to go on from")
    parser.add_argument("--first-words", type=int, default=8, help="a text, in the beginning")
    parser.add_argument("--rule", choices=("auto", "torch"), default="auto", help="of GDN")
    options = parser.parse_args(argv)
    training = Training(
        options.device,
        tokens=options.tokens,
        words=options.words,
        classes=options.classes,
        rate=options.rate,
        seed=options.seed,
        rule=options.rule,
    )
    if options.start is not None:
        training.model.load(options.start)
    lines = train(training, options.minutes, options.enough, options.out, first=options.first_words)
    training.model.save(options.out)
    rows = max(1, 2 * options.tokens // (2 + 2 * options.words * task.WORD_TOKENS))
    tests = {
        fault or "whole": training.test(options.words, rows, fault)
        for fault in (None, "forget", "lost rows")
    }
    report = {
        "command": " ".join(["python -m cuda_ext.bench.copy_task.train", *(argv or sys.argv[1:])]),
        "kernels": training.kernels,
        "steps": training.step,
        "words": options.words,
        "tests": tests,
        "lines": lines,
    }
    (options.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(tests, indent=1), flush=True)
    right = tests["whole"]["words"]
    if right >= GOOD_ENOUGH:
        print(f"trained: {right:.2%} of the words of {options.words} are right", flush=True)
        return 0
    reached = lines[-1]["words"] if lines else 0
    print(
        f"not trained: {right:.2%} of the words of {options.words} are right, {GOOD_ENOUGH:.0%} "
        f"are needed; texts had got to {reached} words in {training.step} steps. "
        "Give more --minutes, or score texts as short as these (--output)",
        flush=True,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
