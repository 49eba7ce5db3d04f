"""What a preflight found, as values; the command line prints it."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, Field

from vllm_gaudi_ext.problems import Problem


class Found(BaseModel):
    """One thing that was found.

    `what` says what was asked for or found, `fix` what mends it.
    """

    what: str
    fix: str


def found(problems: Iterable[Problem]) -> list[Found]:
    """The engine's refusals as findings, in their own words."""
    return [Found(what=problem.what, fix=problem.fix) for problem in problems]


class PreflightReport(BaseModel):
    """Everything that a preflight found.

    The exit code is 1 where something is wrong, 2 where nothing is wrong but something could not
    be checked, and 0 where everything was checked and nothing is wrong. Warnings change nothing.
    """

    file: str
    platform: str | None
    vllm: str | None = Field(description="version of the vLLM whose parser was asked")
    block_tokens: int | None = None
    assumed: list[str] = Field(default=[], description="readings that the recipe passes")
    problems: list[Found] = []
    unchecked: list[str] = []
    warnings: list[Found] = []

    @property
    def exit_code(self) -> int:
        """0, 1 or 2, as above."""
        if self.problems:
            return 1
        return 2 if self.unchecked else 0
