import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sequence import FinishReason, SamplingParams, Sequence, SequenceStatus, TokenSample
from kv_cache.block_hash import BlockHasher, hash_blocks
from kv_cache.layout import KVDtype
from kvferry_rpc import common_pb2

EOS = 2


def make(sampling: SamplingParams, *, tokens: int = 5, output: int = 0, max_context_tokens: int = 100) -> Sequence:
    return Sequence(
        "a",
        range(10, 10 + tokens),
        sampling,
        num_output_tokens=output,
        eos_token_ids=frozenset({EOS}),
        max_context_tokens=max_context_tokens,
    )


def test_tokens_of_an_earlier_attempt_are_output() -> None:
    seq = make(SamplingParams(max_tokens=4), tokens=5, output=2)
    assert seq.prompt_token_ids == (10, 11, 12)
    assert seq.output_token_ids == [13, 14]
    assert (seq.num_prompt_tokens, seq.num_output_tokens, seq.num_arrival_tokens) == (3, 2, 5)
    assert seq.append_token(TokenSample(7)) is None
    assert seq.append_token(TokenSample(8)) is FinishReason.LENGTH
    assert seq.token_ids == [10, 11, 12, 13, 14, 7, 8]
    assert [sample.token_id for sample in seq.samples] == [7, 8]


@pytest.mark.parametrize("output", [5, 6, -1])
def test_output_must_leave_a_prompt(output: int) -> None:
    with pytest.raises(ValueError, match="leave no prompt"):
        make(SamplingParams(max_tokens=4), tokens=5, output=output)


def test_end_of_text_stops_unless_it_is_ignored() -> None:
    assert make(SamplingParams(max_tokens=4)).append_token(TokenSample(EOS)) is FinishReason.STOP
    assert make(SamplingParams(max_tokens=4, ignore_eos=True)).append_token(TokenSample(EOS)) is None


def test_a_stop_token_stops_even_when_end_of_text_is_ignored() -> None:
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, stop_token_ids=frozenset({9}))
    assert make(sampling).append_token(TokenSample(9)) is FinishReason.STOP


def test_nothing_stops_before_min_tokens() -> None:
    seq = make(SamplingParams(max_tokens=5, min_tokens=3, stop_token_ids=frozenset({9})))
    assert [seq.append_token(TokenSample(token)) for token in (EOS, 9)] == [None, None]
    assert seq.append_token(TokenSample(9)) is FinishReason.STOP


def test_earlier_output_counts_for_min_tokens() -> None:
    seq = make(SamplingParams(max_tokens=5, min_tokens=3), tokens=5, output=2)
    assert seq.append_token(TokenSample(EOS)) is FinishReason.STOP


def test_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    assert make(SamplingParams(max_tokens=1)).append_token(TokenSample(EOS)) is FinishReason.STOP
    assert make(SamplingParams(max_tokens=1)).append_token(TokenSample(5)) is FinishReason.LENGTH


def test_a_full_context_ends_by_length() -> None:
    seq = make(SamplingParams(max_tokens=50), tokens=5, max_context_tokens=7)
    assert seq.max_total_tokens == 7
    assert [seq.append_token(TokenSample(5)) for _ in range(2)] == [None, FinishReason.LENGTH]


def test_an_ending_is_told_before_the_token_is_appended() -> None:
    seq = make(SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=frozenset({9})), tokens=5, output=1)
    assert [seq.ending(9, count) for count in (1, 2, 4)] == [None, FinishReason.STOP, FinishReason.STOP]
    assert [seq.ending(5, count) for count in (2, 3, 4)] == [None, None, FinishReason.LENGTH]
    assert seq.num_output_tokens == 1


def test_a_constraint_is_advanced_with_each_token_appended() -> None:
    class Listening:
        def __init__(self) -> None:
            self.heard: list[int] = []

        def allowed(self) -> None:
            return None

        def advance(self, token_id: int) -> None:
            self.heard.append(token_id)

        def rewind(self, num_tokens: int) -> None:
            raise AssertionError("nothing was only tried")

    constraint = Listening()
    seq = Sequence("a", [1, 2, 3], SamplingParams(max_tokens=4), max_context_tokens=9, constraint=constraint)
    for token in (7, 8):
        seq.append_token(TokenSample(token))
    assert constraint.heard == [7, 8]


