"""Peers in processes of their own that die or talk nonsense, over every transport: nobody else is harmed."""

import os
import pickle
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.events import Committed, Failed, Fenced, Sent
from kv_transfer.receive_table import ReceiveCounts
from kvferry_rpc.internal_pb2 import Ticket
from tests.support.kv_pair import LIBRARIES, WAIT_S, Pair, wiring
from tests.support.kv_process import Peer
from tests.support.listening import listening
from tests.support.pickled import Bomb

KINDS = ("tcp", "shm", *LIBRARIES)
NUM_BLOCKS = 32
LONG_S = 60.0  # A lease or timeout that no test waits for.
SOURCE = [9, 8, 2, 3]


@contextmanager
def peers(role: str, kind: str, count: int, options: dict[str, Any]) -> Iterator[list[Peer]]:
    with ExitStack() as stack:
        made = [Peer(role, kind, NUM_BLOCKS, options) for _ in range(count)]
        for peer in made:
            stack.callback(peer.close)
        yield made


def order(peer: Peer, what: str, ticket: Ticket, **fields: Any) -> None:
    peer.do(do=what, ticket=ticket.SerializeToString().hex(), **fields)


def begin(peer: Peer, pair: Pair, ticket: Ticket) -> None:
    """Two of four blocks are pushed."""
    order(peer, "open", ticket, num_tokens=pair.tokens(4), within_s=LONG_S)
    order(peer, "push", ticket, first=0, blocks=SOURCE[:2])


def complete(peer: Peer, pair: Pair, ticket: Ticket) -> None:
    order(peer, "push", ticket, first=2, blocks=SOURCE[2:])
    order(peer, "commit", ticket, num_tokens=pair.tokens(4))


@pytest.mark.parametrize("kind", KINDS)
def test_one_of_three_senders_killed_in_mid_transfer_costs_its_own_hand_offs_only(kind: str) -> None:
    """H082, H053, H070: also one that was cancelled here just before, whose sender can say nothing any more."""
    options = {"lease_s": LONG_S, "io_timeout_s": LONG_S}
    with (
        peers("prefill", kind, 3, {"io_timeout_s": LONG_S}) as (dying, *living),
        Pair(num_blocks=NUM_BLOCKS, receiver=options, **wiring(kind)) as pair,
    ):
        blocks = iter(range(NUM_BLOCKS))
        lost, cancelled, *kept = [pair.reserve([next(blocks) for _ in range(4)]) for _ in range(4)]
        for peer, ticket in zip((dying, dying, *living), (lost, cancelled, *kept), strict=True):
            begin(peer, pair, ticket)
        pair.wait_until_open(4)
        assert pair.receiver.abort(cancelled.handoff_id, "the client left")
        dying.signal(signal.SIGKILL)
        for peer, ticket in zip(living, kept, strict=True):
            complete(peer, pair, ticket)
        for ticket in (lost, cancelled):
            pair.received.wait(ticket.handoff_id, Fenced)
            assert pair.received.kinds(ticket.handoff_id) == ["Failed", "Fenced"]
        for peer, ticket in zip(living, kept, strict=True):
            assert isinstance(pair.received.wait(ticket.handoff_id, Committed, Failed), Committed)
            assert pair.equal(ticket, SOURCE)
            assert peer.wait_event("Sent", "Failed")["event"] == "Sent"
            pair.receiver.release(ticket.handoff_id)
        assert pair.receiver.snapshot().handoffs == ReceiveCounts(0, 0, 0, 0)
        # What the dead one held is free, and is used.
        again = pair.reserve([*lost.block_ids])
        begin(living[0], pair, again)
        complete(living[0], pair, again)
        assert isinstance(pair.received.wait(again.handoff_id, Committed, Failed), Committed)
        assert [peer.finish() for peer in living] == [0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_one_of_three_receivers_killed_in_mid_transfer_costs_its_own_hand_offs_only(kind: str) -> None:
    """H082, H070, the other way round."""
    with (
        peers("decode", kind, 3, {"lease_s": LONG_S, "io_timeout_s": LONG_S}) as (dying, *living),
        Pair(num_blocks=NUM_BLOCKS, sender={"io_timeout_s": LONG_S}, **wiring(kind)) as pair,
    ):
        lost, *kept = [peer.reserve(range(4), pair.tokens(4)) for peer in (dying, *living)]
        for ticket in (lost, *kept):
            pair.open(ticket, SOURCE, within_s=LONG_S)
            pair.push(ticket, range(2))
        dying.signal(signal.SIGKILL)
        for ticket in kept:
            pair.push(ticket, range(2, 4))
            pair.commit(ticket, 4)
            assert isinstance(pair.sent.wait(ticket.handoff_id, Sent, Failed), Sent)
        assert isinstance(pair.sent.wait(lost.handoff_id, Sent, Failed), Failed)
        for peer in living:
            assert peer.wait_event("Committed", "Failed")["event"] == "Committed"
        assert [peer.finish() for peer in living] == [0, 0]


def shown_out(stranger: socket.socket) -> None:
    with suppress(OSError):  # It may be closed already.
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(4096):
            pass


@pytest.mark.parametrize("kind", KINDS)
def test_strangers_at_every_port_that_a_transport_opens_do_no_harm(kind: str, tmp_path: Path) -> None:
    """H074, H085, for the ports of the libraries too, which open with the first link: here and at the other end."""
    trap = tmp_path / "trap"
    bomb = pickle.dumps(Bomb(trap))
    said = (bomb, len(bomb).to_bytes(4, "big") + bomb, b"\xff" * 4096, b"GET / HTTP/1.1\r\n\r\n", bytes(64))
    with peers("decode", kind, 1, {"lease_s": LONG_S}) as (peer,), Pair(**wiring(kind)) as pair:

        def works() -> bool:
            ticket = peer.reserve(next(places), pair.tokens(4))
            pair.send(ticket, SOURCE)
            sent = pair.sent.wait(ticket.handoff_id, Sent, Failed)
            return peer.wait_event("Committed", "Failed")["event"] == "Committed" and isinstance(sent, Sent)

        places = (range(first, first + 4) for first in range(0, NUM_BLOCKS - 4, 4))
        assert works()
        found = listening(peer.process.pid)
        control = int(peer.reserve([NUM_BLOCKS - 1], pair.tokens(1)).data_address.rpartition(":")[2])
        assert len(found) >= (2 if kind in LIBRARIES else 1)
        with ExitStack() as strangers:
            for address, port in sorted(found | listening(os.getpid())):
                assert address == "0100007F", "on the loopback address alone"
                for data in said:
                    stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S))
                    stranger.sendall(data)
                    if port == control:
                        shown_out(stranger)
            # A library looks at its ports only while there is something to move: that is, now.
            assert works() or works(), "it may have cost a link"
        assert works() or works(), "and again when they have hung up"
        assert not trap.exists()
        assert peer.finish() == 0
