"""Second turns of a chat on two real workers: the answer's KV goes back to prefill, or is computed, never mistaken."""

import random
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.faults import FaultPlan
from kvferry_rpc.common_pb2 import ErrorCode, SamplingParams
from kvferry_rpc.internal_pb2 import PrefillDone
from tests.support.worker_pair import Outcome, Request, WorkerPair

BLOCK = 8
FIRST = [int(token) for token in range(7, 28)]  # 21 tokens: two full blocks
ANSWER_TOKENS = 24
# The KV of prompt and answer without its last token, in full blocks: what decode holds; and what prefill holds.
ON_DECODE, ON_PREFILL = 40, 16


@pytest.fixture(scope="module")
def expected(checkpoint: Path, cache: Path) -> Outcome:
    """The second turn on workers that do not know the pull."""
    with WorkerPair(checkpoint, cache) as pair:
        return pair.run(second_turn(pair), greedy(8))


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, num_logprobs=0)


def second_turn(pair: WorkerPair, salt: bytes = b"") -> list[int]:
    """Run the first turn; the prompt of the second."""
    answer = pair.run(FIRST, greedy(ANSWER_TOKENS), cache_salt=salt).token_ids
    return [*FIRST, *answer, 3, 4, 5, 6, 7]


def computed(pair: WorkerPair) -> int:
    return pair.prefill.snapshot.view.load.prompt_tokens_computed


def begin(pair: WorkerPair, prompt: list[int], **prefill: Any) -> Request:
    request = pair.admit(prompt, greedy(8))
    ticket = request.ticket()
    assert ticket is not None
    pair.prefill_into(request, ticket, source_tokens=ON_DECODE, **prefill)
    return request


def wait_for_pull(pair: WorkerPair, request: Request) -> None:
    pair.wait_until(lambda: request.pull is not None)


def assert_same(outcome: Outcome, expected: Outcome) -> PrefillDone:
    """Token for token, and as sure of each as the workers without a pull were: wrong KV would show."""
    assert outcome.token_ids == expected.token_ids
    for token, other in zip(outcome.tokens, expected.tokens, strict=True):
        assert token.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert outcome.prefill_done is not None
    return outcome.prefill_done


@pytest.mark.parametrize("transport", ["memory", "tcp", "shm"])
def test_the_blocks_of_an_answer_are_pulled_and_not_computed_and_the_text_is_the_same(
    checkpoint: Path, cache: Path, expected: Outcome, transport: str
) -> None:
    with WorkerPair(checkpoint, cache, transport=transport) as pair:
        prompt = second_turn(pair)
        before = computed(pair)
        outcome = pair.run(prompt, greedy(8), source_tokens=ON_DECODE)
        pair.wait_at_rest()
        assert computed(pair) - before == len(prompt) - ON_DECODE
    done = assert_same(outcome, expected)
    assert done.pulled_tokens == ON_DECODE - ON_PREFILL
    assert done.cached_tokens == ON_DECODE
    assert done.pull_ms > 0


def test_a_third_turn_finds_what_the_second_one_pulled(checkpoint: Path, cache: Path) -> None:
    with WorkerPair(checkpoint, cache) as pair:
        prompt = second_turn(pair)
        pair.run(prompt, greedy(8), source_tokens=ON_DECODE)
        again = pair.run([*prompt[:ON_DECODE], 9, 9], greedy(2), source_tokens=ON_DECODE)
    assert again.prefill_done is not None
    assert again.prefill_done.cached_tokens == ON_DECODE
    assert again.prefill_done.pulled_tokens == 0


def test_blocks_evicted_on_decode_meanwhile_are_computed(checkpoint: Path, cache: Path, expected: Outcome) -> None:
    with WorkerPair(checkpoint, cache, num_blocks=9) as pair:
        prompt = second_turn(pair)  # 50 tokens: seven blocks, and one to decode into
        for seed in range(4):  # others push the chat out of decode's cache
            pair.run([60 + seed] * 33, greedy(20), local_prefill=True)
        request = begin(pair, prompt)
        outcome = request.wait()
    assert request.pull is not None, "prefill did not know"
    assert assert_same(outcome, expected).pulled_tokens == 0


@pytest.mark.parametrize("transport", ["memory", "tcp", "shm"])
@pytest.mark.parametrize(
    "faults",
    [FaultPlan(corrupt_at_post=1), FaultPlan(skip_block=3), FaultPlan(swap_blocks=(2, 4)), FaultPlan(fail_at_post=1)],
    ids=["corrupt", "skip", "swap", "fail"],
)
def test_a_mutated_pull_is_refused_and_its_tokens_are_computed(
    checkpoint: Path, cache: Path, expected: Outcome, transport: str, faults: FaultPlan
) -> None:
    with WorkerPair(checkpoint, cache, transport=transport, pull_faults=faults) as pair:
        outcome = pair.run(second_turn(pair), greedy(8), source_tokens=ON_DECODE)
    assert assert_same(outcome, expected).pulled_tokens == 0


