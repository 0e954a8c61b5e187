"""A worker end in another process, as a test drives it; see kv_peer.py for what runs there."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvferry_rpc.internal_pb2 import Ticket
from tests.support.json_process import JsonProcess
from tests.support.kv_pair import WAIT_S


class Peer(JsonProcess):
    """One process. Whoever makes it closes it."""

    def __init__(self, role: str, transports: str | Sequence[str], num_blocks: int, options: dict[str, Any]) -> None:
        names = [transports] if isinstance(transports, str) else list(transports)
        config = {"transports": names, "num_blocks": num_blocks, "options": options}
        super().__init__("tests.support.kv_peer", role, json.dumps(config))
        self.wait(lambda line: "ready" in line)

    def do(self, **command: Any) -> None:
        self.tell(json.dumps(command))

    def reserve(self, block_ids: Sequence[int], num_tokens: int) -> Ticket:
        """A place in the pool of a `decode` peer."""
        self.do(block_ids=list(block_ids), first_block=0, num_tokens=num_tokens)
        return Ticket.FromString(bytes.fromhex(self.wait(lambda line: "ticket" in line)["ticket"]))

    def wait(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The next line that is wanted; those before it are gone."""
        deadline = time.monotonic() + WAIT_S
        while True:
            line = self.hear_within(deadline - time.monotonic())
            if wanted(line):
                return line

    def wait_event(self, *kinds: str) -> dict[str, Any]:
        return self.wait(lambda line: line.get("event") in kinds)

    def finish(self) -> int:
        """Let it close by itself, as it does when nobody has more for it; its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(WAIT_S)
