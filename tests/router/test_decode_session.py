"""The stream to a decode worker."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvferry_rpc.common_pb2 import ErrorCode, SamplingParams
from kvferry_rpc.internal_pb2 import (
    Admit,
    DecodeCommand,
    DecodeEvent,
    HandOver,
    Paused,
    PrefillDone,
    Register,
)
from router.dispatch import decode_session
from router.dispatch.decode_session import DecodeSession
from router.dispatch.inbox import Inbox
from runtime.clock import ManualClock
from runtime.errors import KvferryError
from runtime.grpc_life import channel
from tests.support.fake_model import continuation
from tests.support.fake_workers import SECRET, Fabric, FakeDecode

CLOCK = ManualClock()


def admit(request_id: str, attempt: int = 1, max_tokens: int = 4) -> Admit:
    return Admit(
        request_id=request_id,
        attempt=attempt,
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=max_tokens),
        local_prefill=True,
        deadline_ms=10_000,
    )


class SteppingDecode(FakeDecode):
    """Answers every step of a move as if it could be done."""

    def __init__(self, worker_id: str, fabric: Fabric) -> None:
        super().__init__(worker_id, fabric)
        self.steps: list[str] = []
        self.move = self._step

    async def _step(self, command: DecodeCommand, outbox: "asyncio.Queue[DecodeEvent | None]") -> None:
        kind = str(command.WhichOneof("kind"))
        self.steps.append(kind)
        names = {"request_id": "r", "attempt": 1}
        if kind == "pause":
            outbox.put_nowait(DecodeEvent(**names, paused=Paused()))
        elif kind == "hand_over":
            outbox.put_nowait(DecodeEvent(**names, handed_over=PrefillDone()))
        await self._note()


class Harness:
    """One fake worker and a session with it."""

    def __init__(self, worker: SteppingDecode, register: Register) -> None:
        self.worker = worker
        self.breaks: list[str] = []
        self.session = DecodeSession(
            register, "router-test", lambda address: channel(address, SECRET), self.breaks.append, random.Random(1)
        )

    async def read(self, inbox: Inbox) -> list[int]:
        """Tokens up to done. Raises the failure."""
        tokens: list[int] = []
        async with asyncio.timeout(10):
            while True:
                tokens.extend(token.token_id for token in inbox.take_tokens())
                if inbox.decode_failure is not None:
                    raise inbox.decode_failure
                if inbox.decode_done is not None:
                    return tokens
                await inbox.wait()

    async def run(self, request_id: str, attempt: int = 1) -> list[int]:
        inbox = Inbox(0, CLOCK)
        await self.session.admit(admit(request_id, attempt), inbox)
        return await self.read(inbox)


@asynccontextmanager
async def harness(**changes: object) -> AsyncIterator[Harness]:
    before = asyncio.all_tasks()
    worker = SteppingDecode("d0", Fabric())
    register = await worker.start()
    for name, value in changes.items():
        setattr(register, name, value)
    setup = Harness(worker, register)
    setup.session.start()
    try:
        yield setup
    finally:
        await setup.session.close()
        await worker.stop()
    assert {task for task in asyncio.all_tasks() - before if "session" in task.get_name()} == set()


async def test_many_requests_share_one_stream_and_get_their_own_tokens() -> None:
    async with harness() as setup:
        answers = await asyncio.gather(*(setup.run(f"r{i}") for i in range(20)))
        assert answers == [continuation([1, 2, 3], 4)] * 20
        assert setup.worker.sessions == 1
        assert setup.session.requests_in_flight == 0


async def test_events_of_another_attempt_go_to_nobody() -> None:
    async with harness() as setup:
        setup.worker.pause_after = 1
        inbox = Inbox(0, CLOCK)
        await setup.session.admit(admit("r", attempt=1), inbox)
        async with asyncio.timeout(10):
            while not inbox.take_tokens():
                await inbox.wait()
        setup.session.cancel("r", 1)
        assert await asyncio.wait_for(_second_attempt(setup), 10) == continuation([1, 2, 3], 4)
        assert inbox.take_tokens() == ()
        assert setup.worker.cancelled == [("r", 1)]


async def _second_attempt(setup: Harness) -> list[int]:
    setup.worker.pause_after = None
    return await setup.run("r", attempt=2)


async def test_cancel_reaches_the_worker_and_is_idempotent() -> None:
    # H055, H061
    async with harness() as setup:
        setup.worker.pause_after = 1
        await setup.session.admit(admit("r"), Inbox(0, CLOCK))
        await setup.worker.until(lambda: ("r", 1) in setup.worker.live)
        for _ in range(3):
            setup.session.cancel("r", 1)
        await setup.worker.until(lambda: not setup.worker.live)
        assert setup.session.requests_in_flight == 0
        assert setup.worker.cancelled == [("r", 1)]


async def test_a_request_that_is_cancelled_before_it_was_sent_is_never_sent() -> None:
    async with harness() as setup:
        await setup.run("warm-up")
        await setup.session.admit(admit("unsent"), Inbox(0, CLOCK))
        setup.session.cancel("unsent", 1)
        await setup.run("after")
        assert [sent.request_id for sent in setup.worker.admitted] == ["warm-up", "after"]
        assert setup.worker.cancelled == []


async def test_a_cancel_after_the_end_says_nothing() -> None:
    async with harness() as setup:
        await setup.run("r")
        setup.session.cancel("r", 1)
        await setup.run("after")
        assert setup.worker.cancelled == []


async def test_the_steps_of_a_move_go_out_in_order_and_end_with_the_request() -> None:
    async with harness() as setup:
        setup.worker.pause_after = 1
        inbox = Inbox(0, CLOCK)
        await setup.session.admit(admit("r"), inbox)
        await setup.worker.until(lambda: setup.worker.live)
        setup.session.pause("r", 1)
        async with asyncio.timeout(10):
            while not inbox.is_paused:
                await inbox.wait()
        setup.session.resume("r", 1)
        setup.session.hand_over(HandOver(request_id="r", attempt=1))
        await setup.worker.until(lambda: setup.worker.steps == ["pause", "resume", "hand_over"])
        async with asyncio.timeout(10):
            while inbox.handed_over is None:
                await inbox.wait()
        assert setup.session.requests_in_flight == 0
        setup.session.pause("r", 1)
        setup.session.resume("nobody", 1)
        setup.session.cancel("r", 1)
        setup.worker.pause_after = None
        await setup.run("after")
        assert len(setup.worker.steps) == 3
        assert setup.worker.cancelled == []


async def test_a_broken_stream_fails_all_its_requests_and_the_session_comes_back() -> None:
    async with harness() as setup:
        setup.worker.pause_after = 1
        inboxes = [Inbox(0, CLOCK) for _ in range(3)]
        for number, inbox in enumerate(inboxes):
            await setup.session.admit(admit(f"r{number}"), inbox)
        await setup.worker.until(lambda: len(setup.worker.live) == 3)
        await setup.worker.drop_sessions()
        for inbox in inboxes:
            with pytest.raises(KvferryError, match="dropped") as caught:
                await setup.read(inbox)
            assert caught.value.code == ErrorCode.UNAVAILABLE
        assert setup.breaks == ["d0"]
        with pytest.raises(KvferryError, match="no session"):
            await setup.session.admit(admit("meanwhile"), Inbox(0, CLOCK))
        await setup.worker.until(lambda: setup.worker.sessions == 2)
        setup.worker.pause_after = None
        assert await setup.run("r0", attempt=2) == continuation([1, 2, 3], 4)


async def test_another_life_of_the_worker_refuses_the_session() -> None:
    async with harness(incarnation=b"an earlier life!") as setup:
        async with asyncio.timeout(10):
            with pytest.raises(KvferryError) as caught:
                await setup.run("r")
        assert caught.value.code == ErrorCode.UNAVAILABLE
        assert setup.worker.admitted == []


async def test_a_worker_that_cannot_be_reached_fails_requests_within_the_connect_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # H056: a peer that accepts and never answers is the same.
    monkeypatch.setattr(decode_session, "CONNECT_TIMEOUT_S", 0.1)
    async with harness(address="127.0.0.1:1") as setup:
        async with asyncio.timeout(10):
            with pytest.raises(KvferryError) as caught:
                await setup.session.admit(admit("r"), Inbox(0, CLOCK))
        assert caught.value.code == ErrorCode.UNAVAILABLE


async def test_closing_fails_what_runs_and_later_admissions() -> None:
    async with harness() as setup:
        setup.worker.pause_after = 1
        inbox = Inbox(0, CLOCK)
        await setup.session.admit(admit("r"), inbox)
        await setup.session.close()
        with pytest.raises(KvferryError, match="no longer attached"):
            await setup.read(inbox)
        with pytest.raises(KvferryError, match="closed"):
            await setup.session.admit(admit("r", attempt=2), Inbox(0, CLOCK))


async def test_what_a_detached_worker_said_last_is_still_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_session, "LAST_WORDS_S", 30.0)
    async with harness() as setup:
        setup.worker.pause_after = 1
        inbox = Inbox(0, CLOCK)
        await setup.session.admit(admit("r"), inbox)
        await setup.worker.until(lambda: setup.worker.live)
        leaving = asyncio.create_task(setup.session.leave())
        await asyncio.sleep(0)
        with pytest.raises(KvferryError, match="closed"):
            await setup.session.admit(admit("r", attempt=2), Inbox(0, CLOCK))
        setup.worker.resume.set()
        await setup.worker.until(lambda: not setup.worker.live)
        await setup.worker.drop_sessions()
        await asyncio.wait_for(leaving, 10)
        assert await setup.read(inbox) == continuation([1, 2, 3], 4)
        assert setup.breaks == []
        assert setup.worker.sessions == 1


async def test_a_detached_worker_whose_stream_does_not_end_is_heard_for_a_moment_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_session, "LAST_WORDS_S", 0.01)
    async with harness() as setup:
        setup.worker.pause_after = 1
        inbox = Inbox(0, CLOCK)
        await setup.session.admit(admit("r"), inbox)
        await asyncio.wait_for(setup.session.leave(), 10)
        with pytest.raises(KvferryError, match="no longer attached"):
            await setup.read(inbox)


async def test_admissions_that_the_worker_does_not_take_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_session, "MAX_OUTBOUND_ADMITS", 5)
    async with harness() as setup:
        await setup.run("warm-up")
        for number in range(5):
            await setup.session.admit(admit(f"r{number}"), Inbox(0, CLOCK))
        with pytest.raises(KvferryError) as caught:
            await setup.session.admit(admit("one-too-many"), Inbox(0, CLOCK))
        assert caught.value.code == ErrorCode.OVERLOADED
        assert setup.session.requests_in_flight == 5
