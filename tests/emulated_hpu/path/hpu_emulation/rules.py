"""Device rules that a test can switch on: shape counts, host-sync refusal, an ordered log.

Placement. Emulated device tensors are CPU tensors, so a tag tells them apart. The tag sits on the
storage (views share it, and it dies with the memory). A storage is tagged when it is allocated on
device "hpu", copied there, or named to `mark_device`. What a torch function makes out of a tagged
tensor is tagged only while one of the contexts below is open: tagging every result at all times
would cost every call. A tensor made by an untracked call counts as a host tensor; a test that
needs such tensors to count opens `track_placement` before the engine is made. While a context is
open, `.device` of a tagged tensor is `cpu:0`, so that what is made on, or moved to, the device of
another tensor is placed there too.

All contexts are per process except `forbid_host_sync`, which binds the thread that opened it: an
async output thread may wait for the device while the step thread may not.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

Signature = tuple[tuple[tuple[int, ...], str], ...]
"""One (shape, dtype) for each tensor input, in argument order."""


DEVICE = torch.device("cpu", 0)
"""What `.device` of a device tensor is while a context is open; a host tensor's has no index."""


class HostSyncError(RuntimeError):
    """A step made the host wait for the device."""


class MixedPlacementError(RuntimeError):
    """One operation was given device tensors and host tensors that are not scalars."""


