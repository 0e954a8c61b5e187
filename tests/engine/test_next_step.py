"""The decode step that is expected, and what comes instead."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from engine.batch import Batch, build_batch
from engine.engine import Engine
from engine.execution.next_step import NextStep, expect_next
from engine.model_runner import RowResult, batch_row
from engine.scheduler import Schedule
from engine.sequence import SamplingParams, TokenSample
from tests.support.toy_engine import MODEL, PROMPT, ToyEngine, sequence

BLOCK = 8


class Steps:
    """An engine whose tokens are chosen by the test: 1, or what `tokens` says for a sequence."""

    def __init__(self, lengths: dict[str, int], **sizes: int) -> None:
        self.toy = ToyEngine(MODEL, block_size=BLOCK, **{"num_blocks": 40, "token_budget": 64, **sizes})  # type: ignore[arg-type]
        self.engine: Engine = self.toy.engine
        for seq_id, length in lengths.items():
            self.add(seq_id, length)

    def add(self, seq_id: str, length: int, max_tokens: int = 30) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.engine.add(sequence(seq_id, (PROMPT * 3)[:length], sampling=sampling))

    def step(self, tokens: dict[str, int] | None = None) -> NextStep | None:
        """One step; what was expected to follow before it was published."""
        return self.compute_or_none(self.engine.schedule(), tokens)

    def compute_or_none(self, schedule: Schedule, tokens: dict[str, int] | None = None) -> NextStep | None:
        """The same for a schedule."""
        batch = build_batch([batch_row(item) for item in schedule.items], BLOCK)
        expected = expect_next(schedule, BLOCK, batch.logits_order)
        results: dict[str, RowResult] = {
            item.seq.seq_id: (TokenSample((tokens or {}).get(item.seq.seq_id, 1)),)
            for item in schedule.items
            if item.samples
        }
        self.engine.publish(schedule, results)
        return expected

    def compute(self, schedule: Schedule) -> NextStep:
        """The same, where something can be expected."""
        expected = self.compute_or_none(schedule)
        assert expected is not None
        return expected

    def expect(self, tokens: dict[str, int] | None = None) -> NextStep:
        """As `step`, where something can be expected."""
        expected = self.step(tokens)
        assert expected is not None
        return expected


def assert_same_batch(ours: Batch, schedule: Schedule) -> None:
    theirs = build_batch([batch_row(item) for item in schedule.items], BLOCK)
    for field in fields(Batch):
        left, right = getattr(ours, field.name), getattr(theirs, field.name)
        equal = torch.equal(left, right) if isinstance(right, Tensor) else left == right
        assert equal, field.name


def test_sequences_that_go_on_are_the_batch_that_was_expected_with_all_their_new_blocks() -> None:
    steps = Steps({"a": 3, "b": 7, "c": 8, "d": 20})
    complete = 0
    expected = steps.expect()
    for _ in range(12):
        schedule = steps.engine.schedule()
        assert expected.matches(schedule)
        assert expected.keeps_order
        complete += expected.is_complete
        assert_same_batch(expected.filled(schedule, BLOCK), schedule)
        expected = steps.compute(schedule)
    assert 0 < complete < 12


def test_what_needs_no_new_block_is_complete_but_for_its_tokens() -> None:
    steps = Steps({"a": 3})
    expected = steps.expect()
    assert expected.is_complete
    assert expected.batch.token_ids.tolist() == [0]


def test_a_sequence_that_ends_by_its_length_is_not_expected() -> None:
    steps = Steps({"a": 3})
    steps.add("short", 5, max_tokens=2)
    expected = steps.expect()
    assert expected.matches(steps.engine.schedule())
    steps = Steps({"a": 3})
    steps.add("short", 5, max_tokens=1)
    expected = steps.expect()
    assert [seq.seq_id for seq in expected.seqs] == ["a"]
    assert not expected.keeps_order
    assert expected.matches(steps.engine.schedule())


def test_nothing_is_expected_after_the_last_tokens() -> None:
    steps = Steps({})
    steps.add("short", 5, max_tokens=1)
    assert steps.step() is None


def test_nothing_is_expected_while_a_prompt_is_computed() -> None:
    assert Steps({"a": 40}, token_budget=16).step() is None


def test_a_sequence_that_stopped_is_missed() -> None:
    steps = Steps({"a": 3, "b": 4})
    expected = steps.expect({"a": 0})
    assert not expected.matches(steps.engine.schedule())


def test_one_that_was_cancelled_is_missed() -> None:
    steps = Steps({"a": 3, "b": 4})
    expected = steps.expect()
    steps.engine.cancel("b")
    assert not expected.matches(steps.engine.schedule())


def test_a_namesake_is_not_taken_for_one_that_was_cancelled() -> None:
    steps = Steps({"a": 3})
    expected = steps.expect()
    steps.engine.cancel("a")
    steps.add("a", 4)
    assert not expected.matches(steps.engine.schedule())


def test_one_that_is_admitted_is_missed() -> None:
    steps = Steps({"a": 3})
    expected = steps.expect()
    steps.add("b", 4)
    assert not expected.matches(steps.engine.schedule())


def test_one_that_is_preempted_is_missed() -> None:
    steps = Steps({"a": 13, "b": 13}, num_blocks=7)
    expected = steps.expect()
    while not (schedule := steps.engine.schedule()).preempted:
        assert expected.matches(schedule)
        expected = steps.compute(schedule)
    assert not expected.matches(schedule)


def test_one_that_is_held_back_is_missed() -> None:
    steps = Steps({"a": 3, "b": 4})
    expected = steps.expect()
    assert not expected.matches(steps.engine.schedule({"b"}))


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_the_order_of_rows_is_told_from_that_of_the_logits(order: tuple[str, ...]) -> None:
    """A chunk comes behind single tokens; a longer context comes behind a shorter one."""
    lengths = {"a": 5, "b": 6}
    expected = Steps({name: lengths[name] for name in order}).expect()
    assert expected.batch.starts == (5, 6)
    # Both are chunks from 0 here, in the order in which they came.
    assert expected.keeps_order is (order == ("a", "b"))
