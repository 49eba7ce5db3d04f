"""Runs both arms of a serving benchmark, point by point, and keeps what it has after each.

python -m cuda_ext.bench.serve.run CONFIG [--out FOLDER] [--concurrency 16,64] [--budget-s 540]
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cuda_ext.bench.provenance import provenance
from cuda_ext.bench.serve import plots, report
from cuda_ext.bench.serve.arms import ArmFailed, ArmProcess, OutOfTime
from cuda_ext.bench.serve.checks import Check
from cuda_ext.bench.serve.child import EngineChild
from cuda_ext.bench.serve.config import (
    ARMS,
    Arm,
    BenchConfig,
    ConfigError,
    arm_environment,
    arm_flags,
    checked_config,
    find_config,
    load_config,
    refusal,
)
from cuda_ext.bench.serve.load import points
from cuda_ext.bench.serve.plan import Budget, Step, steps
from cuda_ext.bench.serve.progress import Reporter
from cuda_ext.bench.serve.results import (
    MergeRefused,
    Results,
    collect,
    load_results,
    load_summary,
    merge,
    read_checks,
    write_summary,
)
from cuda_ext.bench.serve.server import LAST_PORT, ServerArm, port_problems, server_problems
from cuda_ext.bench.serve.shapes import write_shape

GREEN, RED, USAGE, INTERRUPTED = 0, 1, 2, 130
PROFILE_S = 10.0
"""Of an arm at one concurrency, as a guess before any was seen."""


@dataclass
class Options:
    """How a config is run.

    Args:
        out: folder of the results.
        mode: `engine` for engines in child processes, `server` for `vllm serve`.
        arms: both, or one for a partial result.
        repeats: of each point and arm.
        budget_s: seconds after which nothing new starts, and nothing goes on.
        session: what results must share to be merged.
        commit: for the record, where git can't say.
        command: for the record.
        port: of the stock server; the other one has the next.
        checks: of the gate, made elsewhere.
    """

    out: Path
    mode: str = "engine"
    arms: tuple[Arm, ...] = ARMS
    repeats: int = 1
    budget_s: float | None = None
    session: str | None = None
    commit: str | None = None
    command: Sequence[str] = ()
    port: int = 8017
    checks: Sequence[Check] = ()


@dataclass
class _Run:
    """A run under way."""

    config: BenchConfig
    options: Options
    reporter: Reporter
    make: Callable[[Arm], ArmProcess]
    results: Results
    budget: Budget
    begin: float
    alive: dict[Arm, ArmProcess] = field(default_factory=dict)
    made: dict[Arm, ArmProcess] = field(default_factory=dict)
    awake: Arm | None = None

    @property
    def passed(self) -> float:
        return time.monotonic() - self.begin

    @property
    def restart(self) -> bool:
        return self.budget.restart

    def execute(self) -> None:
        """Every step that the budget allows."""
        config, options = self.config, self.options
        order = steps(points(config.load), options.arms, options.repeats, restart=self.restart)
        if not self.restart:
            # All import vLLM now, and start one after another.
            for arm in options.arms:
                self.made[arm] = self.make(arm)
            for arm in options.arms:
                self.switch_to(arm)
            # Whoever is ready begins: that spares a switch.
            assert self.awake is not None
            if order and order[0].arm != self.awake:
                turned = (self.awake, *(arm for arm in options.arms if arm != self.awake))
                order = steps(points(config.load), turned, options.repeats, restart=False)
        begun: set[int] = set()
        left_out: set[int] = set()
        for index, step in enumerate(order):
            ready = self.awake or step.arm
            owed = self.budget.obligation(index, order, begun, ready)
            # One pair comes before all profiles, and they before the rest.
            kept = sum(self._profile_s(arm) for arm in options.arms) if begun else 0.0
            allowed = step.pair in begun or self.budget.allows(owed + kept, self.passed)
            if step.pair in left_out or not allowed:
                left_out.add(step.pair)
                self._leave_out(f"{step.arm} at {step.point.label}, run {step.run}")
            else:
                begun.add(step.pair)
                self.switch_to(step.arm)
                self.measure(step)
            later = order[index + 1 :]
            last = not any(one.arm == step.arm for one in later)
            if self.restart and last and self.awake == step.arm:
                self.profile(step.arm, [one for one in later if one.pair in begun])
        if not self.restart:
            first = self.awake
            for arm in sorted(options.arms, key=lambda arm: arm != first):
                self.profile(arm)
        self.stop()

    def _profile_s(self, arm: Arm) -> float:
        """Seconds that an arm's profile may take; 0 where none is to come."""
        wanted = self.config.profile.concurrency
        return PROFILE_S * (len(wanted) + 1) if wanted and arm not in self.results.profiles else 0.0

    def profile(self, arm: Arm, later: Sequence[Step] = ()) -> None:
        """Profile an arm, once, where the config asks for it and the time allows it.

        Args:
            arm: which.
            later: steps that still have to fit.
        """
        taken = self._profile_s(arm)
        if not taken:
            return
        owed = self.budget.obligation(0, later, {one.pair for one in later}, arm) if later else 0.0
        switch = 0.0 if self.awake == arm else self.budget.change(arm)
        if not self.budget.allows(taken + owed + switch, self.passed):
            self._leave_out(f"profile of {arm}")
            return
        self.switch_to(arm)
        with self.reporter.step(f"profile {arm}") as tick:
            self.results.profiles[arm] = self.alive[arm].profile(self.config.profile, tick)
        for line in self.results.profiles[arm]:
            self.reporter.say(report.profile_line(arm, line))
        self.save()

    def _leave_out(self, text: str) -> None:
        self.results.left_out.append(text)
        self.reporter.say(f"left out for want of time: {text}")
        self.save()

    def switch_to(self, arm: Arm) -> None:
        """Make this arm the one that holds the device."""
        if self.awake == arm:
            return
        begin = time.monotonic()
        if self.awake is not None:
            leaving = self.alive[self.awake]
            if self.restart:
                with self.reporter.step(f"stop {self.awake}"):
                    leaving.stop()
                del self.alive[self.awake]
            else:
                with self.reporter.step(f"put {self.awake} to sleep"):
                    leaving.sleep()
            self.awake = None
        if arm in self.alive:
            with self.reporter.step(f"wake {arm}"):
                self.alive[arm].wake()
            taken = time.monotonic() - begin
            self.budget.saw_switch(taken)
            self.reporter.say(f"switched to {arm} in {taken:.1f} s")
        else:
            self.start(arm)
            self.budget.saw_start(arm, time.monotonic() - begin)
        self.awake = arm

    def start(self, arm: Arm) -> None:
        """Start an arm, warm it up, and take its part of the gate."""
        process = self.made.pop(arm, None) or self.make(arm)
        self.alive[arm] = process
        with self.reporter.step(f"start {arm}") as tick:
            facts = process.start(tick)
        self.results.facts[arm] = facts
        self.reporter.say(f"{arm} started: {report.start_line(facts)}")
        with self.reporter.step(f"warm up {arm}") as tick:
            process.warm_up(tick)
        if arm not in self.results.gates:
            begin = time.monotonic()
            with self.reporter.step(f"gate of {arm}") as tick:
                self.results.gates[arm] = process.gate(tick)
            self.reporter.say(f"gate's part of {arm}: {time.monotonic() - begin:.1f} s")
        self.save()

    def measure(self, step: Step) -> None:
        """One step, saved as soon as it is there."""
        begin = time.monotonic()
        name = f"{step.arm}, {step.point.label}"
        with self.reporter.step(name) as tick:
            found = self.alive[step.arm].point(step.point, step.run, tick)
        self.budget.saw_step(step, time.monotonic() - begin)
        self.results.runs.append(found)
        self.reporter.say(report.run_line(found))
        self.save()

    def save(self) -> None:
        self.results.save(self.options.out)

    def stop(self, *, force: bool = False) -> None:
        """End every process."""
        for process in (*self.alive.values(), *self.made.values()):
            process.stop(force=force)
        self.alive.clear()
        self.made.clear()
        self.awake = None


