import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kv_event_log import KVEventLog


def _hash(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_a_first_read_is_a_snapshot_in_order_of_storing() -> None:
    log = KVEventLog()
    log.publish([(_hash(2), False), (_hash(1), False), (_hash(2), True), (_hash(3), False)])
    read = log.read(None, 1)
    assert read.snapshot
    assert read.changes == ((_hash(1), False), (_hash(3), False))
    assert log.read(read.cursor, 10).changes == ()


def test_two_readers_each_get_every_change_once_in_order() -> None:
    log = KVEventLog()
    slow = fast = log.read(None, 10).cursor
    changes = tuple((_hash(number), False) for number in range(5))
    log.publish(changes[:2])
    first = log.read(fast, 10)
    log.publish(changes[2:])
    assert first.changes + log.read(first.cursor, 10).changes == changes
    assert log.read(slow, 10).changes == changes


def test_a_limit_cuts_a_read_and_the_next_one_goes_on() -> None:
    log = KVEventLog()
    cursor = log.read(None, 10).cursor
    log.publish([(_hash(number), False) for number in range(5)])
    sizes = []
    while (read := log.read(cursor, 2)).changes:
        assert not read.snapshot
        sizes.append(len(read.changes))
        cursor = read.cursor
    assert sizes == [2, 2, 1]


def test_a_reader_that_lags_too_far_gets_a_snapshot() -> None:
    log = KVEventLog(capacity=3)
    cursor = log.read(None, 10).cursor
    log.publish([(_hash(number), False) for number in range(3)])
    assert not log.read(cursor, 10).snapshot
    log.publish([(_hash(0), True)])
    read = log.read(cursor, 10)
    assert read.snapshot
    assert read.changes == ((_hash(1), False), (_hash(2), False))


def test_replaced_content_reaches_every_reader_even_an_up_to_date_one() -> None:
    log = KVEventLog()
    log.publish([(_hash(1), False)])
    cursor = log.read(None, 10).cursor
    log.replace([_hash(7)])
    read = log.read(cursor, 10)
    assert read.snapshot
    assert read.changes == ((_hash(7), False),)


def test_changes_that_say_nothing_new_are_dropped() -> None:
    log = KVEventLog()
    cursor = log.read(None, 10).cursor
    log.publish([(_hash(1), True), (_hash(1), False), (_hash(1), False)])
    assert log.read(cursor, 10).changes == ((_hash(1), False),)


def test_without_readers_the_log_stays_bounded() -> None:
    log = KVEventLog(capacity=100)
    for number in range(20_000):
        log.publish([(_hash(number % 64), number % 128 >= 64)])
    assert len(log._recent) == 100
    assert len(log._content) <= 64


def test_a_capacity_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity"):
        KVEventLog(0)


@settings(deadline=None, max_examples=150)
@given(
    capacity=st.integers(1, 6),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("publish"), st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=6)),
            st.tuples(st.just("replace"), st.lists(st.integers(0, 5), max_size=4)),
            st.tuples(st.just("read"), st.tuples(st.integers(0, 1), st.integers(1, 4))),
        ),
        max_size=30,
    ),
)
def test_every_reader_ends_with_the_true_content(capacity: int, steps: list[tuple[str, object]]) -> None:
    log = KVEventLog(capacity)
    truth: set[bytes] = set()
    seen: list[set[bytes]] = [set(), set()]
    cursors: list[int | None] = [None, None]

    def read(reader: int, limit: int) -> bool:
        got = log.read(cursors[reader], limit)
        cursors[reader] = got.cursor
        if got.snapshot:
            seen[reader].clear()
        for block_hash, removed in got.changes:
            (seen[reader].discard if removed else seen[reader].add)(block_hash)
        return bool(got.changes)

    for kind, argument in steps:
        if kind == "publish":
            changes = [(_hash(number), removed) for number, removed in argument]  # type: ignore[attr-defined]
            log.publish(changes)
            for block_hash, removed in changes:
                (truth.discard if removed else truth.add)(block_hash)
        elif kind == "replace":
            truth = {_hash(number) for number in argument}  # type: ignore[attr-defined]
            log.replace(truth)
        else:
            read(*argument)  # type: ignore[misc]
    for reader in range(2):
        while read(reader, 2):
            pass
        assert seen[reader] == truth


def test_writer_and_reader_threads_agree() -> None:
    log = KVEventLog(capacity=16)
    done = threading.Event()

    def write() -> None:
        for number in range(3000):
            log.publish([(_hash(number % 50), (number // 50) % 2 == 1)])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen: set[bytes] = set()
    cursor: int | None = None
    finished = False
    while True:
        read = log.read(cursor, 8)
        cursor = read.cursor
        if read.snapshot:
            seen.clear()
        for block_hash, removed in read.changes:
            (seen.discard if removed else seen.add)(block_hash)
        if finished and not read.changes and not read.snapshot:
            break
        finished = done.is_set()
    writer.join()
    assert seen == set(log._content)
