"""Two engines, hand-offs between them, random arrivals, cancels and late writers, on pools that are far too small."""

from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from engine.engine import SequenceOutput
from engine.sequence import FinishReason, Sequence, SequenceStatus, TokenSample
from tests.support.toy_engine import ToyEngine, assert_greedy_text, sequence, transfer
from tests.support.toy_model import VOCAB_SIZE, ToyModel

MODEL = ToyModel()
BASE = [(7 * i * i + 3 * i + 1) % VOCAB_SIZE for i in range(48)]
BLOCK = 8

prompts = st.tuples(
    st.integers(0, 44) | st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 4 * BLOCK]),
    st.lists(st.integers(1, VOCAB_SIZE - 1), max_size=3),
).map(lambda parts: [*BASE[: parts[0]], *parts[1]] or [1])


@dataclass
class HandOff:
    """One sequence on its way from prefill to decode, and its twin on the prefill side."""

    seq: Sequence
    twin: Sequence
    cached_blocks: int
    table: tuple[int, ...]
    first: TokenSample | None = None
    source_quarantine: int | None = None


class TwoEngines(RuleBasedStateMachine):
    """Whatever happens: the text is the model's, blocks are whole, and in the end all of them are back."""

    def __init__(self) -> None:
        super().__init__()
        self.prefill = ToyEngine(MODEL, num_blocks=10, token_budget=11, max_num_seqs=3, prefill_only=True)
        self.decode = ToyEngine(MODEL, num_blocks=9, token_budget=6, max_num_seqs=4, speculative_tokens=3)
        self.hand_offs: list[HandOff] = []
        self.quarantines: list[tuple[int, list[int]]] = []
        self.seqs: list[Sequence] = []
        self.reported: dict[str, FinishReason] = {}

    @rule(prompt=prompts, max_tokens=st.integers(1, 18))
    def add_local(self, prompt: list[int], max_tokens: int) -> None:
        seq = sequence(f"local{len(self.seqs)}", prompt, max_tokens=max_tokens)
        self.decode.engine.add(seq)
        self.seqs.append(seq)

    @rule(prompt=prompts, max_tokens=st.integers(1, 18))
    def begin_hand_off(self, prompt: list[int], max_tokens: int) -> None:
        seq = sequence(f"remote{len(self.seqs)}", prompt, max_tokens=max_tokens)
        allocation = self.decode.engine.reserve(seq)
        if allocation is not None:
            twin = sequence(seq.seq_id, prompt, max_tokens=max_tokens)
            self.prefill.engine.add(twin)
            self.hand_offs.append(HandOff(seq, twin, *allocation))
            self.seqs.append(seq)

    @rule(count=st.integers(1, 6))
    def step_decode(self, count: int) -> None:
        for _ in range(count):
            self.report(self.decode.step())

    @rule(count=st.integers(1, 4))
    def step_prefill(self, count: int) -> None:
        for _ in range(count):
            for output in self.prefill.step():
                hand_off = next(h for h in self.hand_offs if h.twin is output.seq)
                (hand_off.first,) = output.samples
                hand_off.source_quarantine = self.prefill.engine.quarantine(output.seq.seq_id)

    @precondition(lambda self: self.hand_offs)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        self.finish_hand_off(data.draw(st.sampled_from(self.hand_offs)))

    def finish_hand_off(self, hand_off: HandOff) -> None:
        if hand_off.first is None or hand_off.source_quarantine is None:
            return
        self.hand_offs.remove(hand_off)
        if hand_off.seq.status is SequenceStatus.RECEIVING:
            blocks = slice(hand_off.cached_blocks, -(-hand_off.seq.num_tokens // BLOCK))
            source = self.prefill.blocks._quarantines[hand_off.source_quarantine]
            transfer(self.prefill.cache, self.decode.cache, source[blocks], hand_off.table[blocks])
        self.prefill.engine.release_quarantine(hand_off.source_quarantine)
        output = self.decode.engine.admit_received(hand_off.seq, hand_off.seq.num_tokens, hand_off.first)
        self.report([output] if output else [])

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.seqs))
        if seq.status is SequenceStatus.FINISHED:
            return
        hand_off = next((h for h in self.hand_offs if h.seq is seq), None)
        quarantine_id = self.decode.engine.cancel(seq.seq_id, quarantine=hand_off is not None)
        if hand_off is not None:
            assert quarantine_id is not None
            self.quarantines.append((quarantine_id, list(hand_off.table[hand_off.cached_blocks :])))
            if hand_off.source_quarantine is None:
                self.hand_offs.remove(hand_off)
                self.prefill.engine.cancel(seq.seq_id)

    @precondition(lambda self: self.quarantines)
    @rule()
    def late_writer_then_fence(self) -> None:
        quarantine_id, writable = self.quarantines.pop(0)
        self.decode.poison(writable)
        self.decode.engine.release_quarantine(quarantine_id)

    def report(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            assert output.seq.seq_id not in self.reported, "reported after its end"
            if output.finish_reason is not None:
                self.reported[output.seq.seq_id] = output.finish_reason

    def teardown(self) -> None:
        for _ in range(400):
            if self.decode.engine.is_idle and self.prefill.engine.is_idle:
                break
            self.step_prefill(1)
            for hand_off in list(self.hand_offs):
                self.finish_hand_off(hand_off)
            while self.quarantines:
                self.late_writer_then_fence()
            self.step_decode(1)
        for toy in (self.prefill, self.decode):
            assert toy.engine.is_idle, "stuck"
            toy.engine.check_integrity()
        for seq in self.seqs:
            assert seq.status is SequenceStatus.FINISHED
            assert self.reported.get(seq.seq_id, FinishReason.CANCELLED) is seq.finish_reason
            if seq.samples:
                assert_greedy_text(MODEL, seq)
            if seq.finish_reason is FinishReason.LENGTH:
                assert seq.num_output_tokens == seq.sampling.max_tokens
            if seq.seq_id.startswith("remote"):
                assert seq.arrival_tokens_computed == 0


TwoEngines.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
test_any_order_of_events_gives_the_models_text_and_all_blocks_back = TwoEngines.TestCase
