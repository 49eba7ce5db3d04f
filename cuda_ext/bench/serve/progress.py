"""What an operator sees while a run goes on: a bar in a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cuda_ext.bench.serve.arms import Tick

LINES_EVERY_S = 10.0
WIDTH = 120


def describe(found: dict[str, Any]) -> str:
    """One line of a `progress` event."""
    parts = [f"{found['done']}/{found['of']} requests"] if "of" in found else []
    if found.get("seconds"):
        parts.append(f"{found.get('tokens', 0) / found['seconds']:,.0f} tok/s")
    if "running" in found:
        parts.append(f"{found['running']} running, {found['waiting']} waiting")
    return ", ".join(parts)


class Reporter:
    """Says what a run does.

    Args:
        console: where to.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        if not self.console.is_terminal:
            self.console = Console(file=self.console.file, width=WIDTH)
        self._begin = time.monotonic()

    def say(self, text: str) -> None:
        """A line that stays, with the seconds since the start."""
        passed = time.monotonic() - self._begin
        self.console.print(
            f"[{passed:6.1f} s] {text}", markup=False, highlight=False, soft_wrap=True
        )

    @contextmanager
    def step(self, text: str) -> Iterator[Tick]:
        """While something runs; gives what takes its progress events."""
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[detail]}"),
                TimeElapsedColumn(),
            )
            with Progress(*columns, console=self.console, transient=True) as bar:
                task = bar.add_task(text, total=None, detail="")
                yield lambda found: bar.update(
                    task,
                    completed=found.get("done", 0),
                    total=found.get("of"),
                    detail=describe(found),
                )
            return
        last = time.monotonic()

        def tick(found: dict[str, Any]) -> None:
            nonlocal last
            if time.monotonic() - last >= LINES_EVERY_S:
                last = time.monotonic()
                self.say(f"  {text}: {describe(found)}")

        yield tick