def run(config: BenchConfig, options: Options, reporter: Reporter | None = None) -> Results:
    """Run a config.

    Returns:
        What was found, also where the run ended early; `failure` says why then. The result file,
        the file of all requests and the plot lie in `options.out`.
    """
    reporter = reporter or Reporter()
    options.out.mkdir(parents=True, exist_ok=True)
    restart = config.interleave == "restart" or len(options.arms) == 1
    begin = time.monotonic()
    deadline = None if options.budget_s is None else begin + options.budget_s
    origin = provenance(options.command, options.commit)
    origin |= {
        "session": options.session or uuid.uuid4().hex[:12],
        "mode": "in-process" if options.mode == "engine" else "server",
        "interleave": "restart" if restart else "sleep",
    }
    results = Results(config, origin, extra=list(options.checks))
    model, drafter = None, None
    if config.shape is not None:
        model, drafter = write_shape(config.shape, options.out / "shape")

    def make(arm: Arm) -> ArmProcess:
        flags = arm_flags(
            config,
            arm,
            model=str(model) if model else None,
            drafter=str(drafter) if drafter else None,
            # A single arm may be merged with one that slept, so the config alone decides.
            sleep=config.interleave == "sleep",
        )
        environment = arm_environment(config, arm)
        if options.mode == "server":
            return ServerArm(
                arm, config, flags, environment, options.out, deadline, port=options.port
            )
        return EngineChild(arm, config, flags, environment, options.out, deadline)

    under_way = _Run(
        config,
        options,
        reporter,
        make,
        results,
        Budget(options.budget_s, restart),
        begin,
    )
    reporter.say(
        f"{config.name}: {', '.join(options.arms)} on {origin['device']}, session "
        f"{origin['session']}, interleave {origin['interleave']}"
    )
    try:
        under_way.execute()
    except (ArmFailed, OutOfTime) as error:
        results.failure = str(error)
        reporter.say(f"ended early: {error}")
    except KeyboardInterrupt:
        results.failure = "interrupted"
        raise
    finally:
        # After `execute` none is left; whatever a failure left may be in the middle of something.
        under_way.stop(force=True)
        path = results.save(options.out)
        _draw(results.summary(), path, reporter)
    return results


