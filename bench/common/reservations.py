"""Ways of giving each sequence one contiguous piece of a KV pool, as was done before paging: what kvferry is compared
with in bench/kv_waste.py. Sizes are in tokens; nothing has bytes.

    FirstFit    a piece as long as the sequence can ever become, at the first gap that has room
    Buddies     a piece of a power of two that holds what is there; twice as much, elsewhere, when it is full
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from bench.common.lengths import Lengths


class Piece(NamedTuple):
    """Part of a pool."""

    start: int
    size: int


class FirstFit:
    """Pieces of any size. The gaps are kept in order and grow together again."""

    def __init__(self, pool_tokens: int) -> None:
        self._gaps = [Piece(0, pool_tokens)]

    def take(self, size: int) -> Piece | None:
        """The first gap's beginning. None = no gap is long enough."""
        for index, gap in enumerate(self._gaps):
            if gap.size >= size:
                self._gaps[index : index + 1] = [Piece(gap.start + size, gap.size - size)] if gap.size > size else []
                return Piece(gap.start, size)
        return None

    def give_back(self, piece: Piece) -> None:
        """It is free again."""
        index = bisect_left(self._gaps, piece)
        start, end = piece.start, piece.start + piece.size
        last = index
        if index and self._gaps[index - 1].start + self._gaps[index - 1].size == start:
            index -= 1
            start = self._gaps[index].start
        if last < len(self._gaps) and self._gaps[last].start == end:
            end += self._gaps[last].size
            last += 1
        self._gaps[index:last] = [Piece(start, end - start)]


class Buddies:
    """Pieces of powers of two. A piece is split in halves as often as need be, and halves that are free become one."""

    def __init__(self, pool_tokens: int) -> None:
        """The pool is rounded down to a power of two."""
        self._size = 1 << (pool_tokens.bit_length() - 1)
        self._free: dict[int, list[int]] = {self._size: [0]}  # starts by size, in order

    def take(self, size: int) -> Piece | None:
        """A piece of the next power of two. None = there is none."""
        wanted = 1 << (size - 1).bit_length()
        found = next((have for have in sorted(self._free) if have >= wanted and self._free[have]), None)
        if found is None:
            return None
        start = self._free[found].pop(0)
        while found > wanted:
            found //= 2
            insort(self._free.setdefault(found, []), start + found)
        return Piece(start, wanted)

    def give_back(self, piece: Piece) -> None:
        """It is free again."""
        start, size = piece
        while size < self._size and start ^ size in self._free.get(size, []):
            self._free[size].remove(start ^ size)
            start, size = start & ~size, size * 2
        insort(self._free.setdefault(size, []), start)


class Allocator(Protocol):
    """FirstFit or Buddies."""

    def take(self, size: int) -> Piece | None:
        """A piece of at least this size, or None."""
        ...

    def give_back(self, piece: Piece) -> None:
        """It is free again."""
        ...


class Moment(NamedTuple):
    """A pool after a step: sequences in it, tokens whose KV is there, and slots that nobody else can use."""

    num_sequences: int
    num_tokens: int
    num_slots: int


@dataclass(slots=True)
class _Running:
    request: Lengths
    num_tokens: int
    piece: Piece

    @property
    def is_done(self) -> bool:
        # The last token of an answer is never looked back at.
        return self.num_tokens >= self.request.prompt + self.request.output - 1


class Contiguous:
    """Sequences served from contiguous pieces: a token each a step, in order of arrival. Generous: a prompt is there
    at once, whatever its length, and moving a sequence costs nothing.
    """

    def __init__(
        self,
        requests: Iterator[Lengths],
        allocator: Allocator,
        *,
        reserved_tokens: int | None = None,
        reserved_output: int | None = None,
    ) -> None:
        """What is taken for a sequence: `reserved_tokens`, whatever it is; or its prompt and `reserved_output`; or,
        with neither, what there is of it, and more as it grows."""
        self._requests = requests
        self._allocator = allocator
        self._reserved_tokens = reserved_tokens
        self._reserved_output = reserved_output
        self._waiting: deque[_Running] = deque()
        self._running: list[_Running] = []  # by arrival

    def step(self) -> Moment:
        """Everybody gets a token; who is done leaves; who fits comes in."""
        for each in list(self._running):
            # It may have been preempted in this very step.
            if each in self._running:
                self._grow(each)
        for each in [each for each in self._running if each.is_done]:
            self._leave(each)
        while self._admit():
            pass
        slots = sum(each.piece.size for each in self._running)
        return Moment(len(self._running), sum(each.num_tokens for each in self._running), slots)

    def _grow(self, each: _Running) -> None:
        while each.num_tokens + 1 > each.piece.size:
            piece = self._allocator.take(each.num_tokens + 1)
            if piece is not None:
                self._allocator.give_back(each.piece)
                each.piece = piece
                break
            victim = self._running[-1]
            self._leave(victim)
            self._waiting.appendleft(victim)
            if victim is each:
                return
        each.num_tokens += 1

    def _leave(self, each: _Running) -> None:
        self._running.remove(each)
        self._allocator.give_back(each.piece)

    def _admit(self) -> bool:
        if not self._waiting:
            request = next(self._requests)
            self._waiting.append(_Running(request, request.prompt, Piece(0, 0)))
        first = self._waiting[0]
        size = first.num_tokens
        if self._reserved_tokens is not None:
            size = self._reserved_tokens
        elif self._reserved_output is not None:
            size = first.request.prompt + self._reserved_output
        piece = self._allocator.take(size)
        if piece is None:
            return False
        first.piece = piece
        self._running.append(self._waiting.popleft())
        return True
