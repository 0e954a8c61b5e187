"""Answers that leave a decode worker which drains: with their KV, without a lost or changed token."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvferry_rpc.common_pb2 import Error, ErrorCode
from router.dispatch import course
from router.dispatch.course import MAX_MOVES
from router.dispatch.dispatch_limits import DispatchLimits
from router.dispatch.proof import Clause, StrictRefusal
from router.generation import TokenBatch, TokenEnd
from tests.support.fake_moves import MovingDecode
from tests.support.fake_workers import error
from tests.support.router_cluster import ANSWER, PROMPT, RouterCluster, failure_of, first_tokens, router_cluster
from tests.support.sinks import EnoughTokens


async def read_on(stream: AsyncIterator[TokenBatch | TokenEnd], tokens: list[int]) -> tuple[list[int], TokenEnd]:
    """The whole answer, of which these tokens were read before, and its end."""
    async for item in stream:
        if isinstance(item, TokenEnd):
            return tokens, item
        tokens = tokens + [token.token_id for token in item.tokens]
    raise AssertionError("the stream has no end")


async def half_way(
    cluster: RouterCluster, tokens: int = 3, *, local: bool = False, refusal: Error | None = None
) -> "tuple[MovingDecode, MovingDecode, asyncio.Task[tuple[list[int], TokenEnd]]]":
    """An answer that has got so far on `decode-0` when that is asked to let it stand still; `decode-1` is idle. Neither
    has acted on it when this returns, but for a refusal."""
    first = await cluster.decode("decode-0")
    first.pause_after = tokens
    if not local:
        await cluster.prefill()
    stream = cluster.stream(cluster.request())
    head = await first_tokens(stream, tokens)
    # The word of the prefill worker is awaited before anything else.
    await cluster.until(lambda: cluster.in_flight().get("prefill-0", 0) == 0)
    second = await cluster.decode("decode-1")
    second.ticket_gate = asyncio.Event()
    first.pause_refusals = [refusal] if refusal else []
    cluster.drain("decode-0")
    rest = asyncio.create_task(read_on(stream, head))
    await first.until(lambda: first.pauses)
    first.resume.set()
    return first, second, rest


@pytest.mark.parametrize("tokens", range(1, 8))
@pytest.mark.parametrize("local", [False, True], ids=["remote", "local"])
async def test_an_answer_leaves_a_draining_worker_with_its_kv_wherever_it_is(tokens: int, local: bool) -> None:
    async with router_cluster() as cluster:
        first, second, rest = await half_way(cluster, tokens, local=local)
        second.ticket_gate.set()
        got, end = await rest
        assert got == ANSWER
        assert end.completion_tokens == 8
        (admit,) = second.admitted
        assert not admit.local_prefill
        assert admit.attempt == 2
        given = admit.num_output_tokens
        assert given == tokens - 1
        assert list(admit.prompt_token_ids) == [*PROMPT, *ANSWER[:given]], "all but the last token, which comes along"
        (hand_over,) = first.hand_overs
        assert hand_over.ticket.decode_worker_id == "decode-1"
        receipt = end.receipt
        assert receipt.decode_worker == "decode-1"
        assert receipt.prefill_worker == ("decode-0" if local else "prefill-0")
        assert receipt.earlier_failures == []
        assert receipt.tokens_recomputed == 0
        (migration,) = receipt.migrations
        assert (migration.from_worker, migration.to_worker) == ("decode-0", "decode-1")
        assert migration.output_tokens == given + 1
        assert (migration.transport, migration.blocks_sent, migration.bytes_sent) == ("tcp", 3, 3 * 4096)
        assert migration.checksum_verified
        assert migration.tokens_recomputed == 0
        assert cluster.counter("kvferry_migrations_total", outcome="moved") == 1
        assert cluster.counter("kvferry_retries_total") == 0


async def test_what_the_prefill_worker_said_stays_on_the_receipt() -> None:
    async with router_cluster() as cluster:
        _, second, rest = await half_way(cluster)
        second.cached_tokens = 32
        second.checksum = b"another digest"
        first = cluster.workers["decode-0"]
        assert isinstance(first, MovingDecode)
        first.sent_checksum = b"another digest"
        second.ticket_gate.set()
        _, end = await rest
        receipt = end.receipt
        assert (receipt.transport, receipt.blocks_sent) == ("tcp", 3)
        assert receipt.checksum != b"another digest"
        assert receipt.migrations[0].checksum == b"another digest"
        assert receipt.decode_cached_tokens == 0, "what the second worker had spared the move, not the hand-off"
        assert end.cached_tokens == 0


async def test_without_another_worker_the_answer_ends_where_it_is() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        await cluster.prefill()
        decode.pause_after = 2
        stream = cluster.stream(cluster.request())
        tokens = await first_tokens(stream, 2)
        cluster.drain("decode-0")
        decode.resume.set()
        tokens += await first_tokens(stream, 6)
        end = await anext(stream)
        assert isinstance(end, TokenEnd)
        assert tokens == ANSWER
        assert end.receipt.migrations == []
        assert not decode.hand_overs


@pytest.mark.parametrize("where", ["pause", "admission", "ticket"])
async def test_a_move_that_is_refused_leaves_the_answer_where_it_is(where: str) -> None:
    async with router_cluster() as cluster:
        refusal = error(ErrorCode.HANDOFF_FAILED, "not now")
        first, second, rest = await half_way(cluster, refusal=refusal if where == "pause" else None)
        if where == "admission":
            await second.until(lambda: second.live)
            await second.refuse_all(error(ErrorCode.OVERLOADED, "no room"))
        else:
            first.hand_over_refusals = [refusal]
            second.ticket_gate.set()
        got, end = await rest
        assert got == ANSWER
        assert end.receipt.decode_worker == "decode-0"
        assert end.receipt.attempt == 1
        assert end.receipt.migrations == []
        assert cluster.counter("kvferry_retries_total") == 0
        await second.until(lambda: not second.live)


@pytest.mark.parametrize("where", ["failed", "dropped", "killed"])
async def test_a_worker_that_is_lost_while_it_hands_over_costs_no_token(where: str) -> None:
    async with router_cluster() as cluster:
        first, second, rest = await half_way(cluster)
        if where == "failed":
            first.hand_over_failures = [error(ErrorCode.HANDOFF_FAILED, "the link broke")]
        elif where == "dropped":
            first.drops_at_hand_over = True
        else:
            first.hand_over_gate = asyncio.Event()
            second.ticket_gate.set()
            await first.until(lambda: first.hand_overs)
            await cluster.kill("decode-0")
        second.ticket_gate.set()
        got, end = await rest
        assert got == ANSWER
        assert end.receipt.decode_worker == "decode-1"
        assert end.receipt.attempt == 3
        assert len(end.receipt.earlier_failures) == 1
        await second.until(lambda: not second.live)


async def test_the_worker_it_goes_to_is_lost_on_the_way_and_the_answer_is_made_good() -> None:
    async with router_cluster() as cluster:
        first, second, rest = await half_way(cluster)
        first.hand_over_gate = asyncio.Event()
        second.ticket_gate.set()
        await first.until(lambda: first.hand_overs)
        await cluster.kill("decode-1")
        await cluster.decode("decode-2")
        first.hand_over_gate.set()
        got, end = await rest
        assert got == ANSWER
        assert end.receipt.decode_worker in ("decode-0", "decode-2")


async def test_an_answer_moves_as_often_as_it_must() -> None:
    async with router_cluster() as cluster:
        first, second, rest = await half_way(cluster, 1)
        second.pause_after = 3
        second.ticket_gate.set()
        await first.until(lambda: not first.live)
        third = await cluster.decode("decode-2")
        cluster.drain("decode-1")
        await second.until(lambda: second.pauses)
        second.resume.set()
        got, end = await rest
        assert got == ANSWER
        assert len(third.admitted) == 1
        moves = [(migration.from_worker, migration.to_worker) for migration in end.receipt.migrations]
        assert moves == [("decode-0", "decode-1"), ("decode-1", "decode-2")]
        assert end.receipt.attempt == 3


async def test_a_reader_that_has_enough_after_a_move_gets_the_whole_receipt() -> None:
    async with router_cluster() as cluster:
        first = await cluster.decode("decode-0")
        await cluster.prefill()
        first.pause_after = 2
        stream = cluster.stream(cluster.request())
        await first_tokens(stream, 2)
        second = await cluster.decode("decode-1")
        second.pause_after = 3
        await cluster.until(lambda: cluster.in_flight()["prefill-0"] == 0)
        cluster.drain("decode-0")
        while not second.admitted:
            assert isinstance(await anext(stream), TokenBatch)
        end = await stream.athrow(EnoughTokens())
        assert isinstance(end, TokenEnd)
        assert len(end.receipt.migrations) == 1
        await second.until(lambda: not second.live)
        assert second.cancelled == [("request-1", 2)]


async def test_a_reader_that_leaves_in_the_middle_of_a_move_leaves_nothing_behind() -> None:
    async with router_cluster() as cluster:
        first, second, rest = await half_way(cluster)
        await second.until(lambda: second.live)
        rest.cancel()
        await asyncio.gather(rest, return_exceptions=True)
        await first.until(lambda: not first.live)
        await second.until(lambda: not second.live)


async def test_a_worker_that_does_not_answer_keeps_no_answer_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "PATIENCE_S", 0.05)
    async with router_cluster() as cluster:
        _, second, rest = await half_way(cluster)
        got, end = await rest
        assert got == ANSWER
        assert end.receipt.decode_worker == "decode-0"
        await second.until(lambda: not second.live)
        assert cluster.counter("kvferry_migrations_total", outcome="failed") == 1


async def test_only_so_many_answers_stand_still_at_once() -> None:
    async with router_cluster() as cluster:
        first = await cluster.decode("decode-0")
        first.pause_after = 2
        first.hand_over_gate = asyncio.Event()
        streams = [cluster.stream(cluster.request()) for _ in range(MAX_MOVES + 4)]
        heads = await asyncio.gather(*(first_tokens(stream, 2) for stream in streams))
        await cluster.decode("decode-1")
        cluster.drain("decode-0")
        reading = [asyncio.create_task(read_on(*pair)) for pair in zip(streams, heads, strict=True)]
        await first.until(lambda: len(first.hand_overs) == MAX_MOVES)
        first.resume.set()
        await first.until(lambda: len(first.live) == MAX_MOVES)
        assert len(first.pauses) == MAX_MOVES, "the others went on, and ended here"
        first.hand_over_gate.set()
        answers = await asyncio.gather(*reading)
        assert [tokens for tokens, _ in answers] == [ANSWER] * (MAX_MOVES + 4)
        assert sum(len(end.receipt.migrations) for _, end in answers) == MAX_MOVES


@pytest.mark.parametrize("proven", [True, False])
async def test_a_strict_router_insists_on_the_proof_of_a_move_too(proven: bool) -> None:
    async with router_cluster(DispatchLimits(strict_handoff=True)) as cluster:
        first, second, rest = await half_way(cluster)
        if not proven:
            first.sent_checksum = b"what nobody verified"
        second.ticket_gate.set()
        if proven:
            got, end = await rest
            assert got == ANSWER
            assert end.receipt.migrations[0].checksum_verified
            return
        failure = await failure_of(rest)
        assert isinstance(failure, StrictRefusal)
        assert failure.clause is Clause.DIGESTS
