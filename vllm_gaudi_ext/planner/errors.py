"""The one exception that the planner raises for what a user typed or for the file a user named."""

from __future__ import annotations


class PlanError(ValueError):
    """A single line that says what was asked, what was found and what to pass instead."""


class IllegalValue(PlanError):
    """The same, for a value that vLLM refuses too, whatever else is unknown."""
