"""Takes the fingerprints of many pages at once: in C where the helper was built, else in Python, with the same values.

In C a page can be copied in the same pass, while it is in the CPU's cache. That is what makes looking at every page on
a one-sided write cost little. All of it runs without the interpreter lock. Any thread.
"""

import functools
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kv_cache.layout import PAGE_ALIGNMENT_BYTES, KVCacheLayout, KVDtype
from kv_transfer import fingerprint, native
from kv_transfer.native import NativePages, NativeUnavailable
from kv_transfer.pages import PageRun, PagesAt

PageFingerprints = npt.NDArray[np.uint64]
"""uint64 [page], block by block."""


class Fingerprinter(Protocol):
    """One way to do it. `seed` is the hand-off's. Raises ValueError, and touches nothing, for pages not in memory."""

    def fingerprints(self, pages: PagesAt, seed: int) -> PageFingerprints:
        """Those of all pages."""

    def copy(self, source: PagesAt, target: PagesAt, seed: int) -> PageFingerprints:
        """Copy all pages, which do not overlap, and return the fingerprints of what was read."""


class PythonFingerprinter:
    """With xxhash and numpy, block by block and page by page."""

    def fingerprints(self, pages: PagesAt, seed: int) -> PageFingerprints:
        """See Fingerprinter."""
        _check(pages, seed)
        seeds = fingerprint.page_seeds(seed, pages.run.blocks, pages.run.layers)
        return np.array(fingerprint.pages(pages.views(), pages.page_bytes, seeds), np.uint64)

    def copy(self, source: PagesAt, target: PagesAt, seed: int) -> PageFingerprints:
        """See Fingerprinter."""
        _check_target(source, target, seed)
        found = self.fingerprints(source, seed)
        size = len(source.run.layers) * source.page_bytes
        read, written = np.frombuffer(source.memory, np.uint8), np.frombuffer(target.memory, np.uint8)
        for start, into in zip(source.offsets.tolist(), target.offsets.tolist(), strict=True):
            np.copyto(written[into : into + size], read[start : start + size])
        return found


class NativeFingerprinter:
    """With the C helper, in one call."""

    def __init__(self, library: NativePages, *, plain: bool = False) -> None:
        """`plain`: without the CPU's vector instructions."""
        self._library = library
        self._plain = plain

    def fingerprints(self, pages: PagesAt, seed: int) -> PageFingerprints:
        """See Fingerprinter."""
        _check(pages, seed)
        return self._run(pages, None, seed)

    def copy(self, source: PagesAt, target: PagesAt, seed: int) -> PageFingerprints:
        """See Fingerprinter."""
        _check(source, seed)
        _check_target(source, target, seed)
        return self._run(source, target, seed)

    def _run(self, source: PagesAt, target: PagesAt | None, seed: int) -> PageFingerprints:
        run = source.run
        found = np.empty(run.num_pages, np.uint64)
        place = native.Place(
            seed, run.blocks.start, run.layers.start, len(run.blocks), len(run.layers), source.page_bytes
        )
        # These arrays keep the memory mapped until the call is over.
        read, read_at = _arrays(source)
        written, written_at = (None, None) if target is None else _arrays(target)
        self._library.pages(place, read, read_at, written, written_at, found, plain=self._plain)
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
    layout = KVCacheLayout("check", "0", num_layers=2, num_kv_heads=1, head_dim=64, block_size=16, dtype=KVDtype.INT8)
    run = PageRun(range(3, 5), range(2))
    memory = memoryview(bytes(range(256)) * (2 * layout.block_bytes // 256))
    pages = PagesAt.in_order(run, layout, memory)
    found, expected = (
        one.fingerprints(pages, 0xDEC0DED) for one in (NativeFingerprinter(library), PythonFingerprinter())
    )
    if not np.array_equal(found, expected):
        raise NativeUnavailable("its fingerprints are wrong: the compiler or the CPU is at fault")
    return library


def _check(pages: PagesAt, seed: int) -> None:
    """Raises ValueError for what C must not be called with."""
    run, page_bytes = pages.run, pages.page_bytes
    if page_bytes <= 0 or page_bytes % PAGE_ALIGNMENT_BYTES:
        raise ValueError(f"pages have a multiple of {PAGE_ALIGNMENT_BYTES} bytes, not {page_bytes}")
    if run.blocks.step != 1 or run.layers.step != 1 or min(run.blocks.start, run.layers.start, seed) < 0:
        raise ValueError(f"no run of pages: {run} of seed {seed}")
    if len(pages.offsets) != len(run.blocks):
        raise ValueError(f"{len(pages.offsets)} places for {len(run.blocks)} blocks")
    last = pages.memory.nbytes - len(run.layers) * page_bytes
    if run.blocks and not 0 <= int(pages.offsets.min()) <= int(pages.offsets.max()) <= last:
        raise ValueError(f"pages outside their memory of {pages.memory.nbytes} bytes")


def _check_target(source: PagesAt, target: PagesAt, seed: int) -> None:
    _check(target, seed)
    if (target.run, target.page_bytes) != (source.run, source.page_bytes):
        raise ValueError(f"{target.run} of {target.page_bytes} bytes each do not take {source.run}")
    if target.memory.readonly:
        raise ValueError("the target cannot be written")


def _arrays(pages: PagesAt) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    return np.frombuffer(pages.memory, np.uint8), np.ascontiguousarray(pages.offsets, np.int64)
