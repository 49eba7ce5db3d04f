"""`make demo`: both flows, each in the environment that holds its engine, and one verdict.

    python3 tests/demo/demo.py

gaudi_flow.py shows prefix caching on the emulated device, replay_flow.py ReplaySSM on vLLM's CPU
backend. A flow that can't run on this machine, for a reason that environment.py excuses, is left
out and says so; the other one then decides alone. The last line is `demo: ok` or
`demo: FAILED: why`, and the exit code tells the same. The standard library is enough to run this
file.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import FAILED, GAUDI_RESULT, LEFT_OUT, OK, REPLAY_RESULT, TESTS

HERE = Path(__file__).resolve().parent
ENVIRONMENT = TESTS / "environments" / "environment.py"
INTERRUPTED = 130


@dataclass(frozen=True)
class Flow:
    """A program of the demo.

    Args:
        title: what it is called in the verdict.
        environment: as environment.py names it.
        program: beside this file.
        result: the file that it writes.
    """

    title: str
    environment: str
    program: str
    result: Path


FLOWS = (
    Flow("Gaudi flow", "gaudi-or-dev", "gaudi_flow.py", GAUDI_RESULT),
    Flow("ReplaySSM flow", "cpu-or-dev", "replay_flow.py", REPLAY_RESULT),
)


def outcome(flow: Flow, code: int) -> tuple[str, str]:
    """How a flow ended that gave exit code `code`: its status, and why, in words.

    Its file and its exit code must agree: a flow that was killed has written nothing, and one that
    never began, since its environment could not be made, neither.
    """
    try:
        result: Mapping[str, Any] = json.loads(flow.result.read_text())
        status, problems = result["status"], list(result["problems"])
    except (OSError, ValueError, KeyError, TypeError):
        return FAILED, f"ended with code {code} and no result, see above"
    if (status in (OK, LEFT_OUT)) != (code == 0):
        return FAILED, f"ended with code {code}, and its result says {status!r}"
    return status, "; ".join(map(str, problems))


def verdict(ends: Sequence[tuple[Flow, str, str]]) -> tuple[bool, str]:
    """Whether the demo as a whole is ok, and its last line, from flows, statuses and reasons."""
    failed = [f"{flow.title}: {why}" for flow, status, why in ends if status == FAILED]
    if not failed and not any(status == OK for _, status, _ in ends):
        failed = [f"{flow.title} left out: {why}" for flow, _, why in ends]
    if failed:
        return False, f"demo: FAILED: {'; '.join(failed)}"
    return True, "demo: ok"


def _run(flow: Flow) -> int:
    flow.result.unlink(missing_ok=True)
    command = [sys.executable, str(ENVIRONMENT), flow.environment, "--"]
    process = subprocess.Popen([*command, "python", str(HERE / flow.program)])
    try:
        return process.wait()
    except KeyboardInterrupt:
        # From the terminal it has had one too; it stops its server, and says so.
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait()
        raise


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Run the flows; returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    ends = []
    try:
        for flow in FLOWS:
            print(f"== {flow.title}", flush=True)
            code = _run(flow)
            if code == INTERRUPTED:
                raise KeyboardInterrupt
            ends.append((flow, *outcome(flow, code)))
    except KeyboardInterrupt:
        print("demo: FAILED: interrupted", flush=True)
        return INTERRUPTED
    good, line = verdict(ends)
    print(line, flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
