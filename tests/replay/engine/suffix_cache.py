"""Stands in for Arctic Inference's suffix cache, which has to be compiled.

vLLM's own proposer of the method `suffix` runs on it, and that is what is tested: drafts of lengths
that change from step to step, none for some requests. The trees of the real one find longer drafts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest


@dataclass(frozen=True)
class Draft:
    """What `speculate` gives."""

    token_ids: list[int]


class SuffixDecodingCache:
    """What vLLM's proposer calls; drafts what followed the longest earlier match of the end."""

    def __init__(self, max_tree_depth: int, max_cached_requests: int) -> None:
        self.max_tree_depth = max_tree_depth
        self.cached_requests: set[str] = set()
        self._tokens: dict[str, list[int]] = {}

    @property
    def active_requests(self) -> set[str]:
        return set(self._tokens)

    def start_request(self, req_id: str, prompt_token_ids: Sequence[int]) -> None:
        self._tokens[req_id] = [int(token) for token in prompt_token_ids]

    def stop_request(self, req_id: str) -> None:
        del self._tokens[req_id]

    def evict_cached_response(self, req_id: str) -> None:
        self.cached_requests.discard(req_id)

    def add_active_response(self, req_id: str, token_ids: Sequence[int]) -> None:
        self._tokens[req_id] += [int(token) for token in token_ids]

    def speculate(
        self,
        req_id: str,
        pattern: Sequence[int],
        *,
        max_spec_tokens: int,
        max_spec_factor: float,
        min_token_prob: float,
    ) -> Draft:
        tokens = self._tokens[req_id]
        for length in range(min(8, len(pattern)), 0, -1):
            end = [int(token) for token in pattern[-length:]]
            for first in range(len(tokens) - length - 1, -1, -1):
                if tokens[first : first + length] == end:
                    follows = tokens[first + length :]
                    # As the real one: no longer draft than the match allows for.
                    most = min(max_spec_tokens, int(max_spec_factor * length) + 1)
                    return Draft(follows[:most])
        return Draft([])


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-in where vLLM looks, unless the real one is installed."""
    try:
        import arctic_inference.suffix_decoding  # noqa: F401
    except ImportError:
        import vllm.config.speculative

        package, module = (
            ModuleType(name) for name in ("arctic_inference", "arctic_inference.suffix_decoding")
        )
        module.SuffixDecodingCache = SuffixDecodingCache  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, package.__name__, package)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(vllm.config.speculative, "has_arctic_inference", lambda: True)
