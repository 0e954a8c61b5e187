"""One end of hand-offs in a process of its own, driven by JSON lines: commands on stdin, events on stdout.

python -m tests.support.kv_peer prefill|decode '{"transports": [...], "num_blocks": 16, "options": {...}}'
"""

import hashlib
import json
import sys
import time
from typing import Any

from kv_transfer.events import CommitRecord, Committed, Drained, Failed, Fenced, ReceiveEvent, SendEvent, Sent
from kv_transfer.network import build_network
from kv_transfer.receiver import HandoffReceiver
from kv_transfer.sender import HandoffSender
from kvferry_rpc.internal_pb2 import Ticket
from runtime.clock import SystemClock
from tests.support.kv_pair import LAYOUT, block_of, fill, make_identity


def tell(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def prefill(config: dict[str, Any]) -> None:
    identity = make_identity("prefill", config["num_blocks"], shared=False)
    fill(identity, 1)

    def on_event(event: SendEvent) -> None:
        message = event.error.message if isinstance(event, Failed) else ""
        tell(event=type(event).__name__, handoff_id=event.handoff_id, message=message)
        assert isinstance(event, Sent | Failed | Drained)

    network = build_network(config["transports"], "127.0.0.1")
    sender = HandoffSender(
        identity,
        transports=config["transports"],
        network=network,
        clock=SystemClock(),
        on_event=on_event,
        **config["options"],
    )
    tell(ready=True)
    for line in sys.stdin:
        command = json.loads(line)
        ticket = Ticket.FromString(bytes.fromhex(command["ticket"]))
        if command["do"] == "open":
            sender.open(ticket, command["num_tokens"], time.monotonic() + command["within_s"])
        elif command["do"] == "push":
            sender.push(ticket.handoff_id, command["first"], command["blocks"], range(LAYOUT.num_layers))
        elif command["do"] == "commit":
            sender.commit(ticket.handoff_id, CommitRecord(command["num_tokens"], b"first token"))
    sender.close(10.0)
    network.close()


def decode(config: dict[str, Any]) -> None:
    identity = make_identity("decode", config["num_blocks"])
    tickets: dict[str, Ticket] = {}

    def on_event(event: ReceiveEvent) -> None:
        message = event.error.message if isinstance(event, Failed) else ""
        content = hashlib.blake2b()
        if isinstance(event, Committed):
            for block_id in tickets[event.handoff_id].block_ids:
                content.update(block_of(identity, block_id))
        tell(event=type(event).__name__, handoff_id=event.handoff_id, message=message, content=content.hexdigest())
        assert isinstance(event, Committed | Failed | Fenced)

    network = build_network(config["transports"], "127.0.0.1")
    receiver = HandoffReceiver(
        identity,
        bind_host="127.0.0.1",
        transports=config["transports"],
        network=network,
        clock=SystemClock(),
        on_event=on_event,
        **config["options"],
    )
    receiver.start()
    tell(ready=True)
    for line in sys.stdin:
        command = json.loads(line)
        ids = command["block_ids"]
        ticket = receiver.reserve("r", 1, command["first_block"], ids, command["num_tokens"])
        tickets[ticket.handoff_id] = ticket
        tell(ticket=ticket.SerializeToString().hex())
    receiver.close(10.0)
    network.close()


if __name__ == "__main__":
    {"prefill": prefill, "decode": decode}[sys.argv[1]](json.loads(sys.argv[2]))
