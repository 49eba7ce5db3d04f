"""Packaged facts: the shapes of known models and drafters, and what is known of each platform.

A fact that no public source gives has no value: it is listed as unknown with what hints there are,
and the planner says what to pass instead of guessing. `model_facts.json` and `platforms.json`
carry the source of every value.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from functools import lru_cache
from importlib import resources
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vllm_gaudi_ext.planner.errors import PlanError


class ModelFacts(BaseModel):
    """What is known of one model or drafter."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: dict[str, Any] = Field(description="keys and values of the Hugging Face config.json")
    absent: list[str] = Field(description="keys that are known not to be in the file")
    unknown: dict[str, str] = Field(description="keys without a public value, and what hints exist")
    inferred: dict[str, str] = Field(description="keys whose value was not read from this file")
    sources: dict[str, str] = Field(description="where the values come from")
    notes: str = ""


class FactsFile(BaseModel):
    """`model_facts.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_version: Literal[1] = Field(alias="schema")
    generated: str
    about: str
    family_notes: dict[str, str]
    models: dict[str, ModelFacts]
    drafters: dict[str, ModelFacts]


class Platform(BaseModel):
    """One kind of card."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = ""
    vendor: Literal["gaudi", "nvidia", "cpu", "unknown"]
    title: str
    unit: int = Field(ge=1, description="tokens that the block size is rounded up to")
    unit_source: str
    device_memory_mib: int | None
    memory_source: str
    whole_blocks: bool = Field(
        description="whether attention takes a block of any multiple of the unit without splitting "
        "it, and any KV-cache layout, as packed layouts ask"
    )
    whole_blocks_source: str


class PlatformsFile(BaseModel):
    """`platforms.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_version: Literal[1] = Field(alias="schema")
    about: str
    platforms: dict[str, Platform]


def _packaged(name: str) -> Any:
    return json.loads(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def load_facts() -> FactsFile:
    """The packaged model facts."""
    return FactsFile.model_validate(_packaged("model_facts.json"))


@lru_cache(maxsize=1)
def load_platforms() -> dict[str, Platform]:
    """The packaged platforms by name."""
    parsed = PlatformsFile.model_validate(_packaged("platforms.json"))
    return {
        name: platform.model_copy(update={"name": name})
        for name, platform in parsed.platforms.items()
    }


def _match(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` means: with or without its organisation, in any case."""
    wanted = name.strip().lower()
    names = list(known)
    for candidate in names:
        short = candidate.split("/")[-1].lower()
        if wanted in (candidate.lower(), short, short.removesuffix("-instruct")):
            return candidate
    return None


def find_model(name: str) -> tuple[str, ModelFacts] | None:
    """Full name and facts of a known model, or None."""
    facts = load_facts()
    found = _match(name, facts.models)
    return None if found is None else (found, facts.models[found])


def find_drafter(name: str) -> tuple[str, ModelFacts] | None:
    """Full name and facts of a known drafter, or None."""
    facts = load_facts()
    found = _match(name, facts.drafters)
    return None if found is None else (found, facts.drafters[found])


def nearest(name: str, known: Iterable[str]) -> str:
    """Known names closest to `name`, for an error message; all of them when none is close."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    short = {candidate.split("/")[-1]: candidate for candidate in by_lower}
    close = difflib.get_close_matches(name.lower().split("/")[-1], short, n=3, cutoff=0.6)
    return ", ".join(by_lower[short[c]] for c in close) or ", ".join(by_lower.values())


def find_platform(name: str) -> Platform:
    """The platform of that name.

    Raises:
        PlanError: there is none.
    """
    platforms = load_platforms()
    try:
        return platforms[name.strip().lower()]
    except KeyError:
        raise PlanError(
            f"platform {name!r} is not known; known are {', '.join(platforms)}; "
            "for another card pass --unit with its attention block"
        ) from None
