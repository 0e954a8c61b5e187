"""What a request used is free as soon as it has ended, however it ends: nothing of it waits for the collector.

A router lets its collector look seldom (`runtime.collector`). A reference cycle with a prompt of a million tokens in it
would then be kept until hundreds of requests later.
"""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError
from tests.support.http_door import CONTEXT, Door, chat_body, completion_body, one_by_one, says

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = "a " * (CONTEXT * 3)
SHORTER = "a " * (CONTEXT // 3)
# Fewer would also be found elsewhere.
MANY = CONTEXT // 3


@pytest.fixture(autouse=True, scope="module")
def _nothing_older() -> Iterator[None]:
    """What other tests have left is no business of the collector here: looking at it would take all the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@contextmanager
def collected() -> Iterator[list[Any]]:
    """What the collector finds at the end of the block that nothing else would have freed."""
    gc.collect()
    gc.disable()
    found: list[Any] = []
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def large(garbage: list[Any]) -> list[str]:
    """What holds a prompt, and the failures that hold it."""
    kinds = [type(it).__name__ for it in garbage if isinstance(it, (list, tuple)) and len(it) >= MANY]
    return kinds + [repr(it) for it in garbage if isinstance(it, KvferryError)]


def fails(_: Any) -> Any:
    return [KvferryError(ErrorCode.UNAVAILABLE, "scripted")]


def breaks_off(_: Any) -> Any:
    return [*one_by_one("Some text."), KvferryError(ErrorCode.UNAVAILABLE, "scripted")]


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "text", "changes"),
    [
        (says("Some text."), SHORTER, {}),
        (says("Some text."), LONG, {}),
        (says("Some text."), SHORTER, {"temperature": 9}),
        (says("Some text."), SHORTER, {"unknown": 1}),
        (fails, SHORTER, {}),
        (breaks_off, SHORTER, {}),
    ],
)
async def test_nothing_large_waits_for_the_collector(
    path: str, stream: bool, script: Any, text: str, changes: dict[str, Any]
) -> None:
    door = Door(script)
    body: dict[str, Any] = {
        COMPLETIONS: completion_body(prompt=text),
        "/v1/messages": chat_body(messages=[{"role": "user", "content": text}], max_tokens=8),
        "/v1/responses": {"model": "tiny-real", "input": text},
    }[path]
    for _ in range(2):
        with collected() as garbage:
            call = door.call(path, {**body, "stream": stream, **changes})
            await call.task
            del call
            await asyncio.sleep(0)
    # The first request makes what is made once.
    door.source.requests.clear()
    assert large(garbage) == []


async def test_choices_that_fail_together_leave_nothing_either() -> None:
    door = Door(breaks_off)
    with collected() as garbage:
        call = door.call(COMPLETIONS, completion_body(prompt=SHORTER, n=3))
        await call.task
        del call
        await asyncio.sleep(0)
    assert large(garbage) == []


async def test_a_client_that_leaves_leaves_nothing() -> None:
    door = Door(lambda _: [*one_by_one("Some text."), asyncio.Event()])
    with collected() as garbage:
        call = door.call(CHAT, chat_body(messages=[{"role": "user", "content": SHORTER}], stream=True))
        await call.start()
        call.disconnect()
        await call.task
        del call
        await asyncio.sleep(0)
    assert large(garbage) == []


async def test_a_large_body_that_is_no_json_leaves_nothing() -> None:
    door = Door(says("x"))
    with collected() as garbage:
        answer = await door.post(COMPLETIONS, b'{"model": ' + b" " * 200_000)
    assert answer.status_code == 400
    assert large(garbage) == []
