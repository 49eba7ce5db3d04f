"""The two values that pass between the rooms of the checker: a prompt, and a server's answer."""

from __future__ import annotations

from dataclasses import dataclass

# A prompt is a row of units. An int is one token id (or, where the server takes text only, the
# index of a word); a str is an earlier answer's text, put back as it came.
Prompt = tuple["int | str", ...]


@dataclass(frozen=True)
class Answer:
    """One completion, as far as the checker reads it.

    Args:
        labels: one string a generated token; the whole text as one label where the server names
            no tokens.
        token_ids: ids of the generated tokens, or None where the server does not return them.
        logprobs: natural-log probability of each generated token; an entry is None where the
            server sent null. None as a whole where logprobs were not returned.
        top: per generated token the likeliest labels with their logprobs, or None.
        text: the generated text.
        prompt_tokens: the server's count of prompt tokens, or None.
        cached_tokens: the server's count of prompt tokens taken from its cache, or None.
        attempts: how often the request was sent; above 1 the server may have seen it before.
    """

    labels: tuple[str, ...]
    token_ids: tuple[int, ...] | None
    logprobs: tuple[float | None, ...] | None
    top: tuple[dict[str, float], ...] | None
    text: str
    prompt_tokens: int | None
    cached_tokens: int | None
    attempts: int = 1

    def units(self) -> Prompt:
        """The answer as units that can follow its prompt in a next turn."""
        if self.token_ids is not None:
            return self.token_ids
        return (self.text,)

    def tail(self, start: int) -> Answer:
        """The answer from its token `start` on."""
        return Answer(
            labels=self.labels[start:],
            token_ids=None if self.token_ids is None else self.token_ids[start:],
            logprobs=None if self.logprobs is None else self.logprobs[start:],
            top=None if self.top is None else self.top[start:],
            text=self.text,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            attempts=self.attempts,
        )
