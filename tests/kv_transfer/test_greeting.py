"""Who may speak on a link: proofs, versions, layouts, and everything that is refused before."""

import contextlib
import dataclasses
import os
import pickle
import re
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kv_transfer
from kv_cache.layout import KVCacheLayout
from kv_transfer import handshake
from kv_transfer.events import Failed
from kv_transfer.messages import (
    HANDOFF_VERSION,
    MAX_GREETING_BYTES,
    Challenge,
    Goodbye,
    Hello,
    Introduction,
    Open,
    Renew,
    Welcome,
)
from kv_transfer.talk import Talk
from kv_transfer.transport import LinkError
from kv_transfer.transport_tcp import TcpNetwork
from kv_transfer.wire import HEADER, decode_greeting, encode
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.protocol_version import ProtocolVersion
from tests.support.kv_pair import LAYOUT, Pair, block_of, make_identity
from tests.support.kv_stranger import TIMEOUT_S, answer, dial, frame, greeted, heard_to_the_end, say, still_works

NONCE = b"n" * 16
MAJOR = HANDOFF_VERSION.major


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair(transports=("tcp",)) as both:
        yield both


class TouchesFile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mknod, (str(self.path),))


def test_pickles_do_nothing(pair: Pair, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    data = pickle.dumps(TouchesFile(trap))
    for said in (data, frame(data), frame(encode(Hello(b"kvferry", MAJOR, NONCE))) + frame(data)):
        with dial(pair) as sock:
            sock.sendall(said)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            heard_to_the_end(sock)
    channel = greeted(pair)
    channel.send(data, [], TIMEOUT_S)
    channel.wait_until_peer_closes()
    channel.close()
    assert not trap.exists()
    assert still_works(pair)


def test_no_wire_path_can_unpickle() -> None:
    """H074. In all packages: any of them may be given what came over a wire."""
    root = Path(kv_transfer.__path__[0]).parent
    packages = [
        "decode_worker",
        "engine",
        "kv_cache",
        "kv_transfer",
        "kvferry",
        "prefill_worker",
        "router",
        "runtime",
        "worker",
    ]
    unpickles = re.compile(
        r"\b(import|from) (c?pickle|marshal|dill|shelve|joblib|yaml)\b|(?<![.\w])(eval|exec)\(|torch\.load"
    )
    for package in packages:
        for path in (root / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if path == root / "runtime" / "config_file.py":
                # The operator's own file, and a loader that makes no objects.
                text = text.replace("import yaml", "", 1)
                assert set(re.findall(r"yaml\.\w*(?:[Ll]oad)\w*", text)) == {"yaml.SafeLoader"}
            found = unpickles.search(text)
            assert found is None, f"{found} in {path}"
    for path in (root / "kv_transfer").rglob("*.py"):
        assert "torch" not in path.read_text(encoding="utf-8"), path


NONSENSE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(64),
    "ones": b"\xff" * 64,
    "a huge message": struct.pack("!II", 0xFFFFFFFF, 0),
    "a message over the greeting's bound": struct.pack("!II", MAX_GREETING_BYTES + 1, 0),
    "a huge payload": struct.pack("!II", 10, 0xFFFFFFFF) + b"x" * 10,
    "an empty message": frame(b""),
    "half a header": b"\0\0",
    "half a message": struct.pack("!II", 100, 0) + b"x" * 10,
    "not msgpack": frame(b"\xc1" * 20),
    "deep nesting": frame(b"\x91" * 4000),
    "an unknown message": frame(msgspec.msgpack.encode(["Nonsense", 1])),
    "the wrong magic": frame(encode(Hello(b"other", MAJOR, NONCE))),
    "a short nonce": frame(encode(Hello(b"kvferry", MAJOR, b"n"))),
    "no greeting": frame(encode(Open("h", 1, b"", b"", "tcp"))),
    "out of turn": frame(encode(Challenge(MAJOR, NONCE))),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_closes_its_own_link_only_and_is_logged_once(
    name: str, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    with dial(pair) as sock:
        sock.sendall(NONSENSE[name])
        with contextlib.suppress(OSError):  # It may be closed already.
            sock.shutdown(socket.SHUT_WR)
        assert heard_to_the_end(sock) == b"", "a stranger is told nothing"
    assert still_works(pair)
    assert len([record for record in caplog.records if "refused a link" in record.message]) == 1


def test_another_version_is_refused_by_name(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with dial(pair) as sock:
        sock.sendall(frame(encode(Hello(b"kvferry", MAJOR + 1, NONCE))))
        heard_to_the_end(sock)
    assert f"{MAJOR + 1}.0 of the hand-off protocol is spoken there and {HANDOFF_VERSION} here" in caplog.text


@pytest.mark.parametrize("distance", [-1, 0, 1, 2])
def test_a_sender_one_minor_version_away_is_welcome_and_one_further_away_is_not(pair: Pair, distance: int) -> None:
    theirs = ProtocolVersion(MAJOR, HANDOFF_VERSION.minor + distance)
    with dial(pair) as sock:
        sock.sendall(frame(encode(Hello(b"kvferry", MAJOR, NONCE, theirs.minor))))
        size, _ = HEADER.unpack(sock.recv(HEADER.size, socket.MSG_WAITALL))
        challenge = decode_greeting(sock.recv(size, socket.MSG_WAITALL))
        assert isinstance(challenge, Challenge)
        assert ProtocolVersion(challenge.version, challenge.minor) == HANDOFF_VERSION
        sock.sendall(
            frame(encode(Introduction(b"forged", "prefill", b"i" * 16, LAYOUT.to_proto().SerializeToString())))
        )
        said = heard_to_the_end(sock)
    # One that goes on with the greeting looks at the proof.
    assert (b"secret" in said) is (abs(distance) <= 1)


def test_a_greeting_of_the_version_before_minor_ones_is_understood() -> None:
    before = msgspec.msgpack.encode(["Hello", b"kvferry", MAJOR, NONCE])
    assert decode_greeting(before) == Hello(b"kvferry", MAJOR, NONCE, 0)
    later = msgspec.msgpack.encode(["Challenge", MAJOR, NONCE, 2, "what a later version adds"])
    assert decode_greeting(later) == Challenge(MAJOR, NONCE, 2)


def test_a_sender_refuses_a_receiver_that_is_too_far_away(pair: Pair) -> None:
    ticket = pair.reserve([1])
    with socket.create_server(("127.0.0.1", 0)) as server:
        ticket.data_address = f"127.0.0.1:{server.getsockname()[1]}"
        pair.send(ticket, [2])
        sock, _ = server.accept()
        with sock:
            sock.settimeout(TIMEOUT_S)
            size, _ = HEADER.unpack(sock.recv(HEADER.size, socket.MSG_WAITALL))
            sock.recv(size, socket.MSG_WAITALL)
            sock.sendall(frame(encode(Challenge(MAJOR, NONCE, HANDOFF_VERSION.minor + 2))))
            assert heard_to_the_end(sock) == b"", "it does not introduce itself"
    failed = pair.sent.wait(ticket.handoff_id, Failed)
    assert f"{MAJOR}.{HANDOFF_VERSION.minor + 2} of the hand-off protocol" in failed.error.message


def introduce(sock: socket.socket, introduction: Introduction) -> bytes:
    """All that the receiver says to this introduction."""
    sock.sendall(frame(encode(Hello(b"kvferry", MAJOR, NONCE))))
    size, _ = HEADER.unpack(sock.recv(HEADER.size, socket.MSG_WAITALL))
    assert isinstance(decode_greeting(sock.recv(size, socket.MSG_WAITALL)), Challenge)
    sock.sendall(frame(encode(introduction)))
    return heard_to_the_end(sock)


@pytest.mark.parametrize("proof", [b"", b"x" * 32, b"secret"])
def test_a_forged_proof_is_refused_and_learns_nothing(pair: Pair, proof: bytes) -> None:
    layout = LAYOUT.to_proto().SerializeToString()
    with dial(pair) as sock:
        said = introduce(sock, Introduction(proof, "prefill", b"i" * 16, layout))
    goodbye = decode_greeting(said[HEADER.size :])
    assert isinstance(goodbye, Goodbye)
    assert goodbye.code == ErrorCode.UNAUTHENTICATED
    assert b"decode" not in said
    assert still_works(pair)


def test_a_proof_cannot_be_replayed(pair: Pair) -> None:
    recorded: list[bytes] = []
    channel = TcpNetwork().connect(pair.receiver.address, TIMEOUT_S)

    class Tap:
        def __getattr__(self, name: str) -> Any:
            return getattr(channel, name)

        def send(self, message: bytes, payload: Any, timeout_s: float) -> None:
            recorded.append(message)
            channel.send(message, payload, timeout_s)

    handshake.greet(Talk(Tap(), TIMEOUT_S), pair.prefill)  # type: ignore[arg-type]
    channel.stop()
    channel.close()
    introduction = decode_greeting(recorded[1])
    assert isinstance(introduction, Introduction)
    with dial(pair) as sock:
        goodbye = decode_greeting(introduce(sock, introduction)[HEADER.size :])
    assert isinstance(goodbye, Goodbye)


def test_another_cluster_secret_is_refused_on_both_sides() -> None:
    with Pair(transports=("tcp",)) as pair:
        object.__setattr__(pair.prefill, "cluster_secret", b"guess")
        ticket = pair.reserve([1])
        pair.send(ticket, [2])
        failed = pair.sent.wait(ticket.handoff_id, Failed)
        assert failed.error.code == ErrorCode.UNAUTHENTICATED
        assert "secret" in failed.error.message
        assert pair.receiver.snapshot().handoffs.reserved == 1
        assert not block_of(pair.decode, 1).any()


def test_a_false_receiver_is_found_out(pair: Pair) -> None:
    """Whoever answers at the ticket's address must prove the secret before it gets a byte."""
    impostor = make_identity("decode", 1, secret=b"guess")
    ticket = pair.reserve([1])
    with socket.create_server(("127.0.0.1", 0)) as server:
        ticket.data_address = f"127.0.0.1:{server.getsockname()[1]}"
        pair.send(ticket, [2])
        sock, _ = server.accept()
        with sock:
            sock.settimeout(TIMEOUT_S)
            size, _ = HEADER.unpack(sock.recv(HEADER.size, socket.MSG_WAITALL))
            hello = decode_greeting(sock.recv(size, socket.MSG_WAITALL))
            assert isinstance(hello, Hello)
            sock.sendall(frame(encode(Challenge(MAJOR, NONCE))))
            size, _ = HEADER.unpack(sock.recv(HEADER.size, socket.MSG_WAITALL))
            assert isinstance(decode_greeting(sock.recv(size, socket.MSG_WAITALL)), Introduction)
            layout = LAYOUT.to_proto().SerializeToString()
            claim = ("decode", impostor.incarnation, layout)
            proof = handshake._proof(impostor, b"kvferry receiver", hello.nonce + NONCE, *claim)
            sock.sendall(frame(encode(Welcome(proof, *claim))))
            assert heard_to_the_end(sock) == b""
    failed = pair.sent.wait(ticket.handoff_id, Failed)
    assert failed.error.code == ErrorCode.UNAUTHENTICATED
    impostor.pool.close()


DIFFERENCES = {
    "model_id": "other-model",
    "model_revision": "def456",
    "num_layers": 4,
    "num_kv_heads": 4,
    "head_dim": 32,
    "axis_order": "other",
    "hash_version": 99,
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_layouts_that_differ_are_refused_naming_both_values(name: str) -> None:
    layout: KVCacheLayout = dataclasses.replace(LAYOUT, total_kv_heads=None, **{name: DIFFERENCES[name]})
    with Pair(transports=("tcp",)) as pair:
        other = make_identity("prefill", 16, layout=layout, shared=False)
        object.__setattr__(pair.prefill, "layout", other.layout)
        ticket = pair.reserve([1])
        pair.send(ticket, [2])
        failed = pair.sent.wait(ticket.handoff_id, Failed)
        ours, theirs = getattr(LAYOUT, name), DIFFERENCES[name]
        assert str(ours) in failed.error.message
        assert str(theirs) in failed.error.message
        assert pair.receiver.snapshot().handoffs.reserved == 1
        assert not block_of(pair.decode, 1).any()
        other.pool.close()


def test_a_receiver_that_never_answers_the_greeting_fails_the_hand_off_in_time() -> None:
    with (
        Pair(transports=("tcp",), sender={"io_timeout_s": 0.2}) as pair,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        ticket = pair.reserve([1])
        ticket.data_address = f"127.0.0.1:{silent.getsockname()[1]}"
        pair.send(ticket, [2])
        failed = pair.sent.wait(ticket.handoff_id, Failed)
        assert "in time" in failed.error.message
        pair.sent.wait(ticket.handoff_id, type(failed))


def test_a_stranger_who_says_nothing_is_shown_out() -> None:
    with Pair(transports=("tcp",), receiver={"io_timeout_s": 0.1}) as pair, dial(pair) as sock:
        assert heard_to_the_end(sock) == b""
        assert still_works(pair)


def test_the_port_is_bound_to_its_address_only(pair: Pair) -> None:
    assert pair.receiver.address.startswith("127.0.0.1:")
    port = pair.receiver.address.rsplit(":", 1)[1]
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert next(entry for entry in listening if entry.endswith(f":{int(port):04X}")).startswith("0100007F")


def test_sixty_four_senders_at_once(pair: Pair) -> None:
    failures: list[str] = []

    def one(number: int) -> None:
        try:
            for _ in range(3):
                channel = greeted(pair)
                say(channel, Renew(("x",)))
                answer(channel)
                channel.stop()
                channel.close()
        except LinkError as error:
            failures.append(f"{number}: {error}")

    threads = [threading.Thread(target=one, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert still_works(pair)
