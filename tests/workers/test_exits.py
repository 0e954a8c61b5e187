"""Every way in which a request can end early, on a real pair of workers: each leaves both pools whole."""

import random
from pathlib import Path

import pytest

from kv_transfer.faults import FaultPlan
from kvferry_rpc.common_pb2 import ErrorCode, SamplingParams
from prefill_worker.worker import Cancel
from runtime.clock import ManualClock
from tests.support.tiny_checkpoints import make_model, save_checkpoint
from tests.support.worker_pair import Request, WorkerPair

SEED = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), make_model("llama_gqa"))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 96) for _ in range(length)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def test_a_cancel_between_ticket_and_prefill_frees_the_reservation(checkpoint: Path, cache: Path) -> None:
    with WorkerPair(checkpoint, cache) as pair:
        request = pair.admit(prompt_of(40), greedy(4))
        assert request.ticket() is not None
        assert pair.decode.snapshot.view.load.num_receiving in (0, 1)
        pair.cancel(request)


def test_a_cancel_while_the_prompt_is_computed_stops_both_workers(checkpoint: Path, cache: Path) -> None:
    with WorkerPair(checkpoint, cache, num_blocks=64, token_budget=8) as pair:
        pair.prefill_gate.close(after_steps=2)
        request = pair.admit(prompt_of(200), greedy(4))
        ticket = request.ticket()
        assert ticket is not None
        pair.prefill_into(request, ticket)
        pair.wait_until(lambda: pair.prefill.snapshot.view.load.prompt_tokens_computed == 16)
        pair.cancel(request)
        pair.prefill_gate.open()
        short = pair.run(prompt_of(9, seed=2), greedy(3))
        assert len(short.tokens) == 3
    assert pair.prefill_engine.load().prompt_tokens_computed == 16 + 9


def test_a_cancel_while_decoding_ends_the_sequence(checkpoint: Path, cache: Path) -> None:
    with WorkerPair(checkpoint, cache) as pair:
        pair.decode_gate.close(after_steps=5)
        request = pair.admit(prompt_of(20), greedy(200))
        ticket = request.ticket()
        assert ticket is not None
        pair.prefill_into(request, ticket)
        pair.wait_until(lambda: pair.decode.snapshot.steps == 5)
        tokens_generated = pair.decode.snapshot.view.load.tokens_generated
        pair.cancel(request)
        pair.decode_gate.open()
    assert pair.decode_engine.load().tokens_generated == tokens_generated


def test_no_room_is_said_at_once_and_leaves_nothing_behind(checkpoint: Path, cache: Path) -> None:
    with WorkerPair(checkpoint, cache, num_blocks=8) as pair:
        first = pair.admit(prompt_of(40), greedy(4))
        assert first.ticket() is not None
        second = pair.admit(prompt_of(40, seed=1), greedy(4))
        assert second.ticket() is None
        assert second.outcome.decode_error is not None
        assert second.outcome.decode_error.code == ErrorCode.OVERLOADED
        assert second.outcome.decode_error.retry_after_ms > 0
        pair.cancel(first)


def test_a_ticket_that_nobody_uses_runs_out(checkpoint: Path, cache: Path) -> None:
    with WorkerPair(checkpoint, cache, lease_s=0.2) as pair:
        request = pair.admit(prompt_of(40), greedy(4))
        assert request.ticket() is not None
        outcome = request.wait(prefill=False)
        assert outcome.decode_error is not None
        assert outcome.decode_error.code == ErrorCode.HANDOFF_FAILED


def test_a_prompt_that_waits_longer_than_the_lease_keeps_its_place(checkpoint: Path, cache: Path) -> None:
    clock, lease_s = ManualClock(), 3.0
    with WorkerPair(checkpoint, cache, lease_s=lease_s, num_blocks=128, max_num_seqs=4, clock=clock) as pair:
        pair.prefill_gate.close()
        requests = [pair.admit(prompt_of(230, seed), greedy(1)) for seed in range(4)]
        for request in requests:
            ticket = request.ticket()
            assert ticket is not None
            pair.prefill_into(request, ticket)
        pair.wait_until(lambda: pair.receiver.snapshot().handoffs.transferring == 4)
        for _ in range(5):
            clock.advance(lease_s / 2)
            pair.sender.sweep(clock.now())
            pair.wait_until(lambda: pair.receiver._next_expiry() == clock.now() + lease_s)  # all were renewed
        pair.prefill_gate.open()
        outcomes = [request.wait() for request in requests]
    assert all(outcome.decode_done is not None for outcome in outcomes)
    waits = [outcome.prefill_done.wait_ms for outcome in outcomes if outcome.prefill_done]
    assert waits == [2.5 * lease_s * 1e3] * 4


