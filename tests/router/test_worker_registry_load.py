"""What the router believes to run on each worker: reports, leases, and workers without room."""

import random
from typing import Any

import pytest

from kvferry_rpc.common_pb2 import ErrorCode
from kvferry_rpc.internal_pb2 import LoadReport
from router.workers.worker_registry import WorkerRegistry
from runtime.clock import ManualClock
from runtime.errors import KvferryError
from tests.support.registry_parts import Listener, attach


def test_the_load_is_the_larger_of_what_was_reported_and_what_was_sent() -> None:
    registry = WorkerRegistry(ManualClock())
    worker = attach(registry)
    registry.report(worker, LoadReport(sequences_running=2, sequences_waiting=1, tokens_waiting=50))
    with registry.lease("d0", 30):
        load = registry.cluster_load().decode[0]
        assert (load.requests, load.pending_tokens) == (3, 50)
        with registry.lease("d0", 40), registry.lease("d0", 0), registry.lease("d0", 0):
            load = registry.cluster_load().decode[0]
            assert (load.requests, load.pending_tokens) == (4, 70)


def test_a_lease_counts_from_its_start_to_its_end_however_it_ends() -> None:
    # H019
    registry = WorkerRegistry(ManualClock())
    attach(registry)

    def fail_half_way() -> None:
        with registry.lease("d0", 7) as lease:
            assert registry.views()[0].requests_in_flight == 1
            lease.computed()
            assert registry.cluster_load().decode[0].pending_tokens == 0
            lease.computed()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert registry.views()[0].requests_in_flight == 0
    assert registry.cluster_load().decode[0].pending_tokens == 0


def test_leases_of_an_earlier_life_do_not_touch_the_counters_of_the_next() -> None:
    registry = WorkerRegistry(ManualClock())
    attach(registry)
    with registry.lease("d0", 7):
        attach(registry)
        assert registry.views()[0].requests_in_flight == 0
        with registry.lease("d0", 3):
            pass
    assert registry.views()[0].requests_in_flight == 0
    assert registry.cluster_load().decode[0].pending_tokens == 0


def test_a_lease_on_a_worker_that_is_gone_is_refused() -> None:
    registry = WorkerRegistry(ManualClock())
    with pytest.raises(KvferryError) as caught, registry.lease("d0", 1):
        pass
    assert caught.value.code == ErrorCode.UNAVAILABLE


def test_a_refused_lease_marks_the_worker_full_until_a_report_or_a_request_leaving_it() -> None:
    registry, listener = WorkerRegistry(ManualClock()), Listener()
    worker = attach(registry)
    registry.subscribe(listener)

    def refuse() -> None:
        with registry.lease("d0", 1) as lease:
            lease.refused()

    refuse()
    assert registry.cluster_load().decode[0].full
    assert listener.rooms == 0
    registry.report(worker, LoadReport())
    assert not registry.cluster_load().decode[0].full
    with registry.lease("d0", 1):
        refuse()
        assert registry.cluster_load().decode[0].full
    assert not registry.cluster_load().decode[0].full
    assert listener.rooms == 2


@pytest.mark.parametrize("seed", range(3))
def test_counters_equal_what_is_in_flight_at_any_moment_of_a_random_run(seed: int) -> None:
    rng = random.Random(seed)
    registry = WorkerRegistry(ManualClock())
    names = ["d0", "d1"]
    for name in names:
        attach(registry, name)
    open_leases: list[tuple[str, int, Any]] = []
    for _ in range(500):
        if rng.random() < 0.5:
            name, tokens = rng.choice(names), rng.randrange(100)
            lease = registry.lease(name, tokens)
            lease.__enter__()
            open_leases.append((name, tokens, lease))
        elif open_leases:
            _, _, lease = open_leases.pop(rng.randrange(len(open_leases)))
            lease.__exit__(None, None, None)
        for view, load in zip(registry.views(), registry.cluster_load().decode, strict=True):
            mine = [tokens for name, tokens, _ in open_leases if name == view.worker_id]
            assert view.requests_in_flight == len(mine)
            assert load.pending_tokens == sum(mine)
    while open_leases:
        open_leases.pop()[2].__exit__(None, None, None)
    assert {view.requests_in_flight for view in registry.views()} == {0}
