"""Log probabilities of prompts: those of the model without a cache, each position once, whatever happens in between."""

import mmap
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import engine.prompt_scoring
from engine.build import build_engine, plan_engine
from engine.engine import SequenceOutput
from engine.options import EngineOptions
from engine.prompt_logprobs import PromptLogprobs, PromptToken
from engine.sequence import FinishReason, SamplingParams, Sequence
from engine.wire import prompt_logprobs
from kvferry_rpc.common_pb2 import ErrorCode
from tests.support.device_engine import DeviceToyEngine
from tests.support.toy_engine import MODEL, PROMPT, ToyEngine, sequence
from tests.support.toy_model import ToyModel

TINY_REAL = Path(__file__).parents[1] / "data" / "tiny-real"
SCORED = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=3)
LONG = [(7 * i * i + 3 * i) % 60 + 1 for i in range(150)]


def given(outputs: Iterable[SequenceOutput], seq_id: str = "a") -> list[PromptToken]:
    return [token for output in outputs if output.seq.seq_id == seq_id for token in output.prompt_logprobs]


def assert_scored(tokens: list[PromptToken], prompt: list[int], logits: Tensor, alternatives: int = 3) -> None:
    """`logits` [n, vocab]: those behind each token of the prompt."""
    assert [token.position for token in tokens] == list(range(1, len(prompt)))
    expected = logits.double().log_softmax(dim=-1)
    for token in tokens:
        row = expected[token.position - 1]
        assert token.token_id == prompt[token.position]
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=2e-4)
        assert abs(token.rank - 1 - int((row > row[token.token_id]).sum())) <= 1  # rounding may swap two neighbours
        assert len(token.top_logprobs) == alternatives
        best = row.topk(alternatives).values if alternatives else torch.zeros(0)
        assert [logprob for _, logprob in token.top_logprobs] == pytest.approx(best.tolist(), abs=2e-4)
        for token_id, logprob in token.top_logprobs:
            assert logprob == pytest.approx(float(row[token_id]), abs=2e-4)


def scored(toy: ToyEngine, prompt: list[int], seq_id: str = "a") -> list[PromptToken]:
    toy.engine.add(sequence(seq_id, prompt, sampling=SCORED))
    return given(toy.run_until_idle(), seq_id)


@pytest.mark.parametrize("token_budget", [5, 16, 64, 512])
def test_a_prompt_in_chunks_of_any_size_has_the_log_probabilities_of_the_whole(token_budget: int) -> None:
    toy = ToyEngine(MODEL, num_blocks=32, token_budget=token_budget)
    assert_scored(scored(toy, LONG), LONG, MODEL.dense_logits(LONG))


@pytest.mark.parametrize("graphs", [True, False])
def test_a_device_gives_the_same(graphs: bool) -> None:
    toy = DeviceToyEngine(MODEL, num_blocks=32, token_budget=19, graphs=graphs)
    toy.engine.add(sequence("other", PROMPT[:9], max_tokens=12))
    assert_scored(scored(toy, LONG), LONG, MODEL.dense_logits(LONG))


def test_never_more_than_a_slice_of_logits_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Watched(ToyModel):
        def logits(self, hidden: Tensor) -> Tensor:
            sizes.append(len(hidden))
            return super().logits(hidden)

    toy = ToyEngine(Watched(), num_blocks=32, token_budget=512)
    assert_scored(scored(toy, LONG), LONG, MODEL.dense_logits(LONG))
    assert sizes[:4] == [64, 64, 21, 1]
    assert max(sizes) <= engine.prompt_scoring.SLICE_ROWS


def test_a_cached_prefix_is_computed_again_and_what_was_computed_is_cached() -> None:
    toy = ToyEngine(MODEL, num_blocks=32)
    toy.engine.add(sequence("before", PROMPT))
    toy.run_until_idle()
    first = sequence("a", PROMPT, sampling=SCORED)
    toy.engine.add(first)
    assert_scored(given(toy.run_until_idle()), PROMPT, MODEL.dense_logits(PROMPT))
    assert first.num_cached_tokens == 0
    assert scored(toy, LONG, "b")
    again = sequence("again", LONG)
    toy.engine.add(again)
    toy.run_until_idle()
    assert again.num_cached_tokens == (len(LONG) - 1) // 8 * 8


