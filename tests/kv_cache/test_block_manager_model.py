"""The block manager against a deliberately dumb model, over random histories.

The model knows no free list, reference counts, index or twins: it looks through all tables whenever it wants to know
something. It also plays the device: it writes content into the blocks it is given, so a wrong block shows as wrong
content. It runs once with real hashes and once with hashes of two bits, which collide all the time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from kv_cache.block_hash import hash_block
from kv_cache.block_manager import Allocation, BlockManager, BlockStateError, Resync

NUM_BLOCKS = 9
SIZE = 2
MAX_EVENTS = 6

Content = tuple[int, ...]
"""All token ids from the start of the sequence to the end of the block: what its KV depends on."""


@dataclass(eq=False)
class Cell:
    """A held block as the model sees it."""

    block_id: int
    content: Content | None = None  # Set once stored.


@dataclass
class Model:
    """What the block manager should do, worked out by looking at everything."""

    name_of: Callable[[Content], bytes]
    tables: dict[str, list[Cell]] = field(default_factory=dict)
    quarantines: dict[int, list[Cell]] = field(default_factory=dict)
    cached: list[Content] = field(default_factory=list)  # Held by nobody, in order of release.

    def in_tables(self) -> set[Cell]:
        return {cell for table in self.tables.values() for cell in table}

    def held(self) -> set[Cell]:
        return self.in_tables() | {cell for table in self.quarantines.values() for cell in table}

    def present(self) -> set[Content]:
        return {cell.content for cell in self.held() if cell.content is not None} | set(self.cached)

    def usage(self) -> tuple[int, int, int, int]:
        used, held = len(self.in_tables()), len(self.held())
        return NUM_BLOCKS - held - len(self.cached), len(self.cached), used, held - used

    def available(self) -> int:
        return NUM_BLOCKS - len(self.held())

    def match(self, tokens: Content) -> int:
        count = 0
        while (count + 1) * SIZE <= len(tokens) and tokens[: (count + 1) * SIZE] in self.present():
            count += 1
        return count

    def holders(self, cell: Cell) -> int:
        return sum(cell in table for table in [*self.tables.values(), *self.quarantines.values()])

    def evict_for(self, count: int) -> None:
        """Make room for fresh blocks: drop the cached content released longest ago that nothing else extends."""
        for _ in range(count - (NUM_BLOCKS - len(self.held()) - len(self.cached))):
            present = self.present()
            oldest_leaf = next(
                content
                for content in self.cached
                if not any(len(other) == len(content) + SIZE and other[: len(content)] == content for other in present)
            )
            self.cached.remove(oldest_leaf)

    def release(self, table: list[Cell]) -> None:
        """The table is gone already: content that only it held is cached now, leaves first."""
        present = self.present()
        for cell in reversed(table):
            if cell.content is not None and cell.content not in present:
                self.cached.append(cell.content)

    def can_be_named(self, content: Content) -> bool:
        """No other content of this name is present."""
        return all(self.name_of(other) != self.name_of(content) for other in self.present() - {content})


class BlockManagerMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")
    quarantines = Bundle("quarantines")
    # Mostly one long common prefix with short tails, so that prefixes are often found again.
    token_lists = st.builds(
        lambda num_zeros, tail: (0,) * num_zeros + tail,
        st.integers(0, 6),
        st.lists(st.integers(0, 1), max_size=4).map(tuple),
    )

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, SIZE, max_events=MAX_EVENTS)
        self.model = Model(self.name_of)
        self.tokens: dict[str, Content] = {}
        self.memory: list[Content | None] = [None] * NUM_BLOCKS
        self.replica: set[bytes] = set()
        self.num_sequences = 0

    @staticmethod
    def name_of(content: Content) -> bytes:
        name = b""
        for start in range(0, len(content), SIZE):
            name = hash_block(name, content[start : start + SIZE])
        return name

    def names(self, tokens: Content) -> list[bytes]:
        return [self.name_of(tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)]

    def new_id(self) -> str:
        self.num_sequences += 1
        return f"seq-{self.num_sequences}"

    def fresh_cells(self, blocks: Sequence[int]) -> list[Cell]:
        """Blocks just taken: nobody may hold them, and what they contained is void."""
        assert len(set(blocks)) == len(blocks)
        assert not set(blocks) & {cell.block_id for cell in self.model.held()}
        for block in blocks:
            self.memory[block] = None
        return [Cell(block) for block in blocks]

    @rule(target=sequences, tokens=token_lists, extra=st.integers(1, 5), limit=st.none() | st.integers(0, 3))
    def allocate(self, tokens: Content, extra: int, limit: int | None) -> str | MultipleResults[str]:
        seq_id = self.new_id()
        num_tokens = len(tokens) + extra
        cached = min(self.model.match(tokens), limit if limit is not None else NUM_BLOCKS)
        prefix = [tokens[: (index + 1) * SIZE] for index in range(cached)]
        num_fresh = -(-num_tokens // SIZE) - cached
        pinned = sum(content in self.model.cached for content in prefix)
        allocation = self.manager.allocate(seq_id, num_tokens, self.names(tokens), tokens, limit)
        if num_fresh > self.model.available() - pinned:
            assert allocation is None
            return multiple()
        assert allocation is not None
        assert allocation.cached_blocks == cached
        self.model.tables[seq_id] = self.cells_of(allocation, prefix, num_fresh)
        self.tokens[seq_id] = tokens + (0,) * extra
        self.compute(seq_id, cached)
        return seq_id

    def cells_of(self, allocation: Allocation, prefix: list[Content], num_fresh: int) -> list[Cell]:
        table: list[Cell] = []
        for block, content in zip(allocation.block_table, prefix, strict=False):
            assert self.memory[block] == content
            same = [cell for cell in self.model.held() if cell.content == content]
            if same:
                table += [cell for cell in same if cell.block_id == block]
            else:
                self.model.cached.remove(content)
                table.append(Cell(block, content))
        assert len(table) == len(prefix)
        self.model.tables["being allocated"] = table
        self.model.evict_for(num_fresh)
        table += self.fresh_cells(allocation.block_table[len(prefix) :])
        return self.model.tables.pop("being allocated")

    def compute(self, seq_id: str, first_block: int) -> None:
        """Write the KV of every block from this one on, partly filled ones too."""
        tokens = self.tokens[seq_id]
        for index, cell in enumerate(self.model.tables[seq_id]):
            if index >= first_block:
                assert cell.content is None
                assert self.model.holders(cell) == 1
                self.memory[cell.block_id] = tokens[: (index + 1) * SIZE]

    @rule(seq_id=sequences, more=st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple))
    def append(self, seq_id: str, more: Content) -> None:
        table = self.model.tables[seq_id]
        length = len(self.tokens[seq_id])
        if length % SIZE and not self.make_writable_as_predicted(seq_id, len(table) - 1):
            return
        needed = -(-(length + len(more)) // SIZE) - len(table)
        grown = self.manager.append(seq_id, length + len(more))
        assert grown == (needed <= self.model.available())
        if grown:
            self.model.evict_for(needed)
            table += self.fresh_cells(self.manager.block_table(seq_id)[len(table) :])
            self.tokens[seq_id] += more
            self.compute(seq_id, length // SIZE)

    @rule(seq_id=sequences, from_end=st.integers(0, 3), bit=st.integers(0, 1))
    def rewrite(self, seq_id: str, from_end: int, bit: int) -> None:
        """Change the tokens from some block on, as nothing in the engine does; the tail must be private for it."""
        if from_end >= len(self.model.tables[seq_id]):
            return
        index = len(self.model.tables[seq_id]) - 1 - from_end
        if self.make_writable_as_predicted(seq_id, index):
            tokens = self.tokens[seq_id]
            self.tokens[seq_id] = tokens[: index * SIZE] + (bit,) * (len(tokens) - index * SIZE)
            self.compute(seq_id, index)

    def make_writable_as_predicted(self, seq_id: str, index: int) -> bool:
        """Whether the block is writable now."""
        model, table = self.model, self.model.tables[seq_id]
        cell = table[index]
        if any(later.content is not None or model.holders(later) > 1 for later in table[index + 1 :]):
            with pytest.raises(BlockStateError):
                self.manager.make_writable(seq_id, index)
            return False
        only_one = cell.content is not None and not any(
            other.content == cell.content for other in model.held() - {cell}
        )
        must_copy = model.holders(cell) > 1 or only_one
        result = self.manager.make_writable(seq_id, index)
        if must_copy and not model.available():
            assert result is None
            return False
        assert result is not None
        if not must_copy:
            assert (result.block_id, result.copy) == (cell.block_id, None)
            cell.content = None
            return True
        model.evict_for(1)
        (fresh,) = self.fresh_cells([result.block_id])
        table[index] = fresh
        model.release([cell])
        assert result.copy == (cell.block_id, fresh.block_id)
        self.memory[fresh.block_id] = self.memory[cell.block_id]
        return True

    @rule(seq_id=sequences, count=st.integers(1, 4), skip=st.sampled_from([0, 0, 0, 1]))
    def store(self, seq_id: str, count: int, skip: int) -> None:
        table, tokens = self.model.tables[seq_id], self.tokens[seq_id]
        unnamed = [index for index in range(len(tokens) // SIZE) if table[index].content is None]
        for index in unnamed[skip : skip + count]:
            content = tokens[: (index + 1) * SIZE]
            rooted = index == 0 or table[index - 1].content is not None
            expected = rooted and self.model.can_be_named(content)
            stored = self.manager.store(seq_id, index, self.name_of(content), tokens[index * SIZE : (index + 1) * SIZE])
            assert stored == expected
            if expected:
                table[index].content = content
                if content in self.model.cached:
                    self.model.cached.remove(content)

    @rule(target=sequences, seq_id=sequences)
    def fork(self, seq_id: str) -> str:
        child_id = self.new_id()
        self.manager.fork(seq_id, child_id)
        self.model.tables[child_id] = self.model.tables[seq_id].copy()
        self.tokens[child_id] = self.tokens[seq_id]
        return child_id

    @rule(seq_id=consumes(sequences))
    def free(self, seq_id: str) -> None:
        self.manager.free(seq_id)
        self.model.release(self.model.tables.pop(seq_id))

    @rule(target=quarantines, seq_id=consumes(sequences))
    def quarantine(self, seq_id: str) -> int:
        quarantine_id = self.manager.quarantine(seq_id)
        self.model.quarantines[quarantine_id] = self.model.tables.pop(seq_id)
        return quarantine_id

    @rule(quarantine_id=consumes(quarantines))
    def release(self, quarantine_id: int) -> None:
        self.manager.release_quarantine(quarantine_id)
        self.model.release(self.model.quarantines.pop(quarantine_id))

    @rule(tokens=token_lists)
    def match(self, tokens: Content) -> None:
        assert self.manager.match_prefix(self.names(tokens), tokens) == self.model.match(tokens)

    @rule()
    def follow_events(self) -> None:
        events = self.manager.take_events()
        if isinstance(events, Resync):
            self.replica = set(self.manager.snapshot_hashes())
        else:
            for name, removed in events:
                assert (name in self.replica) == removed
                (self.replica.remove if removed else self.replica.add)(name)
        assert self.replica == set(self.manager.snapshot_hashes())

    @invariant()
    def the_state_is_sound_and_as_the_model_says(self) -> None:
        self.manager.check_integrity()
        usage = self.manager.usage()
        assert (usage.free, usage.cached, usage.used, usage.quarantined) == self.model.usage()
        assert self.manager.can_allocate(self.model.available())
        assert not self.manager.can_allocate(self.model.available() + 1)
        assert sorted(self.manager.snapshot_hashes()) == sorted(map(self.name_of, self.model.present()))
        for seq_id, table in self.model.tables.items():
            assert self.manager.block_table(seq_id) == [cell.block_id for cell in table]
        for content in self.model.present():
            assert self.manager.match_prefix(self.names(content), content) == len(content) // SIZE

    @invariant()
    def no_block_lost_its_content(self) -> None:
        for cell in self.model.held():
            assert cell.content is None or self.memory[cell.block_id] == cell.content
        for seq_id, table in self.model.tables.items():
            for index, cell in enumerate(table):
                written = self.memory[cell.block_id]
                assert written is not None
                assert written == self.tokens[seq_id][: len(written)]
                assert len(written) > index * SIZE

    def teardown(self) -> None:
        for seq_id in list(self.model.tables):
            self.manager.free(seq_id)
        for quarantine_id in self.model.quarantines:
            self.manager.release_quarantine(quarantine_id)
        self.manager.check_integrity()
        usage = self.manager.usage()
        assert usage.free + usage.cached == usage.total


class CollidingMachine(BlockManagerMachine):
    @staticmethod
    def name_of(content: Content) -> bytes:
        return bytes([blake2b(repr(content).encode(), digest_size=1).digest()[0] & 3])


SETTINGS = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("machine", [BlockManagerMachine, CollidingMachine])
def test_random_histories_agree_with_the_model(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=SETTINGS)
