"""Device "hpu" becomes memory of the CPU, for every thread of the process.

A `TorchFunctionMode` sees each torch call before it runs, rewrites device "hpu" (or a bare index)
to "cpu", and keeps device memory apart from host memory where a device would: a copy from one to
the other is always a new allocation, never the same bytes. `hpu_emulation.rules` says what a test
can ask of the calls. Modes are per thread, so `Thread.run` is wrapped to enter one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hpu_emulation import rules

_INDEXED = frozenset({
    torch.index_select, torch.Tensor.index_select,
    torch.index_copy, torch.Tensor.index_copy, torch.Tensor.index_copy_,
    torch.index_add, torch.Tensor.index_add, torch.Tensor.index_add_,
    torch.nn.functional.embedding,
})  # fmt: skip

# Modes see these too, but they only say which device is meant: "hpu" must stay "hpu".
_NAME_DEVICES = frozenset({torch.device, torch._C._nn._parse_to})
_MOVES = frozenset({torch.Tensor.to, torch.Tensor.cpu})
_ALIASES_HOST = frozenset({torch.as_tensor, torch.asarray})


def device_name(value: object) -> str | None:
    """The device that `value` names, "hpu" or "cpu"; None where it names neither."""
    if isinstance(value, torch.device):
        if value == rules.DEVICE:
            return "hpu"
        return value.type if value.type in ("hpu", "cpu") else None
    if type(value) is str:
        kind = value.partition(":")[0]
        return kind if kind in ("hpu", "cpu") else None
    return None


def _wrap_last(index: torch.Tensor, size: int) -> torch.Tensor:
    return torch.where(index == -1, size - 1, index)


def _with_wrapped_index(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace index -1 by the last row, which is what vllm-gaudi's padding expects of a device."""
    if func is torch.nn.functional.embedding:
        names, position, index_name = ["input", "weight"], 0, "input"
    else:
        names, position, index_name = ["input", "dim", "index"], 2, "index"
    given = dict(zip(names, args, strict=False)) | kwargs
    if index_name == "input":
        size = given["weight"].shape[0]
    else:
        table = given["input"] if "input" in given else given["self"]
        size = table.shape[given["dim"]] if table.dim() else 1
    wrapped = _wrap_last(given[index_name], size)
    if len(args) > position:
        return (*args[:position], wrapped, *args[position + 1 :]), kwargs
    return args, kwargs | {index_name: wrapped}


class EmulatedDevice(TorchFunctionMode):
    """Runs every torch call of one thread on the CPU, with the rules of `hpu_emulation`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _NAME_DEVICES:
            return func(*args, **kwargs)
        target = None
        if kwargs.get("pin_memory"):
            # Pinning needs an accelerator of its own; it changes how fast a copy is, and no value.
            kwargs = kwargs | {"pin_memory": False}
        if "device" in kwargs:
            device = kwargs["device"]
            # A bare index, as from torch.hpu.current_device(), means that HPU.
            target = "hpu" if type(device) is int else device_name(device)
            if target == "hpu":
                kwargs = kwargs | {"device": "cpu"}
        for position, value in enumerate(args):
            if isinstance(value, torch.device) or type(value) is str:
                named = device_name(value)
                target = named or target
                if named == "hpu":
                    args = (*args[:position], "cpu", *args[position + 1 :])
                break
        if rules.OPEN.any:
            return rules.observed_call(
                func, args, kwargs, lambda: _perform(func, args, kwargs, target), target
            )
        return _perform(func, args, kwargs, target)


def _perform(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], target: str | None
) -> Any:
    """Run one call on the CPU; `target` is the device that it names, if it names one."""
    if func in _INDEXED:
        args, kwargs = _with_wrapped_index(func, args, kwargs)
    result = func(*args, **kwargs)
    if func is torch.Tensor.cpu:
        target = "cpu"
    if target is None or not isinstance(result, torch.Tensor):
        return result
    if func in _MOVES:
        source = args[0]
        if rules.is_device(source) == (target == "hpu"):
            return result
        if result.numel() and result.data_ptr() == source.data_ptr():
            result = result.clone()
    elif func in _ALIASES_HOST and target == "hpu" and not rules.is_device(result):
        result = result.clone()
    return rules.mark_device(result) if target == "hpu" else result


_entered = threading.local()


def enter() -> None:
    """Emulate the device in this thread, from here to the thread's end. Repeats do nothing."""
    if getattr(_entered, "mode", None) is None:
        # A decaying state passes through denormals, on which a CPU is many times slower.
        torch.set_flush_denormal(True)
        _entered.mode = EmulatedDevice()
        _entered.mode.__enter__()


class _GeneratorType(type(torch.Generator)):  # type: ignore[misc]
    """Makes every generator, also one that torch itself made, an instance of `torch.Generator`."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _CpuGenerator)


_CpuGenerator = torch.Generator


class _Generator(torch.Generator, metaclass=_GeneratorType):
    """A `torch.Generator` whose device may be "hpu": the C++ type knows no such backend."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu" if device_name(device) == "hpu" else device)


def install() -> None:
    """Emulate the device in this thread and in every thread that starts later."""
    enter()
    run = threading.Thread.run
    if getattr(run, "enters_emulated_device", False):
        return

    def run_on_emulated_device(self: threading.Thread) -> None:
        enter()
        run(self)

    run_on_emulated_device.enters_emulated_device = True  # type: ignore[attr-defined]
    threading.Thread.run = run_on_emulated_device  # type: ignore[method-assign]
    torch.Generator = _Generator
