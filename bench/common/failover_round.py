"""One round of the failover benchmark: hand-offs are under way, one side gets a signal, everything must come right.

1. Both ends are told of some hand-offs, which then run by a random schedule of their own.
2. At a random moment one side is killed or stopped. The survivor must end each hand-off within the deadline.
3. A stopped process is killed, or continued: then it must end its own, and what it still writes must do no harm.
4. A new hand-off must come through; then every content is looked at again, and every block must be free.
"""

import itertools
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.common.failover_cast import Cast, End
from bench.common.failover_messages import (
    BEGUN,
    DECODE,
    PREFILL,
    Audit,
    Audited,
    Go,
    Happened,
    Piece,
    Prepare,
    Prepared,
    Recheck,
    Rechecked,
    Reserve,
    Reserved,
)
from bench.common.harness import BenchmarkError

_SPANS_S = (0.05, 0.2, 0.5)
_MAX_SIZE_BITS = 7
_MAX_CHUNKS = 3
_PROOF_BLOCKS = 64
_SENT = (["Sent", "Drained"], ["Failed", "Drained"])
_RECEIVED = (["Committed"], ["Failed", "Fenced"])
_RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class Case:
    """Who gets which signal."""

    transport: str
    number: signal.Signals
    side: str

    @property
    def variant(self) -> str:
        return f"{self.transport}:{self.number.name}:{self.side}"


@dataclass(frozen=True, slots=True)
class Rules:
    """How many hand-offs a round has, of how many layers, and after how long an ending is overdue."""

    num_handoffs: int
    num_layers: int
    deadline_s: float


@dataclass(slots=True)
class Tally:
    """What came of a round. `wrong` and `hung` are sentences, one for each; `detected_s` one time for each hand-off."""

    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    leaked_blocks: int = 0
    detected_s: list[float] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.wrong and not self.hung and not self.leaked_blocks


@dataclass(slots=True)
class Story:
    """What is known of one hand-off: the events of each side, and when it was opened."""

    number: int
    sender: End
    receiver: End
    sent: list[Happened] = field(default_factory=list)
    received: list[Happened] = field(default_factory=list)
    begun_s: float = float("inf")

    def told_by(self, end: End) -> list[Happened]:
        return self.sent if end is self.sender else self.received

    def over(self, end: End) -> bool:
        """Whether this end has nothing left to say."""
        endings = _SENT if end is self.sender else _RECEIVED
        return [event.kind for event in self.told_by(end)] in list(endings)

    def decided(self, end: End) -> bool:
        """Whether this end knows how it went, though it may still have to wait until nobody touches the blocks."""
        return bool(self.told_by(end))

    def faults(self) -> Iterator[str]:
        """What must never be: events out of order or twice, other content, a receipt for what did not arrive."""
        for events, endings in ((self.sent, _SENT), (self.received, _RECEIVED)):
            kinds = [event.kind for event in events]
            if not any(ending[: len(kinds)] == kinds for ending in endings):
                yield f"hand-off {self.number} ended as {kinds}"
        if any(not event.right for event in self.received):
            yield f"hand-off {self.number} was committed with another content"
        if any(event.kind == "Sent" for event in self.sent) and any(event.kind == "Failed" for event in self.received):
            yield f"hand-off {self.number} was reported as sent and did not arrive"

    def __str__(self) -> str:
        kinds = [[f"{event.kind}({event.reason})" for event in events] for events in (self.sent, self.received)]
        return f"hand-off {self.number}: sender {kinds[0]}, receiver {kinds[1]}"