def test_neighbours_do_not_change_it_and_get_none() -> None:
    toy = ToyEngine(MODEL, num_blocks=64, token_budget=48)
    for name, prompt in (("x", PROMPT), ("y", PROMPT[:3]), ("z", [5])):
        toy.engine.add(sequence(name, prompt))
    toy.engine.add(sequence("a", LONG, sampling=SCORED))
    toy.engine.add(sequence("b", PROMPT[::-1], sampling=SCORED))
    outputs = toy.run_until_idle()
    assert_scored(given(outputs, "a"), LONG, MODEL.dense_logits(LONG))
    assert_scored(given(outputs, "b"), PROMPT[::-1], MODEL.dense_logits(PROMPT[::-1]))
    assert not any(given(outputs, name) for name in "xyz")


def test_they_all_come_before_or_with_the_first_token_and_drafts_do_not_touch_them() -> None:
    toy = ToyEngine(MODEL, num_blocks=32, token_budget=20, speculative_tokens=4)
    prompt = PROMPT[:6] * 6
    toy.engine.add(sequence("a", prompt, sampling=SamplingParams(max_tokens=20, temperature=0.0, prompt_logprobs=3)))
    outputs = toy.run_until_idle()
    with_tokens = next(index for index, output in enumerate(outputs) if output.samples)
    assert_scored(given(outputs[: with_tokens + 1]), prompt, MODEL.dense_logits(prompt))
    assert not given(outputs[with_tokens + 1 :])


@pytest.mark.parametrize("shared", [True, False])
def test_a_preempted_sequence_tells_each_position_once(shared: bool) -> None:
    """An older one takes its blocks, in the middle of its prompt."""
    toy = ToyEngine(MODEL, num_blocks=9, token_budget=3, max_num_seqs=2, prefix_caching=shared)
    older = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, prompt_logprobs=3)
    toy.engine.add(sequence("older", PROMPT[:16], sampling=older))
    younger = sequence("a", LONG[:40], sampling=SCORED)
    toy.engine.add(younger)
    outputs: list[SequenceOutput] = []
    while not toy.engine.load().preemptions:
        outputs += toy.step()
    assert 0 < len(given(outputs)) < 39
    assert younger.num_computed_tokens == 0
    outputs += toy.run_until_idle()
    assert_scored(given(outputs), LONG[:40], MODEL.dense_logits(LONG[:40]))
    assert_scored(given(outputs, "older"), PROMPT[:16], MODEL.dense_logits(PROMPT[:16]))


def test_a_sequence_preempted_within_its_prompt_goes_on_behind_what_it_has_told() -> None:
    toy = ToyEngine(MODEL, num_blocks=32, token_budget=16)
    seq = sequence("a", LONG, sampling=SCORED)
    toy.engine.add(seq)
    outputs = toy.step() + toy.step()
    assert len(given(outputs)) == 32
    toy.engine._scheduler._preempt_youngest()
    outputs += toy.run_until_idle()
    assert_scored(given(outputs), LONG, MODEL.dense_logits(LONG))
    # Of the four blocks computed before, the last one's logits were told, and none of its successor's.
    assert seq.preempted_tokens == 0


def test_a_prefill_worker_tells_them_with_each_chunk() -> None:
    toy = ToyEngine(MODEL, num_blocks=32, token_budget=64, prefill_only=True)
    toy.engine.add(sequence("a", LONG, sampling=SCORED))
    outputs = [toy.step() for _ in range(3)]
    assert [len(given(step)) for step in outputs] == [64, 64, 21]
    assert [[output.finish_reason for output in step] for step in outputs] == [[None], [None], [FinishReason.LENGTH]]
    assert_scored([token for step in outputs for token in given(step)], LONG, MODEL.dense_logits(LONG))
    toy.engine.finish("a")


