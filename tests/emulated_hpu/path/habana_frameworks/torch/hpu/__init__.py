"""The device module, also installed as `torch.hpu`.

Work runs when it is enqueued, so streams and events order nothing; they write to the open logs of
`hpu_emulation.rules`, and waiting for them is refused where a test forbids it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from hpu_emulation import rules

from habana_frameworks.torch.hpu import graphs, metrics, random

__all__ = ["Event", "Stream", "graphs", "metrics", "random"]

Module = TypeVar("Module")
MEMORY_BYTES = 4 * 2**30
"""What `mem_get_info` reports, total and free alike: nothing is accounted for."""


class Stream:
    """A numbered queue; 0 is the default stream."""

    _numbers = itertools.count()

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.number = next(Stream._numbers)

    def wait_stream(self, other: Stream) -> None:
        """Would hold this stream back until `other` is done with what it has now."""
        rules.append("stream", "wait_stream", other.number, self.number)

    def wait_event(self, event: Event) -> None:
        """Would hold this stream back until `event` has happened."""
        rules.append("stream", "wait_event", event.number, self.number)

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event`, or a new one, on this stream, and return it."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Wait for the stream. Raises HostSyncError inside `forbid_host_sync`."""
        rules.refuse_wait("Stream.synchronize")
        rules.append("stream", "synchronize", None, self.number)

    def query(self) -> bool:
        """Whether all work is done: always."""
        return True


class Event:
    """A numbered mark in a stream."""

    _numbers = itertools.count()

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.number = next(Event._numbers)

    def record(self, stream: Stream | None = None) -> None:
        """Mark this place in `stream`, by default the current one."""
        rules.append("event", "record", self.number, stream.number if stream else None)

    def wait(self, stream: Stream | None = None) -> None:
        """Would hold `stream`, by default the current one, back until the event has happened."""
        rules.append("event", "wait", self.number, stream.number if stream else None)

    def synchronize(self) -> None:
        """Wait for the event. Raises HostSyncError inside `forbid_host_sync`."""
        rules.refuse_wait("Event.synchronize")
        rules.append("event", "synchronize", self.number)

    def query(self) -> bool:
        """Whether the event has happened: always."""
        return True

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds from this event to `other`: 0, for nothing is timed."""
        return 0.0


_streams = {0: Stream()}


def current_stream(device: object = None) -> Stream:
    """The stream that this thread enqueues on."""
    return _streams[rules.current_stream_number()]


def default_stream(device: object = None) -> Stream:
    """Stream 0."""
    return _streams[0]


@contextlib.contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    """Make `chosen` this thread's current stream for the length of the block."""
    if chosen is None:
        yield
        return
    _streams[chosen.number] = chosen
    with rules.on_stream(chosen.number):
        yield


def synchronize(device: object = None) -> None:
    """Wait for the device. Raises HostSyncError inside `forbid_host_sync`."""
    rules.refuse_wait("hpu.synchronize")
    rules.append("device", "synchronize")


def is_available() -> bool:
    """True: that is what this package is for."""
    return True


def is_initialized() -> bool:
    """True: there is nothing to initialise."""
    return True


def device_count() -> int:
    """One device."""
    return 1


def current_device() -> int:
    """Device 0."""
    return 0


def set_device(device: object) -> None:
    """There is one device to choose."""


def get_device_name(device: object = None) -> str:
    """A name that no real device has."""
    return "emulated HPU (CPU)"


def mem_get_info(device: object = None) -> tuple[int, int]:
    """(free, total) in bytes; both are `MEMORY_BYTES`."""
    return MEMORY_BYTES, MEMORY_BYTES


def memory_allocated(device: object = None) -> int:
    """0: allocations are not accounted for."""
    return 0


def max_memory_allocated(device: object = None) -> int:
    """0: allocations are not accounted for."""
    return 0


def memory_stats(device: object = None) -> dict[str, int]:
    """Empty: allocations are not accounted for."""
    return {}


def reset_peak_memory_stats(device: object = None) -> None:
    """There are no statistics to reset."""


def empty_cache() -> None:
    """There is no caching allocator to empty."""


def wrap_in_hpu_graph(module: Module, *args: Any, **kwargs: Any) -> Module:
    """Would capture and replay graphs of `module`; returns it, to run eagerly."""
    return module


def manual_seed_all(seed: int) -> None:
    """Seed the generator of the device, which is that of the CPU."""
    torch.manual_seed(seed)
