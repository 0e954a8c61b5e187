from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.interface import AttentionBackend
from engine.attention.torch_paged import TorchAttention
from engine.batch import Batch
from engine.model_runner import ModelRunner
from engine.sampler import Sampler, SampleRow
from engine.scheduler import Schedule, ScheduledSequence
from engine.sequence import SamplingParams, Sequence, TokenSample
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError
from tests.support.toy_engine import poisoned_cache, sequence
from tests.support.toy_model import VOCAB_SIZE, ToyModel


class Bench:
    """A runner over a pool whose blocks are given to sequences by hand."""

    def __init__(self) -> None:
        self.model = ToyModel()
        self.cache = poisoned_cache(self.model.layout(8), 16)
        self.runner = ModelRunner(self.model, TorchAttention(self.cache, self.model.attention), Sampler(), 8)

    def item(self, seq: Sequence, table: tuple[int, ...], start: int, length: int) -> ScheduledSequence:
        return ScheduledSequence(seq, start, length, start + length == seq.num_tokens, table)

    def guessing(self, seq: Sequence, table: tuple[int, ...], *guesses: int) -> ScheduledSequence:
        """The last token of `seq` and guesses of what follows; what is before it is computed first."""
        last = seq.num_tokens - 1
        self.run(ScheduledSequence(seq, 0, last, False, table))
        return ScheduledSequence(seq, last, 1 + len(guesses), True, table, guesses)

    def run(self, *items: ScheduledSequence, hook: Callable[[int], None] | None = None) -> dict[str, object]:
        return dict(self.runner.run(Schedule(items), hook))


def test_a_prompt_in_chunks_samples_the_token_of_the_whole() -> None:
    bench = Bench()
    seq = sequence("a", range(1, 20))
    assert bench.run(bench.item(seq, (4, 1, 9), 0, 8)) == {}
    assert bench.run(bench.item(seq, (4, 1, 9), 8, 3)) == {}
    want = int(bench.model.dense_logits(seq.token_ids)[-1].argmax())
    assert bench.run(bench.item(seq, (4, 1, 9), 11, 8)) == {"a": (TokenSample(want),)}


def test_only_sequences_that_reach_their_last_token_are_sampled() -> None:
    bench = Bench()
    a, b, c = sequence("a", range(1, 20)), sequence("b", [5]), sequence("c", range(30, 40))
    result = bench.run(bench.item(a, (0, 1, 2), 0, 8), bench.item(b, (3,), 0, 1), bench.item(c, (4, 5), 0, 10))
    assert result == {
        seq.seq_id: (TokenSample(int(bench.model.dense_logits(seq.token_ids)[-1].argmax())),) for seq in (b, c)
    }


def test_seeded_noise_depends_on_seed_and_position_alone() -> None:
    def sample(seed: int, neighbours: int) -> object:
        bench = Bench()
        seq = sequence("a", range(1, 12), sampling=SamplingParams(max_tokens=3, seed=seed))
        others = [
            bench.item(sequence(f"n{i}", [i + 1, 3], temperature=1.0), (10 + i,), 0, 2) for i in range(neighbours)
        ]
        return bench.run(*others, bench.item(seq, (0, 1), 0, 11))["a"]

    assert sample(5, 0) == sample(5, 3)
    assert len({str(sample(seed, 0)) for seed in range(8)}) > 1


def test_the_sampler_is_told_the_position_in_the_whole_sequence() -> None:
    seen: list[SampleRow] = []

    class Recording(Sampler):
        def sample(self, logits: Tensor, rows: SequenceOf[SampleRow]) -> list[TokenSample | KvferryError]:
            seen.extend(rows)
            return super().sample(logits, rows)

    bench = Bench()
    runner = ModelRunner(bench.model, TorchAttention(bench.cache, bench.model.attention), Recording(), 8)
    seq = sequence("a", [1, 2, 3], output=[4, 5])
    runner.run(Schedule((bench.item(seq, (0,), 0, 5),)))
    assert seen == [SampleRow(seq.sampling, (1, 2, 3), [4, 5], 5, seq.eos_token_ids)]


def test_earlier_output_is_penalised() -> None:
    bench = Bench()
    prompt = list(range(1, 12))
    favourite = SamplingParams(max_tokens=99, temperature=0.0, logit_bias=((50, 60.0),))
    assert bench.run(bench.item(sequence("a", prompt, sampling=favourite), (0, 1), 0, 11)) == {"a": (TokenSample(50),)}
    tired = replace(favourite, frequency_penalty=2.0)
    again = sequence("b", prompt, output=[50] * 40, sampling=tired)
    (result,) = bench.run(bench.item(again, (2, 3, 4, 5, 6, 7, 8), 0, 51)).values()
    assert isinstance(result, tuple)
    assert result[0].token_id != 50


