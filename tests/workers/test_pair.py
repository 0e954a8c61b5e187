"""A prefill and a decode worker together: same text as `transformers`, and proof that a wrong block is never used.

The models are seeded random checkpoints, and log probabilities are compared as well as tokens: a trained model may
hardly look at the middle of its context, so its text alone would prove little.
"""

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from kv_transfer.faults import FaultPlan
from kvferry_rpc.common_pb2 import ErrorCode, SamplingParams
from tests.support.pair_checks import TOKENS, TOLERANCE, greedy, largest_difference
from tests.support.worker_pair import WorkerPair

BLOCK = 8
CHUNK = 16
# Attention does not care about the order of full blocks (positions are inside K), so the swap takes the last, partly
# filled one: its empty slots end up in the middle of the context.
MUTATIONS = {
    "one byte corrupted": FaultPlan(corrupt_at_post=1),
    "one block skipped": FaultPlan(skip_block=1),
    "two blocks swapped": FaultPlan(swap_blocks=(0, 5)),
}


@pytest.mark.parametrize("transport", ["memory", "tcp", "shm"])
def test_prompts_of_every_length_around_a_block_and_a_chunk_have_the_log_probabilities_of_transformers(
    model: PreTrainedModel, checkpoint: Path, cache: Path, transport: str
) -> None:
    with WorkerPair(checkpoint, cache, transport=transport, token_budget=CHUNK) as pair:
        for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7):
            prompt = TOKENS[:length]
            outcome = pair.run(prompt, greedy())
            assert largest_difference(model, prompt, outcome) < TOLERANCE
            assert outcome.first == outcome.tokens[0]
            assert [token.index for token in outcome.tokens] == list(range(10))
            assert outcome.prefill_done is not None
            assert outcome.decode_done is not None
            assert outcome.decode_done.checksum_verified
            assert outcome.decode_done.checksum == outcome.prefill_done.checksum
            assert outcome.decode_done.tokens_recomputed == 0
            assert outcome.prefill_done.transport == transport
            assert outcome.verified is not None
            assert outcome.verified.checksum_verified
            assert outcome.verified.checksum == outcome.prefill_done.checksum
            assert outcome.verified.transport == transport
            assert outcome.verified.commit_ms == outcome.decode_done.commit_ms > 0


def test_the_same_prompt_again_moves_at_most_one_block(model: PreTrainedModel, checkpoint: Path, cache: Path) -> None:
    prompt = TOKENS[:45]
    with WorkerPair(checkpoint, cache) as pair:
        first, second = pair.run(prompt, greedy()), pair.run(prompt, greedy())
    assert first.prefill_done is not None
    assert second.prefill_done is not None
    assert second.decode_done is not None
    assert first.prefill_done.blocks_sent == 6
    assert second.prefill_done.blocks_sent == 1
    assert second.prefill_done.cached_tokens == second.decode_done.cached_tokens == 40
    assert second.token_ids == first.token_ids
    assert largest_difference(model, prompt, second) < TOLERANCE


def test_every_length_of_prefix_that_decode_has_gives_the_same_text(
    model: PreTrainedModel, checkpoint: Path, cache: Path
) -> None:
    for shared in range(1, 6):
        with WorkerPair(checkpoint, cache) as pair:
            pair.run([*TOKENS[: shared * BLOCK], 5], greedy(1))
            prompt = TOKENS[:45]
            outcome = pair.run(prompt, greedy())
            assert outcome.prefill_done is not None
            assert outcome.prefill_done.blocks_sent == 6 - shared
            assert largest_difference(model, prompt, outcome) < TOLERANCE


def test_without_any_transfer_the_text_is_the_same(model: PreTrainedModel, checkpoint: Path, cache: Path) -> None:
    with WorkerPair(checkpoint, cache) as pair:
        outcome = pair.run(TOKENS[:45], greedy(), local_prefill=True)
    assert largest_difference(model, TOKENS[:45], outcome) < TOLERANCE
    assert outcome.decode_done is not None
    assert not outcome.decode_done.checksum_verified