def test_a_source_that_is_never_told_costs_the_request_time_alone(
    checkpoint: Path, cache: Path, expected: Outcome
) -> None:
    with WorkerPair(checkpoint, cache, pull_patience_s=0.2) as pair:
        prompt = second_turn(pair)
        pair.exports = False
        outcome = begin(pair, prompt).wait()
    assert assert_same(outcome, expected).pulled_tokens == 0


def test_a_source_that_dies_in_mid_pull_costs_the_request_time_alone(checkpoint: Path, cache: Path) -> None:
    with WorkerPair(checkpoint, cache, pull_faults=FaultPlan(bytes_per_second=2000)) as pair:
        prompt = second_turn(pair)
        before = computed(pair)
        pair.decode_gate.close()  # only the way to prefill is looked at here
        request = begin(pair, prompt)
        wait_for_pull(pair, request)
        pair.export_sender.close(10.0)
        pair.decode_gate.open()
        outcome = request.wait()
        pair.wait_at_rest()
        assert computed(pair) - before == len(prompt) - ON_PREFILL
    assert len(outcome.tokens) == 8


def test_a_tenants_blocks_are_not_sent_for_another_tenants_prompt(checkpoint: Path, cache: Path) -> None:
    with WorkerPair(checkpoint, cache) as pair:
        prompt = second_turn(pair, salt=b"one")
        before = computed(pair)
        request = begin(pair, prompt)
        outcome = request.wait()
        pair.wait_at_rest()
        assert request.pull is not None
        assert computed(pair) - before == len(prompt)
    assert outcome.prefill_done is not None
    assert outcome.prefill_done.pulled_tokens == 0


def test_blocks_sent_under_a_wrong_salt_are_not_used(checkpoint: Path, cache: Path) -> None:
    """Whatever a router mixes up, and however well the bytes verify."""
    with WorkerPair(checkpoint, cache) as pair:
        prompt = second_turn(pair, salt=b"one")
        pair.exports = False
        request = begin(pair, prompt)
        wait_for_pull(pair, request)
        assert request.pull is not None
        pair.export(request, request.pull, salt=b"one")
        outcome = request.wait()
    assert outcome.prefill_done is not None
    assert outcome.prefill_done.pulled_tokens == 0


def test_a_cancel_in_mid_pull_leaves_nothing_behind(checkpoint: Path, cache: Path) -> None:
    with WorkerPair(checkpoint, cache, pull_faults=FaultPlan(bytes_per_second=20_000)) as pair:
        prompt = second_turn(pair)
        request = begin(pair, prompt)
        wait_for_pull(pair, request)
        pair.cancel(request)
        assert len(pair.run(prompt, greedy(3)).tokens) == 3


def test_a_deadline_in_mid_pull_is_kept(checkpoint: Path, cache: Path) -> None:
    with WorkerPair(checkpoint, cache) as pair:
        prompt = second_turn(pair)
        pair.exports = False
        pair.prefill_gate.close()
        outcome = begin(pair, prompt, deadline_s=0.5).wait()
        pair.prefill_gate.open()
    assert outcome.prefill_error is not None
    assert outcome.prefill_error.code == ErrorCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("seed", range(3))
def test_a_storm_of_chats_pulls_and_cancels_keeps_every_text_and_every_block(
    checkpoint: Path, cache: Path, seed: int
) -> None:
    rng = random.Random(seed)
    texts: dict[tuple[int, ...], list[int]] = {}
    with WorkerPair(checkpoint, cache, num_blocks=26, pull_faults=FaultPlan(corrupt_at_post=3)) as pair:
        chats = [[5 + chat] * rng.randrange(4, 20) for chat in range(3)]
        for _ in range(14):
            number = rng.randrange(len(chats))
            prompt = chats[number]
            request = pair.admit(prompt, greedy(rng.randrange(1, 12)))
            ticket = request.ticket()
            if ticket is None:
                continue
            pair.prefill_into(request, ticket, source_tokens=len(prompt) if rng.random() < 0.8 else None)
            if rng.random() < 0.25:
                pair.cancel(request)
                continue
            outcome = request.wait()
            if outcome.decode_error is None:
                texts[tuple(prompt)] = outcome.token_ids
                chats[number] = [*prompt, *outcome.token_ids, 3]
    with WorkerPair(checkpoint, cache, num_blocks=26) as pair:
        for prompt, text in texts.items():
            solo = pair.run(list(prompt), greedy(len(text)), local_prefill=True)
            assert solo.token_ids == text