def _draw(summary: Mapping[str, Any], path: Path, reporter: Reporter) -> None:
    if not summary["points"]:
        return
    try:
        plots.draw(summary, path.with_suffix(".png"))
    except ImportError as missing:
        reporter.say(f"no plot: {missing}")


def _numbers(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise ValueError(text)
    return found


def _port(text: str) -> int:
    port = int(text)
    if not 1 <= port <= LAST_PORT:
        raise argparse.ArgumentTypeError(
            f"{port} is not from 1 to {LAST_PORT}: the two servers have it and the next"
        )
    return port


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench serve", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("config", nargs="?", help="a YAML, or the name of a packaged one")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    parser.add_argument("--mode", choices=("engine", "server"), default="engine")
    parser.add_argument("--interleave", choices=("sleep", "restart"), help="default: the config's")
    parser.add_argument("--arm", choices=ARMS, help="only this one, for a partial result")
    parser.add_argument("--concurrency", type=_numbers, help="instead of the config's: 16,64,256")
    parser.add_argument("--output-tokens", type=_numbers, help="instead of the config's: 512,3072")
    parser.add_argument(
        "--waves", type=int, help="closed loop: requests for each in flight; 1 is one burst"
    )
    parser.add_argument(
        "--points",
        help="closed loop, in this order and no other: 256x512x3,64x3072 (requests in flight x "
        "output tokens x waves)",
    )
    parser.add_argument("--profile", type=_numbers, help="at these concurrencies: 16,64")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key of the YAML, of `serve` where it is no other: attention-config.backend=...",
    )
    parser.add_argument("--repeats", type=int, default=1, help="of each point and arm")
    parser.add_argument("--budget-s", type=float, help="start nothing that would pass this")
    parser.add_argument("--session", help="what partial results must share to be merged")
    parser.add_argument("--merge", type=Path, nargs="+", help="results of one arm each, to be one")
    parser.add_argument(
        "--collect", type=Path, nargs="+", help="results of both arms each, of other points"
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="SESSION:CONCURRENCYxOUTPUT",
        help="with --collect: leave out that point of that session; the result says so",
    )
    parser.add_argument(
        "--port", type=_port, default=8017, help="of the servers, in server mode: this and the next"
    )
    parser.add_argument("--checks", type=Path, help="JSON list of checks made elsewhere")
    parser.add_argument("--commit", help="for the record, where git can't say")
    return parser


