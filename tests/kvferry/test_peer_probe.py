"""`kvferry doctor --peer` and `--listen` with both ends in one process; and the rules by which they judge."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import msgspec
import pytest

from kv_transfer.choice import EndFacts
from kv_transfer.options import TransferOptions
from kv_transfer.receive_table import ReceiveCounts
from kvferry import peer_probe
from kvferry.commands.doctor import peer_lines, split_address
from kvferry.console import format_table
from kvferry.peer_listener import ProbeListener
from kvferry.peer_probe import Trial, check_versions, judge, probe
from kvferry.probe_wire import (
    DEFAULT_PORT,
    LARGE_BLOCKS,
    LAYOUT,
    SERVICE,
    EndReport,
    OutcomeReply,
    OutcomeRequest,
    TicketReply,
    TicketRequest,
    decode,
    encode,
    versions,
)
from kvferry_rpc.common_pb2 import ErrorCode
from kvferry_rpc.internal_pb2 import Ticket
from runtime.clock import Clock, ManualClock
from runtime.errors import KvferryError
from runtime.grpc_life import GrpcServer, channel

SECRET = b"a secret of both ends"
LOCAL = TransferOptions(transports=("shm", "tcp"))
RDMA = EndFacts("", ("nixl", "ucx"))


def _end(*transports: str, facts: EndFacts | None = None) -> EndReport:
    return EndReport(
        *versions(), "1.0", "host", transports, {"ucx": "its library is not installed"}, facts or EndFacts()
    )


@asynccontextmanager
async def _listening(options: TransferOptions = LOCAL, clock: Clock | None = None) -> AsyncIterator[tuple[Any, str]]:
    listener = ProbeListener("127.0.0.1", 0, SECRET, options, clock)
    try:
        yield listener, await listener.start()
    finally:
        await listener.close()


async def _call(address: str, method: str, request: bytes, secret: bytes = SECRET) -> bytes:
    async with channel(address, secret) as calls:
        rpc: Any = calls.unary_unary(f"/{SERVICE}/{method}")
        answer: bytes = await rpc(request, timeout=20)
        return answer


async def _ticket(address: str, transport: str = "tcp", num_blocks: int = 1) -> TicketReply:
    return decode(await _call(address, "Ticket", encode(TicketRequest(transport, num_blocks))), TicketReply)


async def test_every_transport_that_both_ends_have_is_measured() -> None:
    async with _listening() as (_, address):
        report = await probe(address, SECRET, LOCAL)
    assert [(trial.transport, trial.failure) for trial in report.trials] == [("shm", ""), ("tcp", "")]
    for trial in report.trials:
        assert trial.works
        assert trial.fixed_ms is not None
        assert trial.fixed_ms > 0
        assert trial.gigabytes_per_s is not None
        assert trial.gigabytes_per_s > 0
    assert (report.chosen, report.expected, report.warning) == ("shm", "shm", "")


async def test_a_transport_of_one_end_only_is_shown_with_the_reason() -> None:
    async with _listening(TransferOptions(transports=("tcp",))) as (_, address):
        report = await probe(address, SECRET, LOCAL)
    shm, tcp = report.trials
    assert (shm.works, shm.failure) == (False, "at the peer: not among --transports")
    assert tcp.works
    assert (report.chosen, report.expected, report.warning) == ("tcp", "tcp", "")  # nothing better is in common


async def test_ends_with_nothing_in_common_have_no_choice() -> None:
    async with _listening(TransferOptions(transports=("tcp",))) as (_, address):
        report = await probe(address, SECRET, TransferOptions(transports=("shm",)))
    assert (report.chosen, report.warning) == ("", "no transport works between these hosts")


async def test_a_library_that_fails_here_does_not_keep_the_others_from_a_try(monkeypatch: pytest.MonkeyPatch) -> None:
    real = peer_probe.build_network

    def build(names: Any, bind_host: str) -> Any:
        if "shm" in names:
            raise RuntimeError("the driver said no")
        return real(names, bind_host)

    async with _listening() as (_, address):
        monkeypatch.setattr(peer_probe, "build_network", build)
        report = await probe(address, SECRET, LOCAL)
    assert [trial.failure for trial in report.trials] == ["here: the driver said no", ""]
    assert report.warning == "shm was expected, tcp will be used: here: the driver said no"


@pytest.mark.parametrize("ticket", [b"\xff\xff", b""])
async def test_a_peer_whose_tickets_make_no_sense_fails_the_trials_and_not_the_command(
    ticket: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nonsense(self: ProbeListener, request: bytes, context: Any) -> bytes:
        return encode(TicketReply(ticket))

    monkeypatch.setattr(ProbeListener, "ticket", nonsense)
    async with _listening() as (_, address):
        report = await probe(address, SECRET, LOCAL)
    assert all("ticket" in trial.failure for trial in report.trials)
    assert report.chosen == ""


async def test_an_end_that_is_not_there_is_unavailable() -> None:
    async with _listening() as (_, address):
        pass
    with pytest.raises(KvferryError, match="doctor --listen") as caught:
        await probe(address, SECRET, LOCAL)
    assert caught.value.code == ErrorCode.UNAVAILABLE
    with pytest.raises(KvferryError) as caught:
        await probe("no such host:1", SECRET, LOCAL)
    assert caught.value.code == ErrorCode.UNAVAILABLE


async def test_another_secret_is_unauthenticated_and_nothing_is_handed_out() -> None:
    async with _listening() as (listener, address):
        with pytest.raises(KvferryError, match="another cluster secret") as caught:
            await probe(address, b"a secret of one end", LOCAL)
        assert caught.value.code == ErrorCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError):
            await _call(address, "Ticket", encode(TicketRequest("tcp", 1)), b"a secret of one end")
        assert listener._receiver.snapshot().handoffs == ReceiveCounts(0, 0, 0, 0)


async def test_a_server_that_is_something_else_is_named() -> None:
    server = GrpcServer("127.0.0.1", 0, secret=SECRET)
    await server.start()
    try:
        with pytest.raises(KvferryError, match=r"no `kvferry doctor --listen`") as caught:
            await probe(server.address, SECRET, LOCAL)
        assert caught.value.code == ErrorCode.INVALID_REQUEST
    finally:
        await server.stop(0)


async def test_a_peer_of_another_version_is_refused_naming_both(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _listening() as (listener, address):
        listener._report = msgspec.structs.replace(listener._report, protocol_version=99, kvferry_version="9.9")
        with pytest.raises(KvferryError, match=r"kvferry 9\.9 .*99") as caught:
            await probe(address, SECRET, LOCAL)
        assert caught.value.code == ErrorCode.INVALID_REQUEST
    with pytest.raises(KvferryError):
        check_versions(_end("tcp"), msgspec.structs.replace(_end("tcp"), probe_version=0))


@pytest.mark.parametrize("method", ["Introduce", "Ticket", "Outcome"])
async def test_bytes_that_are_no_message_are_refused(method: str) -> None:
    async with _listening() as (_, address):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _call(address, method, b"\xc1\x00")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await _ticket(address)).refusal == ""


async def test_a_ticket_is_for_the_transport_asked_for_and_no_other() -> None:
    async with _listening() as (_, address):
        ticket = Ticket.FromString((await _ticket(address, "shm", LARGE_BLOCKS)).ticket)
        assert [offer.name for offer in ticket.transports] == ["shm"]
        assert len(ticket.block_ids) == LARGE_BLOCKS
        assert "does not reach" in (await _ticket(address, "pigeon")).refusal
        for count in (0, LARGE_BLOCKS + 1):
            assert "blocks" in (await _ticket(address, num_blocks=count)).refusal
        unknown = await _call(address, "Outcome", encode(OutcomeRequest("nothing")))
        assert "not known" in decode(unknown, OutcomeReply).failure


async def test_places_held_by_silent_peers_run_out_and_come_back_with_their_leases() -> None:
    clock = ManualClock()
    async with _listening(clock=clock) as (listener, address):
        tickets = [Ticket.FromString((await _ticket(address)).ticket) for _ in range(4)]
        assert "places are taken" in (await _ticket(address)).refusal
        clock.advance(60)
        listener._receiver.sweep(clock.now())
        for ticket in tickets:
            outcome = await _call(address, "Outcome", encode(OutcomeRequest(ticket.handoff_id)))
            assert decode(outcome, OutcomeReply).failure
        async with asyncio.timeout(20):  # The fence follows the failure at once, on another thread.
            while (await _ticket(address)).refusal:
                pass


@pytest.mark.parametrize(
    ("own", "peer", "trials", "chosen", "best", "warned"),
    [
        (_end("shm", "tcp"), _end("tcp"), [Trial("tcp")], "tcp", "tcp", ""),
        (
            _end("nixl", "tcp", facts=RDMA),
            _end("nixl", "tcp", facts=RDMA),
            [Trial("nixl"), Trial("tcp")],
            "nixl",
            "nixl",
            "",
        ),
        (
            _end("nixl", "ucx", "tcp", facts=RDMA),
            _end("nixl", "ucx", "tcp", facts=RDMA),
            [Trial("nixl", "no route"), Trial("ucx", "no route either"), Trial("tcp")],
            "tcp",
            "nixl",
            "nixl was expected, tcp will be used: no route",
        ),
        # RDMA at one end only: tcp is what is to be expected.
        (_end("nixl", "tcp", facts=RDMA), _end("nixl", "tcp"), [Trial("nixl"), Trial("tcp")], "tcp", "tcp", ""),
        # shm across hosts was never expected.
        (_end("shm", "tcp"), _end("shm", "tcp"), [Trial("shm", "other host"), Trial("tcp")], "tcp", "tcp", ""),
        (_end("tcp"), _end("tcp"), [Trial("tcp", "closed")], "", "tcp", "no transport works between these hosts"),
        (_end(), _end(), [], "", "", "no transport works between these hosts"),
    ],
)
def test_what_would_be_chosen_is_judged_against_what_should_work(
    own: EndReport, peer: EndReport, trials: list[Trial], chosen: str, best: str, warned: str
) -> None:
    report = judge(own, peer, trials)
    assert (report.chosen, report.expected, report.warning) == (chosen, best, warned)


def test_a_person_reads_a_row_for_each_transport_with_figures_or_the_reason() -> None:
    trials = [Trial("tcp", detail="lo", fixed_ms=1.25, gigabytes_per_s=2.345), Trial("ucx", "here: not installed")]
    lines = peer_lines(replace(judge(_end("tcp", facts=RDMA), _end("tcp"), trials)))
    table = next(line for line in lines if isinstance(line, list))
    assert format_table(table)[1:] == [
        "tcp        yes    2.35  1.2       lo",
        "ucx        no                     here: not installed",
    ]
    assert "chosen: tcp; expected: tcp" in lines
    assert "here: host, kvferry 1.0, RDMA by nixl, ucx" in lines


def test_blocks_of_the_probe_are_as_large_as_documented() -> None:
    assert LAYOUT.page_bytes == 64 * 1024
    assert LARGE_BLOCKS * LAYOUT.block_bytes == 16 * 1024 * 1024


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("node-7", ("node-7", DEFAULT_PORT)),
        ("node-7:9", ("node-7", 9)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]", ("::1", DEFAULT_PORT)),
        ("[::1]:9", ("::1", 9)),
    ],
)
def test_an_address_has_an_optional_port(text: str, parts: tuple[str, int]) -> None:
    assert split_address(text) == parts


@pytest.mark.parametrize("text", ["", ":9", "host:", "host:port", "host:65536", "::1", "[]:1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        split_address(text)
