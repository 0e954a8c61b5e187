"""Memory that a peer can map: aligned, checked, and gone when closed."""

import os
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kv_transfer import region as region_module
from kv_transfer.region import PAGE_BYTES, MemoryRegion, RegionDescriptor, RegionError, available_memory_bytes


def address_of(region: MemoryRegion) -> int:
    return int(np.frombuffer(region.buffer, np.uint8).__array_interface__["data"][0])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [1, 4096, 3 * 4096 + 17])
def test_a_pool_begins_on_a_page_border_and_is_zero(shared: bool, size: int) -> None:
    with MemoryRegion.allocate(size, shared=shared) as region:
        assert address_of(region) % PAGE_BYTES == 0
        assert region.buffer.nbytes == region.size_bytes == size
        assert not region.buffer.readonly
        assert not any(region.buffer)


def flags_of(address: int) -> list[str]:
    """What the system knows of the mapping that the address is in."""
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            within = int(found[1], 16) <= address < int(found[2], 16)
        elif within and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"{address:x} is not mapped")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages in this system")
def test_private_memory_may_be_in_huge_pages() -> None:
    with MemoryRegion.allocate(4 << 20, shared=False) as region:
        assert "hg" in flags_of(address_of(region))


def test_a_system_without_huge_pages_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module.mmap, "MADV_HUGEPAGE", 9999)
    with MemoryRegion.allocate(4 << 20, shared=False) as region:
        assert not any(region.buffer[:4096])


def test_what_one_side_writes_the_other_reads() -> None:
    with MemoryRegion.allocate(10_000, shared=True) as ours, MemoryRegion.open_remote(ours.descriptor()) as theirs:
        assert theirs.size_bytes == 10_000
        assert address_of(theirs) % PAGE_BYTES == 0
        theirs.buffer[9_999] = 7
        ours.buffer[0] = 8
        assert (ours.buffer[9_999], theirs.buffer[0]) == (7, 8)


def test_a_mapped_region_outlives_its_owner() -> None:
    ours = MemoryRegion.allocate(100, shared=True)
    theirs = MemoryRegion.open_remote(ours.descriptor())
    ours.close()
    theirs.buffer[0] = 1
    theirs.close()


def changed(region: MemoryRegion, **changes: object) -> bytes:
    descriptor = msgspec.msgpack.decode(region.descriptor(), type=RegionDescriptor)
    return msgspec.msgpack.encode(msgspec.structs.replace(descriptor, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"nonce": b"0" * 16},
        {"nonce": b""},
        {"size_bytes": 101},
        {"size_bytes": 0},
        {"size_bytes": 2**50},
        {"fd": 9999},
        {"fd": -1},
        {"pid": 2**30},
        {"pid": -1},
    ],
)
def test_a_descriptor_of_another_region_is_refused(changes: dict[str, object]) -> None:
    with MemoryRegion.allocate(100, shared=True) as region, pytest.raises(RegionError):
        MemoryRegion.open_remote(changed(region, **changes))


def test_a_file_that_is_not_a_region_is_refused(tmp_path: os.PathLike[str]) -> None:
    with MemoryRegion.allocate(100, shared=True) as region:
        path = os.path.join(tmp_path, "file")
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        try:
            os.write(fd, b"x" * 8192)
            with pytest.raises(RegionError, match="not a memory file"):
                MemoryRegion.open_remote(changed(region, fd=fd))
        finally:
            os.close(fd)


@pytest.mark.parametrize("junk", [b"", b"\x00", b"junk" * 100, msgspec.msgpack.encode({"pid": "x"})])
def test_a_malformed_descriptor_is_refused(junk: bytes) -> None:
    with pytest.raises(RegionError, match="malformed"):
        MemoryRegion.open_remote(junk)


def test_a_peer_cannot_shrink_the_pool_under_us() -> None:
    with MemoryRegion.allocate(100, shared=True) as region:
        descriptor = msgspec.msgpack.decode(region.descriptor(), type=RegionDescriptor)
        fd = os.open(f"/proc/{descriptor.pid}/fd/{descriptor.fd}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.ftruncate(fd, 0)
        finally:
            os.close(fd)


def test_private_memory_has_no_descriptor() -> None:
    with MemoryRegion.allocate(100, shared=False) as region:
        assert not region.shared
        with pytest.raises(RegionError, match="private"):
            region.descriptor()


@pytest.mark.parametrize("shared", [False, True])
def test_too_little_memory_is_a_clear_error(shared: bool) -> None:
    with pytest.raises(RegionError, match=r"pool needs \d+ bytes of memory, \d+ are available"):
        MemoryRegion.allocate(2**60, shared=shared, name="pool")


@pytest.mark.parametrize("shared", [False, True])
def test_what_the_system_refuses_is_a_clear_error(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module, "available_memory_bytes", lambda: None)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RegionError, match="could not be allocated"):
        MemoryRegion.allocate(2**62, shared=shared)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_must_be_positive(size: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        MemoryRegion.allocate(size, shared=True)


def test_the_available_memory_is_known_here() -> None:
    available = available_memory_bytes()
    assert available is not None
    assert available > 0


def test_no_file_descriptor_is_left() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        ours = MemoryRegion.allocate(100, shared=True)
        theirs = MemoryRegion.open_remote(ours.descriptor())
        theirs.close()
        ours.close()
        ours.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_closing_while_an_array_still_looks_is_safe() -> None:
    region = MemoryRegion.allocate(100, shared=True)
    array = np.frombuffer(region.buffer, np.uint8)
    region.close()
    assert array[0] == 0
