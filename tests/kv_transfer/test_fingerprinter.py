"""Every way of taking fingerprints, in C and in Python, gives the values of the specification and copies every byte."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer import fingerprint, native
from kv_transfer.events import Committed, Failed
from kv_transfer.fingerprinter import (
    Fingerprinter,
    NativeFingerprinter,
    PageFingerprints,
    PythonFingerprinter,
    best_fingerprinter,
    describe_best,
)
from kv_transfer.native import NativePages, NativeUnavailable
from kv_transfer.pages import PageRun, PagesAt
from tests.support.kv_pair import KINDS, LIBRARIES, Pair, wiring


def native_fingerprinter(*, plain: bool) -> NativeFingerprinter:
    try:
        return NativeFingerprinter(NativePages(), plain=plain)
    except NativeUnavailable as error:
        pytest.skip(f"no C helper here: {error}")


WAYS: dict[str, Callable[[], Fingerprinter]] = {
    "vector": lambda: native_fingerprinter(plain=False),
    "plain C": lambda: native_fingerprinter(plain=True),
    "Python": PythonFingerprinter,
}


def scattered(run: PageRun, page_bytes: int, pool_blocks: int, seed: int) -> PagesAt:
    """Pages of random content in a pool of this many places for a block."""
    random = np.random.default_rng(seed)
    size_each = len(run.layers) * page_bytes
    memory = memoryview(bytearray(random.bytes(pool_blocks * size_each)))
    places = random.permutation(pool_blocks)[: len(run.blocks)]
    return PagesAt(run, page_bytes, memory, places.astype(np.int64) * size_each)


def expected(pages: PagesAt, seed: int) -> list[int]:
    """Page by page."""
    found = []
    for block, offset in zip(pages.run.blocks, pages.offsets.tolist(), strict=True):
        for index, layer in enumerate(pages.run.layers):
            start = offset + index * pages.page_bytes
            under = fingerprint.page_seeds(seed, range(block, block + 1), range(layer, layer + 1))[0]
            found.append(xxhash.xxh3_64_intdigest(pages.memory[start : start + pages.page_bytes], under))
    return found


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=40, deadline=None)
@given(
    page_bytes=st.integers(1, 40).map(lambda n: 256 * n),
    blocks=st.tuples(st.integers(0, 2**30), st.integers(0, 4)),
    layers=st.tuples(st.integers(0, 200), st.integers(1, 3)),
    seed=st.integers(0, 2**64 - 1),
)
def test_the_values_are_those_of_xxhash_and_copies_are_whole(
    way: str, page_bytes: int, blocks: tuple[int, int], layers: tuple[int, int], seed: int
) -> None:
    look = WAYS[way]()
    run = PageRun(range(blocks[0], sum(blocks)), range(layers[0], sum(layers)))
    source = scattered(run, page_bytes, 6, seed=1)
    assert look.fingerprints(source, seed).tolist() == expected(source, seed)
    target = scattered(run, page_bytes, 7, seed=2)
    before = bytes(target.memory)
    assert look.copy(source, target, seed).tolist() == expected(source, seed)
    assert b"".join(target.views()) == b"".join(source.views())
    for view, old in zip(target.views(), _views(target, before), strict=True):
        view[:] = old
    assert target.memory == before, "nothing else was touched"


def _views(pages: PagesAt, content: bytes) -> list[memoryview]:
    return PagesAt(pages.run, pages.page_bytes, memoryview(content), pages.offsets).views()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shift", [0, 1, 8, 16, 32])
def test_pages_need_not_be_aligned(way: str, shift: int) -> None:
    run = PageRun(range(2), range(3))
    source = scattered(run, 1280, 2, seed=3)
    target = PagesAt(run, 1280, memoryview(bytearray(source.size_bytes + 64)), np.array([shift, shift + 3 * 1280]))
    moved = PagesAt(run, 1280, memoryview(bytes(shift) + bytes(source.memory)), source.offsets + shift)
    assert WAYS[way]().copy(moved, target, 9).tolist() == expected(source, 9)
    assert b"".join(target.views()) == b"".join(source.views())


RUN = PageRun(range(2), range(3))
REFUSED = {
    "before the memory": PagesAt(RUN, 256, memoryview(bytearray(2000)), np.array([0, -1])),
    "behind the memory": PagesAt(RUN, 256, memoryview(bytearray(2000)), np.array([0, 2000 - 3 * 256 + 1])),
    "too few places": PagesAt(RUN, 256, memoryview(bytearray(2000)), np.array([0])),
    "no multiple of 256": PagesAt(RUN, 255, memoryview(bytearray(2000)), np.array([0, 768])),
    "no bytes": PagesAt(RUN, 0, memoryview(bytearray(2000)), np.array([0, 768])),
    "no run": PagesAt(PageRun(range(0, 4, 2), range(3)), 256, memoryview(bytearray(2000)), np.array([0, 768])),
    "negative": PagesAt(PageRun(range(-2, 0), range(3)), 256, memoryview(bytearray(2000)), np.array([0, 768])),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_lie_within_its_memory_is_refused_before_a_byte_is_touched(way: str, case: str) -> None:
    look, good = WAYS[way](), scattered(RUN, 256, 2, seed=4)
    with pytest.raises(ValueError):
        look.fingerprints(REFUSED[case], 1)
    with pytest.raises(ValueError):
        look.copy(good, REFUSED[case], 1)
    with pytest.raises(ValueError):
        look.copy(REFUSED[case], good, 1)
    assert not any(REFUSED[case].memory)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_needs_a_target_that_can_be_written_and_takes_the_same_pages(way: str) -> None:
    look, source = WAYS[way](), scattered(RUN, 512, 2, seed=5)
    frozen = PagesAt(RUN, 512, memoryview(bytes(source.memory)), source.offsets)
    with pytest.raises(ValueError, match="cannot be written"):
        look.copy(source, frozen, 1)
    with pytest.raises(ValueError, match="do not take"):
        look.copy(source, scattered(RUN, 256, 4, seed=6), 1)
    with pytest.raises(ValueError, match="do not take"):
        look.copy(source, scattered(PageRun(range(1, 3), range(3)), 512, 2, seed=6), 1)


def test_without_a_usable_library_python_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NativeUnavailable, match="was not built"):
        NativePages(tmp_path / "pages.so")
    (tmp_path / "pages.so").write_text("no library")
    monkeypatch.setattr(native.NativePages.__init__, "__defaults__", (tmp_path / "pages.so",))
    assert describe_best()[0] is False
    best_fingerprinter.cache_clear()
    assert isinstance(best_fingerprinter(), PythonFingerprinter)
    best_fingerprinter.cache_clear()


def test_a_library_with_other_values_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    native_fingerprinter(plain=False)
    monkeypatch.setattr(NativePages, "pages", lambda self, place, *arrays, plain: arrays[-1].fill(7))
    assert describe_best() == (False, "its fingerprints are wrong: the compiler or the CPU is at fault")


def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    native_fingerprinter(plain=False)
    monkeypatch.setattr(native, "VERSION", native.VERSION + 1)
    with pytest.raises(NativeUnavailable, match="install kvferry again"):
        NativePages()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ways", [("vector", "Python"), ("Python", "vector"), ("plain C", "Python")])
def test_ends_that_take_fingerprints_in_different_ways_agree(kind: str, ways: tuple[str, str]) -> None:
    sender, receiver = ({"fingerprinter": WAYS[way]()} for way in ways)
    with Pair(sender=sender, receiver=receiver, **wiring(kind)) as pair:
        ticket, source = pair.reserve([1, 5, 2]), [9, 10, 3]
        pair.send(ticket, source)
        assert isinstance(pair.outcome(ticket)[0], Committed)
        assert pair.equal(ticket, source)


class Careless:
    """Looks, and then lets a byte change: what a race with whoever owns the pool, or a copy gone wrong, would do."""

    def __init__(self, way: str) -> None:
        self._look = WAYS[way]()

    def fingerprints(self, pages: PagesAt, seed: int) -> PageFingerprints:
        found = self._look.fingerprints(pages, seed)
        pages.views()[-1][-1] ^= 1
        return found

    def copy(self, source: PagesAt, target: PagesAt, seed: int) -> PageFingerprints:
        found = self._look.copy(source, target, seed)
        target.views()[0][7] ^= 1
        return found


class Misled(Careless):
    """Looks at something else than what goes out."""

    def fingerprints(self, pages: PagesAt, seed: int) -> PageFingerprints:
        found = self._look.fingerprints(pages, seed)
        found[-1] ^= np.uint64(1)
        return found

    def copy(self, source: PagesAt, target: PagesAt, seed: int) -> PageFingerprints:
        found = self._look.copy(source, target, seed)
        found[0] ^= np.uint64(1)
        return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_what_was_looked_at_is_refused(kind: str, way: str) -> None:
    with Pair(sender={"fingerprinter": Misled(way)}, **wiring(kind)) as pair:
        ticket = pair.reserve([1, 5, 2])
        pair.send(ticket, [9, 10, 3])
        received, _ = pair.outcome(ticket)
        assert isinstance(received, Failed)
        assert "does not hold what was sent" in received.error.message


# The others look while the bytes are under way: what changes then may be out already.
@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(LIBRARIES)))
@pytest.mark.parametrize("way", WAYS)
def test_what_changes_after_it_was_looked_at_is_refused(kind: str, way: str) -> None:
    with Pair(sender={"fingerprinter": Careless(way)}, **wiring(kind)) as pair:
        ticket = pair.reserve([1, 5, 2])
        pair.send(ticket, [9, 10, 3])
        received, _ = pair.outcome(ticket)
        assert isinstance(received, Failed)
        assert "does not hold what was sent" in received.error.message
