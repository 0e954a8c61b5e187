"""The C kernels of the engine for CPUs, which hatch_build.py builds from the C files here where there is a compiler.

One library for all of them; who uses functions of it declares them: engine/attention/native.py those of attention.c,
engine/ops/native_ops.py those of ops.c and gemm.c. Any thread.
"""

import ctypes
from enum import IntEnum
from functools import cache
from pathlib import Path

LIBRARY = Path(__file__).with_name("kernels.so")
VERSION = 3


class NativeUnavailable(Exception):
    """There is no library that can be used. The message says why."""


class Level(IntEnum):
    """`enum level` of vectors.h: instruction sets, best last."""

    PLAIN_C = 0
    AVX2 = 1
    AVX512 = 2


_NAMES = {
    Level.PLAIN_C: "plain C",
    Level.AVX2: "AVX2",
    Level.AVX512: "AVX-512",
}


class NativeKernels:
    """The loaded library. Calls run without the interpreter lock. Nothing is checked in C."""

    def __init__(self, path: Path = LIBRARY) -> None:
        """Raises NativeUnavailable."""
        try:
            self.library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeUnavailable(f"it was not built when kvferry was installed ({error})") from error
        version = self.function("kvferry_kernels_version", ctypes.c_int64)()
        if version != VERSION:
            raise NativeUnavailable(f"it has version {version}, not {VERSION}: install kvferry again")
        self.level = Level(self.function("kvferry_kernels_level", ctypes.c_int64)())

    @property
    def instructions(self) -> str:
        """The best instruction set of this CPU that the library has code for, for messages."""
        return _NAMES[self.level]

    def function(self, name: str, result: type | None, *arguments: type) -> "ctypes._NamedFuncPointer":
        """The function `name` of the library with these ctypes types. Raises NativeUnavailable if it has none."""
        try:
            function = self.library[name]
        except AttributeError as error:
            raise NativeUnavailable("it was built from other source: install kvferry again") from error
        function.restype = result
        function.argtypes = arguments
        return function


@cache
def _loaded() -> NativeKernels | NativeUnavailable:
    try:
        return NativeKernels()
    except NativeUnavailable as error:
        return error


def kernels() -> NativeKernels:
    """The library, loaded once a process. Raises NativeUnavailable, every time, if it cannot be."""
    loaded = _loaded()
    if isinstance(loaded, NativeUnavailable):
        raise NativeUnavailable(str(loaded))
    return loaded
