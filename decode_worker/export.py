"""Sending back what only this worker's prefix cache holds, to a prefill worker that would have to compute it.

1. `ExportRequest` comes from a router with the prefill worker's ticket. If every block up to the ticket's last is
   cached here, they are pinned, pushed and committed at once: their KV is final.
2. `Drained`: nobody reads them any more, and they are ordinary cached blocks again.
Failure exits: a block is not here any more, too many exports run, the ticket is for another kind of block: the hand-off
is opened and given up at once, so that the prefill worker need not wait. Nobody else is told.
"""

import logging
from dataclasses import dataclass

from engine.engine import Engine
from kv_cache.layout import KVCacheLayout
from kv_transfer.events import CommitRecord, Drained, Failed, SendEvent
from kv_transfer.sender import HandoffSender
from kvferry_rpc import internal_pb2
from runtime.errors import KvferryError, invalid
from runtime.limits import MAX_CACHE_SALT_BYTES

# Each pins blocks that running sequences may want.
MAX_EXPORTS = 16

_MAX_HANDOFF_ID_CHARS = 512

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """Blocks that a prefill worker wants, checked by `check_export`. Times are on the worker's clock, in seconds."""

    token_ids: tuple[int, ...]  # up to the end of the ticket's last block
    cache_salt: bytes
    ticket: internal_pb2.Ticket
    deadline: float
    request_id: str = ""


def check_export(message: internal_pb2.Export, now: float) -> ExportRequest:
    """Raises KvferryError (INVALID_REQUEST) for what makes no sense."""
    ticket = message.ticket
    if not 1 <= len(ticket.handoff_id) <= _MAX_HANDOFF_ID_CHARS:
        raise invalid("ticket", f"its hand-off id must have 1 to {_MAX_HANDOFF_ID_CHARS} characters")
    if len(message.cache_salt) > MAX_CACHE_SALT_BYTES:
        raise invalid("cache_salt", f"is longer than {MAX_CACHE_SALT_BYTES} bytes")
    num_blocks, block_size = ticket.first_block + len(ticket.block_ids), ticket.layout.block_size
    if not block_size or not num_blocks or len(message.prompt_token_ids) != num_blocks * block_size:
        raise invalid("prompt_token_ids", f"are not the {num_blocks} blocks of {block_size} tokens of the ticket")
    deadline = now + message.deadline_ms / 1e3
    return ExportRequest(tuple(message.prompt_token_ids), message.cache_salt, ticket, deadline, message.request_id)


class Exporter:
    """The exports of one decode worker. Every method belongs to the engine's owner thread."""

    def __init__(self, engine: Engine, sender: HandoffSender, layout: KVCacheLayout) -> None:
        self._engine = engine
        self._sender = sender
        self._layout = layout
        self._open: dict[str, str] = {}  # hand-off -> the name it holds blocks under

    def __len__(self) -> int:
        """Exports that still read blocks."""
        return len(self._open)

    def begin(self, request: ExportRequest) -> None:
        """Send what the ticket wants, if it is all here; otherwise give the hand-off up."""
        ticket = request.ticket
        if ticket.handoff_id in self._open:
            return  # asked twice; its blocks may still be held although the sender has forgotten it
        try:
            self._sender.open(ticket, len(request.token_ids), request.deadline)
        except (KvferryError, ValueError) as error:
            extra = {"request_id": request.request_id}
            _log.info("nothing is sent to %s: %s", ticket.decode_worker_id, error, extra=extra)
            return
        hold = f"export/{ticket.handoff_id}"
        reason = self._refusal(ticket)
        held = None if reason else self._engine.prefix_holds.pin(hold, request.token_ids, request.cache_salt)
        if held is None:
            self._sender.abort(ticket.handoff_id, reason or "these blocks are not cached here any more")
            return
        self._open[ticket.handoff_id] = hold
        layers = range(self._layout.num_layers)
        self._sender.push(ticket.handoff_id, ticket.first_block, held.block_table[ticket.first_block :], layers)
        # In place of a first token: what these blocks are, so that nobody can take them for those of another text.
        self._sender.commit(ticket.handoff_id, CommitRecord(len(request.token_ids), held.content_name))

    def handle(self, event: SendEvent) -> None:
        """News of the sender."""
        match event:
            case Failed():
                _log.info("export %s was given up: %s", event.handoff_id, event.error.message)
            case Drained():
                hold = self._open.pop(event.handoff_id, None)
                if hold is not None:
                    self._engine.prefix_holds.release(hold)
            case _:
                pass  # `Drained` follows

    def _refusal(self, ticket: internal_pb2.Ticket) -> str:
        if len(self._open) >= MAX_EXPORTS:
            return f"{MAX_EXPORTS} exports are under way"
        theirs = ticket.layout
        if (theirs.block_size, theirs.dtype) != (self._layout.block_size, self._layout.dtype.value):
            return f"blocks of {theirs.block_size} tokens in {theirs.dtype} have other names than those here"
        return ""