class Play:
    """Rounds with one cast, one after the other. One thread."""

    def __init__(self, cast: Callable[[Callable[[End, Happened], None]], Cast], rules: Rules) -> None:
        """`cast` makes one that tells its events to the argument. Use `stage` as a context before any round."""
        self._rules = rules
        self._numbers = itertools.count(1)
        self._stories: dict[int, Story] = {}
        self._tally = Tally()
        self.stage = self._cast = cast(self._on_event)

    def round(self, case: Case, random: np.random.Generator) -> Tally:
        """One of them. Raises BenchmarkError when the benchmark itself cannot go on."""
        self._tally = Tally()
        self._stories.clear()
        cast = self._cast
        moment_s = self._begin(random)
        cast.listen(moment_s)
        victim, survivor = cast.ends[case.side], cast.other(case.side)
        signal_s = time.monotonic()
        victim.signal(case.number)
        if case.number == signal.SIGKILL:
            victim.kill()
            self._overdue(survivor, Story.over, signal_s)
            cast.replace(case.side)
        else:
            self._overdue(survivor, Story.decided, signal_s)
            self._after_stop(victim, survivor, go_on=bool(random.integers(3)))
        self._note_detection(survivor, signal_s)
        self._prove()
        self._settle()
        if not self._tally.clean:  # What is wrong now must not be counted again in the next round.
            for role in (PREFILL, DECODE):
                cast.replace(role).kill()
        return self._tally

    # ---- before the signal

    def _begin(self, random: np.random.Generator) -> float:
        """Let the hand-offs begin; the moment for the signal."""
        span_s = float(random.choice(_SPANS_S))
        for _ in range(self._rules.num_handoffs):
            num_blocks = 1 << int(random.integers(_MAX_SIZE_BITS + 1))
            self._prepare(num_blocks, random, span_s)
        self._cast.ends[PREFILL].tell(Go())
        return time.monotonic() + float(random.uniform(0.1, 1.1)) * span_s

    def _prepare(self, num_blocks: int, random: np.random.Generator | None = None, span_s: float = 0.0) -> Story:
        cast, number = self._cast, next(self._numbers)
        sender, receiver = cast.ends[PREFILL], cast.ends[DECODE]
        story = self._stories[number] = Story(number, sender, receiver)
        reserved = cast.ask(receiver, Reserve(number, num_blocks), Reserved)
        if reserved.fault:
            raise BenchmarkError(f"the decode process could not reserve: {reserved.fault}")
        cast.ask(sender, self._schedule(number, reserved.ticket, num_blocks, random, span_s), Prepared)
        return story

    def _schedule(
        self, number: int, ticket: bytes, num_blocks: int, random: np.random.Generator | None, span_s: float
    ) -> Prepare:
        """Layer groups of some chunks, at times spread over the span; all at once without randomness."""
        layers, chunks, group = self._rules.num_layers, 1, self._rules.num_layers
        if random is not None:
            chunks = min(num_blocks, int(random.integers(1, _MAX_CHUNKS + 1)))
            group = int(random.choice([size for size in (1, 2, layers) if size <= layers]))
        cuts = [num_blocks * chunk // chunks for chunk in range(chunks + 1)]
        parts = [
            (range(start, stop), range(layer, min(layer + group, layers)))
            for start, stop in itertools.pairwise(cuts)
            for layer in range(0, layers, group)
        ]
        times = [0.0] * (len(parts) + 2)
        if random is not None:
            times = sorted(random.uniform(random.uniform(0.0, 0.5) * span_s, span_s, len(times)).tolist())
        pieces = tuple(Piece(at, *part) for at, part in zip(times[1:-1], parts, strict=True))
        return Prepare(number, ticket, times[0], pieces, times[-1])

    # ---- after it

    def _after_stop(self, victim: End, survivor: End, *, go_on: bool) -> None:
        """Replace the stopped one, while its hand-offs may be unfenced if it writes alone; then let it end or go on."""
        cast = self._cast
        cast.replace(victim.role)
        if survivor.role == DECODE:
            self._prove()
        ended_s = time.monotonic()
        if go_on:
            victim.signal(signal.SIGCONT)
            self._overdue(victim, Story.over, ended_s)
        else:
            victim.kill()
        self._overdue(survivor, Story.over, ended_s)
        if go_on:
            cast.restore(victim)

    def _prove(self) -> None:
        """A hand-off must come through within the deadline, though the first attempts may not."""
        until_s = time.monotonic() + self._rules.deadline_s
        while True:
            story = self._prepare(_PROOF_BLOCKS)
            self._cast.ends[PREFILL].tell(Go())
            for end in (story.sender, story.receiver):
                self._overdue(end, Story.over, time.monotonic(), [story])
            if any(event.kind == "Sent" for event in story.sent):
                return
            if time.monotonic() > until_s or not story.over(story.receiver):
                self._tally.hung.append(f"no new hand-off comes through; {story}")
                return
            self._cast.listen(time.monotonic() + _RETRY_S)

    def _settle(self) -> None:
        """Look at everything once more, when nothing should be held."""
        cast = self._cast
        for role, end in cast.ends.items():
            if role == DECODE:
                changed = cast.ask(end, Recheck(), Rechecked).changed
                self._tally.wrong += [f"hand-off {number} was overwritten after its commit" for number in changed]
            found = cast.ask(end, Audit(), Audited)
            self._tally.leaked_blocks += found.held_blocks
            if found.touched_blocks:
                self._tally.wrong.append(f"{found.touched_blocks} blocks of {role} were written while nobody held them")
            if found.fault:
                self._tally.wrong.append(f"the block manager of {role}: {found.fault}")
            if found.open_handoffs:
                self._tally.hung.append(f"{found.open_handoffs} hand-offs of {role} are not over")
        for story in self._stories.values():
            self._tally.wrong += story.faults()

    def _overdue(
        self,
        end: End,
        enough: Callable[[Story, End], bool],
        since_s: float,
        stories: Sequence[Story] | None = None,
    ) -> None:
        """Wait until the hand-offs of this end (or some) have come so far; those that have not at the deadline hang."""
        if stories is None:
            stories = [story for story in self._stories.values() if end in (story.sender, story.receiver)]

        def done() -> bool:
            return end.ended or all(enough(story, end) for story in stories)

        self._cast.listen(since_s + self._rules.deadline_s, done)
        late = [story for story in stories if not enough(story, end)]
        if end.ended and end.exit_code != -signal.SIGKILL:
            self._tally.hung.append(f"the {end.role} process died by itself, with exit code {end.exit_code}")
        self._tally.hung += [f"the {end.role} process has not ended {story}" for story in late]

    def _note_detection(self, survivor: End, signal_s: float) -> None:
        """Of those open at the signal that failed for it."""
        for story in self._stories.values():
            if story.begun_s > signal_s or survivor not in (story.sender, story.receiver):
                continue
            for event in story.told_by(survivor):
                if event.kind == "Failed" and event.at_s >= signal_s:
                    self._tally.detected_s.append(event.at_s - signal_s)

    def _on_event(self, end: End, event: Happened) -> None:
        story = self._stories.get(event.number)
        if story is None:  # Of an earlier round, which has counted it as hanging.
            return
        if event.kind == BEGUN:
            story.begun_s = event.at_s
        else:
            story.told_by(end).append(event)
