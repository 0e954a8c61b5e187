"""Who is attached to the router, and how healthy it takes them to be."""

from typing import Any

import pytest

from kvferry_rpc.common_pb2 import ErrorCode
from kvferry_rpc.internal_pb2 import KVEvents, LoadReport, Role
from router.policy import Health
from router.workers.worker_registry import ModelLimits, WorkerRegistry
from runtime.clock import ManualClock
from runtime.errors import KvferryError
from tests.support.fake_workers import layout, registration
from tests.support.registry_parts import Listener, attach, stored

# ---- registration ----


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"protocol_version": 99}, "protocol_version"),
        ({"worker_id": ""}, "worker_id"),
        ({"worker_id": "x" * 200}, "worker_id"),
        ({"worker_id": "a\nb"}, "worker_id"),
        ({"incarnation": b"short"}, "incarnation"),
        ({"role": Role.ROLE_UNSPECIFIED}, "role"),
        ({"address": ""}, "address"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"max_context_tokens": 0}, "max_context_tokens"),
        ({"layout": layout(dtype="fp99")}, "layout"),
        ({"layout": layout(num_layers=0)}, "layout"),
    ],
)
def test_a_registration_that_makes_no_sense_is_refused_by_its_field(changes: dict[str, Any], field: str) -> None:
    registry = WorkerRegistry(ManualClock())
    register = registration(**{"worker_id": "d0", "role": Role.DECODE, **changes})
    with pytest.raises(KvferryError) as caught:
        registry.attach(register, lambda: None)
    assert caught.value.code == ErrorCode.INVALID_REQUEST
    assert caught.value.field == field
    assert registry.views() == []


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"layout": layout(model_revision="f" * 16)}, ("f" * 16, "0" * 16)),
        ({"layout": layout(num_layers=3)}, ("3", "2")),
        ({"vocab_size": 5000}, ("5000", "1000")),
    ],
)
def test_a_worker_that_does_not_match_the_others_is_refused_and_both_values_are_named(
    changes: dict[str, Any], values: tuple[str, str]
) -> None:
    # H076, H075
    registry = WorkerRegistry(ManualClock())
    attach(registry, "d0")
    with pytest.raises(KvferryError) as caught:
        attach(registry, "p0", Role.PREFILL, **changes)
    assert all(value in caught.value.message for value in (*values, "d0", "p0"))
    assert [view.worker_id for view in registry.views()] == ["d0"]


def test_a_model_can_be_exchanged_once_all_its_workers_are_gone() -> None:
    registry = WorkerRegistry(ManualClock())
    first = attach(registry, "d0")
    registry.detach(first)
    assert registry.limits is None
    assert not registry.hashers
    attach(registry, "d0", layout=layout(model_revision="f" * 16), vocab_size=5000)
    assert registry.limits == ModelLimits(5000, 512)
    assert [hasher.model_revision for hasher in registry.hashers.values()] == ["f" * 16]


def test_workers_whose_blocks_can_be_converted_go_together_and_each_layout_has_its_names() -> None:
    registry = WorkerRegistry(ManualClock())
    attach(registry, "p0", Role.PREFILL)
    attach(registry, "p1", Role.PREFILL, layout=layout(dtype="bf16"))
    wide = attach(registry, "d0", layout=layout(block_size=32))
    assert sorted(hasher.block_size for hasher in registry.hashers.values()) == [16, 16, 32]
    assert {view.layout.block_size for view in registry.cluster_load().decode} == {32}
    registry.detach(wide)
    assert [hasher.block_size for hasher in registry.hashers.values()] == [16, 16]


def test_a_decode_worker_whose_heads_no_prefill_worker_has_whole_is_refused() -> None:
    registry = WorkerRegistry(ManualClock())
    heads = {"total_kv_heads": 4, "num_kv_heads": 2}
    attach(registry, "p0", Role.PREFILL, layout=layout(**heads, kv_head_start=0))
    attach(registry, "d0", layout=layout(**heads, kv_head_start=0))
    with pytest.raises(KvferryError, match="does not go with p0"):
        attach(registry, "d1", layout=layout(**heads, kv_head_start=1))


def test_the_context_is_that_of_the_smallest_worker() -> None:
    # H013: limits that differ between the halves are known at the door.
    registry = WorkerRegistry(ManualClock())
    attach(registry, "d0", max_context_tokens=2000)
    small = attach(registry, "p0", Role.PREFILL, max_context_tokens=1000)
    assert registry.limits == ModelLimits(1000, 1000)
    registry.detach(small)
    assert registry.limits == ModelLimits(1000, 2000)


def test_a_new_life_of_a_worker_takes_the_place_of_the_old_one() -> None:
    registry, listener, replaced = WorkerRegistry(ManualClock()), Listener(), []
    registry.subscribe(listener)
    old = registry.attach(registration("d0", Role.DECODE), lambda: replaced.append("old"))
    registry.apply_events(old, KVEvents(snapshot=True, events=stored(1, 2)))
    new = attach(registry, "d0")
    assert replaced == ["old"]
    assert listener.told == ["+d0", "-d0", "+d0"]
    assert registry.views()[0].index_blocks == 0
    registry.detach(old)  # The old stream ends late.
    assert registry.is_current(new)
    assert listener.told == ["+d0", "-d0", "+d0"]


# ---- health ----


def test_a_silent_worker_is_stalled_until_it_reports_again() -> None:
    clock = ManualClock()
    registry = WorkerRegistry(clock, silent_after_s=5)
    worker = attach(registry)
    assert registry.ready
    clock.advance(5.1)
    assert registry.views()[0].health is Health.STALLED
    assert not registry.ready
    registry.report(worker, LoadReport())
    assert registry.views()[0].health is Health.READY


def test_a_worker_whose_engine_stands_still_is_stalled_but_stays_attached() -> None:
    # H018, H094
    registry = WorkerRegistry(ManualClock())
    worker = attach(registry)
    registry.report(worker, LoadReport(engine_stalled_ms=10_000))
    assert registry.ready
    registry.report(worker, LoadReport(engine_stalled_ms=10_001))
    assert not registry.ready
    assert registry.cluster_load().decode[0].health is Health.STALLED


def test_a_suspect_is_avoided_until_its_next_report() -> None:
    # H003: the first broken connection is remembered.
    registry = WorkerRegistry(ManualClock())
    worker = attach(registry)
    registry.suspect("d0")
    assert registry.views()[0].health is Health.STALLED
    registry.report(worker, LoadReport())
    assert registry.views()[0].health is Health.READY
    registry.suspect("nobody")


def test_draining_is_for_good_and_never_ready() -> None:
    registry = WorkerRegistry(ManualClock())
    worker = attach(registry)
    registry.drain(worker)
    registry.report(worker, LoadReport())
    assert registry.views()[0].health is Health.DRAINING
    assert not registry.ready


def test_a_prefill_worker_alone_makes_nothing_ready() -> None:
    registry = WorkerRegistry(ManualClock())
    attach(registry, "p0", Role.PREFILL)
    assert not registry.ready