ALLOWED = {
    ("WAITING", "RECEIVING"),
    ("WAITING", "RUNNING"),
    ("WAITING", "FINISHED"),
    ("RECEIVING", "RUNNING"),
    ("RECEIVING", "FINISHED"),
    ("RUNNING", "PREEMPTED"),
    ("RUNNING", "FINISHED"),
    ("PREEMPTED", "RUNNING"),
    ("PREEMPTED", "FINISHED"),
}


@pytest.mark.parametrize("source", SequenceStatus)
@pytest.mark.parametrize("target", SequenceStatus)
def test_only_the_transitions_of_the_table_are_allowed(source: SequenceStatus, target: SequenceStatus) -> None:
    seq = make(SamplingParams(max_tokens=1))
    seq.status = source
    if (source.name, target.name) in ALLOWED:
        seq.move_to(target)
        assert seq.status is target
    else:
        with pytest.raises(ValueError, match="not allowed"):
            seq.move_to(target)
        assert seq.status is source


def test_a_terminal_state_never_changes() -> None:
    seq = make(SamplingParams(max_tokens=1))
    seq.finish(FinishReason.CANCELLED)
    with pytest.raises(ValueError, match="not allowed"):
        seq.finish(FinishReason.STOP)
    assert seq.finish_reason is FinishReason.CANCELLED


def test_what_a_preemption_makes_compute_again_is_counted_apart() -> None:
    seq = make(SamplingParams(max_tokens=50), tokens=20)
    seq.start_computing(8)
    seq.advance(7)
    assert (seq.arrival_tokens_computed, seq.preempted_tokens) == (7, 0)
    seq.lose_blocks()
    seq.start_computing(8)
    seq.advance(5)
    assert (seq.arrival_tokens_computed, seq.preempted_tokens) == (7, 5)
    seq.advance(7)  # two of them again, five for the first time
    assert (seq.num_computed_tokens, seq.arrival_tokens_computed, seq.preempted_tokens) == (20, 12, 7)
    seq.append_token(TokenSample(5))
    seq.advance(1)  # an output token is neither
    assert (seq.arrival_tokens_computed, seq.preempted_tokens) == (12, 7)


def test_received_tokens_that_are_computed_after_a_preemption_are_preempted_tokens() -> None:
    seq = make(SamplingParams(max_tokens=50), tokens=20)
    seq.start_computing(20)
    seq.append_token(TokenSample(5))
    seq.lose_blocks()
    seq.start_computing(16)
    seq.advance(5)
    assert (seq.arrival_tokens_computed, seq.preempted_tokens) == (0, 4)


@pytest.mark.parametrize("step", [0, -1, 6])
def test_advancing_by_nothing_or_past_the_end_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match="cannot advance"):
        make(SamplingParams(max_tokens=1), tokens=5).advance(step)


@given(st.integers(1, 40), st.integers(0, 40))
def test_growing_hashes_equal_hashes_of_the_whole(prompt: int, output: int) -> None:
    hasher = BlockHasher("m", "r", 8, KVDtype.FP32)
    seq = Sequence("a", range(prompt), SamplingParams(max_tokens=99), max_context_tokens=99, cache_salt=b"tenant")
    for token in range(output):
        seq.extend_hashes(hasher)
        seq.append_token(TokenSample(token))
    seq.extend_hashes(hasher)
    assert seq.block_hashes == hash_blocks(hasher.root(b"tenant"), seq.token_ids, 8)


def test_absent_fields_of_the_message_take_their_defaults() -> None:
    assert SamplingParams.from_proto(common_pb2.SamplingParams(max_tokens=3)) == SamplingParams(max_tokens=3)


def test_every_field_of_the_message_is_taken_over() -> None:
    message = common_pb2.SamplingParams(
        max_tokens=3,
        min_tokens=1,
        temperature=0.0,
        top_k=5,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias=[common_pb2.LogitBias(token_id=4, bias=-2.0)],
        num_logprobs=0,
        prompt_logprobs=2,
        stop_token_ids=[7, 8],
        ignore_eos=True,
        seed=2**63 + 1,
    )
    assert SamplingParams.from_proto(message) == SamplingParams(
        3, 1, 0.0, 5, 0.5, 0.25, 1.5, -0.5, 0.75, ((4, -2.0),), 0, 2, frozenset({7, 8}), True, 2**63 + 1
    )
