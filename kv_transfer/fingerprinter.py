"""Takes the fingerprints of many pages at once: in C where the helper was built, else in Python. The values are the same.

In C a page can be copied in the same pass, while it is in the CPU's cache. That is what makes looking at every page on
a one-sided write cost little. All of it runs without the interpreter lock. Any thread.
"""

import functools
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kv_cache.layout import PAGE_ALIGNMENT_BYTES
from kv_transfer import fingerprint, native
from kv_transfer.native import NativePages, NativeUnavailable
from kv_transfer.pages import PagesAt

PageFingerprints = npt.NDArray[np.uint64]
"""uint64 [page], block by block."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which pages of which hand-off these are: `seed` is the hand-off's, blocks count from the start of the prompt."""

    seed: int
    blocks: range
    layers: range


class Fingerprinter(Protocol):
    """One way to do it. Both methods raise ValueError, and touch nothing, where pages do not fit place or memory."""

    def fingerprints(self, pages: PagesAt, place: Place) -> PageFingerprints:
        """Those of all pages, which are the ones of `place` in its order."""

    def copy(self, source: PagesAt, target: PagesAt, place: Place) -> PageFingerprints:
        """Copy all pages, and return the fingerprints of what was read. The two do not overlap."""


class PythonFingerprinter:
    """With xxhash and numpy, block by block and page by page."""

    def fingerprints(self, pages: PagesAt, place: Place) -> PageFingerprints:
        """See Fingerprinter."""
        page_bytes = _page_bytes(pages, place)
        seeds = fingerprint.page_seeds(place.seed, place.blocks, place.layers)
        return np.array(fingerprint.pages(pages.views(), page_bytes, seeds), np.uint64)

    def copy(self, source: PagesAt, target: PagesAt, place: Place) -> PageFingerprints:
        """See Fingerprinter."""
        _page_bytes(target, place, writable=True)
        found = self.fingerprints(source, place)
        read, written = np.frombuffer(source.memory, np.uint8), np.frombuffer(target.memory, np.uint8)
        for start, into in zip(source.offsets.tolist(), target.offsets.tolist(), strict=True):
            np.copyto(written[into : into + target.size_each], read[start : start + source.size_each])
        return found


class NativeFingerprinter:
    """With the C helper, in one call."""

    def __init__(self, library: NativePages, *, plain: bool = False) -> None:
        """`plain`: without the CPU's vector instructions."""
        self._library = library
        self._plain = plain

    def fingerprints(self, pages: PagesAt, place: Place) -> PageFingerprints:
        """See Fingerprinter."""
        return self._run(pages, None, place)

    def copy(self, source: PagesAt, target: PagesAt, place: Place) -> PageFingerprints:
        """See Fingerprinter."""
        return self._run(source, target, place)

    def _run(self, source: PagesAt, target: PagesAt | None, place: Place) -> PageFingerprints:
        page_bytes = _page_bytes(source, place)
        if target is not None and _page_bytes(target, place, writable=True) != page_bytes:
            raise ValueError(f"pages of {source.size_each} bytes a block do not fit those of {target.size_each}")
        found = np.empty(len(place.blocks) * len(place.layers), np.uint64)
        # These arrays keep the memory mapped until the call is over.
        read, read_at = np.frombuffer(source.memory, np.uint8), np.ascontiguousarray(source.offsets, np.int64)
        where = native.Place(
            place.seed, place.blocks.start, place.layers.start, len(place.blocks), len(place.layers), page_bytes
        )
        if target is None:
            self._library.pages(where, (_address(read), _address(read_at)), None, _address(found), plain=self._plain)
            return found
        written, written_at = np.frombuffer(target.memory, np.uint8), np.ascontiguousarray(target.offsets, np.int64)
        self._library.pages(
            where,
            (_address(read), _address(read_at)),
            (_address(written), _address(written_at)),
            _address(found),
            plain=self._plain,
        )
        return found


@functools.cache
def best_fingerprinter() -> Fingerprinter:
    """The fastest that there is here."""
    try:
        return NativeFingerprinter(_checked_library())
    except NativeUnavailable:
        return PythonFingerprinter()


def describe_best() -> tuple[bool, str]:
    """(whether the C helper is in use, which instructions it takes or why it is not), for people."""
    try:
        return True, _checked_library().instructions
    except NativeUnavailable as error:
        return False, str(error)


def _checked_library() -> NativePages:
    """The library, if its values are what every peer expects. Raises NativeUnavailable."""
    library = NativePages()
    memory = memoryview(bytes(range(256)) * 20)
    pages, place = PagesAt.in_order(memory, 2), Place(0xDEC0DED, range(3, 5), range(1, 3))
    if not np.array_equal(
        NativeFingerprinter(library).fingerprints(pages, place), PythonFingerprinter().fingerprints(pages, place)
    ):
        raise NativeUnavailable("its fingerprints are wrong: the compiler or the CPU is at fault")
    return library


def _page_bytes(pages: PagesAt, place: Place, *, writable: bool = False) -> int:
    """The size of one page. Raises ValueError for pages that are not those of `place` or not inside their memory."""
    if len(pages.offsets) != len(place.blocks) or not place.layers or pages.size_each % len(place.layers):
        raise ValueError(f"{len(pages.offsets)} times {pages.size_each} bytes are not the pages of {place}")
    size = pages.size_each // len(place.layers)
    if size <= 0 or size % PAGE_ALIGNMENT_BYTES:
        raise ValueError(f"pages have a multiple of {PAGE_ALIGNMENT_BYTES} bytes, not {size}")
    if place.blocks.step != 1 or place.layers.step != 1 or min(place.blocks.start, place.layers.start, place.seed) < 0:
        raise ValueError(f"no run of pages: {place}")
    if len(pages.offsets) and not 0 <= pages.offsets.min() <= pages.offsets.max() <= pages.memory.nbytes - pages.size_each:
        raise ValueError(f"pages outside their memory of {pages.memory.nbytes} bytes")
    if writable and pages.memory.readonly:
        raise ValueError("the target cannot be written")
    return size


def _address(array: npt.NDArray[np.generic]) -> int:
    address: int = array.ctypes.data
    return address