@pytest.mark.parametrize("change", ["secret", "incarnation", "attempt"])
def test_a_forged_ticket_is_refused_and_the_real_one_still_works(checkpoint: Path, cache: Path, change: str) -> None:
    with WorkerPair(checkpoint, cache) as pair:
        request = pair.admit(prompt_of(20), greedy(3))
        ticket = request.ticket()
        assert ticket is not None
        forged = type(ticket).FromString(ticket.SerializeToString())
        if change == "attempt":
            forged.attempt += 1
        else:
            setattr(forged, change, b"x" * 16)
        thief = Request(request.message, request.session_id)
        pair.prefill_into(thief, forged)
        refused = thief.wait_prefill()
        assert refused.prefill_error is not None
        assert refused.prefill_error.code == ErrorCode.HANDOFF_FAILED
        pair.prefill_into(request, ticket)
        assert len(request.wait().tokens) == 3


def test_a_ticket_for_another_prompt_is_refused_at_the_door(checkpoint: Path, cache: Path) -> None:
    with WorkerPair(checkpoint, cache) as pair:
        request = pair.admit(prompt_of(20), greedy(3))
        ticket = request.ticket()
        assert ticket is not None
        other = pair.admit(prompt_of(40), greedy(3))
        assert other.ticket() is not None
        pair.prefill_into(other, ticket)
        refused = other.wait_prefill()
        assert refused.prefill_error is not None
        assert refused.prefill_error.code == ErrorCode.INVALID_REQUEST
        pair.cancel(request)
        pair.cancel(other)


def test_a_deadline_ends_a_request_whose_kv_never_comes_on_the_decode_worker(checkpoint: Path, cache: Path) -> None:
    with WorkerPair(checkpoint, cache) as pair:
        request = pair.admit(prompt_of(40), greedy(4), deadline_s=0.05)
        assert request.ticket() is not None
        outcome = request.wait(prefill=False)
    assert outcome.decode_error is not None
    assert outcome.decode_error.code == ErrorCode.DEADLINE_EXCEEDED


def test_a_deadline_ends_a_request_that_is_being_decoded(checkpoint: Path, cache: Path) -> None:
    clock = ManualClock()
    with WorkerPair(checkpoint, cache, clock=clock) as pair:
        pair.decode_gate.close(after_steps=5)
        request = pair.admit(prompt_of(20), greedy(200), deadline_s=5.0)
        ticket = request.ticket()
        assert ticket is not None
        pair.prefill_into(request, ticket)
        assert request.wait_prefill().prefill_done is not None
        pair.wait_until(lambda: pair.decode.snapshot.steps == 5)
        clock.advance(5.0)
        outcome = request.wait()
    assert outcome.decode_error is not None
    assert outcome.decode_error.code == ErrorCode.DEADLINE_EXCEEDED
    assert [token.index for token in outcome.tokens] == list(range(6))


@pytest.mark.parametrize("steps", [0, 2])
def test_a_deadline_ends_a_prompt_that_waits_or_is_being_computed_on_the_prefill_worker(
    checkpoint: Path, cache: Path, steps: int
) -> None:
    clock = ManualClock()
    with WorkerPair(checkpoint, cache, num_blocks=64, token_budget=8, clock=clock) as pair:
        pair.prefill_gate.close(after_steps=steps)
        request = pair.admit(prompt_of(200), greedy(4))
        ticket = request.ticket()
        assert ticket is not None
        pair.prefill_into(request, ticket, deadline_s=5.0)
        pair.wait_until(lambda: pair.prefill.snapshot.steps == steps)
        pair.wait_until(lambda: pair.receiver.snapshot().handoffs.transferring == 1)
        clock.advance(5.0)
        outcome = request.wait()  # the decode worker is told why; its own deadline is far away
    assert outcome.prefill_error is not None
    assert outcome.prefill_error.code == ErrorCode.DEADLINE_EXCEEDED
    assert outcome.decode_error is not None
    assert pair.prefill_engine.load().prompt_tokens_computed == 8 * steps


