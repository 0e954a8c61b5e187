"""What a conversation gains from the KV of its earlier turns: prompt tokens not computed, and time to the first token.

Sessions go on turn by turn on one engine; each prompt is everything said before and something new. What should be found
is worked out beside it, from token ids alone. Each turn is also served by an engine that keeps nothing.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.common.harness import BenchmarkError, Better, Options, Pair, Report, summarise
from bench.common.small_engines import (
    BLOCK_SIZE,
    add_model_flags,
    chosen_model,
    greedy,
    layout_of,
    run_to_end,
    small_engine,
    step,
)
from bench.common.text import excerpt, text_tokens
from engine.engine import Engine
from engine.models import load_model
from engine.ops.native_ops import best_cpu_ops
from engine.prepared_model import PreparedModel
from engine.scheduler import SchedulerConfig
from kv_cache.layout import KVDtype

_TOKEN_BUDGET = 256


@dataclass(frozen=True, slots=True)
class Plan:
    """Tokens of the first message, of each later one, and of an answer; and how many messages there are."""

    first_tokens: int
    later_tokens: int
    answer_tokens: int
    num_turns: int

    @property
    def most_tokens(self) -> int:
        """Of a session at its end."""
        return self.first_tokens + (self.num_turns - 1) * self.later_tokens + self.num_turns * self.answer_tokens


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt: its tokens, those found by the engine, those that should be, and seconds to the first token."""

    prompt_tokens: int
    saved_tokens: int
    known_tokens: int
    warm_s: float
    cold_s: float

    @property
    def hit(self) -> float:
        """The share of the prompt that should be found."""
        return self.known_tokens / self.prompt_tokens

    @property
    def speedup(self) -> Pair:
        """How many times sooner the first token came, and the ideal: the time of a prompt is that of its new tokens."""
        return Pair(self.cold_s / self.warm_s, 1 / (1 - self.hit))


@dataclass(slots=True)
class Memory:
    """All that was ever computed, in whole blocks, by its token ids: a cache without end, and without hashes."""

    block_size: int
    _known: set[tuple[int, ...]] = field(default_factory=set)

    def find(self, prompt: Sequence[int]) -> int:
        """Leading tokens of the prompt that were computed before. The last one is always computed."""
        found = 0
        while found + self.block_size < len(prompt) and tuple(prompt[: found + self.block_size]) in self._known:
            found += self.block_size
        return found

    def add(self, tokens: Sequence[int]) -> None:
        """The KV of all these tokens was computed."""
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            self._known.add(tuple(tokens[:end]))


class Sessions:
    """Two engines that answer the same prompts: one keeps what it has computed, the other does not."""

    def __init__(self, prepared: PreparedModel, plan: Plan, num_sessions: int) -> None:
        self._plan = plan
        self._text = text_tokens(prepared)
        model, layout = load_model(prepared, best_cpu_ops()), layout_of(prepared, KVDtype.FP32)
        config = SchedulerConfig(_TOKEN_BUDGET, max_num_seqs=8, max_waiting=8)
        room = plan.most_tokens + 4 * BLOCK_SIZE
        self._warm = small_engine(prepared, model, layout, (num_sessions + 1) * room, config)
        self._cold = small_engine(prepared, model, layout, 2 * room, config, prefix_caching=False)
        self._memory = Memory(BLOCK_SIZE)
        self._num_served = 0

    def warm_up(self) -> None:
        """One prompt that no session begins with, on both."""
        for engine in (self._warm, self._cold):
            run_to_end(engine, [greedy("warm-up", self._text[: self._plan.first_tokens][::-1], 2)])

    def session(self, start: int) -> list[Turn]:
        """A session whose messages are the text from `start` on. Raises BenchmarkError when answers differ."""
        plan, said, at = self._plan, list[int](), start
        turns = []
        for number in range(plan.num_turns):
            count = plan.later_tokens if number else plan.first_tokens
            said += excerpt(self._text, at, count)
            at += count
            turn, said = self._turn(said)
            turns.append(turn)
        return turns

    def _turn(self, prompt: list[int]) -> tuple[Turn, list[int]]:
        known = self._memory.find(prompt)
        computed = self._warm.load().prompt_tokens_computed
        warm_s, answer = self._serve(self._warm, prompt)
        saved = len(prompt) - (self._warm.load().prompt_tokens_computed - computed)
        cold_s, expected = self._serve(self._cold, prompt)
        if answer != expected:
            raise BenchmarkError(f"with its earlier turns kept, the answer was {answer}, without them {expected}")
        # The last token of an answer is never looked back at, so it is not computed.
        self._memory.add(prompt + answer[:-1])
        return Turn(len(prompt), saved, known, warm_s, cold_s), prompt + answer

    def _serve(self, engine: Engine, prompt: list[int]) -> tuple[float, list[int]]:
        """Seconds to the first token, and the whole answer."""
        self._num_served += 1
        seq = greedy(f"s{self._num_served}", prompt, self._plan.answer_tokens)
        began = time.perf_counter()
        engine.add(seq)
        while not seq.num_output_tokens:
            step(engine)
        took_s = time.perf_counter() - began
        run_to_end(engine, [])
        return took_s, seq.output_token_ids


def report_turns(name: str, sessions: Sequence[Sequence[Turn]], report: Report, seed: int) -> None:
    """Tokens saved, one pair a session; and for each turn but the first its time, one pair a session."""
    saved = [
        Pair(
            sum(turn.saved_tokens for turn in turns) / sum(turn.prompt_tokens for turn in turns),
            sum(turn.known_tokens for turn in turns) / sum(turn.prompt_tokens for turn in turns),
        )
        for turns in sessions
    ]
    metric = "prefill_tokens_saved_vs_hit_share"
    report.add(summarise(metric, name, "share", Better.HIGHER, "hit_share", saved, seed))
    for number, turns in enumerate(zip(*sessions, strict=True), 1):
        warm_ms, cold_ms = (
            1000 * statistics.median(seconds)
            for seconds in ([turn.warm_s for turn in turns], [turn.cold_s for turn in turns])
        )
        report.note(
            f"{name}, turn {number}: {turns[0].prompt_tokens} tokens, {turns[0].hit:.1%} found, first token after "
            f"{warm_ms:.1f} ms, without a cache {cold_ms:.1f} ms"
        )
        if number > 1:
            pairs = [turn.speedup for turn in turns]
            report.add(summarise("ttft_vs_ideal", f"{name}:turn{number}", "x", Better.HIGHER, "ideal", pairs, seed))


def plan_for(prepared: PreparedModel, options: Options) -> Plan:
    """As many turns as the length of the run allows, and the model's context."""
    plan = Plan(256, 64, 16, options.pick(2, 4, 8))
    return plan if plan.most_tokens <= prepared.shape.max_context_tokens else Plan(64, 24, 8, 2)


def main(argv: list[str] | None = None) -> None:
    """Run it. Raises BenchmarkError when an answer depends on what was kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_flags(parser)
    options, given = Options.parse(parser, argv)
    torch.set_num_threads(1)
    with Report(options) as report:
        prepared = chosen_model(given, report)
        num_sessions = options.num_pairs
        served = Sessions(prepared, plan_for(prepared, options), num_sessions)
        served.warm_up()
        # Coprime to common block sizes and far apart: no session says what another did.
        starts = [options.seed + 337 * number for number in range(num_sessions)]
        report_turns(prepared.name, [served.session(start) for start in starts], report, options.seed)


if __name__ == "__main__":
    main()
