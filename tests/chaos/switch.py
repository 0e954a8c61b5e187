"""A network made of TUN devices whose packets all pass through this process, which can lose, delay or hold them.

Nothing of the kernel's traffic control is needed, and every pair of nodes has a link of its own in each direction.
"""

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

MTU = 9000
_MAX_PACKET = 65536
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_IPV4 = 4
# What a link with a bandwidth holds back at most, in seconds of it; more is dropped, as by any router.
_MOST_QUEUED_S = 0.5
_IDLE_S = 0.2


@dataclass(frozen=True)
class LinkState:
    """One direction between two nodes. `bytes_per_s` 0 = as fast as can be."""

    blocked: bool = False
    loss: float = 0.0
    delay_s: float = 0.0
    bytes_per_s: float = 0.0


CLEAN = LinkState()
Pair = tuple[str, str]  # from, to


def open_tun(device: str) -> int:
    """A new TUN device in the network namespace of this process; it can be moved to another one. Raises OSError."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(tun)
        raise
    return tun


class Switch:
    """Moves packets between nodes in a thread of its own. `set_links` and `close` by any thread."""

    def __init__(self, tuns: Mapping[str, int], addresses: Mapping[str, str], seed: int) -> None:
        """Takes over the descriptors. Both mappings are by node; addresses are IPv4."""
        self._tuns = dict(tuns)
        self._by_tun = {tun: name for name, tun in tuns.items()}
        self._by_address = {bytes(map(int, address.split("."))): name for name, address in addresses.items()}
        self._links: dict[Pair, LinkState] = {}
        self._free_at: dict[Pair, float] = {}
        self._queue: list[tuple[float, int, str, bytes]] = []
        self._numbers = itertools.count()
        self._rng = random.Random(seed)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="switch", daemon=True)
        self._thread.start()

    def set_links(self, pairs: Iterable[Pair], state: LinkState) -> None:
        """From now on these links are like this. Packets under way stay under way."""
        self._links = {**self._links, **dict.fromkeys(pairs, state)}

    def link(self, pair: Pair) -> LinkState:
        """How a link is now."""
        return self._links.get(pair, CLEAN)

    def close(self) -> None:
        """Stop, and remove the devices."""
        self._closing.set()
        self._thread.join()
        for tun in self._tuns.values():
            os.close(tun)

    def _run(self) -> None:
        poll = select.epoll()
        for tun in self._by_tun:
            poll.register(tun, select.EPOLLIN)
        with contextlib.closing(poll):
            while not self._closing.is_set():
                wait_s = min(_IDLE_S, self._queue[0][0] - time.monotonic()) if self._queue else _IDLE_S
                for tun, _ in poll.poll(max(wait_s, 0.0)):
                    with contextlib.suppress(BlockingIOError):
                        for _ in range(64):
                            self._take(self._by_tun[tun], os.read(tun, _MAX_PACKET))
                while self._queue and self._queue[0][0] <= time.monotonic():
                    _, _, target, packet = heapq.heappop(self._queue)
                    self._give(target, packet)

    def _take(self, source: str, packet: bytes) -> None:
        target = self._by_address.get(packet[16:20]) if packet[0] >> 4 == _IPV4 else None
        if target is None:
            return
        pair = (source, target)
        state = self._links.get(pair, CLEAN)
        if state is CLEAN:
            self._give(target, packet)
        elif not state.blocked and not (state.loss and self._rng.random() < state.loss):
            self._hold(pair, state, packet)

    def _hold(self, pair: Pair, state: LinkState, packet: bytes) -> None:
        now = time.monotonic()
        start = now
        if state.bytes_per_s:
            start = max(now, self._free_at.get(pair, 0.0))
            if start - now > _MOST_QUEUED_S:
                return
            self._free_at[pair] = start = start + len(packet) / state.bytes_per_s
        due = start + state.delay_s
        heapq.heappush(self._queue, (due, next(self._numbers), pair[1], packet))

    def _give(self, target: str, packet: bytes) -> None:
        # A device whose queue is full, or that is down, loses packets, as devices do.
        with contextlib.suppress(OSError):
            os.write(self._tuns[target], packet)


def slower(state: LinkState, other: LinkState) -> LinkState:
    """Both at once."""
    return replace(
        state,
        blocked=state.blocked or other.blocked,
        loss=max(state.loss, other.loss),
        delay_s=max(state.delay_s, other.delay_s),
        bytes_per_s=min((rate for rate in (state.bytes_per_s, other.bytes_per_s) if rate), default=0.0),
    )
