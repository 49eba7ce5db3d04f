"""A long chat over HTTP: the same growing prompt cold and cached, and what sets the two apart.

History is exact in tokens: a turn's prompt is the last turn's prompt, the answer's token ids as
they were generated, and the new message as the chat template writes it. (A chat endpoint would
tokenise the answer's text again, and could get other tokens.) Message lengths are chosen so that
block boundaries fall where the demo wants them: into text that prefill computes, or into an answer.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from common import DemoFailure

ANSWER_TOKENS = 24
TOP_LOGPROBS = 5
ANSWER_SECONDS = 300

_SUBJECTS = ("The miller", "A traveller", "The old bridge", "Our server", "The second boat")
_VERBS = ("waits for", "remembers", "carries", "writes down", "asks about", "restores")
_OBJECTS = ("the river", "a long prompt", "every block", "the first question", "a quiet state")


@dataclass(frozen=True)
class Answer:
    """What one request gave.

    Args:
        tokens: generated token ids.
        top: for each of them, logprobs of the likeliest tokens by name.
        prompt_tokens, cached_tokens: as the server counted them.
        first_token_seconds: from sending to the first token.
    """

    tokens: tuple[int, ...]
    top: tuple[Mapping[str, float], ...]
    prompt_tokens: int
    cached_tokens: int
    first_token_seconds: float

    def difference(self, other: Answer) -> float:
        """The largest difference of logprobs, as far as both answers had the same text before.

        So the first position at which they chose differently is the last that counts. A token that
        one of them does not name has at most the least logprob that it names.
        """
        largest = 0.0
        steps = zip(self.top, other.top, self.tokens, other.tokens, strict=True)
        for mine, theirs, token, other_token in steps:
            largest = max(largest, _excess(mine, theirs), _excess(theirs, mine))
            if token != other_token:
                break
        return largest


def _excess(some: Mapping[str, float], others: Mapping[str, float]) -> float:
    """How much more likely a token is at most in `some`, as a difference of logprobs."""
    least = min(others.values())
    return max(value - others.get(token, least) for token, value in some.items())


class Client:
    """Speaks to one server, about the model that it serves."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self.model = str(self._json("GET", "/v1/models")["data"][0]["id"])

    def tokenize(self, text: str) -> list[int]:
        """Token ids of plain text."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return list(self._json("POST", "/tokenize", body)["tokens"])

    def tokenize_message(self, text: str) -> list[int]:
        """Token ids of a user's message in the chat template, up to where the answer begins."""
        body = {"model": self.model, "messages": [{"role": "user", "content": text}]}
        return list(self._json("POST", "/tokenize", body)["tokens"])

    def answer(
        self, prompt: Sequence[int], salt: str, answer_tokens: int = ANSWER_TOKENS
    ) -> Answer:
        """Greedy answer of exactly `answer_tokens` tokens; blocks are shared within one `salt`."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": answer_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "logprobs": TOP_LOGPROBS,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
            "cache_salt": salt,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        tokens: list[int] = []
        top: list[Mapping[str, float]] = []
        usage: dict[str, Any] = {}
        first = None
        sent = time.perf_counter()
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            if not response.is_success:
                raise DemoFailure(f"{response.status_code}: {response.read().decode()[:300]}")
            for event in _events(response.iter_lines()):
                if "error" in event:
                    raise DemoFailure(str(event["error"])[:300])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    if choice["token_ids"] and first is None:
                        first = time.perf_counter() - sent
                    tokens += choice["token_ids"]
                    top += choice["logprobs"]["top_logprobs"]
        if first is None or {len(tokens), len(top)} != {answer_tokens} or not usage:
            raise DemoFailure(f"{len(tokens)} tokens, {len(top)} logprobs, usage {usage}")
        if (details := usage.get("prompt_tokens_details")) is None:
            raise DemoFailure("no prompt_tokens_details, and so no cached tokens, in the usage")
        cached = details["cached_tokens"]
        return Answer(tuple(tokens), tuple(top), usage["prompt_tokens"], cached, first)

    def _json(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        response = self._http.request(method, path, json=body)
        if not response.is_success:
            raise DemoFailure(f"{path}: {response.status_code}: {response.text[:300]}")
        return dict(response.json())


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The objects of a stream of server-sent events."""
    for line in lines:
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        if data:
            yield json.loads(data)


def words(seed: int) -> Iterator[str]:
    """Words of sentences without end, with line numbers that depend on the seed."""
    sentences = itertools.product(_SUBJECTS, _VERBS, _OBJECTS)
    for number, (subject, verb, thing) in enumerate(itertools.cycle(sentences), start=97 * seed):
        yield from f"{subject} {verb} {thing}, as line {number} says.".split()


def message_of(client: Client, seed: int, most: int) -> list[int]:
    """A user's message, as `Client.tokenize_message` gives it, of `most` tokens or a few less."""
    source = list(itertools.islice(words(seed), most))

    def ids(count: int) -> list[int]:
        return client.tokenize_message(" ".join(source[:count]))

    # The longest that is not too long: a word is at least a token.
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(ids(middle)) <= most else (low, middle - 1)
    return ids(low)
