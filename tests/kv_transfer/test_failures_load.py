"""What goes wrong only after a long time or with many at once: memory, threads, posted operations, greetings."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv_cache.layout import KVDtype
from kv_transfer.events import CommitRecord, Committed, Failed
from kv_transfer.payload import PagePusher
from kv_transfer.sender import HandoffSender
from runtime.clock import SystemClock
from tests.support.kv_convert_pair import ConvertPair
from tests.support.kv_pair import KINDS, LAYOUT, LIBRARIES, POISON, WAIT_S, Events, Pair, make_identity, wiring
from tests.support.kv_soak import WINDOW
from tests.support.kv_stranger import dial, heard_to_the_end

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", ["tcp", "shm", *LIBRARIES])
def test_a_process_needs_no_more_memory_however_many_hand_offs_it_has_seen(kind: str) -> None:
    """H069: less than 1 MB for 1000. A leak shows in every window; one alone may have met a larger heap of malloc's."""
    command = [sys.executable, "-m", "tests.support.kv_soak", kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    growth = json.loads(done.stdout)
    assert min(growth) < WINDOW * 1000, growth


class PostsCounted:
    """Counts writes, and how many are under way at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes = self.most_at_once = self._now = 0
        real = PagePusher.write
        lock = threading.Lock()

        def write(*arguments: Any) -> None:
            with lock:
                self.writes += 1
                self._now += 1
                self.most_at_once = max(self.most_at_once, self._now)
            try:
                real(*arguments)
            finally:
                with lock:
                    self._now -= 1

        monkeypatch.setattr(PagePusher, "write", write)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_and_twenty_eight_at_once_of_the_smallest_pages_are_few_writes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H089: half of the heads in half of the block size: 48 pages each, but no write for each of them."""
    posts = PostsCounted(monkeypatch)
    source, target = replace(LAYOUT, block_size=16), replace(LAYOUT, num_kv_heads=1, total_kv_heads=2)
    with ConvertPair(source, target, num_tokens=128 * 128, kind=kind) as pair:
        tickets = [
            pair.receiver.reserve(f"r{index}", 1, 0, range(16 * index, 16 * index + 16), 128) for index in range(128)
        ]
        for ticket in tickets:
            pair.sender.open(ticket, 128, time.monotonic() + WAIT_S)
        for layer in range(LAYOUT.num_layers):
            for ticket in tickets:
                pair.sender.push(ticket.handoff_id, 0, pair.local[:8], range(layer, layer + 1))
        for ticket in tickets:
            pair.sender.commit(ticket.handoff_id, CommitRecord(128, b""))
        for ticket in tickets:
            assert isinstance(pair.outcome(ticket)[0], Committed)
    assert posts.writes <= 128 * LAYOUT.num_layers, "layers that wait are joined, and pages always"
    assert posts.most_at_once == 1, "a link has one write under way"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(16, 8), (8, 16)], ids=["smaller", "larger"])
def test_every_prefix_that_decode_has_gets_exactly_its_tail_between_unequal_blocks(
    kind: str, sizes: tuple[int, int]
) -> None:
    """H077: in blocks of either size, also with another dtype."""
    source, target = replace(LAYOUT, block_size=sizes[0]), replace(LAYOUT, block_size=sizes[1], dtype=KVDtype.INT8)
    with ConvertPair(source, target, num_tokens=10 * sizes[1] - 1, kind=kind) as pair:
        expected = pair.expected()
        for first_block in range(11):
            np.frombuffer(pair.decode.pool.buffer, np.uint8)[:] = POISON
            ticket = pair.reserve(first_block=first_block)
            pair.send(ticket)
            received, sent = pair.outcome(ticket)
            assert isinstance(received, Committed), received
            assert received.stats.num_blocks == sent.stats.num_blocks == 10 - first_block
            assert pair.arrived(ticket) == expected[first_block * target.block_bytes :]
            pair.receiver.release(ticket.handoff_id)
            untouched = pair.decode.pool.buffer[: (pair.decode.num_blocks - 10 + first_block) * target.block_bytes]
            assert bytes(untouched) == bytes([POISON]) * untouched.nbytes


SENDERS = {"memory": 64, "memory-direct": 64, "tcp": 64, "shm": 64}


@pytest.mark.parametrize("kind", KINDS)
def test_senders_that_come_all_at_once_are_all_served_while_strangers_talk_nonsense(kind: str) -> None:
    """H090: links, and with them registrations of memory, come and go in parallel."""
    count = SENDERS.get(kind, 12)
    with Pair(num_blocks=count, **wiring(kind)) as pair:
        how = {"transports": wiring(kind)["transports"], "network": pair.sender._network, "clock": SystemClock()}
        failures: list[object] = []

        def one(number: int) -> None:
            identity = make_identity(f"prefill-{number}", 4, shared=False)
            events = Events()
            for _ in range(2):  # A link is made, used and ended.
                sender = HandoffSender(identity, on_event=events, **how)
                ticket = pair.reserve([number])
                sender.open(ticket, pair.tokens(1), time.monotonic() + WAIT_S)
                sender.push(ticket.handoff_id, 0, [1], range(LAYOUT.num_layers))
                sender.commit(ticket.handoff_id, CommitRecord(pair.tokens(1), b""))
                received = pair.received.wait(ticket.handoff_id, Committed, Failed)
                if not isinstance(received, Committed):
                    failures.append(received)
                pair.receiver.release(ticket.handoff_id)
                sender.close(10.0)
            identity.pool.close()

        def stranger() -> None:
            for data in (os.urandom(10), b"\0\0\0\x0a\0\0\0\0" + os.urandom(10), b"\xff" * 10_000_000):
                with dial(pair) as sock:
                    try:
                        sock.sendall(data)
                        sock.shutdown(1)
                    except OSError:  # Shown out before the end of it.
                        continue
                    heard_to_the_end(sock)

        threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
        if not kind.startswith("memory"):
            threads += [threading.Thread(target=stranger) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert failures == []
        pair.wait_until_links(0)