def _configured(chosen: argparse.Namespace) -> BenchConfig:
    config = load_config(find_config(chosen.config))
    changed: dict[str, Any] = {}
    if chosen.concurrency:
        changed["concurrency"] = chosen.concurrency
        changed["request_rates"] = []
    if chosen.output_tokens:
        changed["output_tokens"] = chosen.output_tokens
    if chosen.waves is not None:
        changed["waves"] = chosen.waves
    whole = config.model_dump()
    if chosen.points:
        changed |= {"points": chosen.points.split(","), "concurrency": [], "request_rates": []}
    elif chosen.concurrency or chosen.output_tokens:
        changed["points"] = []
    whole["load"] |= changed
    if chosen.profile:
        whole["profile"]["concurrency"] = chosen.profile
    for text in chosen.set:
        _set(whole, text)
    if chosen.interleave:
        whole["interleave"] = chosen.interleave
    return checked_config(whole, chosen.config)


def _set(whole: dict[str, Any], text: str) -> None:
    """Change one key of a config, `a.b=value`, the value as in YAML.

    Raises:
        ConfigError: it has no value, or a key on its way holds none.
    """
    path, is_there, value = text.partition("=")
    keys = path.split(".")
    if keys[0] not in whole:
        keys.insert(0, "serve")
    if not is_there or not all(keys):
        raise ConfigError(f"--set {text}: write KEY=VALUE")
    place = whole
    for key in keys[:-1]:
        place = place.setdefault(key, {})
        if not isinstance(place, dict):
            raise ConfigError(f"--set {text}: {key} has no keys below it")
    place[keys[-1]] = yaml.safe_load(value)


def _command(arguments: Sequence[str]) -> list[str]:
    """For the record: without the folder of the results, and with the config's name alone."""
    found, rest = ["gaudi-ext bench serve"], iter(arguments)
    for word in rest:
        if word == "--out":
            next(rest, None)
        elif not word.startswith("--out="):
            found.append(Path(word).name if word.endswith((".yaml", ".yml")) else word)
    return found


def _terminate(*_: Any) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 with a green gate, 1 with a red one, 2 for what was asked wrongly."""
    parser = _parser()
    chosen = parser.parse_args(argv)
    reporter = Reporter()
    if sum(map(bool, (chosen.config, chosen.merge, chosen.collect))) != 1:
        parser.error("name a config, or results to --merge or to --collect")
    if chosen.without and not chosen.collect:
        parser.error("--without goes with --collect")
    try:
        if chosen.collect:
            given = [load_summary(path) for path in chosen.collect]
            summary = collect(given, chosen.without)
            _draw(summary, write_summary(summary, chosen.out), reporter)
        elif chosen.merge:
            results = merge([load_results(path) for path in chosen.merge])
            summary = results.summary()
            _draw(summary, results.save(chosen.out), reporter)
        else:
            config = _configured(chosen)
            arms = (chosen.arm,) if chosen.arm else ARMS
            if chosen.mode == "server":
                # The second arm starts when the first has done all its points.
                found = [*server_problems(config), *port_problems(chosen.port, arms)]
                if found:
                    raise refusal(chosen.config, found, " in server mode")
            options = Options(
                out=chosen.out.resolve(),
                mode=chosen.mode,
                arms=arms,
                repeats=chosen.repeats,
                budget_s=chosen.budget_s,
                session=chosen.session,
                commit=chosen.commit,
                command=_command(sys.argv[1:] if argv is None else argv),
                port=chosen.port,
                checks=read_checks(chosen.checks) if chosen.checks else (),
            )
            signal.signal(signal.SIGTERM, _terminate)
            summary = run(config, options, reporter).summary()
    except (ConfigError, MergeRefused) as error:
        print(error, file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("interrupted; what was measured is saved", file=sys.stderr)
        return INTERRUPTED
    report.print_summary(summary, reporter.console)
    return GREEN if summary["gate"] == "green" and "failure" not in summary else RED


if __name__ == "__main__":
    sys.exit(main())
