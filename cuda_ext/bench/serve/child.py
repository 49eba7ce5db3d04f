"""The parent's side of an engine in a child process (engine.py)."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from cuda_ext.bench.serve.arms import ArmFailed, OutOfTime, Tick
from cuda_ext.bench.serve.config import Arm, BenchConfig, Profile
from cuda_ext.bench.serve.load import Point
from cuda_ext.bench.serve.measure import Run
from vllm_gaudi_ext import envs

LOG_LINES = 15
STOP_S = 20.0


def log_tail(path: Path, lines: int = LOG_LINES) -> str:
    """The last lines of a log, for a failure's message."""
    if not path.is_file():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


class EngineChild:
    """An arm whose engine runs in a child process.

    The process starts with this object, so that it imports vLLM while another arm still starts.

    Args:
        arm: which.
        config: of the benchmark.
        flags: of this arm's `vllm serve`.
        environment: variables over those of this process.
        folder: for the files of this arm: flags, job and log.
        deadline: on the monotonic clock; None for none.
    """

    module = "cuda_ext.bench.serve.engine"

    def __init__(
        self,
        arm: Arm,
        config: BenchConfig,
        flags: Mapping[str, Any],
        environment: Mapping[str, str],
        folder: Path,
        deadline: float | None,
    ) -> None:
        self.arm = arm
        self._deadline = deadline
        folder.mkdir(parents=True, exist_ok=True)
        written = folder / f"{arm}.yaml"
        written.write_text(yaml.safe_dump(dict(flags), sort_keys=False))
        job = folder / f"{arm}.job.json"
        job.write_text(
            json.dumps(
                {
                    "flags": str(written),
                    "load": config.load.model_dump(),
                    "gate": config.gate.model_dump(),
                    "dummy_weights": config.dummy_weights,
                }
            )
        )
        self.log = folder / f"{arm}.log"
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environment}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.module, str(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=envs.with_overrides(variables),
                text=True,
            )
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                self._events.put(json.loads(line))
            except ValueError:
                continue
        self._events.put(None)

    def _next(self) -> dict[str, Any]:
        left = None if self._deadline is None else self._deadline - time.monotonic()
        try:
            event = self._events.get(timeout=None if left is None else max(0.0, left))
        except queue.Empty:
            raise OutOfTime(f"{self.arm}: no answer before the deadline") from None
        if event is None:
            code = self._process.wait()
            tail = log_tail(self.log)
            raise ArmFailed(f"{self.arm}: the engine's process ended with {code}\n{tail}")
        if event["event"] == "failed":
            raise ArmFailed(f"{self.arm}: {event['error']}\n{log_tail(self.log)}")
        return event

    def _ask(self, command: Mapping[str, Any], tick: Tick | None = None) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            # Its last words say why.
            pass
        while True:
            event = self._next()
            if event["event"] == "done":
                return event["result"]
            if event["event"] == "progress" and tick is not None:
                tick({k: v for k, v in event.items() if k != "event"})

    def start(self, tick: Tick) -> dict[str, Any]:
        """Start the engine and give what it says of itself."""
        return dict(self._ask({"do": "start"}, tick))

    def warm_up(self, tick: Tick) -> None:
        """Serve what nobody measures."""
        self._ask({"do": "warm_up"}, tick)

    def gate(self, tick: Tick) -> dict[str, Any]:
        """The gate's log-probabilities."""
        return dict(self._ask({"do": "gate"}, tick))

    def point(self, point: Point, run: int, tick: Tick) -> Run:
        """Measure one point."""
        command = {"do": "point", "arm": self.arm, "point": point.as_json(), "run": run}
        return Run.from_json(self._ask(command, tick))

    def profile(self, profile: Profile, tick: Tick) -> list[dict[str, Any]]:
        """What a step is spent on (`ArmEngine.profile`)."""
        return list(self._ask({"do": "profile", **profile.model_dump()}, tick))

    def sleep(self) -> None:
        """Leave the device to the other arm."""
        self._ask({"do": "sleep"})

    def wake(self) -> None:
        """Take it back."""
        self._ask({"do": "wake"})

    def stop(self, *, force: bool = False) -> None:
        """End the process, by force where it does not by itself."""
        late = self._deadline is not None and time.monotonic() >= self._deadline
        if force or late:
            self._process.kill()
        elif self._process.poll() is None and self._process.stdin is not None:
            try:
                self._process.stdin.write(json.dumps({"do": "stop"}) + "\n")
                self._process.stdin.close()
                self._process.wait(STOP_S)
            except (OSError, ValueError, subprocess.TimeoutExpired):
                self._process.kill()
        self._process.wait()
