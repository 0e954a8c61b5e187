"""The C helper for KV pages, which hatch_build.py builds from pages.c where there is a compiler. Any thread."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LIBRARY = Path(__file__).with_name("pages.so")
VERSION = 1


class NativeUnavailable(Exception):
    """There is no helper that can be used. The message says why."""


class Place(ctypes.Structure):
    """`struct place` of pages.c: which pages, and under which seed."""

    _fields_ = (
        ("base_seed", ctypes.c_uint64),
        ("first_block", ctypes.c_uint64),
        ("first_layer", ctypes.c_uint64),
        ("num_runs", ctypes.c_uint64),
        ("num_layers", ctypes.c_uint64),
        ("page_bytes", ctypes.c_uint64),
    )


class NativePages:
    """The functions of the library. Calls run without the interpreter lock. Nothing is checked here: see pages.c."""

    def __init__(self, path: Path = LIBRARY) -> None:
        """Raises NativeUnavailable."""
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeUnavailable(f"it was not built when kvferry was installed ({error})") from error
        try:
            version = library.kvferry_pages_version
            has_avx2 = library.kvferry_pages_has_avx2
            self._pages = library.kvferry_pages
        except AttributeError as error:
            raise NativeUnavailable("it was built from other source: install kvferry again") from error
        version.restype = ctypes.c_int64
        if version() != VERSION:
            raise NativeUnavailable(f"it has version {version()}, not {VERSION}: install kvferry again")
        self.instructions = "AVX2" if has_avx2() else "plain C"
        pointer = ctypes.c_void_p
        self._pages.argtypes = (ctypes.POINTER(Place), pointer, pointer, pointer, pointer, pointer, ctypes.c_int)
        self._pages.restype = None

    def pages(
        self,
        place: Place,
        source: npt.NDArray[np.uint8],
        source_offsets: npt.NDArray[np.int64],
        target: npt.NDArray[np.uint8] | None,
        target_offsets: npt.NDArray[np.int64] | None,
        found: npt.NDArray[np.uint64],
        *,
        plain: bool,
    ) -> None:
        """`kvferry_pages` with these contiguous arrays. `target` and its offsets may be None."""
        to = None if target is None else _address(target)
        to_at = None if target_offsets is None else _address(target_offsets)
        arrays = (_address(source), _address(source_offsets), to, to_at, _address(found))
        self._pages(ctypes.byref(place), *arrays, plain)


def _address(array: npt.NDArray[Any]) -> int:
    # Not `array.ctypes.data`, which costs more and leaves objects behind for a while.
    address: int = array.__array_interface__["data"][0]
    return address
