"""What the run asks of an arm, whatever serves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from cuda_ext.bench.serve.config import Arm, Profile
from cuda_ext.bench.serve.load import Point
from cuda_ext.bench.serve.measure import Run

Tick = Callable[[dict[str, Any]], None]


class ArmFailed(RuntimeError):
    """The process of an arm died or said that it failed."""


class OutOfTime(RuntimeError):
    """An arm did not answer before the deadline."""


class ArmProcess(Protocol):
    """One arm, from its start to its stop.

    Every method waits for its end, and raises `ArmFailed`, or `OutOfTime` at the deadline.
    """

    arm: Arm

    def start(self, tick: Tick) -> dict[str, Any]:
        """Start the engine and give what it says of itself."""
        ...

    def warm_up(self, tick: Tick) -> None:
        """Serve what nobody measures."""
        ...

    def gate(self, tick: Tick) -> dict[str, Any]:
        """The gate's log-probabilities (`ArmEngine.gate_figures`)."""
        ...

    def point(self, point: Point, run: int, tick: Tick) -> Run:
        """Measure one point."""
        ...

    def profile(self, profile: Profile, tick: Tick) -> list[dict[str, Any]]:
        """What a step is spent on; nothing where there is no telling."""
        ...

    def sleep(self) -> None:
        """Leave the device to the other arm."""
        ...

    def wake(self) -> None:
        """Take it back."""
        ...

    def stop(self, *, force: bool = False) -> None:
        """End the process; no failure of that matters.

        Args:
            force: without waiting for what it does.
        """
        ...