def is_device(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is tagged as living on the emulated device."""
    try:
        return getattr(tensor.untyped_storage(), "_on_emulated_hpu", False)
    except NotImplementedError:  # sparse and other layouts without one storage
        return False


def mark_device(tensor: torch.Tensor) -> torch.Tensor:
    """Tag the storage of `tensor` (and so every view of it) as device memory; returns `tensor`."""
    with contextlib.suppress(NotImplementedError):
        tensor.untyped_storage()._on_emulated_hpu = True
    return tensor


@dataclass
class Shapes:
    """The distinct calls seen by one `watch`.

    `calls` counts by (operation, signature, on device). On a device each distinct eager signature
    is a graph to compile, so it is the number of keys that must stay bounded, not the counts.
    """

    calls: Counter[tuple[str, Signature, bool]] = field(default_factory=Counter)

    def distinct(
        self, ops: Collection[str] | None = None, *, device_only: bool = True
    ) -> set[tuple[str, Signature]]:
        """The distinct (operation, signature) pairs.

        Args:
            ops: operation names to keep, such as "index_copy_"; None keeps all.
            device_only: leave out calls whose tensors all live on the host. Default: True.
        """
        return {
            (name, signature)
            for name, signature, on_device in self.calls
            if (ops is None or name in ops) and (on_device or not device_only)
        }


@dataclass(frozen=True)
class Entry:
    """One line of the log: what was enqueued, on which stream, by which thread."""

    order: int
    kind: str  # "op", "event", "stream", "device" or "note"
    name: str
    stream: int
    thread: int
    detail: object = None


class _Open:
    """What is switched on in this process."""

    def __init__(self) -> None:
        self.any = False
        self.watches: list[tuple[Shapes, frozenset[str] | None]] = []
        self.logs: list[tuple[list[Entry], frozenset[str] | None]] = []
        self.tracking = 0
        self.lock = threading.Lock()
        self.order = itertools.count()

    def refresh(self) -> None:
        self.any = bool(self.watches or self.logs or self.tracking)


OPEN = _Open()
_thread = threading.local()


@contextlib.contextmanager
def _tracking() -> Iterator[None]:
    with OPEN.lock:
        OPEN.tracking += 1
        OPEN.refresh()
    try:
        yield
    finally:
        with OPEN.lock:
            OPEN.tracking -= 1
            OPEN.refresh()


def track_placement() -> contextlib.AbstractContextManager[None]:
    """While open, whatever is computed from device tensors is tagged too (a few us a call)."""
    return _tracking()


@contextlib.contextmanager
def watch(ops: Collection[str] | None = None) -> Iterator[Shapes]:
    """While open, record the shapes and dtypes of the torch calls of all threads.

    Args:
        ops: operation names to record; None records all.
    """
    item = (Shapes(), None if ops is None else frozenset(ops))
    with _tracking():
        with OPEN.lock:
            OPEN.watches.append(item)
        try:
            yield item[0]
        finally:
            with OPEN.lock:
                OPEN.watches.remove(item)


@contextlib.contextmanager
def log(ops: Collection[str] | None = ()) -> Iterator[list[Entry]]:
    """While open, append events, streams, notes and the named operations to a list, in order.

    Args:
        ops: operation names to log beside the events; None logs all. Default: none.
    """
    entries: list[Entry] = []
    item = (entries, None if ops is None else frozenset(ops))
    with _tracking():
        with OPEN.lock:
            OPEN.logs.append(item)
        try:
            yield entries
        finally:
            with OPEN.lock:
                OPEN.logs[:] = [other for other in OPEN.logs if other[0] is not entries]


def note(name: str, detail: object = None) -> None:
    """Put a marker of the test's own into the open logs."""
    append("note", name, detail)


def append(kind: str, name: str, detail: object = None, stream: int | None = None) -> None:
    """Append one entry to each open log. `stream` defaults to the thread's current stream."""
    if not OPEN.logs:
        return
    if stream is None:
        stream = current_stream_number()
    with OPEN.lock:
        entry = Entry(next(OPEN.order), kind, name, stream, threading.get_ident(), detail)
        for entries, ops in OPEN.logs:
            if kind != "op" or ops is None or name in ops:
                entries.append(entry)


def current_stream_number() -> int:
    """The number of the stream that this thread enqueues on; 0 is the default stream."""
    return getattr(_thread, "stream", 0)


@contextlib.contextmanager
def on_stream(number: int) -> Iterator[None]:
    """Make `number` this thread's current stream."""
    before = current_stream_number()
    _thread.stream = number
    try:
        yield
    finally:
        _thread.stream = before


@contextlib.contextmanager
def forbid_host_sync(*, mixed: bool = False) -> Iterator[None]:
    """While open, a call of this thread that would make the host wait for the device raises.

    Args:
        mixed: also refuse an operation that combines device tensors with host tensors of one or
            more dimensions, which a device refuses (copies between the two are allowed). Only
            meaningful where every device tensor is tagged. Default: False.

    Raises:
        HostSyncError: `.item()`, `.tolist()`, `.numpy()`, `.cpu()`, `.to("cpu")` and a copy into a
            host tensor (each unless `non_blocking=True`), conversions to bool, int or float,
            printing, results whose size depends on values (`nonzero`, `masked_select`, `unique`,
            indexing with a bool mask, ...) on a device tensor; and any `synchronize`.
        MixedPlacementError: see `mixed`.
    """
    stack = _thread.__dict__.setdefault("forbidden", [])
    with _tracking():
        stack.append(mixed)
        try:
            yield
        finally:
            stack.pop()


@contextlib.contextmanager
def allow_host_sync() -> Iterator[None]:
    """While open inside `forbid_host_sync`, this thread may wait: for a test's own looks."""
    before = _thread.__dict__.get("forbidden", [])
    _thread.forbidden = []
    try:
        yield
    finally:
        _thread.forbidden = before


def refuse_wait(what: str) -> None:
    """Raise HostSyncError where this thread may not wait for the device."""
    if getattr(_thread, "forbidden", None):
        raise HostSyncError(f"{what} inside forbid_host_sync: the host would wait for the device")


def _named(*names: str) -> frozenset[Callable[..., Any]]:
    found = set()
    for name in names:
        for owner in (torch.Tensor, torch):
            if hasattr(owner, name):
                found.add(getattr(owner, name))
    return frozenset(found)


_WAITS = _named(
    "item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__complex__",
    "__index__", "__contains__", "__format__", "__repr__", "is_nonzero", "equal", "allclose",
    "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount",
)  # fmt: skip
_PLACES = _named("to", "cpu", "hpu", "copy_", "__setitem__", "index_put_", "as_tensor", "tensor")

# Calls that only ask about a tensor and enqueue nothing.
_QUERIES = frozenset({
    "__get__", "__set__", "__len__", "__hash__", "__reduce_ex__", "__deepcopy__", "__iter__",
    "size", "dim", "stride", "numel", "element_size", "storage_offset", "data_ptr",
    "untyped_storage", "is_contiguous", "is_floating_point", "is_complex", "is_inference",
    "is_pinned", "requires_grad_", "ndimension", "nelement", "type", "is_tensor", "get_device",
    "__dlpack_device__", "is_same_size",
})  # fmt: skip


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among `values` (a sequence), and in lists, tuples and dicts in it."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def _is_async(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a copy was asked for with `non_blocking`; given by position, it is the first bool."""
    given = kwargs.get("non_blocking", next((v for v in args[1:] if type(v) is bool), False))
    return bool(given)


def _waits(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: list[torch.Tensor],
    target: str | None,
) -> bool:
    """Whether the call makes the host wait for the device."""
    subject = inputs[0] if inputs else None
    if func in _WAITS:
        return any(map(is_device, inputs))
    if subject is None:
        return False
    if func is torch.Tensor.cpu or (func is torch.Tensor.to and target == "cpu"):
        return is_device(subject) and not _is_async(args, kwargs)
    if func is torch.Tensor.copy_:
        copies_out = not is_device(subject) and any(map(is_device, inputs[1:]))
        return copies_out and not _is_async(args, kwargs)
    if func is torch.Tensor.__getitem__:
        return any(index.dtype == torch.bool and is_device(index) for index in inputs[1:])
    if func is torch.where:
        return len(args) + len(kwargs) == 1 and is_device(subject)
    if func in (torch.repeat_interleave, torch.Tensor.repeat_interleave):
        return is_device(inputs[-1]) and len(inputs) > 1 and kwargs.get("output_size") is None
    return False


def observed_call(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run: Callable[[], Any],
    target: str | None,
) -> Any:
    """Perform one torch call under the open rules.

    Args:
        func: the torch function, with the arguments that the caller gave.
        run: performs the call, with devices mapped.
        target: "hpu" or "cpu" where the call names that device, else None.
    """
    name = getattr(func, "__name__", str(func))
    if name in _QUERIES:
        asks_device = getattr(func, "__self__", None) is torch._C.TensorBase.device
        return DEVICE if asks_device and is_device(args[0]) else run()
    inputs = list(tensors_in(args))
    inputs.extend(tensors_in(kwargs.values()))
    from_device = [tensor for tensor in inputs if is_device(tensor)]
    on_device = bool(from_device) or target == "hpu"
    forbidden = getattr(_thread, "forbidden", None)
    if forbidden and on_device:
        if _waits(func, args, kwargs, inputs, target):
            raise HostSyncError(
                f"{name} on device tensors of shapes {[tuple(t.shape) for t in from_device]} "
                "inside forbid_host_sync: the host would wait for the device"
            )
        if any(forbidden) and func not in _PLACES:
            hosts = [t for t in inputs if t.dim() > 0 and not is_device(t)]
            if hosts and from_device:
                raise MixedPlacementError(
                    f"{name} combines device tensors {[tuple(t.shape) for t in from_device]} "
                    f"with host tensors {[tuple(t.shape) for t in hosts]}"
                )
    signature: Signature = tuple((tuple(t.shape), str(t.dtype)) for t in inputs)
    if OPEN.watches:
        with OPEN.lock:
            for shapes, ops in OPEN.watches:
                if ops is None or name in ops:
                    shapes.calls[name, signature, on_device] += 1
    append("op", name, signature)
    result = run()
    if from_device and target != "cpu" and func not in _WAITS and func is not torch.Tensor.cpu:
        known = {id(tensor) for tensor in inputs}
        for tensor in tensors_in([result]):
            # An in-place copy into a host tensor returns that host tensor.
            if id(tensor) not in known:
                mark_device(tensor)
    return result
