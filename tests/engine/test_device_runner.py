"""An engine whose steps run as on a device gives what one gives that computes them one after the other."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.sequence import SamplingParams, Sequence, TokenConstraint
from tests.support.device_engine import DeviceToyEngine, pool_bytes
from tests.support.toy_engine import EOS, MODEL, PROMPT, ToyEngine, sequence
from tests.support.toy_model import ToyModel

GREEDY = SamplingParams(max_tokens=14, temperature=0.0)
DRAWN = SamplingParams(max_tokens=14, temperature=0.9, top_p=0.9, seed=4)
PLAIN = [GREEDY, DRAWN, replace(DRAWN, top_k=9, seed=8), replace(DRAWN, min_p=0.05, max_tokens=5)]
ON_HOST = [
    replace(GREEDY, num_logprobs=2),
    replace(DRAWN, repetition_penalty=1.3),
    replace(DRAWN, logit_bias=((5, 2.0),)),
    replace(GREEDY, min_tokens=6),
]


def texts(toy: ToyEngine, sampling: list[SamplingParams]) -> list[list[Any]]:
    """What a sequence of each way of sampling becomes: tokens, log probabilities, reasons."""
    seqs = [sequence(f"s{i}", PROMPT[: 3 + 6 * i], sampling=each) for i, each in enumerate(sampling)]
    for seq in seqs:
        toy.engine.add(seq)
    toy.run_until_idle()
    return [[seq.output_token_ids, rounded(seq), seq.finish_reason] for seq in seqs]


def rounded(seq: Sequence) -> list[float | None]:
    return [None if sample.logprob is None else round(sample.logprob, 3) for sample in seq.samples]


@pytest.mark.parametrize("reads_host", [True, False])
@pytest.mark.parametrize("graphs", [True, False])
def test_plain_rows_have_the_same_text(graphs: bool, reads_host: bool) -> None:
    toy = DeviceToyEngine(num_blocks=40, graphs=graphs, reads_host=reads_host)
    assert texts(toy, PLAIN) == texts(ToyEngine(MODEL, num_blocks=40), PLAIN)
    assert toy.runner.steps_as_prepared > 0
    assert bool(toy.captures.rows_replayed) is graphs


@pytest.mark.parametrize("sampling", [ON_HOST, [*PLAIN[:2], *ON_HOST[:2]]], ids=["all", "some"])
def test_rows_for_the_host_have_the_same_text_and_log_probabilities(sampling: list[SamplingParams]) -> None:
    toy = DeviceToyEngine(num_blocks=40)
    assert texts(toy, sampling) == texts(ToyEngine(MODEL, num_blocks=40), sampling)


def test_without_a_sampler_on_the_device_the_text_is_the_same() -> None:
    toy = DeviceToyEngine(num_blocks=40, samples=False)
    assert texts(toy, PLAIN) == texts(ToyEngine(MODEL, num_blocks=40), PLAIN)
    assert toy.device_sampler.num_calls == 0
    assert toy.runner.steps_as_prepared > 0


def test_a_pool_that_is_too_small_changes_no_text() -> None:
    sizes: dict[str, Any] = {"num_blocks": 9, "token_budget": 11}
    long = [replace(each, max_tokens=25, ignore_eos=True) for each in PLAIN]
    toy = DeviceToyEngine(**sizes)
    assert texts(toy, long) == texts(ToyEngine(MODEL, **sizes), long)
    assert toy.engine.load().preemptions > 0
    assert 0 < toy.runner.steps_as_prepared < toy.runner.prepared_steps


def test_guesses_change_no_text() -> None:
    sizes: dict[str, Any] = {"num_blocks": 40, "token_budget": 24, "speculative_tokens": 3}
    repeating = [replace(GREEDY, max_tokens=30, logit_bias=((7, 50.0),)), GREEDY]
    toy = DeviceToyEngine(**sizes)
    assert texts(toy, repeating) == texts(ToyEngine(MODEL, **sizes), repeating)
    assert toy.engine.load().accepted_tokens > 0


def test_most_steps_of_sequences_that_go_on_are_the_ones_prepared() -> None:
    toy = DeviceToyEngine(num_blocks=40)
    texts(toy, [replace(GREEDY, max_tokens=30, ignore_eos=True)] * 3)
    assert toy.runner.steps_as_prepared >= 28


def test_cancelling_and_adding_between_steps_leaves_the_others_their_text() -> None:
    ours, theirs = DeviceToyEngine(num_blocks=40), ToyEngine(MODEL, num_blocks=40)
    kept = []
    for toy in (ours, theirs):
        seqs = [sequence(f"s{i}", PROMPT[: 5 + i], max_tokens=20) for i in range(4)]
        for seq in seqs[:3]:
            toy.engine.add(seq)
        for step in range(40):
            if step == 4:
                toy.engine.cancel("s1")
            if step == 6:
                toy.engine.add(seqs[3])
            if toy.engine.has_work:
                toy.step()
        kept.append([seqs[i].output_token_ids for i in (0, 2, 3)])
    assert kept[0] == kept[1]
    assert all(kept[0])


def test_a_row_that_cannot_be_sampled_fails_alone_with_the_words_of_the_host() -> None:
    model = ToyModel()
    model.nan_token_ids = frozenset({60})
    errors = []
    for toy in (DeviceToyEngine(model, num_blocks=40), ToyEngine(model, num_blocks=40)):
        toy.engine.add(sequence("bad", [3, 60]))
        toy.engine.add(sequence("good", [3, 4], max_tokens=3))
        outputs = toy.run_until_idle()
        errors += [str(output.error) for output in outputs if output.error is not None]
        assert sum(len(output.samples) for output in outputs if output.seq.seq_id == "good") > 0
    assert len(errors) == 2
    assert errors[0] == errors[1]


class OnlyToken:
    """A constraint that leaves one token."""

    def __init__(self, token_id: int) -> None:
        import numpy as np

        self._bits = np.zeros(2, dtype=np.uint32)
        self._bits[token_id // 32] = 1 << (token_id % 32)

    def allowed(self) -> Any:
        return self._bits

    def advance(self, token_id: int) -> None:
        """Nothing changes."""

    def rewind(self, num_tokens: int) -> None:
        """Nothing changes."""


def test_a_grammar_is_heeded() -> None:
    toy = DeviceToyEngine(num_blocks=40)
    constraint: TokenConstraint = OnlyToken(9)
    seq, free = sequence("s", PROMPT[:5], max_tokens=4), sequence("free", PROMPT[:5], max_tokens=4)
    seq.constraint = constraint
    toy.engine.add(seq)
    toy.engine.add(free)
    toy.run_until_idle()
    assert seq.output_token_ids == [9] * 4
    assert free.output_token_ids != [9] * 4


def test_layers_are_told_of_in_order_when_their_pages_are_in_the_mirror() -> None:
    toy = DeviceToyEngine(num_blocks=8, prefill_only=True, token_budget=64)
    toy.engine.add(sequence("s", PROMPT[:19]))
    schedule = toy.engine.schedule()
    blocks = list(schedule.items[0].block_table)
    told = []

    def look(layer: int) -> None:
        told.append(layer)
        keys = toy.cache.k(layer)[blocks]
        assert torch.equal(keys, toy.device_cache.k(layer)[blocks])
        assert not keys.isnan().any()

    toy.engine.publish(schedule, toy.engine.run(schedule, look))
    assert told == [0, 1]
    others = [block for block in range(8) if block not in blocks]
    assert toy.cache.k(0)[others].isnan().all()


def test_layers_that_come_late_are_told_of_before_the_results_and_may_cancel_then() -> None:
    toy = DeviceToyEngine(num_blocks=8, prefill_only=True, token_budget=64, late=True)
    for seq_id in ("s", "other"):
        toy.engine.add(sequence(seq_id, PROMPT[:9]))
    told = []

    def cancel(layer: int) -> None:
        told.append(layer)
        toy.engine.cancel("s")

    schedule = toy.engine.schedule()
    in_flight = toy.runner.launch(schedule, cancel)
    assert told == []
    results = in_flight.results()
    assert told == [0, 1]
    outputs = toy.engine.publish(schedule, results)
    assert [output.seq.seq_id for output in outputs] == ["other"]


def test_a_hand_off_between_two_such_engines_gives_the_text_of_one() -> None:
    prompt = PROMPT[:21]
    prefill = DeviceToyEngine(num_blocks=8, prefill_only=True, token_budget=8)
    decode = DeviceToyEngine(num_blocks=8)
    seq, twin = sequence("s", prompt, max_tokens=20), sequence("s", prompt, max_tokens=20)
    allocation = decode.engine.reserve(seq)
    assert allocation is not None
    prefill.engine.add(twin)
    sent: list[int] = []
    while not twin.samples:
        schedule = prefill.engine.schedule()
        source = list(schedule.items[0].block_table)
        prefill.engine.publish(schedule, prefill.engine.run(schedule, sent.append))
    target = allocation.block_table[: len(source)]
    shape = (8, -1)
    pool_bytes(decode.cache).view(shape)[list(target)] = pool_bytes(prefill.cache).view(shape)[source]
    decode.engine.admit_received(seq, 21, twin.samples[0])
    decode.run_until_idle()
    alone = sequence("s", prompt, max_tokens=20)
    toy = ToyEngine(MODEL, num_blocks=8)
    toy.engine.add(alone)
    toy.run_until_idle()
    assert seq.output_token_ids == alone.output_token_ids


def test_a_prefix_that_is_pinned_for_sending_is_in_the_mirror_and_one_that_was_kept_on_the_device() -> None:
    source, target = DeviceToyEngine(num_blocks=8), DeviceToyEngine(num_blocks=8)
    prompt = PROMPT[:17]
    source.engine.add(sequence("s", prompt, max_tokens=1))
    source.run_until_idle()
    pinned = source.engine.prefix_holds.pin("export", prompt[:16], b"")
    room = target.engine.prefix_holds.reserve("pull", prompt[:16], b"")
    assert pinned is not None
    assert room is not None
    shape = (8, -1)
    sent = pool_bytes(source.cache).view(shape)[list(pinned.block_table)]
    pool_bytes(target.cache).view(shape)[list(room.block_table)] = sent
    target.engine.prefix_holds.keep("pull")
    seq = sequence("s", prompt, max_tokens=6)
    target.engine.add(seq)
    target.run_until_idle()
    assert seq.num_cached_tokens == 16
    alone = sequence("s", prompt, max_tokens=6)
    source.engine.add(alone)
    source.run_until_idle()
    assert seq.output_token_ids == alone.output_token_ids
    assert EOS not in seq.output_token_ids[:-1]
