"""The router's index of a worker's blocks, kept by the events that the worker sends."""

import random

import pytest

from kvferry_rpc.internal_pb2 import KVEvent
from router.workers.prefix_index import Applied, PrefixIndex
from tests.support.registry_parts import block, removed, stored


def test_events_in_order_give_the_workers_content() -> None:
    index = PrefixIndex(10)
    assert not index.in_sync
    assert index.apply(0, True, stored(1, 2)) is Applied.OK
    assert index.apply(2, False, [*stored(3), *removed(1)]) is Applied.OK
    assert index.blocks == {block(2), block(3)}
    assert index.in_sync


def test_an_incarnations_first_events_need_no_snapshot_but_later_ones_do() -> None:
    assert PrefixIndex(10).apply(1, False, stored(1)) is Applied.OK
    late = PrefixIndex(10)
    assert late.apply(7, False, stored(1)) is Applied.NEEDS_RESYNC
    assert late.blocks == set()


def test_a_gap_empties_the_index_until_a_snapshot_comes_and_is_reported_once() -> None:
    index = PrefixIndex(10)
    index.apply(0, True, stored(1, 2))
    assert index.apply(3, False, stored(4)) is Applied.NEEDS_RESYNC
    assert index.blocks == set()
    assert not index.in_sync
    assert index.apply(4, False, stored(5)) is Applied.IGNORED
    assert index.apply(5, True, stored(1, 5)) is Applied.OK
    assert index.apply(7, False, stored(6)) is Applied.OK
    assert index.blocks == {block(1), block(5), block(6)}


def test_a_snapshot_longer_than_a_message_goes_on_in_ordinary_ones() -> None:
    index = PrefixIndex(10)
    index.apply(0, True, stored(1, 2))
    assert index.apply(2, False, stored(3, 4)) is Applied.OK
    assert len(index.blocks) == 4


def test_the_index_never_grows_beyond_the_pool() -> None:
    index = PrefixIndex(3)
    assert index.apply(0, True, stored(1, 2, 3)) is Applied.OK
    assert index.apply(3, False, stored(4)) is Applied.IGNORED
    assert index.blocks == set()
    assert index.apply(4, True, stored(1)) is Applied.OK


def test_a_name_that_is_no_block_hash_is_not_kept() -> None:
    index = PrefixIndex(3)
    index.apply(0, True, [KVEvent(block_hash=b"short"), KVEvent(block_hash=b"x" * 1000), *stored(1)])
    assert index.blocks == {block(1)}


@pytest.mark.parametrize("seed", range(8))
def test_an_index_with_lost_messages_equals_the_worker_once_it_is_in_sync(seed: int) -> None:
    # H021: drop 5 % of the messages, and the first ones always.
    rng = random.Random(seed)
    index, truth, sequence = PrefixIndex(200), set[bytes](), 0
    resync_wanted = False
    for message in range(400):
        if resync_wanted:
            events = [KVEvent(block_hash=name) for name in sorted(truth)]
            index.apply(sequence, True, events)
            sequence += len(events)
            resync_wanted = False
        events = []
        for _ in range(rng.randrange(4)):
            name = block(rng.randrange(60))
            events.append(KVEvent(block_hash=name, removed=name in truth))
            truth ^= {name}
        lost = message < 5 or rng.random() < 0.05
        if not lost:
            resync_wanted = index.apply(sequence, False, events) is Applied.NEEDS_RESYNC
            assert index.blocks == (truth if index.in_sync else set())
        sequence += len(events)
