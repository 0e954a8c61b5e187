"""When a prefill worker is told to pull what a decode worker holds, and from whom."""

from dataclasses import replace

import pytest

from kv_cache.layout import KVCacheLayout, KVDtype
from router.policy import (
    MIN_PULL_BLOCKS,
    ClusterLoad,
    Health,
    Plan,
    RequestShape,
    Source,
    WorkerLoad,
    choose,
)

BLOCK = 16
LAYOUT = KVCacheLayout("m", "r", 2, 2, 8, BLOCK, KVDtype.FP32)


def hashes(count: int) -> tuple[bytes, ...]:
    return tuple(f"block{index}".encode() for index in range(count))


def worker(name: str, cached_blocks: int = 0, **changes: object) -> WorkerLoad:
    held = frozenset(hashes(cached_blocks))
    load = WorkerLoad(name, Health.READY, held, requests=0, pending_tokens=0, blocks_available=1000, layout=LAYOUT)
    return replace(load, **changes)  # type: ignore[arg-type]


def plan_for(
    prefill: tuple[WorkerLoad, ...], decode: tuple[WorkerLoad, ...], num_tokens: int = 200, **changes: object
) -> Plan:
    names = {load.layout: hashes(num_tokens // load.layout.block_size) for load in (*prefill, *decode)}
    request = replace(RequestShape(num_tokens, names), **changes)  # type: ignore[arg-type]
    plan = choose(ClusterLoad(prefill, decode), request, 0)
    assert isinstance(plan, Plan)
    return plan


@pytest.mark.parametrize(
    ("on_prefill", "on_decode", "pulled_to"),
    [
        (0, 0, None),
        (4, 4, None),
        (5, 4, None),
        (4, 4 + MIN_PULL_BLOCKS - 1, None),
        (4, 4 + MIN_PULL_BLOCKS, 4 + MIN_PULL_BLOCKS),
        (0, MIN_PULL_BLOCKS, MIN_PULL_BLOCKS),
        (4, 12, 12),
        (4, 100, 12),  # the last token of 200 is computed, whatever is cached
    ],
)
def test_what_decode_holds_beyond_prefill_is_pulled_when_it_is_worth_a_pull(
    on_prefill: int, on_decode: int, pulled_to: int | None
) -> None:
    plan = plan_for((worker("p0", on_prefill),), (worker("d0", on_decode),))
    assert plan.source == (None if pulled_to is None else Source("d0", pulled_to * BLOCK))
    assert ("pulls" in plan.reason) is (pulled_to is not None)


def test_the_last_block_of_a_prompt_of_whole_blocks_is_never_pulled() -> None:
    plan = plan_for((worker("p0"),), (worker("d0", 12),), num_tokens=12 * BLOCK)
    assert plan.source == Source("d0", 11 * BLOCK)


def test_of_equal_holders_the_decode_worker_of_the_request_is_asked() -> None:
    decode = (worker("d0", 6, requests=50), worker("d1", 6), worker("d2", 6, requests=50))
    plan = plan_for((worker("p0"),), decode)
    assert plan.decode_worker == "d1"
    assert plan.source == Source("d1", 6 * BLOCK)


def test_another_decode_worker_that_holds_more_is_asked_instead() -> None:
    plan = plan_for((worker("p0"),), (worker("d0", 2), worker("d1", 8, requests=50)))
    assert plan.decode_worker == "d0"
    assert plan.source == Source("d1", 8 * BLOCK)


@pytest.mark.parametrize("health", [Health.STALLED, Health.DRAINING])
def test_only_a_ready_worker_is_asked(health: Health) -> None:
    plan = plan_for((worker("p0"),), (worker("d0"), worker("d1", 8, health=health)))
    assert plan.source is None


def test_a_worker_that_failed_this_request_is_not_asked() -> None:
    plan = plan_for((worker("p0"),), (worker("d0"), worker("d1", 8)), avoid=frozenset({"d1"}))
    assert plan.source is None


@pytest.mark.parametrize("change", [{"block_size": 32}, {"dtype": KVDtype.INT8}, {"num_kv_heads": 1}])
def test_only_pools_of_one_layout_exchange_blocks(change: dict[str, object]) -> None:
    other = replace(LAYOUT, **change)  # type: ignore[arg-type]
    plan = plan_for((worker("p0"),), (worker("d0", 8, layout=other), worker("d1", 3, requests=50)))
    assert plan.source == Source("d1", 3 * BLOCK)


def test_nothing_is_pulled_when_it_is_switched_off_or_prefill_is_local() -> None:
    assert plan_for((worker("p0"),), (worker("d0", 8),), allow_pull=False).source is None
    local = plan_for((), (worker("d0", 2), worker("d1", 8)))
    assert local.prefill_worker is None
    assert local.source is None


def test_a_prefill_worker_that_could_pull_is_nearly_as_good_as_one_that_has_the_prefix() -> None:
    has, lacks = worker("p0", 10), worker("p1")
    decode = (worker("d0", 10),)
    assert plan_for((has, lacks), decode).prefill_worker == "p0"
    # 160 tokens moved cost as much as 40 computed: less than a queue of 60 in front of the worker that has them.
    busy = replace(has, pending_tokens=60)
    plan = plan_for((busy, lacks), decode)
    assert plan.prefill_worker == "p1"
    assert plan.source == Source("d0", 10 * BLOCK)
    assert plan_for((busy, lacks), decode, allow_pull=False).prefill_worker == "p0"
