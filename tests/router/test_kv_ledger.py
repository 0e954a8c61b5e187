"""What a decode worker's pool is by now: its last report, and what this router has sent and seen end since."""

import random

import pytest

from kvferry_rpc.internal_pb2 import LoadReport
from router.admission.forecast import PoolState
from router.admission.kv_ledger import Expectation, KVLedger
from router.workers.attached_worker import AttachedWorker
from router.workers.worker_registry import WorkerRegistry
from runtime.clock import ManualClock
from tests.support.fake_workers import BLOCK_SIZE
from tests.support.registry_parts import attach


class Books:
    """A registry with one decode worker of 64 blocks and 16 sequences, and the ledger."""

    def __init__(self) -> None:
        self.clock = ManualClock(10.0)
        self.registry = WorkerRegistry(self.clock)
        self.worker: AttachedWorker = attach(self.registry)
        self.ledger = KVLedger(self.registry.reported_at)

    def report(self, **load: int) -> None:
        self.clock.advance(0.25)
        self.registry.report(self.worker, LoadReport(**load))

    def pool(self) -> PoolState:
        (report,) = self.registry.decode_pools()
        return self.ledger.pool(report)

    def place(self, prompt_tokens: int = 40, expected: int = 8, most: int = 100, shared: int = 0) -> Expectation:
        one = Expectation(prompt_tokens, expected, most, lambda worker_id: 0)
        self.ledger.place(one, "d0", BLOCK_SIZE, shared)
        return one


def test_what_was_sent_since_the_report_is_taken_off_until_the_report_has_it() -> None:
    books = Books()
    books.report(blocks_free=60, blocks_cached=4)
    books.place(shared=1)
    pool = books.pool()
    assert (pool.available, pool.slots_free, pool.growing) == (64 - 2, 15, 1)
    books.report(blocks_free=57, blocks_cached=4, sequences_receiving=1)
    pool = books.pool()
    assert (pool.available, pool.slots_free, pool.growing) == (61, 15, 1)
    assert [seq.remaining for seq in pool.sequences] == [8]


def test_what_ended_since_the_report_is_given_back_until_the_report_lacks_it() -> None:
    books = Books()
    one, other = books.place(), books.place()
    books.report(blocks_free=58, sequences_running=2)
    books.ledger.generated(one, 8)
    books.ledger.leave(one)
    books.ledger.leave(one)
    pool = books.pool()
    assert (pool.available, pool.slots_free) == (58 + 3, 15)
    books.report(blocks_free=61, sequences_running=1)
    assert books.pool().available == 61
    books.ledger.leave(other)
    assert len(books.ledger) == 0


def test_what_ended_before_any_report_had_it_changes_nothing() -> None:
    books = Books()
    books.ledger.leave(books.place())
    pool = books.pool()
    assert (pool.available, pool.slots_free, pool.most_growth) == (64, 16, 0)


def test_a_request_that_got_no_room_gives_nothing_back() -> None:
    books = Books()
    one = books.place()
    books.report(blocks_free=10, sequences_running=5)
    books.ledger.leave(one, was_taken=False)
    assert (books.pool().available, books.pool().slots_free) == (10, 11)


def test_one_that_outgrows_what_was_expected_is_expected_to_go_on_within_its_limit() -> None:
    books = Books()
    one = books.place(expected=8, most=40)
    assert books.pool().most_growth == 0
    books.ledger.generated(one, 8)
    assert one.remaining == 0
    books.ledger.generated(one, 24)
    assert one.remaining == 8
    books.ledger.generated(one, 8)
    assert (one.remaining, one.demand.most) == (0, 0)
    one = books.place(expected=100)
    assert books.pool().most_growth == -(-140 // BLOCK_SIZE) - 3


def test_prompts_that_wait_on_the_worker_will_take_blocks() -> None:
    books = Books()
    books.report(blocks_free=30, sequences_waiting=2, tokens_waiting=5 * BLOCK_SIZE)
    assert books.pool().available == 25


def test_requests_of_other_routers_count_as_the_report_says() -> None:
    books = Books()
    books.report(blocks_free=5, sequences_running=14)
    books.place()
    pool = books.pool()
    assert (pool.slots_free, pool.growing, pool.available) == (1, 15, 2)


def test_a_worker_that_is_gone_leaves_no_account_behind() -> None:
    books = Books()
    one, other = books.place(), books.place()
    books.registry.detach(books.worker)
    books.ledger.leave(one)
    books.ledger.leave(other)
    books.ledger.worker_left("d0")
    assert len(books.ledger) == 0
    # The next life of it starts anew.
    books.worker = attach(books.registry)
    assert books.pool().available == 64


@pytest.mark.parametrize("seed", range(5))
def test_at_rest_every_count_is_zero_whatever_happened(seed: int) -> None:
    # H019
    rng, books, placed = random.Random(seed), Books(), list[Expectation]()
    for _ in range(300):
        action = rng.randrange(5)
        if action == 0:
            placed.append(books.place(rng.randrange(1, 200), rng.randrange(1, 50), shared=rng.randrange(3)))
        elif action == 1 and placed:
            books.ledger.generated(rng.choice(placed), rng.randrange(1, 30))
        elif action == 2 and placed:
            books.ledger.place(rng.choice(placed), "d0", BLOCK_SIZE, 0)
        elif action == 3 and placed:
            books.ledger.leave(placed.pop(rng.randrange(len(placed))), was_taken=rng.random() < 0.5)
        else:
            books.report(blocks_free=40, sequences_running=3)
        assert len(books.ledger) == len(placed)
    for one in placed:
        books.ledger.leave(one)
    books.report(blocks_free=64)
    pool = books.pool()
    assert (pool.available, pool.slots_free, pool.growing, pool.most_growth) == (64, 16, 0, 0)
