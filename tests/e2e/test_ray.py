"""A cluster in Ray, as people start it: served, killed piece by piece, scaled over two nodes, left by its head."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvferry.run_dir import process_start_ticks
from tests.support.deploy_page import page_command
from tests.support.live_cluster import TINY_REAL, models_beside
from tests.support.live_ray import HEAD_HOST, LiveRay, live_ray

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.timeout(900)]
IGNORE_EOS = {"ignore_eos": True}
SECOND_HOST = "127.0.0.3"
PROMPTS = [f"Tell me story number {index} about a fox and a crow. " * 2 for index in range(4)]

BODY: dict[str, Any] = {
    "model": "tiny-real",
    "max_tokens": 120,
    "ignore_eos": True,
    "temperature": 0.9,
    "seed": 11,
    "stream": True,
}


@dataclass
class Served:
    """What `kvferry up --ray` started."""

    ray: LiveRay
    http: str
    state_dir: Path

    @property
    def base_url(self) -> str:
        return f"http://{self.http}"

    def note(self, name: str) -> dict[str, Any]:
        """What the actor of a process has noted of it: its pid, a router's ports."""
        note: dict[str, Any] = json.loads((self.state_dir / name / "process.json").read_text())
        return note

    def pids(self) -> dict[str, int]:
        """Of every process that has an actor now."""
        return {path.parent.name: self.note(path.parent.name)["pid"] for path in self.state_dir.glob("*/process.json")}

    def wait_new_life(self, name: str, old_pid: int) -> dict[str, Any]:
        """Until another process serves in its place; a note is nothing to wait on."""
        deadline = time.monotonic() + 120
        while (note := self.note(name))["pid"] == old_pid:
            assert time.monotonic() < deadline, f"{name} has not come back"
            time.sleep(0.1)
        return note


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One router, one prefill and two decode workers; the node is full then."""
    directory: Path = tmp_path_factory.mktemp("ray")
    with live_ray(cpus=4, gpus=1) as ray:
        # As docs/deploy.md has it, with another model, and where there is room.
        flags = ["--model", str(TINY_REAL), "--num-blocks", "512", "--http-port", "0", "--grpc-port", "0"]
        flags += ["--state-dir", str(directory / "state"), "--cache-dir", str(models_beside(directory))]
        events = ray.kvferry(*page_command("Ray", "up"), *flags, "--decode-shape", "gpus=0.5", "--detach")
        serving = next(event for event in events if event.get("event") == "serving")
        yield Served(ray, serving["http_address"], directory / "state")


def test_the_openai_client_is_served_and_status_shows_each_process(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="none") as client:
        answer = client.completions.create(model="tiny-real", prompt=PROMPTS[0], max_tokens=8, extra_body=IGNORE_EOS)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    processes: dict[str, dict[str, Any]] = served.ray.kvferry(*page_command("Ray", "status"))[0]["processes"]
    assert sorted(processes) == ["decode-0", "decode-1", "prefill-0", "router"]
    for name, facts in processes.items():
        assert facts["running"], name
        assert facts["host"] == HEAD_HOST
        # Who has asked for a share of the GPU sees it, and nobody else does.
        assert facts["devices"] == ("0" if name.startswith("decode") else "")
        assert (facts["group"] == "") is (name == "router")
        assert facts["pid"] == served.note(name)["pid"]
        secret = Path(facts["log"]).parent / "secret"
        assert secret.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
def test_a_worker_process_that_is_killed_comes_back_and_changes_no_text(served: Served, name: str) -> None:
    before = served.note(name)["pid"]

    async def run() -> None:
        async with _http(served) as http:
            expected = [await _text(http, prompt) for prompt in PROMPTS]
            under_way = [asyncio.Event() for _ in PROMPTS]
            streams = [asyncio.create_task(_text(http, *pair)) for pair in zip(PROMPTS, under_way, strict=True)]
            await asyncio.gather(*(event.wait() for event in under_way))
            os.kill(before, signal.SIGKILL)
            assert await asyncio.gather(*streams) == expected

    asyncio.run(run())
    served.wait_new_life(name, before)


def test_a_router_that_is_killed_comes_back_where_it_was_and_who_asks_again_is_answered(served: Served) -> None:
    before = served.note("router")
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="none", max_retries=0) as client:

        def ask() -> str:
            wanted = {"model": "tiny-real", "prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0.9, "seed": 11}
            return client.completions.create(**wanted, extra_body=IGNORE_EOS).choices[0].text

        expected = ask()
        os.kill(before["pid"], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while True:
            try:
                text = ask()
                break
            except (openai.APIConnectionError, openai.InternalServerError):
                assert time.monotonic() < deadline
                time.sleep(0.2)
    assert text == expected
    assert served.wait_new_life("router", before["pid"])["ports"] == before["ports"]


def test_an_actor_that_is_killed_takes_its_process_along_and_both_come_back(served: Served) -> None:
    before = served.note("decode-1")["pid"]
    actor = int(Path(f"/proc/{before}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(actor, signal.SIGKILL)
    served.wait_new_life("decode-1", before)
    assert process_start_ticks(before) is None


def test_a_second_node_takes_workers_and_scaling_flips_and_a_restart_under_load_fail_no_request(served: Served) -> None:
    served.ray.join(SECOND_HOST, cpus=2, gpus=1)
    done: list[dict[str, Any]] = []

    def change() -> None:
        # The node is full, so the new workers go to the other one; then one is flipped, and one of each role stays.
        done.extend(served.ray.kvferry(*page_command("Ray", "scale")))
        for prefill, decode in ((1, 4), (1, 1)):
            done.extend(served.ray.kvferry("scale", "--prefill", str(prefill), "--decode", str(decode)))
        done.extend(served.ray.kvferry(*page_command("Ray", "restart")))

    async def run() -> None:
        async with _http(served) as http:
            expected = [await _text(http, prompt) for prompt in PROMPTS]
            enough = asyncio.Event()

            async def load(index: int) -> None:
                while not enough.is_set():
                    assert await _text(http, PROMPTS[index]) == expected[index]
                    await asyncio.sleep(0.2)  # Two cores have commands and workers to start besides.

            loads = [asyncio.create_task(load(index)) for index in range(2)]
            changing = asyncio.create_task(asyncio.to_thread(change))
            await asyncio.wait([*loads, changing], return_when=asyncio.FIRST_COMPLETED)
            enough.set()
            await asyncio.gather(*loads, changing)

    asyncio.run(run())
    ready = [(event["name"], event["text"]) for event in done if event["event"] == "ready"]
    assert sorted(name for name, _ in ready[:2]) == ["decode-2", "prefill-1"]
    assert [text for _, text in ready[:2] if not text.endswith(f"on {SECOND_HOST}")] == []
    scaled = [event for event in done if event["event"] == "scaled"]
    assert [len(event["added"]) for event in scaled] == [2, 0, 0]
    assert [len(event["flipped"]) for event in scaled] == [0, 1, 0]
    assert [len(event["removed"]) for event in scaled] == [0, 0, 3]
    (restarted,) = [event["replaced"] for event in done if event["event"] == "restarted"]
    assert len(restarted) == 2
    assert [name for name, _ in ready[2:]] == list(restarted.values())


def test_while_the_head_is_away_all_goes_on_and_afterwards_too(served: Served) -> None:
    async def run() -> None:
        async with _http(served) as http:
            expected = [await _text(http, prompt) for prompt in PROMPTS]
            under_way = [asyncio.Event() for _ in PROMPTS]
            streams = [asyncio.create_task(_text(http, *pair)) for pair in zip(PROMPTS, under_way, strict=True)]
            await asyncio.gather(*(event.wait() for event in under_way))
            with served.ray.without_head():
                assert await asyncio.gather(*streams) == expected
                assert await _text(http, PROMPTS[0]) == expected[0]

    asyncio.run(run())
    assert [name for name, pid in served.pids().items() if process_start_ticks(pid) is None] == []


def test_down_ends_every_process(served: Served) -> None:
    pids = served.pids()
    assert pids
    served.ray.kvferry(*page_command("Ray", "down"))
    assert [name for name, pid in pids.items() if process_start_ticks(pid) is not None] == []
    assert served.pids() == {}


@asynccontextmanager
async def _http(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=served.base_url, timeout=120) as http:
        yield http


async def _text(http: httpx.AsyncClient, prompt: str, under_way: asyncio.Event | None = None) -> str:
    """A streamed completion, whole; `under_way` is set behind its second piece."""
    parts: list[str] = []
    async with http.stream("POST", "/v1/completions", json={**BODY, "prompt": prompt}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return "".join(parts)
            if line.startswith("data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                parts.extend(choice["text"] for choice in event["choices"])
                if under_way is not None and len(parts) >= 2:
                    under_way.set()
    raise AssertionError("the stream ended without [DONE]")
