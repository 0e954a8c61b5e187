"""Tool calls over lost workers: the client sees the same calls, piece by piece, whatever was lost under them."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from kvferry_rpc.common_pb2 import ErrorCode
from runtime.clock import SystemClock
from tests.support import fake_workers
from tests.support.fake_workers import error
from tests.support.http_door import Door, chat_body, events, says
from tests.support.router_cluster import RouterCluster, router_cluster
from tests.support.tool_templates import TOOLS, tokenizer_of, tool_door, written

CHAT = "/v1/chat/completions"
CALLS: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": "Brno", "days": 2}), ("clock", {})]
# Characters of several tokens before the calls, where the format has room for content there.
TEXTS = {
    "hermes": "Un caf\u00e9 \U0001f468\u200d\U0001f467. " + written("hermes", CALLS),
    "llama3": written("llama3", CALLS),
    "mistral": "Moment\u00e1lne. " + written("mistral-args", CALLS),
}


@dataclass
class Said:
    """A streamed answer, put together as clients do it."""

    content: str = ""
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    failures: int = field(default=0, compare=False)

    def add(self, chunk: Any) -> None:
        self.failures = len(chunk.get("kv_receipt", {}).get("earlier_failures", ()))
        (choice,) = chunk["choices"]
        self.content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(self.names), "a call begins once, in its turn"
                self.names.append(call["function"]["name"])
                self.arguments.append("")
            self.arguments[call["index"]] += call["function"].get("arguments", "")
        self.finish_reason = choice["finish_reason"] or self.finish_reason


class Chat:
    """A door in front of a cluster whose workers all say the same."""

    def __init__(self, style: str, cluster: RouterCluster, monkeypatch: pytest.MonkeyPatch) -> None:
        tokenizer = tokenizer_of(style)
        (end,) = tokenizer.encode("<|end|>", add_special_tokens=False)
        self.script = [*tokenizer.encode(TEXTS[style], add_special_tokens=False), end]
        self.door: Door = tool_door(says(""), style, source=cluster.dispatcher, clock=SystemClock())
        self.body = chat_body(tools=TOOLS, stream=True, kv_receipt=True, temperature=0, stop_token_ids=[end])
        self.body["max_tokens"] = len(self.script) + 8
        monkeypatch.setattr(fake_workers, "next_token", self._next_token)
        monkeypatch.setattr(fake_workers, "VOCAB", 1 << 20)
        self._prompt_tokens = 0

    async def read(self) -> Said:
        if not self._prompt_tokens:
            asked = {"messages": self.body["messages"], "tools": TOOLS}
            self._prompt_tokens = (await self.door.post("/tokenize", asked)).json()["count"]
        answer = await self.door.post(CHAT, self.body)
        assert answer.status_code == 200, answer.text
        *chunks, done = events(answer.content)
        assert done == "[DONE]"
        said = Said()
        for chunk in chunks:
            said.add(chunk)
        return said

    def _next_token(self, tokens: Any) -> int:
        # A resumed answer is continued from exactly what was given out, or it would not be this text.
        output = list(tokens[self._prompt_tokens :])
        assert output == self.script[: len(output)]
        return self.script[len(output)]


@pytest.mark.parametrize(("style", "stride"), [("hermes", 2), ("llama3", 4), ("mistral", 4)])
async def test_a_loss_under_a_stream_of_calls_changes_none_of_them(
    style: str, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with router_cluster() as cluster:
        chat = Chat(style, cluster, monkeypatch)
        first = await cluster.decode("decode-0")
        await cluster.prefill()
        undisturbed = await chat.read()
        assert undisturbed.names == [name for name, _ in CALLS]
        assert undisturbed.finish_reason == "tool_calls"
        assert undisturbed.failures == 0
        await cluster.decode("decode-1")
        positions = range(0, len(chat.script) - 1, stride)
        lost = 0
        for position in positions:
            first.fail_after = (position, error(ErrorCode.UNAVAILABLE, "lost"))
            cluster.report("decode-0")
            cluster.report("decode-1", sequences_running=4)  # So the other one is taken first.
            cluster.registry.succeeded("decode-0")
            said = await chat.read()
            assert said == undisturbed, f"lost behind {position} tokens"
            lost += said.failures
        assert lost == len(positions)
