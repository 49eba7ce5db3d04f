"""A `vllm serve` child process: started in a process group of its own, awaited, and stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
from common import DemoFailure
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

HOST = "127.0.0.1"
STOP_SECONDS = 30
POLL_SECONDS = 0.5


class Server:
    """A running server; made by `serving`."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self._process = process
        self.url = url
        self.log = log

    def wait_until_healthy(self, limit: float, tick: Callable[[float], None]) -> float:
        """Seconds until `/health` answered 200. `tick` is called with the seconds so far.

        Raises:
            DemoFailure: it ended before, or `limit` seconds went by.
        """
        started = time.monotonic()
        while (seconds := time.monotonic() - started) < limit:
            if (code := self._process.poll()) is not None:
                raise DemoFailure(f"vllm serve ended with code {code}: {self._last_words()}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).is_success:
                    return seconds
            tick(seconds)
            time.sleep(POLL_SECONDS)
        raise DemoFailure(f"vllm serve was not healthy after {limit:.0f} s; log: {self.log}")

    def cache_config(self) -> Mapping[str, str]:
        """The labels of vLLM's metric `vllm:cache_config_info`: the cache configuration."""
        for sample in self._samples():
            if sample.name == "vllm:cache_config_info":
                return sample.labels
        raise DemoFailure("no vllm:cache_config_info in the server's /metrics")

    def counters(self, prefix: str) -> dict[str, float]:
        """Counters whose names start with `prefix`, without it and `_total`; 0 where absent.

        Those that have a label for each position of a draft are left out.
        """
        found: dict[str, float] = defaultdict(float)
        for sample in self._samples():
            name = sample.name.removesuffix("_total")
            if name.startswith(prefix) and name != sample.name and "position" not in sample.labels:
                found[name.removeprefix(prefix)] += sample.value
        return found

    def _samples(self) -> Iterator[Sample]:
        metrics = httpx.get(f"{self.url}/metrics", timeout=30, trust_env=False).raise_for_status()
        for family in text_string_to_metric_families(metrics.text):
            yield from family.samples

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["its log is empty"])[-1].strip()[:300] + f" (log: {self.log})"


@contextlib.contextmanager
def serving(
    command: Sequence[str], port: int, log: Path, env: Mapping[str, str]
) -> Iterator[Server]:
    """A server that runs `command`; at the end, whatever ends it, none of its processes is left.

    Args:
        command: its arguments must make it listen on `HOST` and `port`.
        port: see `free_ports`.
        log: takes its output, stdout and stderr.
        env: its environment.
    """
    # vLLM's sockets lie in the temporary folder, and stay there when it is killed.
    with tempfile.TemporaryDirectory(prefix="gx-", ignore_cleanup_errors=True) as scratch:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env) | {"TMPDIR": scratch},
                start_new_session=True,
            )
        try:
            yield Server(process, f"http://{HOST}:{port}", log)
        finally:
            _stop_group(process)


def _stop_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all that it started: first with SIGTERM, then with SIGKILL."""
    try:
        _signal(process.pid, signal.SIGTERM)
        end = time.monotonic() + STOP_SECONDS
        # The leader is reaped as it ends; the group lives as long as one of its workers does.
        while time.monotonic() < end and (process.poll() is None or _signal(process.pid, 0)):
            time.sleep(0.1)
    finally:
        # Also where a second Ctrl-C cuts the wait short.
        _signal(process.pid, signal.SIGKILL)
        process.wait()


def _signal(group: int, number: int) -> bool:
    """Whether the group exists; it gets signal `number` (0 asks only)."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True
