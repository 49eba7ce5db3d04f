"""A drafter that knows what the model will say: vLLM's `method="custom_class"`.

It continues the texts of a file, spoils drafts at a chosen rate, varies how many it gives, and at
times gives none for one request or for the whole batch. Every draw depends on the seed and on the
request's own tokens, not on the batch that it is in; only whether the whole batch goes without
depends on the number of the call. vLLM makes it in whichever process runs the model, so what it
needs travels in `additional_config`, below `KEY`.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEY = "oracle_drafter"
CLASS = f"{__name__}.OracleDrafter"
WRONG = 3
"""Added to a token that is spoiled; the vocabulary has more than twice as many plain tokens."""


@dataclass(frozen=True)
class Policy:
    """How good the drafts are.

    Args:
        seed: of every draw.
        right: chance of each draft to be the model's own next token.
        silent: chance of a request to get no drafts in a step.
        pause: chance of a step without drafts for any request.
        whole: chance that a request gets all D drafts, all right.
        ragged: whether the number of other drafts varies from 1 to D; else it is always D.
    """

    seed: int = 0
    right: float = 0.9
    silent: float = 0.15
    pause: float = 0.2
    whole: float = 0.2
    ragged: bool = True


Script = Callable[[Sequence[int]], Sequence[int]]


def speculative_config(drafts: int) -> dict[str, Any]:
    """What vLLM takes as `speculative_config`."""
    return {"method": "custom_class", "model": CLASS, "num_speculative_tokens": drafts}


def additional_config(texts: Path, **policy: Any) -> dict[str, Any]:
    """What `additional_config` carries: the file of texts, and a policy other than the default."""
    return {KEY: {"texts": str(texts), **policy}}


class OracleDrafter:
    """Proposes the next tokens of known texts.

    Args:
        vllm_config: the engine's; `additional_config[KEY]` names a JSON file with a list `texts`,
            each a prompt's token ids with the model's own continuation.

    Attributes:
        policy: may be set between steps.
        script: `script(known tokens)` gives a request's drafts instead of the policy.
        calls: steps so far.
    """

    def __init__(self, vllm_config: Any) -> None:
        given = dict(vllm_config.additional_config[KEY])
        self.drafts = vllm_config.speculative_config.num_speculative_tokens
        self._texts: list[list[int]] = json.loads(Path(given.pop("texts")).read_text())["texts"]
        self._given = given
        self.reset()

    def reset(self) -> None:
        """Forget the script, and go back to the policy of the start."""
        self.policy = Policy(**self._given)
        self.script: Script | None = None
        self.calls = 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is none."""

    def text(self, known: Sequence[int]) -> int | None:
        """Number of the text that begins with `known`, or ends within it; None where none does."""
        for number, text in enumerate(self._texts):
            if text[: len(known)] == known[: len(text)]:
                return number
        return None

    def continuation(self, known: Sequence[int]) -> list[int]:
        """What the model says after `known`; empty where no text begins so."""
        number = self.text(known)
        return [] if number is None else self._texts[number][len(known) :]

    def follow(self, steps: Sequence[tuple[int, int]]) -> None:
        """Give each request drafts by a list, and none once it is through.

        Args:
            steps: for each of a request's proposals, how many drafts, of which the first how many
                are right.
        """
        asked: Counter[int | None] = Counter()

        def script(known: Sequence[int]) -> list[int]:
            text = self.text(known)
            number, asked[text] = asked[text], asked[text] + 1
            if number >= len(steps):
                return []
            count, right = steps[number]
            tokens = self.continuation(known)[:count]
            return [t if i < right else spoiled(t) for i, t in enumerate(tokens)]

        self.script = script

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Mapping[str, Any] | None = None,
    ) -> list[list[int]]:
        """Drafts for each request of the batch; none for one that sampled nothing in the step."""
        self.calls += 1
        batch = random.Random(f"{self.policy.seed} {self.calls}")
        pause = self.script is None and batch.random() < self.policy.pause
        found: list[list[int]] = []
        for row, sampled in enumerate(sampled_token_ids):
            known = token_ids_cpu[row, : int(num_tokens_no_spec[row])].tolist()
            if not len(sampled) or pause:
                found.append([])
            elif self.script is not None:
                found.append(list(self.script(known)))
            else:
                found.append(self._draft(known))
        return found

    def _draft(self, known: list[int]) -> list[int]:
        policy = self.policy
        draw = random.Random(f"{policy.seed} {known}")
        if draw.random() < policy.silent:
            return []
        tokens = self.continuation(known)[: self.drafts]
        if draw.random() < policy.whole:
            return tokens
        if policy.ragged:
            tokens = tokens[: draw.randint(1, self.drafts)]
        return [t if draw.random() < policy.right else spoiled(t) for t in tokens]


def spoiled(token: int) -> int:
    """Another plain token than `token`."""
    return WRONG + (token + 1) % 500
