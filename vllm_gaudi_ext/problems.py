"""A reason not to start, and the one text in which all of them reach the operator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """A precondition that does not hold.

    Args:
        what: what was asked for or found, with the numbers.
        fix: the flag, variable or action that mends it.
    """

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what} -> {self.fix}"


def numbered(texts: Iterable[object]) -> str:
    """Each on a line of its own with its number, and a line break before the first."""
    return "".join(f"\n  {number}. {text}" for number, text in enumerate(texts, 1))


def counted(problems: Sequence[object]) -> str:
    """How many there are, as in "1 problem" or "2 problems"."""
    return f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"


def refuse(subject: str, problems: Sequence[Problem], otherwise: str | None = None) -> None:
    """Return where there is no problem.

    Args:
        subject: what can't be done, as in "serve with prefix caching".
        problems: all of them.
        otherwise: a last line, for who would do without.

    Raises:
        RuntimeError: lists every problem with its fix.
    """
    if not problems:
        return
    raise RuntimeError(
        f"gaudi_ext cannot {subject} ({counted(problems)}):{numbered(problems)}"
        + (f"\n{otherwise}" if otherwise else "")
    )
