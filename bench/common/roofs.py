"""The two roofs of a core: how fast it reads memory, and how many floating-point operations it does on registers.

By a small C file (roofs.c), compiled when the benchmark starts; without a compiler by torch, whose sums and products
are nearly as good.
"""

import ctypes
import mmap
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from os import environ
from pathlib import Path
from typing import Protocol

import torch

_SOURCE = Path(__file__).with_name("roofs.c")
_FLAGS = ("-std=c11", "-O3", "-ffp-contract=fast", "-fPIC", "-shared", "-Wno-psabi")
_TIMEOUT_S = 60.0
_AHEAD_BYTES = (0, 1024, 4096)
_FMA_ROUNDS = 6_000_000
_TRIES = 3
_GEMM_SIZE = 768


@dataclass(frozen=True, slots=True)
class Roof:
    """What limits work of so many bytes and operations. The formula of Williams, Waterman and Patterson (2009)."""

    bytes_per_s: float
    flop_per_s: float

    def bound_s(self, size_bytes: float, flop: float) -> float:
        """The least time that the work can take: that of its bytes or that of its operations."""
        return max(size_bytes / self.bytes_per_s, flop / self.flop_per_s)

    def attainable(self, intensity: float) -> float:
        """Operations a second, at most, for work that does `intensity` operations a byte."""
        return min(self.flop_per_s, intensity * self.bytes_per_s)


class RoofMeter(Protocol):
    """Measures roofs. One thread; the caller sets torch's."""

    @property
    def name(self) -> str:
        """What it measures with."""
        ...

    def measure(self) -> Roof:
        """Both roofs, now. Takes tens of milliseconds."""
        ...


class NativeMeter:
    """By roofs.c."""

    name = "C"

    def __init__(self, library: ctypes.CDLL, size_bytes: int) -> None:
        """`size_bytes`: how much is read, several times the CPU's cache; a multiple of 256."""
        self._read, self._fma = library.roofs_read, library.roofs_fma
        self._read.argtypes, self._read.restype = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64), ctypes.c_float
        self._fma.argtypes, self._fma.restype = (ctypes.c_int64, ctypes.c_float), ctypes.c_float
        library.roofs_lanes.restype = ctypes.c_int64
        self.lanes = int(library.roofs_lanes())  # floats in a vector
        self._flop = 24.0 * self.lanes * _FMA_ROUNDS
        self._buffer = _filled(size_bytes)
        # How far ahead it pays to ask for memory is the machine's; found out once, so that a measurement is one pass.
        self._ahead_bytes = min(_AHEAD_BYTES, key=lambda ahead: min(self._read_s(ahead) for _ in range(_TRIES)))

    def measure(self) -> Roof:
        """See RoofMeter."""
        read_s = self._read_s(self._ahead_bytes)
        return Roof(self._buffer.nbytes / read_s, self._flop / _seconds(lambda: self._fma(_FMA_ROUNDS, 0.5)))

    def _read_s(self, ahead_bytes: int) -> float:
        return _seconds(lambda: self._read(self._buffer.data_ptr(), self._buffer.nbytes, ahead_bytes))


class TorchMeter:
    """By torch: a sum, and a large product."""

    name = "torch"

    def __init__(self, size_bytes: int) -> None:
        self._buffer = _filled(size_bytes)
        self._factor = torch.rand(_GEMM_SIZE, _GEMM_SIZE)

    def measure(self) -> Roof:
        """See RoofMeter."""
        read_s = _seconds(self._buffer.sum)
        return Roof(self._buffer.nbytes / read_s, 2.0 * _GEMM_SIZE**3 / _seconds(lambda: self._factor @ self._factor))


def roof_meter(size_bytes: int) -> RoofMeter:
    """The best one here."""
    library = _compiled()
    return TorchMeter(size_bytes) if library is None else NativeMeter(library, size_bytes)


def _compiled() -> ctypes.CDLL | None:
    compiler = shlex.split(environ.get("CC", "cc"))
    if not compiler or shutil.which(compiler[0]) is None:
        return None
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory, "roofs.so")
        command = [*compiler, *_FLAGS, "-o", str(target), str(_SOURCE)]
        try:
            subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=True)
            return ctypes.CDLL(str(target))  # It stays loaded when its file is gone.
        except (OSError, subprocess.SubprocessError):
            return None


def _filled(size_bytes: int) -> torch.Tensor:
    """fp32 of ones, in huge pages where there are any, as KV pools are."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).fill_(1.0)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
