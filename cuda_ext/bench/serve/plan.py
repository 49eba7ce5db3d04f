"""The order of a run's steps, and what the time budget allows. Plain data, no device.

Arms alternate: stock, ReplaySSM, ReplaySSM, stock, ... so that a drift of the machine meets both.
Where both engines stay alive they alternate at every point; where each is started anew, an arm
does all its points first, for a start costs more than they do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from cuda_ext.bench.serve.config import Arm
from cuda_ext.bench.serve.load import Point

GROWTH = 0.75


@dataclass(frozen=True)
class Step:
    """One arm at one point.

    Args:
        arm, point, run: which arm, point and repetition.
        pair: steps of one number are compared, so the budget takes all of them or none.
    """

    arm: Arm
    point: Point
    run: int
    pair: int


def steps(
    points: Sequence[Point], arms: Sequence[Arm], repeats: int, *, restart: bool
) -> list[Step]:
    """All steps, in order."""
    found: list[Step] = []

    def order(turn: int) -> Sequence[Arm]:
        return tuple(arms) if turn % 2 == 0 else tuple(reversed(arms))

    if restart:
        for run in range(repeats):
            for arm in order(run):
                numbered = enumerate(points, run * len(points))
                found += [Step(arm, point, run, pair) for pair, point in numbered]
        return found
    pair = 0
    for run in range(repeats):
        for point in points:
            found += [Step(arm, point, run, pair) for arm in order(pair)]
            pair += 1
    return found


@dataclass
class Budget:
    """Estimates from what was seen, and says what still fits.

    Args:
        seconds: of the whole run; None for no limit.
        restart: whether another arm means another start.
    """

    seconds: float | None
    restart: bool = False
    seen: list[tuple[Step, float]] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    switches: list[float] = field(default_factory=list)

    def saw_step(self, step: Step, seconds: float) -> None:
        """A step took that long."""
        self.seen.append((step, seconds))

    def saw_start(self, seconds: float) -> None:
        """An arm's start, with its warm-up and gate."""
        self.starts.append(seconds)

    def saw_switch(self, seconds: float) -> None:
        """One arm to sleep and the other awake."""
        self.switches.append(seconds)

    def change(self) -> float:
        """Seconds from one arm to the other; 0 where nothing like it was seen."""
        return max(self.starts if self.restart else self.switches, default=0.0)

    def obligation(self, index: int, order: Sequence[Step], begun: Set[int], awake: Arm) -> float:
        """Seconds of a step and of all later ones that its pair, and pairs begun, still need.

        Args:
            index: of the step in `order`.
            order: of the whole run.
            begun: pairs of which a step was done.
            awake: the arm that is ready now.
        """
        total, arm = 0.0, awake
        for step in order[index:]:
            if step.pair in begun or step.pair == order[index].pair:
                total += self.estimate(step) + (self.change() if step.arm != arm else 0.0)
                arm = step.arm
        return total

    def estimate(self, step: Step) -> float:
        """Seconds of a step, from the nearest that was seen; 0 where none was.

        Time grows with the output, and with the requests less than in proportion, since a larger
        batch is cheaper a token.
        """
        mine = [pair for pair in self.seen if pair[0].arm == step.arm] or self.seen
        if not mine:
            return 0.0
        near, seconds = min(mine, key=lambda pair: abs(math.log(_requests(step, pair[0]))))
        more = _requests(step, near)
        seconds *= step.point.output_tokens / near.point.output_tokens
        seconds *= more ** (GROWTH if more > 1 else 1 - GROWTH)
        rate = step.point.rate
        return seconds if rate is None else max(seconds, step.point.requests / rate)

    def allows(self, seconds: float, passed: float) -> bool:
        """Whether that much more fits."""
        return self.seconds is None or passed + seconds <= self.seconds


def _requests(step: Step, near: Step) -> float:
    return step.point.requests / near.point.requests
