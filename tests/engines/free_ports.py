"""Ports of this machine that nobody listens on, and one that somebody does."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

HOST = "127.0.0.1"


def free_ports(count: int = 1) -> int:
    """The first of some, side by side."""
    while True:
        with contextlib.ExitStack() as held:
            probes = [held.enter_context(socket.socket()) for _ in range(count)]
            probes[0].bind((HOST, 0))
            first = int(probes[0].getsockname()[1])
            try:
                for number, probe in enumerate(probes[1:], first + 1):
                    probe.bind((HOST, number))
            except (OSError, OverflowError):
                continue
            return first


@contextlib.contextmanager
def taken(port: int) -> Iterator[None]:
    """Another listens on that port meanwhile."""
    with socket.socket() as other:
        other.bind((HOST, port))
        other.listen()
        yield
