"""Which transport a pair of workers uses. Pure rules; what each end knows of itself is passed in.

1. Both ends say what they have: the receiver's offers on the ticket, the sender's own transports.
2. `candidates` orders the common ones, best first; the sender tries them until one works.
3. `expected` is the best of them that nothing known speaks against. If a worse one is used in the end, `degraded` says
   so, and whoever asked warns, counts it and puts it on the receipt. It is never silent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

# Over RDMA devices. One-sided nixl before ucx: it does not need the receiver to post memory for each payload.
PREFERENCE = ("shm", "nixl", "ucx", "tcp", "memory")

# Without RDMA devices the libraries fall back to TCP by themselves, and are slower at it than blocking sockets: over
# loopback tcp gave 2.0-2.4 GB/s, ucx 0.4-1.0, nixl 0.15-0.18 of a memcpy. So there they come last, but for `memory`,
# which reaches nobody outside the process. `--force-transport` or `--transports` take them all the same.
PREFERENCE_WITHOUT_RDMA = ("shm", "tcp", "ucx", "nixl", "memory")

RDMA_CAPABLE = ("nixl", "ucx")


class EndFacts(msgspec.Struct, frozen=True, array_like=True):
    """What one end knows of itself. Hints: wrong ones cost speed or a needless warning, nothing else.

    `host_id` is equal for processes that can map each other's memory, as far as they can tell; empty when unknown.
    `rdma` names the transports that have RDMA devices to work with and a library that can drive them.
    """

    host_id: str = ""
    rdma: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """What is known of both ends together: whether shm should reach, and which transports should find RDMA."""

    same_host: bool = False
    rdma: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of(cls, own: EndFacts, peer: EndFacts) -> "Pair":
        """An end that says nothing is taken to be elsewhere and without RDMA."""
        same_host = own.host_id != "" and own.host_id == peer.host_id
        return cls(same_host, frozenset(own.rdma) & frozenset(peer.rdma) & frozenset(RDMA_CAPABLE))


_UNKNOWN = Pair()


def candidates(offers: Sequence[str], usable: Sequence[str], pair: Pair = _UNKNOWN) -> list[str]:
    """The names that both ends have, best first; each once. Empty when they have none in common.

    shm is among them whatever the hosts seem to be: to try costs nothing, and it cannot reach the wrong memory.
    Names that these rules do not know come last, in the order of the offers.
    """
    common = dict.fromkeys(name for name in offers if name in usable)
    return sorted(common, key=lambda name: _rank(name, pair))


def expected(offers: Sequence[str], usable: Sequence[str], pair: Pair = _UNKNOWN) -> str:
    """The best common one that should work for this pair; empty when there is none in common.

    shm counts only on the same host, unless there is nothing else.
    """
    common = candidates(offers, usable, pair)
    likely = [name for name in common if name != "shm" or pair.same_host] or common
    return likely[0] if likely else ""


def degraded(used: str, expected_name: str) -> bool:
    """Whether the one in use is worse than what `expected` said. Only shm can be better: where it was not likely."""
    return expected_name not in ("", used) and used != "shm"


def order(names: Sequence[str], rdma: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of one end, best first as far as it can tell alone: how a worker lists what it has."""
    return tuple(candidates(names, names, Pair(same_host=True, rdma=frozenset(rdma))))


def _rank(name: str, pair: Pair) -> tuple[int, int]:
    """Smaller is better. A transport with RDMA is before every one without, but for shm."""
    if name == "shm":
        return (0, 0)
    if name in pair.rdma:
        return (1, PREFERENCE.index(name))
    last = len(PREFERENCE_WITHOUT_RDMA)
    return (2, PREFERENCE_WITHOUT_RDMA.index(name) if name in PREFERENCE_WITHOUT_RDMA else last)
