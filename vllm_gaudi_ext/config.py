"""The options of this package: `--additional-config '{"gaudi_ext": {...}}'` of `vllm serve`.

vLLM hands `additional_config` to every process as it came, so each part of the package reads its
options from there and no second channel is needed. An unknown key is refused: a misspelt option
that is ignored would leave an operator with other behaviour than they asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

KEY = "gaudi_ext"


class ExtOptions(BaseModel):
    """What an operator may ask of this package."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replay: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="ReplaySSM for Gated DeltaNet layers (not on Gaudi): `auto` turns it on for a "
        "Qwen3.5, Qwen3.6 or Qwen3-Next that is served with speculative decoding, `on` without "
        "drafts too, `off` leaves vLLM as it is. Where it is on and can't be had, the server does "
        "not start.",
    )
    backend: Literal["auto", "reference"] = Field(
        default="auto",
        description="What computes a ReplaySSM step: `auto` takes the platform's own, `reference` "
        "plain torch, which is slow on a GPU and needs --enforce-eager there.",
    )

    packing: Literal["auto", "off"] = Field(
        default="auto",
        description="How ReplaySSM's pages lie in the KV cache: `auto` has vLLM (0.31.0 on) pack "
        "all attention layers into one block where more requests fit then, `off` leaves vLLM's "
        "usual groups.",
    )

    @field_validator("replay", "packing", mode="before")
    @classmethod
    def _yaml_words(cls, value: Any) -> Any:
        # In YAML a bare on or off is a boolean.
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


def read_options(additional_config: Any) -> ExtOptions:
    """The options in vLLM's `additional_config`; defaults where there are none.

    Other keys are other plugins', but for those that can only be meant for this one.

    Raises:
        ValueError: a key is unknown or a value is not allowed; every one is named.
    """
    if not isinstance(additional_config, Mapping):
        return ExtOptions()
    for name in additional_config:
        if name != KEY and str(name).lower().replace("-", "_") in (KEY, "replay"):
            raise ValueError(
                f"--additional-config: {name!r} is not read; options of this package go under "
                f"{KEY!r}, for example {example(replay='on')}"
            )
    if KEY not in additional_config:
        return ExtOptions()
    given = additional_config[KEY]
    if not isinstance(given, Mapping):
        raise ValueError(
            f"--additional-config: {KEY!r} must hold a mapping of options, found {given!r}; "
            f"for example {example(replay='on')}"
        )
    try:
        return ExtOptions.model_validate(dict(given))
    except ValidationError as error:
        problems = "; ".join(_problem(item) for item in error.errors())
        raise ValueError(f"--additional-config, {KEY!r}: {problems}") from None


def _problem(item: Any) -> str:
    name = ".".join(map(str, item["loc"]))
    if item["type"] == "extra_forbidden":
        known = ", ".join(ExtOptions.model_fields)
        return f"unknown option {name!r} (known: {known})"
    return f"{name} is {item['input']!r}: {item['msg']}"


def example(**options: str) -> str:
    """The flag that sets `options`, as a shell takes it."""
    return f"--additional-config '{json.dumps({KEY: options})}'"
