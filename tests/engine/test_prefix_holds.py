"""Prefixes held without a sequence: pinned to be sent, or with room to be filled."""

import pytest

from engine.prefix_holds import PrefixHolds
from kv_cache.block_hash import BlockHasher
from kv_cache.block_manager import BlockManager, SequenceExistsError
from kv_cache.layout import KVDtype

BLOCK = 4
TOKENS = list(range(100, 116))  # four blocks


class World:
    def __init__(self, num_blocks: int = 8, *, prefix_caching: bool = True) -> None:
        self.blocks = BlockManager(num_blocks, BLOCK, prefix_caching=prefix_caching)
        self.hasher = BlockHasher("m", "r", BLOCK, KVDtype.FP32)
        self.holds = PrefixHolds(self.blocks, self.hasher)

    def cache(self, tokens: list[int], salt: bytes = b"") -> None:
        """As a sequence that computed them and ended leaves them behind."""
        hashes = self.hasher.hash_blocks(tokens, salt)
        assert self.blocks.allocate("other", len(tokens), hashes, tokens) is not None
        for index, block_hash in enumerate(hashes):
            self.blocks.store("other", index, block_hash, tokens[index * BLOCK : (index + 1) * BLOCK])
        self.blocks.free("other")

    def match(self, tokens: list[int], salt: bytes = b"") -> int:
        return self.blocks.match_prefix(self.hasher.hash_blocks(tokens, salt), tokens)

    def evict_all(self) -> bool:
        """Whether somebody could take the whole pool."""
        taken = self.blocks.allocate("hungry", self.blocks.num_blocks * BLOCK, [], [])
        if taken is not None:
            self.blocks.free("hungry")
        return taken is not None


def test_a_pinned_prefix_is_not_evicted_and_is_ordinary_again_after_its_release() -> None:
    world = World()
    world.cache(TOKENS)
    held = world.holds.pin("x", TOKENS, b"")
    assert held is not None
    assert held.cached_blocks == len(held.block_table) == 4
    assert held.content_name == world.hasher.hash_blocks(TOKENS)[-1]
    assert len(world.holds) == 1
    assert not world.evict_all()
    world.holds.release("x")
    world.holds.release("x")
    assert not world.holds
    assert world.evict_all()
    world.blocks.check_integrity()


@pytest.mark.parametrize(("cached", "salt"), [(TOKENS[:12], b""), ([], b""), (TOKENS, b"another tenant")])
def test_what_is_not_cached_whole_cannot_be_pinned(cached: list[int], salt: bytes) -> None:
    world = World()
    if cached:
        world.cache(cached, salt)
    before = world.blocks.usage()
    assert world.holds.pin("x", TOKENS, b"") is None
    assert world.blocks.usage() == before
    assert not world.holds


def test_room_taken_for_a_prefix_cannot_be_matched_before_it_is_kept() -> None:
    world = World()
    world.cache(TOKENS[:8])
    held = world.holds.reserve("x", TOKENS, b"tenant")
    assert held is not None
    assert held.cached_blocks == 0, "blocks of another tenant are not the beginning of this prompt"
    world.holds.release("x")
    held = world.holds.reserve("x", TOKENS, b"")
    assert held is not None
    assert (held.cached_blocks, len(held.block_table)) == (2, 4)
    assert world.match(TOKENS) == 2
    world.holds.keep("x")
    assert world.match(TOKENS) == 4
    assert not world.holds
    assert world.blocks.usage().available == 8
    world.blocks.check_integrity()


def test_room_given_back_leaves_nothing_to_match() -> None:
    world = World()
    assert world.holds.reserve("x", TOKENS, b"") is not None
    world.holds.release("x")
    assert world.match(TOKENS) == 0
    assert world.blocks.usage().free == 8


def test_nothing_is_reserved_without_room_without_need_or_without_a_prefix_cache() -> None:
    full = World(num_blocks=3)
    assert full.holds.reserve("x", TOKENS, b"") is None
    complete = World()
    complete.cache(TOKENS)
    assert complete.holds.reserve("x", TOKENS, b"") is None
    forgetful = World(prefix_caching=False)
    assert forgetful.holds.reserve("x", TOKENS, b"") is None
    assert not full.holds
    assert not complete.holds
    assert not forgetful.holds


def test_what_was_computed_meanwhile_makes_the_kept_blocks_spares() -> None:
    world = World()
    assert world.holds.reserve("x", TOKENS, b"") is not None
    world.cache(TOKENS[:12])
    world.holds.keep("x")
    assert world.match(TOKENS) == 4
    assert world.blocks.usage().available == 8
    world.blocks.check_integrity()


def test_a_broken_block_and_a_name_in_use_are_defects_of_the_caller() -> None:
    world = World()
    world.cache(TOKENS)
    with pytest.raises(ValueError, match="whole blocks"):
        world.holds.pin("x", TOKENS[:6], b"")
    with pytest.raises(ValueError, match="whole blocks"):
        world.holds.reserve("x", [], b"")
    world.holds.pin("x", TOKENS, b"")
    with pytest.raises(SequenceExistsError):
        world.holds.pin("x", TOKENS, b"")
