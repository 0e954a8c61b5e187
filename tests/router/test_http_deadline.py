"""Fields and headers that say how urgent a request is, on their way to the cluster."""

from typing import Any

import pytest

from router.admission.slo import BATCH, INTERACTIVE
from tests.support.http_door import Door, chat_body, completion_body, says

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("header", "seconds"), [("1500", 1.5), ("1", 0.001), ("30000", 30.0), ("999999999999", 33.0), (None, 33.0)]
)
async def test_the_client_may_shorten_the_deadline_but_not_lengthen_it(header: str | None, seconds: float) -> None:
    door = Door(says("x"), request_timeout_s=33.0)
    headers = {"x-request-timeout-ms": header} if header is not None else {}
    assert (await door.post(CHAT, chat_body(), headers=headers)).status_code == 200
    assert door.source.requests[0].deadline == pytest.approx(100.0 + seconds)


@pytest.mark.parametrize("header", ["0", "-5", "1.5", "1e3", "soon", "", "1" * 13, " ", "٣"])
async def test_a_deadline_that_is_no_number_of_milliseconds_is_refused(header: str) -> None:
    door = Door(says("x"))
    answer = await door.post(COMPLETIONS, completion_body(), headers={"x-request-timeout-ms": header.encode()})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-timeout-ms")
    assert door.source.requests == []
    assert door.refused == ["invalid_request"]


@pytest.mark.parametrize("slo", [INTERACTIVE.name, BATCH.name])
async def test_class_and_priority_reach_every_choice(slo: str) -> None:
    door = Door(says("x"))
    assert (await door.post(CHAT, chat_body(n=2, slo=slo, priority=-7))).status_code == 200
    assert [(request.slo, request.priority) for request in door.source.requests] == [(slo, -7)] * 2


@pytest.mark.parametrize("slo", ["gold", "", 1])
async def test_a_class_that_does_not_exist_is_refused_by_name(slo: Any) -> None:
    answer = await Door(says("x")).post(CHAT, chat_body(slo=slo))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "slo")


async def test_without_a_word_there_is_no_class() -> None:
    door = Door(says("x"))
    await door.post(CHAT, chat_body())
    assert (door.source.requests[0].slo, door.source.requests[0].priority) == ("", 0)
