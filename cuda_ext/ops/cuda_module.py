"""Kernels written in CUDA C++: compiled by NVRTC when first used, launched through the driver.

Triton decides itself where an operand lies; a kernel that keeps a state in registers from its first
load to its last store has to decide that. NVRTC comes with every CUDA build of torch, so neither a
compiler nor a header has to be installed where the kernels run.
"""

from __future__ import annotations

import ctypes
import functools
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch

_MAX_DYNAMIC_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class CudaError(RuntimeError):
    """A call of the driver or of NVRTC failed."""


class _LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16)]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    ]


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "0").partition(".")[0]
    name = f"libnvrtc.so.{major}"
    roots = [Path(sysconfig.get_path("purelib")), Path(torch.__file__).resolve().parents[1]]
    found = [
        str(path)
        for root in roots
        for folder in (f"nvidia/cu{major}/lib", "nvidia/cuda_nvrtc/lib", "torch/lib")
        for path in sorted((root / folder).glob(f"{name}*"))
    ]
    for candidate in (*found, name, f"/usr/local/cuda/lib64/{name}"):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise CudaError(
        f"{name} is needed to compile ReplaySSM's kernels and was not found; it belongs to torch's "
        f"CUDA {torch.version.cuda} build: pip install nvidia-cuda-nvrtc"
    )


def _check(code: int, call: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise CudaError(f"{call} failed: {(text.value or b'?').decode()} ({code})")


def compile_source(source: Path, options: Sequence[str]) -> bytes:
    """Machine code (cubin) of CUDA C++ source.

    Args:
        source: file of one translation unit.
        options: of NVRTC, the architecture among them.

    Raises:
        CudaError: with the compiler's log.
    """
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None
    )
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
    size = ctypes.c_size_t()
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CudaError(f"NVRTC could not compile with {options!r}:\n{log.value.decode()}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


class Kernel:
    """One `extern "C"` kernel of a module on the current device.

    Args:
        cubin: machine code for the device.
        name: of the kernel.
        shared_bytes: dynamic shared memory of a block.

    Raises:
        CudaError: the driver refuses the module or that much shared memory.
    """

    def __init__(self, cubin: bytes, name: str, shared_bytes: int) -> None:
        torch.cuda.current_stream()  # makes torch's context current
        driver = _driver()
        self._module = ctypes.c_void_p()
        _check(driver.cuModuleLoadData(ctypes.byref(self._module), cubin), "cuModuleLoadData")
        self._function = ctypes.c_void_p()
        _check(
            driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()),
            "cuModuleGetFunction",
        )
        _check(
            driver.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED_MEMORY, shared_bytes),
            "cuFuncSetAttribute",
        )
        self.shared_bytes = shared_bytes

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        arguments: ctypes.Structure,
        overlap: bool = False,
    ) -> None:
        """Launch on torch's current stream; capturable, never synchronises.

        Args:
            grid: blocks.
            threads: of a block.
            arguments: the kernel's one parameter, a struct passed by value.
            overlap: programmatic dependent launch: the kernel may start before its predecessor on
                the stream has ended, and waits for it itself.
        """
        config = _LaunchConfig(
            grid=grid,
            block=(threads, 1, 1),
            shared_bytes=self.shared_bytes,
            stream=torch.cuda.current_stream().cuda_stream,
        )
        attribute = _LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION)
        if overlap:
            attribute.value[0] = 1
            config.attributes = ctypes.pointer(attribute)
            config.attribute_count = 1
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        _check(
            _driver().cuLaunchKernelEx(ctypes.byref(config), self._function, parameters, None),
            "cuLaunchKernelEx",
        )