def test_not_a_number_fails_its_own_sequence_only() -> None:
    bench = Bench()
    bench.model.nan_token_ids = frozenset({7})
    good, bad = sequence("good", [1, 2, 3]), sequence("bad", [4, 7, 5])
    result = bench.run(bench.item(bad, (0,), 0, 3), bench.item(good, (1,), 0, 3))
    assert result["good"] == (TokenSample(int(bench.model.dense_logits(good.token_ids)[-1].argmax())),)
    error = result["bad"]
    assert isinstance(error, KvferryError)
    assert error.code == ErrorCode.INTERNAL


def test_the_block_of_a_failed_sequence_does_not_poison_the_next_owner() -> None:
    bench = Bench()
    bench.model.nan_token_ids = frozenset({7})
    bad = sequence("bad", [7] * 8)
    assert isinstance(bench.run(bench.item(bad, (0,), 0, 8))["bad"], KvferryError)
    seq = sequence("next", [1, 2])
    bench.run(bench.item(seq, (0,), 0, 2))
    seq.append_token(TokenSample(3))
    result = bench.run(bench.item(seq, (0,), 2, 1))
    assert result["next"] == (TokenSample(int(bench.model.dense_logits(seq.token_ids)[-1].argmax())),)


def test_the_hook_sees_each_layer_complete_and_in_order() -> None:
    bench = Bench()
    seq = sequence("a", range(1, 11))
    seen: list[tuple[int, bool, bool]] = []

    def hook(layer: int) -> None:
        complete = [not bool(pages[[3, 8]].isnan().any()) for pages in (bench.cache.k(layer), bench.cache.v(layer))]
        later = [bool(bench.cache.k(after)[[3, 8]].isnan().all()) for after in range(layer + 1, bench.model.num_layers)]
        seen.append((layer, all(complete), all(later)))

    bench.run(bench.item(seq, (3, 8), 0, 10), hook=hook)
    assert seen == [(0, True, True), (1, True, True)]


def test_the_pages_a_hook_saw_do_not_change_afterwards() -> None:
    bench = Bench()
    seen: list[Tensor] = []
    bench.run(
        bench.item(sequence("a", range(1, 11)), (3, 8), 0, 10),
        hook=lambda layer: seen.extend((bench.cache.k(layer)[[3, 8]].clone(), bench.cache.v(layer)[[3, 8]].clone())),
    )
    after = [pages[[3, 8]] for layer in range(2) for pages in (bench.cache.k(layer), bench.cache.v(layer))]
    assert all(torch.equal(then, now) for then, now in zip(seen, after, strict=True))


def test_a_failure_of_the_model_passes_through() -> None:
    class Broken(ToyModel):
        def forward(self, batch: Batch, attention: AttentionBackend, on_layer: Callable[[int], None]) -> Tensor:
            raise RuntimeError("out of memory")

    bench = Bench()
    runner = ModelRunner(Broken(), TorchAttention(bench.cache, bench.model.attention), Sampler(), 8)
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.run(Schedule((bench.item(sequence("a", [1]), (0,), 0, 1),)))


def test_logits_are_asked_for_where_they_are_used_only() -> None:
    rows: list[int] = []

    class Counting(ToyModel):
        def logits(self, hidden: Tensor) -> Tensor:
            rows.append(len(hidden))
            return super().logits(hidden)

    bench = Bench()
    runner = ModelRunner(Counting(), TorchAttention(bench.cache, bench.model.attention), Sampler(), 8)
    a, b = sequence("a", range(1, 20)), sequence("b", range(1, 4))
    runner.run(Schedule((bench.item(a, (0, 1, 2), 0, 8),)))
    runner.run(Schedule((bench.item(a, (0, 1, 2), 8, 8), bench.item(b, (3,), 0, 3))))
    assert rows == [1]


# ---- guesses ----

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def greedy_text(bench: Bench, tokens: list[int], count: int) -> list[int]:
    text = list(tokens)
    for _ in range(count):
        text.append(int(bench.model.dense_logits(text)[-1].argmax()))
    return text[len(tokens) :]


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_guesses_are_accepted_up_to_the_first_wrong_one(num_right: int) -> None:
    bench = Bench()
    seq = sequence("a", range(1, 12), sampling=GREEDY)
    want = greedy_text(bench, seq.token_ids, 4)
    guesses = [token if i < num_right else (token + 1) % VOCAB_SIZE for i, token in enumerate(want[:3])]
    item = bench.guessing(seq, (4, 1), *guesses)
    assert bench.run(item) == {"a": tuple(map(TokenSample, want[: num_right + 1]))}


