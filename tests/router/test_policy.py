"""The placement policy: pure decisions from frozen snapshots, some of them from hypothesis."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_cache.layout import KVCacheLayout, KVDtype
from router.policy import (
    ClusterLoad,
    Health,
    NoPlan,
    Plan,
    RequestShape,
    WorkerLoad,
    cached_prefix_tokens,
    choose,
    choose_successor,
)

BLOCK = 16
LAYOUT = KVCacheLayout("m", "r", 2, 2, 8, BLOCK, KVDtype.FP32)


def worker(name: str, **changes: object) -> WorkerLoad:
    idle = WorkerLoad(
        name, Health.READY, frozenset(), requests=0, pending_tokens=0, blocks_available=1000, layout=LAYOUT
    )
    return replace(idle, **changes)  # type: ignore[arg-type]


def hashes(count: int, family: str = "a") -> tuple[bytes, ...]:
    return tuple(f"{family}{index}".encode() for index in range(count))


def shape(num_tokens: int = 100, **changes: object) -> RequestShape:
    plain = RequestShape(num_tokens, {LAYOUT: hashes(num_tokens // BLOCK)})
    return replace(plain, **changes)  # type: ignore[arg-type]


def place(cluster: ClusterLoad, request: RequestShape, turn: int = 0) -> Plan:
    plan = choose(cluster, request, turn)
    assert isinstance(plan, Plan), plan
    return plan


def test_both_halves_are_placed_and_the_reason_names_them() -> None:
    plan = place(ClusterLoad((worker("p0"),), (worker("d0"),)), shape())
    assert (plan.decode_worker, plan.prefill_worker) == ("d0", "p0")
    assert "remote prefill" in plan.reason
    assert "p0" in plan.reason
    assert "d0" in plan.reason


def test_without_a_prefill_worker_the_decode_worker_computes_the_prompt_and_the_reason_says_so() -> None:
    plan = place(ClusterLoad((), (worker("d0"),)), shape())
    assert plan.prefill_worker is None
    assert "no prefill worker is attached" in plan.reason


@pytest.mark.parametrize("health", [Health.STALLED, Health.DRAINING])
def test_a_prefill_worker_that_is_not_ready_is_left_out(health: Health) -> None:
    plan = place(ClusterLoad((worker("p0", health=health),), (worker("d0"),)), shape())
    assert plan.prefill_worker is None
    assert "no prefill worker is ready" in plan.reason


def test_without_a_decode_worker_nothing_can_be_placed() -> None:
    assert choose(ClusterLoad((worker("p0"),), ()), shape(), 0) == NoPlan(
        "decode", False, "no decode worker is attached"
    )


def test_a_draining_decode_worker_gets_nothing_even_when_it_is_alone() -> None:
    plan = choose(ClusterLoad((), (worker("d0", health=Health.DRAINING),)), shape(), 0)
    assert isinstance(plan, NoPlan)
    assert not plan.may_wait
    assert "draining" in plan.reason


def test_a_stalled_decode_worker_is_the_last_resort() -> None:
    # H018: the last one standing is used, not declared dead.
    stalled = worker("d0", health=Health.STALLED)
    assert place(ClusterLoad((), (stalled,)), shape()).decode_worker == "d0"
    busy = worker("d1", requests=50, pending_tokens=100_000)
    assert place(ClusterLoad((), (stalled, busy)), shape()).decode_worker == "d1"


def test_a_failing_decode_worker_comes_behind_those_that_work_and_before_those_that_are_silent() -> None:
    failing, stalled = worker("d0", health=Health.FAILING), worker("d1", health=Health.STALLED)
    busy = worker("d2", requests=50, pending_tokens=100_000)
    assert place(ClusterLoad((), (failing, stalled, busy)), shape()).decode_worker == "d2"
    assert place(ClusterLoad((), (failing, stalled)), shape()).decode_worker == "d0"
    assert place(ClusterLoad((worker("p0", health=Health.FAILING),), (busy,)), shape()).prefill_worker is None


def test_an_answer_moves_to_the_least_busy_worker_with_the_same_blocks_and_room() -> None:
    leaving = worker("d0", health=Health.DRAINING)
    others = (
        worker("d1", requests=9),
        worker("d2", requests=3),
        worker("d3", layout=replace(leaving.layout, block_size=32)),
        worker("d4", full=True),
        worker("d5", blocks_available=1),
        worker("d6", health=Health.STALLED),
        worker("d7", health=Health.FAILING),
        worker("d8"),
    )
    plan = choose_successor(ClusterLoad((), (leaving, *others)), "d0", shape(avoid=frozenset({"d8"})), 0)
    assert plan is not None
    assert (plan.decode_worker, plan.prefill_worker, plan.source) == ("d2", "d0", None)
    assert plan.reason.startswith("moved: d0 drains; d2 has 0 of")
    assert choose_successor(ClusterLoad((), (leaving, *others[2:7])), "d0", shape(), 0) is None
    assert choose_successor(ClusterLoad((), others[:2]), "d0", shape(), 0) is None, "it is gone already"


def test_a_worker_that_failed_the_request_is_avoided_while_there_is_another() -> None:
    both = (worker("d0"), worker("d1", requests=9))
    assert place(ClusterLoad((), both), shape(avoid=frozenset({"d0"}))).decode_worker == "d1"
    assert place(ClusterLoad((), both[:1]), shape(avoid=frozenset({"d0"}))).decode_worker == "d0"


def test_the_only_prefill_worker_having_failed_the_prompt_is_computed_locally() -> None:
    plan = place(ClusterLoad((worker("p0"),), (worker("d0"),)), shape(avoid=frozenset({"p0"})))
    assert plan.prefill_worker is None
    assert "failed this request" in plan.reason


def test_strict_hand_off_never_falls_back_to_local_prefill() -> None:
    strict = shape(allow_local=False, avoid=frozenset({"p0"}))
    assert place(ClusterLoad((worker("p0"),), (worker("d0"),)), strict).prefill_worker == "p0"
    stalled = worker("p0", health=Health.STALLED)
    assert place(ClusterLoad((stalled,), (worker("d0"),)), strict).prefill_worker == "p0"
    none = choose(ClusterLoad((), (worker("d0"),)), strict, 0)
    assert none == NoPlan("prefill", False, "no prefill worker is attached")


def test_full_workers_are_skipped_and_when_all_are_full_it_is_worth_waiting() -> None:
    full, free = worker("d0", full=True), worker("d1", requests=30)
    assert place(ClusterLoad((), (full, free)), shape()).decode_worker == "d1"
    plan = choose(ClusterLoad((), (full,)), shape(), 0)
    assert isinstance(plan, NoPlan)
    assert plan.may_wait
    plan = choose(ClusterLoad((worker("p0", full=True),), (free,)), shape(), 0)
    assert isinstance(plan, NoPlan)
    assert (plan.role, plan.may_wait) == ("prefill", True)


def test_the_longest_cached_prefix_wins_between_equally_loaded_workers() -> None:
    warm = worker("p1", cached_blocks=frozenset(hashes(5)))
    cool = worker("p0", cached_blocks=frozenset(hashes(2)))
    for turn in range(4):
        assert place(ClusterLoad((cool, warm), (worker("d0"),)), shape(), turn).prefill_worker == "p1"


def test_a_prefix_is_left_behind_when_the_queue_before_it_costs_more_than_computing_it() -> None:
    # H004: a popular prefix draws requests only until the queue there is longer than the prefix.
    hot = worker("p0", cached_blocks=frozenset(hashes(6)), pending_tokens=97)
    assert place(ClusterLoad((hot, worker("p1")), (worker("d0"),)), shape(100)).prefill_worker == "p1"
    assert (
        place(ClusterLoad((replace(hot, pending_tokens=90), worker("p1")), (worker("d0"),)), shape(100)).prefill_worker
        == "p0"
    )


def test_a_middle_block_without_its_predecessors_is_no_prefix() -> None:
    islands = worker("p0", cached_blocks=frozenset(hashes(6)[1:]))
    assert cached_prefix_tokens(islands, shape(100)) == 0


def test_a_small_cache_is_no_sign_of_little_load() -> None:
    # H014: the jammed worker has the emptiest index; the others are idle with big ones.
    jammed = worker("d0", requests=20, pending_tokens=20_000)
    others = [worker(f"d{i}", cached_blocks=frozenset(hashes(500, f"other{i}"))) for i in (1, 2, 3)]
    chosen = [place(ClusterLoad((), (jammed, *others)), shape(64), i).decode_worker for i in range(50)]
    assert "d0" not in chosen


def test_a_worker_with_room_for_the_prompt_goes_before_one_without() -> None:
    tight = worker("d0", blocks_available=2)
    roomy = worker("d1", requests=5)
    assert place(ClusterLoad((), (tight, roomy)), shape(100)).decode_worker == "d1"
    assert place(ClusterLoad((), (tight,)), shape(100)).decode_worker == "d0"


def test_equal_workers_take_turns() -> None:
    # H005: many decisions on one unchanged snapshot.
    cluster = ClusterLoad(tuple(worker(f"p{i}") for i in range(4)), tuple(worker(f"d{i}") for i in range(8)))
    plans = [place(cluster, shape(), turn) for turn in range(80)]
    assert set(Counter(plan.decode_worker for plan in plans).values()) == {10}
    assert set(Counter(plan.prefill_worker for plan in plans).values()) == {20}


def test_a_hot_prefix_is_spread_when_the_load_asks_for_it() -> None:
    # H004 in small: 9 of 10 requests share a prefix; the queue of each worker is emptied at a fixed rate.
    names = [f"p{i}" for i in range(4)]
    cached: dict[str, set[bytes]] = {name: set() for name in names}
    pending = dict.fromkeys(names, 0)
    computed: Counter[str] = Counter()
    hits = 0
    for turn in range(400):
        family = "hot" if turn % 10 else f"cold{turn}"
        request = RequestShape(2048 + 40, {LAYOUT: hashes(128, family)})
        loads = tuple(worker(n, cached_blocks=frozenset(cached[n]), pending_tokens=pending[n]) for n in names)
        name = place(ClusterLoad(loads, (worker("d0"),)), request, turn).prefill_worker
        assert name is not None
        found = cached_prefix_tokens(loads[names.index(name)], request)
        hits += found > 0
        computed[name] += request.num_tokens - found
        pending[name] += request.num_tokens - found
        cached[name].update(request.block_hashes[LAYOUT])
        pending = {n: max(0, tokens - 40) for n, tokens in pending.items()}
    assert max(computed.values()) <= 1.5 * computed.total() / len(names)
    assert hits > 0.6 * 400


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3 * BLOCK), st.integers(0, 5))
def test_a_match_is_whole_blocks_and_leaves_a_token_to_compute(num_tokens: int, extra_blocks: int) -> None:
    # H030
    everything = worker("p0", cached_blocks=frozenset(hashes(10)))
    request = RequestShape(num_tokens, {LAYOUT: hashes(num_tokens // BLOCK + extra_blocks)})
    matched = cached_prefix_tokens(everything, request)
    assert matched % BLOCK == 0
    assert matched <= num_tokens // BLOCK * BLOCK
    assert matched < num_tokens


_workers = st.lists(
    st.builds(
        WorkerLoad,
        worker_id=st.sampled_from(["w0", "w1", "w2", "w3"]),
        health=st.sampled_from(Health),
        cached_blocks=st.frozensets(st.sampled_from(hashes(6))),
        requests=st.integers(0, 20),
        pending_tokens=st.integers(0, 5000),
        blocks_available=st.integers(0, 20),
        full=st.booleans(),
        layout=st.just(LAYOUT),
    ),
    max_size=4,
    unique_by=lambda load: load.worker_id,
).map(tuple)


@settings(max_examples=300, deadline=None)
@given(_workers, _workers, st.frozensets(st.sampled_from(["w0", "w1", "w2"])), st.booleans(), st.integers(0, 9))
def test_every_decision_respects_health_room_and_determinism(
    prefill: tuple[WorkerLoad, ...],
    decode: tuple[WorkerLoad, ...],
    avoid: frozenset[str],
    allow_local: bool,
    turn: int,
) -> None:
    cluster = ClusterLoad(prefill, decode)
    request = shape(avoid=avoid, allow_local=allow_local)
    plan = choose(cluster, request, turn)
    assert plan == choose(cluster, request, turn)
    usable = [load for load in decode if load.health is not Health.DRAINING]
    if isinstance(plan, NoPlan):
        assert plan.may_wait or not usable or not allow_local
        return
    chosen = {load.worker_id: load for load in decode}[plan.decode_worker]
    assert chosen.health is not Health.DRAINING
    assert not chosen.full
    if chosen.health is Health.STALLED:
        assert all(load.health is not Health.READY for load in decode)
    if plan.prefill_worker is None:
        assert allow_local
    else:
        source = {load.worker_id: load for load in prefill}[plan.prefill_worker]
        assert not source.full
        assert source.health is Health.READY or not allow_local


def test_each_worker_s_cache_is_read_by_the_names_of_its_own_layout() -> None:
    wide = replace(LAYOUT, block_size=2 * BLOCK)
    request = shape(101, block_hashes={LAYOUT: hashes(6), wide: hashes(3, "wide")})
    cached = frozenset(hashes(6)[:2]) | frozenset(hashes(3, "wide")[:1])
    assert cached_prefix_tokens(worker("p", cached_blocks=cached), request) == 2 * BLOCK
    assert cached_prefix_tokens(worker("d", cached_blocks=cached, layout=wide), request) == 2 * BLOCK
    cached = frozenset(hashes(3, "wide"))
    assert cached_prefix_tokens(worker("p", cached_blocks=cached), request) == 0
    assert cached_prefix_tokens(worker("d", cached_blocks=cached, layout=wide), request) == 3 * 2 * BLOCK
