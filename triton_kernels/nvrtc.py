"""Compile CUDA C++ at run time with the NVRTC library that ships with PyTorch, and launch it.

Users need no CUDA toolkit and no build step. Only the C interfaces of NVRTC and of the driver are
used, both stable over versions.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import pathlib

import torch

_CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9


class KernelCompileError(RuntimeError):
    """NVRTC is missing or rejected the source."""


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    major = str(torch.version.cuda).split(".")[0]
    name = f"libnvrtc.so.{major}"
    candidates = [name]
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        candidates += [str(path) for path in pathlib.Path(root).glob(f"*/lib/{name}")]
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home:
            candidates.append(str(pathlib.Path(home) / "lib64" / name))
    for candidate in candidates:
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise KernelCompileError(
        f"{name} was not found, so the decode kernel cannot be compiled; install the "
        f"nvidia-cuda-nvrtc package of CUDA {major}, on which PyTorch's CUDA builds depend"
    )


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check_driver(result: int, what: str) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        message = text.value.decode() if text.value else f"error {result}"
        raise RuntimeError(f"{what} failed: {message}")


def compile_cubin(source: str, name: str, arch: str, options: tuple[str, ...]) -> bytes:
    """Machine code of a CUDA C++ source for one architecture, such as "90".

    Raises:
        KernelCompileError: with the compiler's log.
    """
    lib = _nvrtc()
    program = ctypes.c_void_p()
    lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
    flags = (f"--gpu-architecture=sm_{arch}", "--std=c++17", *options)
    array = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    result = lib.nvrtcCompileProgram(program, len(flags), array)
    size = ctypes.c_size_t()
    try:
        if result:
            lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            lib.nvrtcGetProgramLog(program, log)
            raise KernelCompileError(f"{name} does not compile: {log.value.decode()}")
        lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetCUBIN(program, cubin)
        return cubin.raw
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


class Kernel:
    """One kernel of a loaded module, whose only parameter is a structure passed by value."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int) -> None:
        driver = _driver()
        torch.cuda.current_stream()  # creates the context
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._shared_bytes = shared_bytes
        _check_driver(driver.cuModuleLoadData(ctypes.byref(self._module), cubin), "loading")
        _check_driver(
            driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()),
            f"looking up {name}",
        )
        for attribute, value in (
            (_CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
            # All of it: several CTAs per multiprocessor live from their shared-memory rings.
            (_CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
        ):
            result = driver.cuFuncSetAttribute(self._function, attribute, value)
            _check_driver(result, "setting the shared memory size")

    def launch(
        self, grid: tuple[int, int, int], threads: int, parameters: ctypes.Structure
    ) -> None:
        """Enqueue on the current stream; can be captured in a CUDA graph."""
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        result = _driver().cuLaunchKernel(
            self._function,
            *grid,
            threads,
            1,
            1,
            self._shared_bytes,
            stream,
            arguments,
            None,
        )
        _check_driver(result, "the launch")