@pytest.mark.parametrize("transport", ["memory", "tcp", "shm"])
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutated_hand_off_is_refused_and_never_an_answer(
    checkpoint: Path, cache: Path, transport: str, name: str
) -> None:
    with WorkerPair(checkpoint, cache, transport=transport, faults=MUTATIONS[name]) as pair:
        outcome = pair.run(TOKENS[:45], greedy())
    assert outcome.decode_error is not None
    assert outcome.decode_error.code == ErrorCode.HANDOFF_FAILED
    assert outcome.prefill_error is not None
    assert outcome.prefill_error.code == ErrorCode.HANDOFF_FAILED
    assert outcome.tokens == []


@pytest.mark.parametrize("transport", ["memory", "tcp", "shm"])
@pytest.mark.parametrize("name", MUTATIONS)
def test_with_checksums_off_the_same_mutation_turns_the_equality_test_red(
    model: PreTrainedModel, checkpoint: Path, cache: Path, transport: str, name: str
) -> None:
    mutations = {"transport": transport, "faults": MUTATIONS[name], "verify_checksums": False}
    with WorkerPair(checkpoint, cache, **mutations) as pair:
        outcome = pair.run(TOKENS[:45], greedy())
    assert len(outcome.tokens) == 10
    assert largest_difference(model, TOKENS[:45], outcome) > TOLERANCE


def test_with_checksums_off_full_blocks_swapped_for_one_request_poison_the_next(
    model: PreTrainedModel, checkpoint: Path, cache: Path
) -> None:
    swapped = {"faults": FaultPlan(swap_blocks=(0, 2)), "token_budget": 64}  # one chunk: both are there to be swapped
    with WorkerPair(checkpoint, cache, verify_checksums=False, **swapped) as pair:
        harmless = pair.run(TOKENS[:45], greedy())
        prompt = [*TOKENS[:BLOCK], *reversed(TOKENS[BLOCK:30])]
        poisoned = pair.run(prompt, greedy())
    assert largest_difference(model, TOKENS[:45], harmless) < TOLERANCE
    assert largest_difference(model, prompt, poisoned) > TOLERANCE


def test_full_blocks_swapped_are_refused_although_their_own_request_would_not_notice(
    checkpoint: Path, cache: Path
) -> None:
    with WorkerPair(checkpoint, cache, faults=FaultPlan(swap_blocks=(0, 2))) as pair:
        outcome = pair.run(TOKENS[:45], greedy())
    assert outcome.decode_error is not None
    assert outcome.decode_error.code == ErrorCode.HANDOFF_FAILED
    assert outcome.tokens == []


def test_seeded_sampling_is_the_same_with_and_without_a_hand_off(checkpoint: Path, cache: Path) -> None:
    sampling = SamplingParams(max_tokens=24, temperature=1.0, seed=99, ignore_eos=True)
    with WorkerPair(checkpoint, cache) as pair:
        remote = pair.run(TOKENS[:21], sampling)
    with WorkerPair(checkpoint, cache) as pair:
        local = pair.run(TOKENS[:21], sampling, local_prefill=True)
    assert remote.token_ids == local.token_ids


def test_an_answer_continued_by_another_attempt_is_the_answer_in_one_go(checkpoint: Path, cache: Path) -> None:
    sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=7, presence_penalty=0.5, ignore_eos=True)
    with WorkerPair(checkpoint, cache) as pair:
        whole = pair.run(TOKENS[:21], sampling)
        begun = whole.token_ids[:8]
        rest = pair.run([*TOKENS[:21], *begun], sampling, num_output_tokens=len(begun))
    assert begun + rest.token_ids == whole.token_ids
    assert [token.index for token in rest.tokens] == list(range(8, 20))


def test_with_next_to_nothing_allowed_to_wait_for_the_link_every_prompt_is_still_sent_whole(
    model: PreTrainedModel, checkpoint: Path, cache: Path
) -> None:
    with WorkerPair(checkpoint, cache, token_budget=8, max_backlog_bytes=1) as pair:
        requests = []
        for seed in range(4):
            prompt = [seed + 3, *TOKENS[:45]]
            request = pair.admit(prompt, greedy(3))
            ticket = request.ticket()
            assert ticket is not None
            pair.prefill_into(request, ticket)
            requests.append((prompt, request))
        outcomes = [(prompt, request.wait()) for prompt, request in requests]
    for prompt, outcome in outcomes:
        assert largest_difference(model, prompt, outcome) < TOLERANCE