def test_sequences_with_and_without_guesses_share_a_step() -> None:
    bench = Bench()
    prompts = {"a": range(1, 12), "b": range(20, 29), "c": range(30, 47)}
    a, b, c = (sequence(name, prompt, sampling=GREEDY) for name, prompt in prompts.items())
    texts = {seq.seq_id: greedy_text(bench, seq.token_ids, 3) for seq in (a, b, c)}
    items = [
        bench.guessing(a, (0, 1), *texts["a"][:2]),
        bench.item(b, (2, 3), 0, 9),
        bench.guessing(c, (4, 5, 6), texts["c"][0], (texts["c"][1] + 1) % VOCAB_SIZE),
    ]
    result = bench.run(*items)
    assert result["a"] == tuple(map(TokenSample, texts["a"]))
    assert result["b"] == (TokenSample(texts["b"][0]),)
    assert result["c"] == tuple(map(TokenSample, texts["c"][:2]))


def test_nothing_is_sampled_behind_a_wrong_guess_or_an_end() -> None:
    rows: list[tuple[int, list[int]]] = []

    class Recording(Sampler):
        def sample(self, logits: Tensor, rows_: SequenceOf[SampleRow]) -> list[TokenSample | KvferryError]:
            rows.extend((row.position, list(row.output_token_ids)) for row in rows_)
            return super().sample(logits, rows_)

    bench = Bench()
    bench.runner = ModelRunner(bench.model, TorchAttention(bench.cache, bench.model.attention), Recording(), 8)
    prompt = list(range(1, 12))
    first, second, third = greedy_text(bench, prompt, 3)
    seq = sequence("a", prompt, sampling=GREEDY)
    bench.run(bench.guessing(seq, (4, 1), first, (second + 1) % VOCAB_SIZE, third))
    assert rows == [(11, []), (12, [first])]
    rows.clear()
    stops = sequence("b", prompt, sampling=SamplingParams(8, temperature=0.0, stop_token_ids=frozenset({first})))
    assert bench.run(bench.guessing(stops, (4, 1), first, second)) == {"b": (TokenSample(first),)}
    assert rows == [(11, [])]


class OddOrEven:
    """A constraint: behind an odd token comes an even one, and the other way round. It writes down what it is told."""

    def __init__(self, last: int) -> None:
        self.tokens = [last]
        self.most = 1

    def allowed(self) -> NDArray[np.uint32]:
        return np.full(-(-VOCAB_SIZE // 32), 0x55555555 if self.tokens[-1] % 2 else 0xAAAAAAAA, dtype=np.uint32)

    def advance(self, token_id: int) -> None:
        self.tokens.append(token_id)
        self.most = max(self.most, len(self.tokens))

    def rewind(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]


def test_a_constraint_follows_the_guesses_and_is_back_where_it_was_after_the_step() -> None:
    masks: list[NDArray[np.uint32]] = []

    class Obedient(Sampler):
        def sample(self, logits: Tensor, rows: SequenceOf[SampleRow]) -> list[TokenSample | KvferryError]:
            for values, row in zip(logits, rows, strict=True):
                assert row.allowed is not None
                masks.append(row.allowed.copy())
                bits = np.unpackbits(row.allowed.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
                values[torch.from_numpy(bits == 0)] = -1e9
            return super().sample(logits, rows)

    bench = Bench()
    bench.runner = ModelRunner(bench.model, TorchAttention(bench.cache, bench.model.attention), Obedient(), 8)
    prompt = list(range(1, 12))
    constraint = OddOrEven(prompt[-1])
    favourites = SamplingParams(8, temperature=0.0, logit_bias=((50, 60.0), (51, 60.0)))
    seq = Sequence("a", prompt, favourites, max_context_tokens=99, constraint=constraint)
    result = bench.run(bench.guessing(seq, (4, 1), 50, 51, 51, 50))["a"]
    assert result == tuple(map(TokenSample, (50, 51, 50)))
    assert [mask[0] for mask in masks] == [0x55555555, 0xAAAAAAAA, 0x55555555]
    assert constraint.tokens == [prompt[-1]], "nothing has come yet"
    assert constraint.most == 3
    for sample in result:
        seq.append_token(sample)
    assert constraint.tokens == [prompt[-1], 50, 51, 50]
