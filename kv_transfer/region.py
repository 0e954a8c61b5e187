"""One block of page-aligned memory: a KV pool. A shared one can be mapped by another process of the same host.

A shared region is an anonymous memory file. The peer opens it through `/proc/<pid>/fd/<fd>`, so nothing is ever left
behind in /dev/shm, and the memory goes away with the last process that maps it. A pid can mean another process in
another pid namespace or after a restart; therefore the file begins with a header page holding a random nonce, which
the opener compares with the one it was told.

    file:    [ header page: magic, size, nonce ][ size_bytes of payload, page-aligned ]
"""

import fcntl
import mmap
import os
import secrets
import struct
from contextlib import suppress
from types import TracebackType

import msgspec

PAGE_BYTES = mmap.PAGESIZE
_HEADER = struct.Struct("!8sQ16s")
_MAGIC = b"kvferry1"
_MEMINFO = "/proc/meminfo"


class RegionError(Exception):
    """A region could not be allocated, or is not the one that its descriptor names."""


class RegionDescriptor(msgspec.Struct, frozen=True):
    """How a process of the same host finds a shared region."""

    pid: int
    fd: int
    size_bytes: int
    nonce: bytes


class MemoryRegion:
    """Memory that one process owns, or a peer's memory mapped here. Make one with `allocate` or `open_remote`.

    Any thread may read the attributes; `close` is for the owner, once.
    """

    def __init__(self, mapping: mmap.mmap, offset: int, size_bytes: int, fd: int | None, nonce: bytes) -> None:
        self._mapping = mapping
        self._whole = memoryview(mapping)
        self._buffer = self._whole[offset : offset + size_bytes]
        self._fd = fd
        self._nonce = nonce
        self.size_bytes = size_bytes

    @classmethod
    def allocate(cls, size_bytes: int, *, shared: bool, name: str = "kv-pool") -> "MemoryRegion":
        """Zeroed memory of `size_bytes`. Shared memory can be mapped by a peer; private memory cannot.

        Raises ValueError for a size that is not positive and RegionError, naming what is needed and what there is,
        when memory is short.
        """
        if size_bytes <= 0:
            raise ValueError(f"a region needs a positive size, not {size_bytes}")
        available = available_memory_bytes()
        if available is not None and size_bytes > available:
            raise RegionError(f"{name} needs {size_bytes} bytes of memory, {available} are available")
        try:
            return cls._allocate_shared(size_bytes, name) if shared else cls._allocate_private(size_bytes)
        except (OSError, MemoryError, OverflowError) as error:
            raise RegionError(f"{name} of {size_bytes} bytes could not be allocated: {error}") from error

    @classmethod
    def _allocate_private(cls, size_bytes: int) -> "MemoryRegion":
        mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Blocks are read in no order, and looking up small pages costs attention up to a third of its time. A system
        # without huge ones refuses, which does no harm.
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        return cls(mapping, 0, size_bytes, None, b"")

    @classmethod
    def _allocate_shared(cls, size_bytes: int, name: str) -> "MemoryRegion":
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, PAGE_BYTES + size_bytes)
            # Without the seals a peer could cut the file, and our next touch of the pool would be a bus error.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            mapping = mmap.mmap(fd, PAGE_BYTES + size_bytes, flags=mmap.MAP_SHARED)
        except BaseException:
            os.close(fd)
            raise
        nonce = secrets.token_bytes(16)
        mapping[: _HEADER.size] = _HEADER.pack(_MAGIC, size_bytes, nonce)
        return cls(mapping, PAGE_BYTES, size_bytes, fd, nonce)

    @classmethod
    def open_remote(cls, descriptor: bytes) -> "MemoryRegion":
        """Map the region that a peer's `descriptor()` names, writable.

        Raises RegionError when it cannot be reached (other host or pid namespace, no permission, process gone) or is
        another region than the one described.
        """
        try:
            target = msgspec.msgpack.decode(descriptor, type=RegionDescriptor)
        except msgspec.MsgspecError as error:
            raise RegionError(f"a malformed region descriptor: {error}") from error
        if min(target.pid, target.fd) < 0 or target.size_bytes <= 0:
            raise RegionError(f"an impossible region descriptor: {target}")
        path = f"/proc/{target.pid}/fd/{target.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RegionError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            _check_header(fd, target, path)
            mapping = mmap.mmap(fd, PAGE_BYTES + target.size_bytes, flags=mmap.MAP_SHARED)
        except (OSError, ValueError, OverflowError) as error:
            raise RegionError(f"{path} cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        return cls(mapping, PAGE_BYTES, target.size_bytes, None, target.nonce)

    @property
    def buffer(self) -> memoryview:
        """The payload: writable bytes, `size_bytes` long, beginning on a page border."""
        return self._buffer

    @property
    def shared(self) -> bool:
        """Whether a peer of the same host can map this region, which is ours."""
        return self._fd is not None

    @property
    def file(self) -> tuple[int, int] | None:
        """For own child processes: the descriptor of our memory file and the offset of the payload in it; None for
        private memory. The child must be given the descriptor while this region is open."""
        return None if self._fd is None else (self._fd, PAGE_BYTES)

    def descriptor(self) -> bytes:
        """What a peer needs for `open_remote`. Raises RegionError for private memory."""
        if self._fd is None:
            raise RegionError("private memory cannot be described to a peer")
        return msgspec.msgpack.encode(RegionDescriptor(os.getpid(), self._fd, self.size_bytes, self._nonce))

    def close(self) -> None:
        """Let go of the memory. Idempotent. Views still held elsewhere keep it mapped until they go too."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
        try:
            self._buffer.release()
            self._whole.release()
            self._mapping.close()
        except BufferError:  # A tensor or array still looks at it: the mapping ends with the last of them.
            return

    def __enter__(self) -> "MemoryRegion":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_header(fd: int, target: RegionDescriptor, path: str) -> None:
    """Raise RegionError unless the file is the region described. Reads by pread: the file may be anything."""
    # A file that could shrink under us would turn a later write into a bus error, so we insist on its seals.
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise RegionError(f"{path} is not a memory file") from error
    header = os.pread(fd, _HEADER.size, 0)
    expected = _HEADER.pack(_MAGIC, target.size_bytes, target.nonce[:16])
    if not secrets.compare_digest(header, expected) or not seals & fcntl.F_SEAL_SHRINK:
        raise RegionError(f"{path} is not the region described")
    if os.fstat(fd).st_size < PAGE_BYTES + target.size_bytes:
        raise RegionError(f"{path} is smaller than described")


def available_memory_bytes() -> int | None:
    """Memory the machine can still give, in bytes; None where the system does not say."""
    try:
        with open(_MEMINFO, encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None
