"""A prefill and a decode end in one process whose pools differ in layout, and what must arrive."""

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from kv_cache.layout import KVCacheLayout, KVDtype
from kv_transfer.convert import PageConverter, requantise, wire_layout
from kv_transfer.events import CommitRecord
from kv_transfer.receiver import HandoffReceiver
from kv_transfer.sender import HandoffSender
from kvferry_rpc.internal_pb2 import Ticket
from runtime.clock import SystemClock
from tests.support.kv_pair import WAIT_S, Ends, Events, make_identity, wiring


class ConvertPair(Ends):
    """Both ends. One prompt lies in the prefill pool, its blocks out of order."""

    def __init__(
        self,
        source: KVCacheLayout,
        target: KVCacheLayout,
        *,
        num_tokens: int,
        kind: str = "memory",
        wire_dtype: KVDtype | None = None,
        **sender: Any,
    ) -> None:
        self.num_tokens, self.num_blocks = num_tokens, target.blocks_for(num_tokens)
        self.prefill = make_identity("prefill", source.blocks_for(num_tokens) + 2, layout=source, shared=False)
        self.decode = make_identity("decode", self.num_blocks + 3, layout=target)
        values = np.random.default_rng(1).standard_normal(self.prefill.pool.size_bytes // 4).astype(np.float32)
        np.frombuffer(self.prefill.pool.buffer, np.uint8)[:] = values.view(np.uint8)
        self.local = [int(block) for block in np.random.default_rng(2).permutation(source.blocks_for(num_tokens))]
        one_sided = kind in ("shm", "memory-direct", "nixl")
        self.wire = wire_layout(target, None if one_sided else wire_dtype)
        self.received, self.sent = Events(), Events()
        how = wiring(kind)
        common: dict[str, Any] = {"transports": how["transports"], "clock": SystemClock(), **how.get("shared", {})}
        self.receiver = HandoffReceiver(self.decode, bind_host="127.0.0.1", on_event=self.received, **common)
        self.sender = HandoffSender(self.prefill, on_event=self.sent, wire_dtype=wire_dtype, **common, **sender)
        self.receiver.start()

    def reserve(self, *, first_block: int = 0, name: str = "r") -> Ticket:
        """A place for the prompt from this block on, its blocks from the end of the pool backwards."""
        ids = [self.decode.num_blocks - 1 - index for index in range(self.num_blocks - first_block)]
        return self.receiver.reserve(name, 1, first_block, ids, self.num_tokens)

    def open(self, ticket: Ticket) -> None:
        self.sender.open(ticket, self.num_tokens, time.monotonic() + WAIT_S)

    def push(self, ticket: Ticket, blocks: range, layers: range) -> None:
        """Prompt blocks of the prefill pool."""
        self.sender.push(ticket.handoff_id, blocks.start, self.local[blocks.start : blocks.stop], layers)

    def send(self, ticket: Ticket, cuts: Sequence[int] = ()) -> None:
        """Open, push chunk by chunk (cut at these blocks), each layer by layer, commit."""
        self.open(ticket)
        borders = [0, *cuts, len(self.local)]
        for first, end in pairwise(borders):
            for layer in range(self.prefill.layout.num_layers):
                self.push(ticket, range(first, end), range(layer, layer + 1))
        self.commit(ticket)

    def commit(self, ticket: Ticket) -> None:
        self.sender.commit(ticket.handoff_id, CommitRecord(self.num_tokens, b"first token"))

    def expected(self) -> bytes:
        """All blocks of the prompt as they must be in the decode pool."""
        target, layers = self.decode.layout, range(self.decode.layout.num_layers)
        on_wire = bytearray(self.wire.pool_bytes(self.num_blocks))
        PageConverter(self.prefill.layout, self.wire).fill(
            self.prefill.pool.buffer,
            dict(enumerate(self.local)),
            range(self.num_blocks),
            layers,
            self.num_tokens,
            memoryview(on_wire),
        )
        if self.wire == target:
            return bytes(on_wire)
        pages = bytearray(target.pool_bytes(self.num_blocks))
        requantise(self.wire, target, memoryview(on_wire), [memoryview(pages)])
        return bytes(pages)

    def arrived(self, ticket: Ticket) -> bytes:
        """The ticket's blocks as they are in the decode pool, in the order of the prompt."""
        size, pool = self.decode.layout.block_bytes, self.decode.pool.buffer
        return b"".join(bytes(pool[block * size : (block + 1) * size]) for block in ticket.block_ids)
