"""One NIXL agent: one end of one link, from its first byte to its last.

Why an agent a link, and not one a process: an agent is the only thing in NIXL that can be stopped. Tried with 1.5.1:
to release a transfer that is under way, or to forget the peer (`invalidateRemoteMD`), answers success, and every byte
of it lands all the same while the agent is used for anything else. Only the end of the agent ends its transfers. On
the side of the receiver too: what a sender has sent may still wait in a socket, and lands when the agent is used next,
even if the sender is gone. So each end of a link ends its agent, and only what no byte can reach is handed on.
An agent costs about 40 ms to make, 5 MB and 10 file descriptors; memory is registered once an agent, whole.
"""

import ctypes
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from kv_transfer.nixl_library import NixlLibrary
from kv_transfer.region import MemoryRegion

_BACKEND = "UCX"
_HOST_MEMORY = 0  # The device id of memory that belongs to no device.
_SPIN_S, _BRISK_S, _CALM_S = 0.002, 0.05, 1.0

Piece = tuple[int, int, int]
"""Of one transfer: address here, address in the peer's memory, size in bytes."""


class NixlError(Exception):
    """NIXL refused or failed."""


class NixlAgent:
    """Any thread, but one at a time: NIXL is told not to lock. All but `release` and `close` raise NixlError."""

    def __init__(self, library: NixlLibrary, memory: Sequence[MemoryRegion]) -> None:
        """Make an agent and register each region, whole."""
        self.name = f"kvferry-{secrets.token_hex(16)}"
        self.num_registrations = 0
        self._nixl = library.bindings
        self._agent: Any = None
        self._backend = 0
        self._peer = ""
        with self._reporting("no agent"):
            config = self._nixl.nixlAgentConfig()
            config.useProgThread = False  # It would poll for ever.
            config.useListenThread = False
            config.syncMode = self._nixl.NIXL_THREAD_SYNC_NONE
            self._agent = self._nixl.nixlAgent(self.name, config)
            self._backend = self._agent.createBackend(_BACKEND, {})
        for region in memory:
            self.register(region)

    def register(self, region: MemoryRegion) -> None:
        """Let a region, whole, be written from here, or into by a peer that has `way_in` from later on."""
        with self._reporting(f"{region.size_bytes} bytes could not be registered"):
            whole = [(address_of(region.buffer), region.size_bytes, _HOST_MEMORY, "")]
            self._agent.registerMem(self._nixl.nixlRegDList(self._nixl.DRAM_SEG, whole), [self._backend])
        self.num_registrations += 1

    @property
    def closed(self) -> bool:
        """Whether it has ended, by `close` or because it could not be made."""
        return self._agent is None

    def way_back(self) -> bytes:
        """What a peer needs to send notes to this agent, and no more: nothing of the memory."""
        with self._reporting("no metadata"):
            nothing = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, 0)
            return bytes(self._agent.getLocalPartialMD(nothing, True, [self._backend]))

    def way_in(self) -> bytes:
        """What a peer needs to write into the memory registered here."""
        with self._reporting("no metadata"):
            return bytes(self._agent.getLocalMD())

    def meet(self, name: str, metadata: bytes) -> None:
        """Learn of the peer. The metadata must be a NIXL agent's own: over some that is not, UCX aborts the process."""
        with self._reporting("the peer's metadata"):
            known = bytes(self._agent.loadRemoteMD(metadata))
        if known != name.encode():
            raise NixlError("the peer's metadata is of another agent")
        self._peer = name

    def prepare(self, pieces: Sequence[Piece], note: bytes) -> int:
        """A write into the peer's memory that is not under way yet; `note` follows its last byte. To be released."""
        table = np.array(pieces, np.uint64)
        here, there = np.zeros((len(pieces), 3), np.uint64), np.zeros((len(pieces), 3), np.uint64)
        here[:, 0], there[:, 0] = table[:, 0], table[:, 1]
        here[:, 1] = there[:, 1] = table[:, 2]
        here[:, 2] = there[:, 2] = _HOST_MEMORY
        with self._reporting("no transfer"):
            source = self._nixl.nixlXferDList(self._nixl.DRAM_SEG, here)
            target = self._nixl.nixlXferDList(self._nixl.DRAM_SEG, there)
            return int(
                self._agent.createXferReq(self._nixl.NIXL_WRITE, source, target, self._peer, note, [self._backend])
            )

    def post(self, transfer: int) -> bool:
        """Begin. Whether it is over already: all bytes in the peer's memory, not only out of ours."""
        with self._reporting("the transfer failed"):
            return self._over(self._agent.postXferReq(transfer))

    def is_over(self, transfer: int) -> bool:
        """Go on with it. Whether it is over, as for `post`."""
        with self._reporting("the transfer failed"):
            return self._over(self._agent.getXferStatus(transfer))

    def release(self, transfer: int) -> None:
        """Forget a transfer. One that is not over goes on until `close`."""
        with suppress(NixlError), self._reporting("the transfer could not be released"):
            self._agent.releaseXferReq(transfer)  # Should it refuse: the end of the agent frees everything.

    def estimate_s(self, transfer: int) -> float:
        """What UCX expects the prepared transfer to take, by the lanes that it has chosen."""
        with self._reporting("no estimate"):
            return float(self._agent.estimateXferCost(transfer)[0]) * 1e-6

    def notes(self) -> list[bytes]:
        """Go on with everything, and take the peer's new notes. Those of anybody else are dropped."""
        with self._reporting("the peer"):
            notes: list[bytes] = self._agent.getNotifs({}, [self._backend]).get(self._peer, [])
            return notes

    def send_note(self, note: bytes) -> None:
        """Send the peer a note that belongs to no transfer. Raises NixlError also once UCX sees that it is gone."""
        with self._reporting("the peer"):
            self._agent.genNotif(self._peer, note, [self._backend])

    def close(self) -> None:
        """On return nothing of this agent reads or writes memory, here or at the peer. Idempotent.

        Takes some milliseconds, and never waits for the peer.
        """
        # The library has no call for it: the agent ends with its last reference, which this is.
        self._agent = None
        self.num_registrations = 0

    def _over(self, status: Any) -> bool:
        if status not in (self._nixl.NIXL_SUCCESS, self._nixl.NIXL_IN_PROG):
            raise NixlError(str(status))
        return bool(status == self._nixl.NIXL_SUCCESS)

    @contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        """Errors of the library, of which there are many classes, as NixlError."""
        if self._agent is None and self._peer:
            raise NixlError("the agent is closed")
        try:
            yield
        except NixlError:
            raise
        except Exception as error:
            raise NixlError(f"{what}: {error}") from error


