"""What goes on from one role of a worker to the next, and what must not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine.sequence import SamplingParams, Sequence
from tests.support.hosted_worker import SECRET, worker_settings
from worker.options import WorkerOptions
from worker.parts import WorkerParts


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return worker_settings(tmp_path_factory.mktemp("worker"))


@contextmanager
def parts_of(settings: dict[str, Any], **changes: Any) -> Iterator[WorkerParts]:
    parts = WorkerParts(WorkerOptions(**{**settings, **changes}), SECRET)
    try:
        yield parts
    finally:
        parts.close(1.0)


def test_the_prefix_cache_goes_on_in_a_new_incarnation(settings: dict[str, Any]) -> None:
    with parts_of(settings) as parts:
        prefill, decode = parts.begin(prefill_only=True), parts.begin(prefill_only=False)
        assert decode.engine is not prefill.engine
        assert decode.engine.block_manager is prefill.engine.block_manager
        assert decode.kv_events is prefill.kv_events
        assert decode.identity.incarnation != prefill.identity.incarnation


def test_a_cache_of_fewer_bits_does_not_go_on(settings: dict[str, Any]) -> None:
    with parts_of(settings, kv_wire_dtype="int8") as parts:
        decode, prefill = parts.begin(prefill_only=False), parts.begin(prefill_only=True)
        assert prefill.engine.block_manager is not decode.engine.block_manager
        assert prefill.kv_events is not decode.kv_events


def test_a_pool_that_was_left_with_something_in_it_is_begun_anew(settings: dict[str, Any]) -> None:
    with parts_of(settings) as parts:
        last = parts.begin(prefill_only=False)
        last.engine.add(Sequence("r", [5, 6, 7], SamplingParams(max_tokens=4), max_context_tokens=64))
        schedule = last.engine.schedule()
        last.engine.publish(schedule, last.engine.run(schedule))
        assert not last.engine.is_idle
        after = parts.begin(prefill_only=True)
        assert after.engine.block_manager is not last.engine.block_manager
        after.engine.check_integrity()
