"""The packets of a run of chaos go where they belong, unless a link is bad. Sockets stand in for network devices."""

import socket
from collections.abc import Iterator

import pytest

from tests.chaos.switch import CLEAN, LinkState, Switch

ADDRESSES = {"a": "10.231.0.10", "b": "10.231.0.11", "c": "10.231.0.12"}
TIMEOUT_S = 20.0


def packet(source: str, target: str, text: bytes, version: int = 4) -> bytes:
    """As much of an IP packet as the switch looks at."""
    addresses = bytes(int(part) for name in (source, target) for part in ADDRESSES[name].split("."))
    return bytes([version << 4 | 5]) + bytes(11) + addresses + text


class Wires:
    """Three nodes on one switch."""

    def __init__(self, seed: int = 1) -> None:
        pairs = {name: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for name in ADDRESSES}
        self.ends = {name: ours for name, (ours, _) in pairs.items()}
        for ours, theirs in pairs.values():
            ours.settimeout(TIMEOUT_S)
            theirs.setblocking(False)
        self.switch = Switch({name: theirs.detach() for name, (_, theirs) in pairs.items()}, ADDRESSES, seed)

    def send(self, source: str, target: str, *texts: bytes) -> None:
        for text in texts:
            self.ends[source].send(packet(source, target, text))

    def heard(self, target: str, count: int) -> list[bytes]:
        return [self.ends[target].recv(4096)[20:] for _ in range(count)]

    def close(self) -> None:
        self.switch.close()
        for end in self.ends.values():
            end.close()


@pytest.fixture
def wires() -> Iterator[Wires]:
    made = Wires()
    yield made
    made.close()


def test_packets_go_to_their_address_and_no_others(wires: Wires) -> None:
    wires.send("a", "b", b"1", b"2")
    wires.send("c", "a", b"3")
    assert wires.heard("b", 2) == [b"1", b"2"]
    assert wires.heard("a", 1) == [b"3"]


def test_what_is_no_ipv4_or_for_nobody_is_dropped(wires: Wires) -> None:
    wires.ends["a"].send(packet("a", "b", b"6", version=6))
    wires.ends["a"].send(packet("a", "b", b"x")[:16] + bytes([9, 9, 9, 9]))
    wires.send("a", "b", b"last")
    assert wires.heard("b", 1) == [b"last"]


def test_a_link_can_be_blocked_in_one_direction_alone(wires: Wires) -> None:
    wires.switch.set_links([("a", "b")], LinkState(blocked=True))
    wires.send("a", "b", b"lost")
    wires.send("b", "a", b"through")
    wires.send("a", "c", b"elsewhere")
    assert wires.heard("a", 1) == [b"through"]
    assert wires.heard("c", 1) == [b"elsewhere"], "and so the first one has been looked at too"
    wires.switch.set_links([("a", "b")], CLEAN)
    wires.send("a", "b", b"again")
    assert wires.heard("b", 1) == [b"again"]


def test_late_packets_come_in_their_order(wires: Wires) -> None:
    wires.switch.set_links([("a", "b")], LinkState(delay_s=0.02))
    wires.send("a", "b", *(bytes([number]) for number in range(20)))
    assert wires.heard("b", 20) == [bytes([number]) for number in range(20)]


def test_what_is_lost_is_drawn_from_the_seed() -> None:
    def heard(seed: int) -> list[bytes]:
        wires = Wires(seed)
        try:
            wires.switch.set_links([("a", "b")], LinkState(loss=0.5))
            for number in range(40):
                wires.send("a", "b", bytes([number]))
                wires.send("a", "c", b"next")
                wires.heard("c", 1)
            # Not at once, as on a clean link, but behind what is still held.
            wires.switch.set_links([("a", "b")], LinkState(delay_s=1e-6))
            wires.send("a", "b", b"end")
            texts: list[bytes] = []
            while texts[-1:] != [b"end"]:
                texts += wires.heard("b", 1)
            return texts
        finally:
            wires.close()

    first = heard(3)
    assert 5 < len(first) < 36
    assert heard(3) == first != heard(4)


def test_a_narrow_link_drops_what_would_wait_too_long(wires: Wires) -> None:
    # A packet takes four hundred times as long as may be waited: the first is under way for ever, others are dropped.
    wires.switch.set_links([("a", "b")], LinkState(bytes_per_s=0.1))
    wires.send("a", "b", b"slow", b"dropped")
    wires.send("a", "c", b"next")
    wires.heard("c", 1)
    wires.switch.set_links([("a", "b")], CLEAN)
    wires.send("a", "b", b"quick")
    assert wires.heard("b", 1) == [b"quick"]