def test_preempted_sequences_of_a_small_pool_all_finish_with_their_solo_text(checkpoint: Path, cache: Path) -> None:
    prompts = [prompt_of(16, seed) for seed in range(4)]
    with WorkerPair(checkpoint, cache, num_blocks=12) as pair:
        solo = [pair.run(prompt, greedy(40)).token_ids for prompt in prompts]
    with WorkerPair(checkpoint, cache, num_blocks=12) as pair:
        pair.decode_gate.close()  # until all have arrived: their answers then grow side by side
        requests = []
        for prompt in prompts:
            request = pair.admit(prompt, greedy(40))
            ticket = request.ticket()
            if ticket is not None:
                pair.prefill_into(request, ticket)
                requests.append((prompt, request))
        pair.wait_until(lambda: pair.decode.snapshot.view.handoffs_committed == len(requests))
        pair.decode_gate.open()
        outcomes = [(prompt, request.wait()) for prompt, request in requests]
        preemptions = pair.decode.snapshot.view.load.preemptions
    assert len(outcomes) >= 2
    assert preemptions > 0
    for prompt, outcome in outcomes:
        assert outcome.token_ids == solo[prompts.index(prompt)]
        assert outcome.decode_done is not None
        assert outcome.decode_done.tokens_recomputed == 0
    assert any(outcome.decode_done and outcome.decode_done.preempted_tokens for _, outcome in outcomes)


@pytest.mark.parametrize("transport", ["memory", "tcp", "shm"])
def test_a_storm_of_cancels_at_random_moments_leaves_both_pools_whole(
    checkpoint: Path, cache: Path, transport: str
) -> None:
    rng = random.Random(SEED)
    with WorkerPair(checkpoint, cache, transport=transport, num_blocks=24) as pair:
        for number in range(80):
            request = pair.admit(prompt_of(rng.randrange(1, 60), rng.randrange(5)), greedy(rng.randrange(1, 12)))
            if rng.random() < 0.2:
                pair.cancel(request)
                continue
            ticket = request.ticket()
            if ticket is None:
                continue
            pair.prefill_into(request, ticket)
            if rng.random() < 0.6:
                for _ in range(rng.randrange(0, 20_000)):
                    pass
                pair.cancel(request)
            elif number % 3:
                request.wait()
        assert not pair.fatal


def test_the_request_after_a_cancelled_one_has_its_own_text(checkpoint: Path, cache: Path) -> None:
    """In the blocks that the cancelled one gave back, over the same link, round after round."""
    with WorkerPair(checkpoint, cache, num_blocks=16, token_budget=8) as pair:
        solo = [pair.run(prompt_of(30, seed), greedy(4), local_prefill=True).token_ids for seed in range(3)]
    with WorkerPair(checkpoint, cache, num_blocks=16, token_budget=8, transport="shm") as pair:
        for number in range(40):
            cancelled = pair.admit(prompt_of(50, seed=100 + number), greedy(4))
            ticket = cancelled.ticket()
            if ticket is not None:
                pair.prefill_into(cancelled, ticket)
            pair.cancel(cancelled)
            wanted = pair.run(prompt_of(30, seed=number % 3), greedy(4))
            if wanted.decode_error is None:  # otherwise the cancelled one still held the room
                assert wanted.token_ids == solo[number % 3]
            else:
                assert wanted.decode_error.code == ErrorCode.OVERLOADED


@pytest.mark.parametrize("transport", ["memory", "tcp", "shm"])
@pytest.mark.parametrize("post", [1, 2, 5])
def test_a_write_that_fails_ends_its_request_on_both_workers_and_no_other(
    checkpoint: Path, cache: Path, transport: str, post: int
) -> None:
    faults = FaultPlan(fail_at_post=post)
    with WorkerPair(checkpoint, cache, transport=transport, faults=faults, token_budget=8) as pair:
        # A writer that comes late takes a whole prompt in one write: as many prompts as writes are sure to reach it.
        outcomes = [pair.run(prompt_of(60, seed), greedy(3)) for seed in range(5)]
    failed = [outcome for outcome in outcomes if outcome.decode_error or outcome.prefill_error]
    assert len(failed) == 1
    assert failed[0].decode_error is not None
    assert failed[0].prefill_error is not None
    assert {failed[0].decode_error.code, failed[0].prefill_error.code} == {ErrorCode.HANDOFF_FAILED}
    assert failed[0].tokens == []


def test_a_ticket_used_for_two_calls_serves_the_first(checkpoint: Path, cache: Path) -> None:
    with WorkerPair(checkpoint, cache, token_budget=8) as pair:
        pair.prefill_gate.close()
        request = pair.admit(prompt_of(40), greedy(3))
        ticket = request.ticket()
        assert ticket is not None
        pair.prefill_into(request, ticket)
        again = Request(request.message, request.session_id)
        pair.prefill_into(again, ticket)
        assert again.submit is not None
        pair.prefill.notify(Cancel(again.submit))
        refused = again.wait_prefill()
        pair.prefill_gate.open()
        assert len(request.wait().tokens) == 3
        assert refused.prefill_error is not None
        assert refused.prefill_error.code == ErrorCode.INVALID_REQUEST
