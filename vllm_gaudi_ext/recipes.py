"""Finds and reads recipes: a folder a deployment, with serve.yaml and recipe.yaml.

serve.yaml holds vLLM's flags and nothing else (`vllm serve --config serve.yaml`); recipe.yaml holds
the facts about it and is never passed to vLLM. The folders lie at the top of the repository, and
`_recipes` beside this file is a link to them, which a wheel holds as plain files.
"""

from __future__ import annotations

import datetime
import difflib
from pathlib import Path
from typing import Annotated, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from vllm_gaudi_ext.planner.config import DrafterOverrides
from vllm_gaudi_ext.planner.errors import PlanError
from vllm_gaudi_ext.planner.serve_args import read_yaml

RECIPES = Path(__file__).resolve().parent / "_recipes"


def _known(value: object) -> object:
    """`unknown` is written out, so that nobody takes a forgotten line for a fact."""
    return None if value == "unknown" else value


def _specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise ValueError(f"{text!r} is no version range such as >=0.31,<0.32") from None
    return text


VersionRange = Annotated[str, AfterValidator(_specifier)]
Whole = Annotated[int | None, BeforeValidator(_known)]
Number = Annotated[float | None, BeforeValidator(_known)]
Text = Annotated[str | None, BeforeValidator(_known)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class ModelRef(_Strict):
    """A checkpoint on the Hugging Face Hub."""

    id: str
    revision: Text = Field(description="the commit whose config the recipe was derived from")


class Reading(_Strict):
    """What the planner asks for and no public file settles, as this recipe reads it."""

    because: str = Field(min_length=1, description="where the values come from")
    mtp_layers: int | None = None
    drafter_layers: int | None = None
    drafter_kv_heads: int | None = None
    drafter_head_dim: int | None = None
    drafter_sliding_layers: int | None = None
    drafter_window: int | None = None

    def values(self) -> dict[str, int]:
        """The values that are given, by the planner's option."""
        given = self.model_dump(exclude={"because"}, exclude_none=True)
        return {name: int(value) for name, value in given.items()}

    def without(self, *, mtp: bool, drafter: bool) -> Reading:
        """Less what is said of the MTP head, or of the drafter."""
        dropped = {
            name: None
            for name in self.values()
            if (mtp and name.startswith("mtp_")) or (drafter and name.startswith("drafter_"))
        }
        return self.model_copy(update=dropped)

    def options(self) -> dict[str, object]:
        """The same as fields of the planner's `Options`."""
        values = self.values()
        overrides = {
            name.removeprefix("drafter_"): value
            for name, value in values.items()
            if name.startswith("drafter_")
        }
        options: dict[str, object] = {"overrides": DrafterOverrides(**overrides)}
        if "mtp_layers" in values:
            options["mtp_layers"] = values["mtp_layers"]
        return options

    def arguments(self) -> str:
        """The same as arguments of `gaudi-ext plan`."""
        return " ".join(f"--{k.replace('_', '-')} {v}" for k, v in self.values().items())

    def sentences(self) -> list[str]:
        """What is assumed, for a reader."""
        return [f"{self.arguments()}: {self.because}"] if self.values() else []


class Expectation(_Strict):
    """What the planner says of the deployment, for one card; None where it was said unknown."""

    block_tokens: Whole
    state_copies: Whole
    state_mib_per_request: Number
    slots: Whole = Field(description="unknown where the pool is: it is not in serve.yaml")
    cached_tokens_multiple_of: Whole


class Evidence(_Strict):
    """One run of the recipe."""

    date: datetime.date
    commit: str
    device: str
    command: str
    result: str


class Recipe(_Strict):
    """A recipe.yaml."""

    schema_version: Literal[1] = Field(alias="schema")
    title: str
    platform: str
    model: ModelRef
    drafter: ModelRef | None = None
    requires: dict[str, VersionRange]
    env: dict[str, str] = {}
    plan: Reading | None = None
    expect: Expectation
    status: Literal["verified", "derived", "untested"]
    evidence: list[Evidence] = []
    limits: list[str]
    start: list[str] = Field(min_length=1, description="commands, run in the recipe's folder")
    check: list[str] = Field(min_length=1, description="commands, run in the recipe's folder")

    @model_validator(mode="after")
    def _status_has_its_grounds(self) -> Recipe:
        if self.status == "verified" and not self.evidence:
            raise ValueError(
                "status verified needs evidence: date, commit, device, command, result"
            )
        if self.status == "derived" and self.plan is not None:
            raise ValueError(
                "status derived needs facts, and `plan` passes readings instead: untested"
            )
        return self


def read_recipe(path: Path) -> Recipe:
    """The recipe of a recipe.yaml.

    Raises:
        PlanError: the file is missing or malformed; one line says where.
    """
    content = read_yaml(path)
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise PlanError(f"{path}: {key + ': ' if key else ''}{reason}") from None


def reading_beside(serve: Path) -> Reading | None:
    """What the recipe.yaml beside a serve.yaml reads into it, if there is one and it does.

    Raises:
        PlanError: what it says under `plan` is not a reading.
    """
    beside = serve.with_name("recipe.yaml")
    said = read_yaml(beside).get("plan") if beside.is_file() else None
    if said is None:
        return None
    try:
        return Reading.model_validate(said)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in ("plan", *first["loc"]))
        raise PlanError(f"{beside}: {key}: {first['msg']}") from None


def recipe_names(folder: Path = RECIPES) -> list[str]:
    """Names of all recipes, sorted.

    Raises:
        PlanError: there is no such folder, so the installation is broken.
    """
    if not folder.is_dir():
        raise PlanError(f"no recipes at {folder}: reinstall the package")
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if (entry / "serve.yaml").is_file() and (entry / "recipe.yaml").is_file()
    )


def find_recipe(name: str, folder: Path = RECIPES) -> Path:
    """The folder of the recipe of that name.

    Raises:
        PlanError: there is none; the nearest names are given.
    """
    names = recipe_names(folder)
    wanted = name.strip().lower()
    if wanted not in names:
        close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.6)
        near = f"nearest are {', '.join(close)}; " if close else ""
        raise PlanError(f"no recipe {name[:80]!r}; {near}gaudi-ext recipes list shows all")
    return folder / wanted