def test_who_receives_its_prompt_tells_nothing_of_it_even_if_it_must_compute_it_again() -> None:
    toy = ToyEngine(MODEL, num_blocks=32)
    seq = sequence("a", PROMPT, sampling=SCORED)
    assert toy.engine.reserve(seq) is not None
    assert seq.prompt_logprobs is None
    toy.engine.cancel("a")


def test_a_prompt_that_cannot_be_scored_fails_alone_and_is_not_cached() -> None:
    model = ToyModel()
    model.nan_token_ids = frozenset({59})
    toy = ToyEngine(model, num_blocks=32, token_budget=64)
    prompt = [*LONG[:20], 59, *LONG[21:40]]
    toy.engine.add(sequence("a", prompt, sampling=SCORED))
    toy.engine.add(sequence("b", PROMPT, sampling=SCORED))
    outputs = toy.run_until_idle()
    (failed,) = [output for output in outputs if output.seq.seq_id == "a"]
    assert failed.finish_reason is FinishReason.FAILED
    assert failed.error is not None
    assert failed.error.code == ErrorCode.INTERNAL
    assert not failed.prompt_logprobs
    assert_scored(given(outputs, "b"), PROMPT, MODEL.dense_logits(PROMPT))


def test_a_prompt_of_one_token_has_none_and_no_alternatives_may_be_wanted() -> None:
    toy = ToyEngine(MODEL, num_blocks=32)
    assert scored(toy, [5]) == []
    toy.engine.add(sequence("b", PROMPT, sampling=SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)))
    assert_scored(given(toy.run_until_idle(), "b"), PROMPT, MODEL.dense_logits(PROMPT), alternatives=0)


def test_on_a_real_model_they_are_those_of_transformers(tmp_path: Path) -> None:
    options = EngineOptions(model=str(TINY_REAL), cache_dir=tmp_path, num_blocks=64, token_budget=50, max_num_seqs=8)
    plan = plan_engine(options, available_bytes=None)
    engine = build_engine(options, plan, memoryview(mmap.mmap(-1, plan.pool_bytes)), prefill_only=False)
    prompt = [1, *(300 + 7 * i % 900 for i in range(120))]
    engine.add(Sequence("a", prompt, SCORED, max_context_tokens=400))
    outputs: list[SequenceOutput] = []
    while engine.has_work:
        schedule = engine.schedule()
        outputs += engine.publish(schedule, engine.run(schedule))
    model = AutoModelForCausalLM.from_pretrained(TINY_REAL, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0]
    assert_scored(given(outputs), prompt, logits)


def test_positions_come_in_order_only() -> None:
    prompt = PromptLogprobs(1, [7, 8, 9])
    assert (prompt.is_complete, prompt.most_cached_tokens) == (False, 0)
    with pytest.raises(ValueError, match="position 2 of a prompt after position 0"):
        prompt.add(PromptToken(2, 9, -1.0, 1))
    prompt.add(PromptToken(1, 8, -1.0, 1))
    prompt.add(PromptToken(2, 9, -1.0, 1))
    assert prompt.is_complete
    assert len(prompt.take()) == 2
    assert prompt.take() == ()


def test_they_travel_in_messages_of_bounded_size() -> None:
    tokens = [PromptToken(position, 5, -0.5, 2, ((9, -0.25),)) for position in range(1, 601)]
    messages = list(prompt_logprobs(tokens))
    assert [len(message.tokens) for message in messages] == [256, 256, 88]
    assert [entry.position for message in messages for entry in message.tokens] == list(range(1, 601))
    (entry,) = [messages[0].tokens[0]]
    assert (entry.token_id, entry.logprob, entry.rank) == (5, -0.5, 2)
    assert [(top.token_id, top.logprob) for top in entry.top_logprobs] == [(9, -0.25)]
    assert list(prompt_logprobs(())) == []