def pair(here: Sequence[tuple[int, int]], there: Sequence[tuple[int, int]]) -> list[Piece]:
    """The bytes of `here`, (address, size) taken as one sequence, onto those of `there`; in as few pieces as possible.

    Raises ValueError unless both are of one length, more than zero.
    """
    if not here or sum(size for _, size in here) != sum(size for _, size in there):
        raise ValueError("a write whose source is not as long as the pages that it names")
    pieces: list[Piece] = []
    targets = iter(there)
    target, room = next(targets)
    for address, size in here:
        while size:
            if not room:
                target, room = next(targets)
            step = min(size, room)
            last = pieces[-1] if pieces else (0, 0, 0)
            if pieces and last[0] + last[2] == address and last[1] + last[2] == target:
                pieces[-1] = (last[0], last[1], last[2] + step)
            else:
                pieces.append((address, target, step))
            address, target, size, room = address + step, target + step, size - step, room - step
    return pieces


def address_of(view: memoryview) -> int:
    """Where its bytes begin. It has some."""
    if view.readonly:
        return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
    return ctypes.addressof(ctypes.c_char.from_buffer(view))  # Five times faster; there may be hundreds in a write.


def pause(waited_s: float) -> None:
    """Let others run between two polls, the longer the longer it has been waited for.

    NIXL has no event to wait on without a thread of its own that polls, and UCX over TCP moves bytes only in the polls.
    Most writes are over in the first stage.
    """
    if waited_s < _SPIN_S:
        os.sched_yield()
    else:
        time.sleep(50e-6 if waited_s < _BRISK_S else 200e-6 if waited_s < _CALM_S else 1e-3)
