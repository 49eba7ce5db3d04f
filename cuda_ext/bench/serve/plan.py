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
"""A batch twice as large takes two to this power as long a step."""
SAME_KIND = 1e-6
"""Points whose prompts and decoding are in proportion but for this can't tell the two apart."""
WARM = 0.6
"""Of the run's first start, what a later one takes, whose kernels are compiled.

On an H200 with the shape of Qwen3.5-4B the first arm took 250 s and the second 74.
"""


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
    starts: list[tuple[Arm, float]] = field(default_factory=list)
    switches: list[float] = field(default_factory=list)

    def saw_step(self, step: Step, seconds: float) -> None:
        """A step took that long."""
        self.seen.append((step, seconds))

    def saw_start(self, arm: Arm, seconds: float) -> None:
        """An arm's start, with its warm-up and gate."""
        self.starts.append((arm, seconds))

    def saw_switch(self, seconds: float) -> None:
        """One arm to sleep and the other awake."""
        self.switches.append(seconds)

    def change(self, arm: Arm) -> float:
        """Seconds until this arm is ready, the other one being so; 0 where nothing was seen.

        With restarts, those of its own last start, of the other's where it had none, and less
        (`WARM`) where that was the first of the run.
        """
        if not self.restart:
            return max(self.switches, default=0.0)
        if not self.starts:
            return 0.0
        own = [index for index, (started, _) in enumerate(self.starts) if started == arm]
        last = own[-1] if own else len(self.starts) - 1
        return self.starts[last][1] * (1.0 if last else WARM)

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
                total += self.estimate(step) + (self.change(step.arm) if step.arm != arm else 0.0)
                arm = step.arm
        return total

    def estimate(self, step: Step) -> float:
        """Seconds of a step; 0 where nothing was seen.

        Those of the same point where this arm has done it, else a sum of prompts and of decoding
        fitted to what the arm has done; else from the nearest point, of the other arm if need be.
        """
        mine = [pair for pair in self.seen if pair[0].arm == step.arm] or self.seen
        if not mine:
            return 0.0
        same = [seconds for old, seconds in mine if old.point == step.point]
        seconds = same[-1] if same else self._fitted(step, mine) or _scaled(step, mine)
        rate = step.point.rate
        return seconds if rate is None else max(seconds, step.point.requests / rate)

    @staticmethod
    def _fitted(step: Step, seen: Sequence[tuple[Step, float]]) -> float | None:
        """By `a * requests + b * decoding`, least squares of relative errors, a and b >= 0.

        All points have prompts of one range, so their requests stand for their prompts' tokens.
        None where the points tell too little, or all had larger batches: a step of few requests
        has a floor that the formula has not.
        """
        if min(_batch(old.point) for old, _ in seen) > _batch(step.point):
            return None
        rows = [
            (old.point.requests / seconds, _decoding(old.point) / seconds)
            for old, seconds in seen
            if seconds > 0
        ]
        aa, bb = sum(x * x for x, _ in rows), sum(y * y for _, y in rows)
        ab, a1, b1 = sum(x * y for x, y in rows), sum(x for x, _ in rows), sum(y for _, y in rows)
        rest = aa * bb - ab * ab
        if rest <= SAME_KIND * aa * bb:
            return None
        a, b = (a1 * bb - b1 * ab) / rest, (b1 * aa - a1 * ab) / rest
        if a < 0:
            a, b = 0.0, b1 / bb
        elif b < 0:
            a, b = a1 / aa, 0.0
        return a * step.point.requests + b * _decoding(step.point)

    def allows(self, seconds: float, passed: float) -> bool:
        """Whether that much more fits."""
        return self.seconds is None or passed + seconds <= self.seconds


def _batch(point: Point) -> int:
    return point.concurrency or point.requests


def _decoding(point: Point) -> float:
    """Steps of all waves, each as long as its batch makes it (`GROWTH`), without a unit."""
    batch = _batch(point)
    return point.requests / batch * point.output_tokens * float(batch) ** GROWTH


def _scaled(step: Step, seen: Sequence[tuple[Step, float]]) -> float:
    """Seconds of the nearest point, in proportion to its output and waves.

    With the batch they grow less than in proportion, since a larger one is cheaper a token.
    """

    def parts(old: Point) -> tuple[float, float]:
        point, more = step.point, _batch(step.point) / _batch(old)
        waves = point.requests / old.requests / more
        return more, waves * point.output_tokens / old.output_tokens

    near, seconds = min(seen, key=lambda pair: sum(abs(math.log(x)) for x in parts(pair[0].point)))
    more, longer = parts(near.point)
    return seconds * longer * more ** (GROWTH if more > 1 else 1 - GROWTH)
