"""The process behind all routers of `bench/router_rps.py`: a mock decode worker and a mock OpenAI server.

It is told what to do by lines of JSON on standard input and answers each with one:

    {"command": "start", "secret": "...", "token_ids": [...], "vocab_size": 4032, "words": [...]}
                                                      -> {"openai_url": "http://127.0.0.1:1234"}
    {"command": "attach", "routers": ["host:port"]}   -> {}        (an empty list detaches)
    {"command": "pace", "step_s": 0.005}              -> {}
    {"command": "held"}                               -> {"held": {request id: [to first token, to last token]}}
                                                         in seconds, of all finished since the last such question

The process ends with its standard input.
"""

import asyncio
import json
import sys
from typing import Any

import uvloop

from bench.common.mock_decode import MockDecode
from bench.common.mock_openai import MockOpenAi

_LINE_LIMIT_BYTES = 1 << 20


class MockBackend:
    """Both servers. Event-loop thread only."""

    def __init__(self) -> None:
        self._decode: MockDecode | None = None
        self._openai: MockOpenAi | None = None

    async def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do what one line says; what to answer."""
        name = command["command"]
        if name == "start":
            return await self._start(command)
        assert self._decode is not None
        assert self._openai is not None
        if name == "attach":
            routers = command["routers"]
            await (self._decode.attach(routers) if routers else self._decode.detach())
        elif name == "pace":
            self._decode.steps.step_s = self._openai.steps.step_s = float(command["step_s"])
        elif name == "held":
            held = {}
            for steps in (self._decode.steps, self._openai.steps):
                held.update({one.request_id: [one.first_held_s, one.held_s] for one in steps.finished.values()})
                steps.finished.clear()
            return {"held": held}
        return {}

    async def close(self) -> None:
        """Close both servers."""
        if self._decode is not None and self._openai is not None:
            await self._decode.close()
            await self._openai.close()

    async def _start(self, command: dict[str, Any]) -> dict[str, Any]:
        secret = command["secret"].encode()
        self._decode = MockDecode("mock-0", command["token_ids"], command["vocab_size"], secret)
        self._openai = MockOpenAi(command["words"])
        await self._decode.start()
        return {"openai_url": await self._openai.start()}


async def serve() -> None:
    """Answer until standard input ends."""
    backend = MockBackend()
    reader = asyncio.StreamReader(limit=_LINE_LIMIT_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        answer = await backend.obey(json.loads(line))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
