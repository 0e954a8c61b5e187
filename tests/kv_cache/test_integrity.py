"""The audit must see each kind of damage: every case breaks one thing in a healthy manager and expects its sentence."""

from collections.abc import Callable

import pytest

from kv_cache.block_hash import hash_blocks
from kv_cache.block_manager import BlockManager, IntegrityError

SIZE = 4


def healthy() -> BlockManager:
    """Blocks 0-2: sequence "a" (two stored, one partly filled). 3-4: cached chain. 5-6: quarantined. 7: twin of 0.

    8-9 are free.
    """
    manager = BlockManager(10, SIZE)
    for seq_id, first in (("a", 0), ("b", 100)):
        tokens = list(range(first, first + 8))
        manager.allocate(seq_id, 9 if seq_id == "a" else 8, [], [])
        for index, name in enumerate(hash_blocks(b"", tokens, SIZE)):
            manager.store(seq_id, index, name, tokens[index * SIZE : (index + 1) * SIZE])
    manager.allocate("q", 8, [], [])
    manager.allocate("twin", 4, [], [])
    manager.store("twin", 0, hash_blocks(b"", [0, 1, 2, 3], SIZE)[0], [0, 1, 2, 3])
    manager.free("b")
    manager.quarantine("q")
    manager.check_integrity()
    return manager


def unname(manager: BlockManager, block: int) -> None:
    entry = manager._index.entry_at[block]
    assert entry is not None
    del manager._index.entries[entry.hash]


def set_field(manager: BlockManager, block: int, field: str, value: object) -> None:
    setattr(manager._index.entry_at[block], field, value)


DAMAGE: list[tuple[str, Callable[[BlockManager], object], str]] = [
    ("lost block", lambda m: m._pool.free_list.remove(9), "block 9 is lost: neither held, free nor cached"),
    ("freed while held", lambda m: m._pool.free_list.insert(0, 0), "block 0 is held and free"),
    ("freed while cached", lambda m: m._pool.free_list.append(3), "block 3 is free and cached"),
    ("cached while held", lambda m: m._index.unheld.update({1: None}), "block 1 is held and cached"),
    ("freed twice", lambda m: m._pool.free_list.append(9), "the free list: block 9 occurs 2 times"),
    ("impossible id", lambda m: m._pool.free_list.append(10), "block 10 does not exist in a pool of 10"),
    ("block twice in a table", lambda m: m._tables["a"].append(0), "sequence 'a': block 0 occurs 2 times"),
    ("lost reference", lambda m: m._pool.table_refs.__setitem__(2, 0), "table_refs is 0, but 1 tables hold it"),
    ("leaked reference", lambda m: m._pool.table_refs.__setitem__(0, 2), "table_refs is 2, but 1 tables hold it"),
    ("dropped table", lambda m: m._tables.pop("a"), "block 2: table_refs is 1, but 0 tables hold it"),
    ("forgotten quarantine", lambda m: m._quarantines.clear(), "quarantine_refs is 1, but 0 quarantines hold it"),
    ("wrong used count", lambda m: setattr(m._pool, "num_used", 5), "num_used is 5, but 4 blocks are in tables"),
    ("wrong quarantine count", lambda m: setattr(m._pool, "num_quarantined", 0), "num_quarantined is 0, but 2 blocks"),
    ("wrong sum", lambda m: setattr(m._pool, "num_used", 5), "free + cached + used + quarantined is 11, not 10"),
    ("short array", lambda m: m._pool.table_refs.pop(), "table_refs has 9 places for 10 blocks"),
    ("freed block keeps its name", lambda m: m._pool.free_list.insert(0, m._index.unheld.popitem()[0]), "still named"),
    ("key lost", lambda m: unname(m, 1), "which the index does not know"),
    ("name lost", lambda m: m._index.entry_at.__setitem__(1, None), "block 1 does not point back to its entry"),
    ("cached without name", lambda m: m._index.entry_at.__setitem__(4, None), "block 4 is cached but not the home"),
    ("wrong key", lambda m: set_field(m, 1, "hash", b"z"), "is named 7a"),
    ("home moved", lambda m: set_field(m, 1, "block_id", 2), "block 1 is neither home nor twin of its entry"),
    ("home and twin", lambda m: set_field(m, 1, "twins", {1: None}), "block 1 is home and twin of"),
    ("twin forgotten", lambda m: set_field(m, 0, "twins", {}), "block 7 is neither home nor twin of its entry"),
    ("twin unheld", lambda m: set_field(m, 0, "twins", {9: None}), "block 9 is a twin of block 0 but nobody holds it"),
    ("twins of a cached block", lambda m: set_field(m, 4, "twins", {2: None}), "block 4 is cached although its twins"),
    ("wrong length", lambda m: set_field(m, 1, "token_ids", (1,)), "block 1 is stored with 1 tokens, not 4"),
    ("orphan", lambda m: unname(m, 0), "block 1 is indexed, but its parent"),
    ("wrong child count", lambda m: set_field(m, 0, "num_children", 0), "num_children is 0, but 1 entries name it"),
    ("eviction order", lambda m: m._index.unheld.move_to_end(4), "block 3 would be evicted before its child, block 4"),
    ("broken chain", lambda m: m._tables["a"].reverse(), "does not follow its parent"),
    ("wrong parent", lambda m: set_field(m, 4, "parent", None), "num_children is 1, but 0 entries name it"),
    (
        "held child of an unheld parent",
        lambda m: set_field(m, 1, "parent", m._index.entry_at[3]),
        "block 1 is held, but its parent, block 3, is not",
    ),
]


@pytest.mark.parametrize(("damage", "sentence"), [case[1:] for case in DAMAGE], ids=[case[0] for case in DAMAGE])
def test_damage_is_seen_and_named(damage: Callable[[BlockManager], object], sentence: str) -> None:
    manager = healthy()
    damage(manager)
    with pytest.raises(IntegrityError) as caught:
        manager.check_integrity()
    assert any(sentence in finding for finding in caught.value.findings), caught.value.findings


def test_the_report_of_great_damage_stays_short() -> None:
    manager = BlockManager(1000, SIZE)
    manager._pool.free_list.clear()
    with pytest.raises(IntegrityError) as caught:
        manager.check_integrity()
    assert len(caught.value.findings) == 20
    assert str(caught.value).startswith("block 0 is lost: neither held, free nor cached; block 1 is lost")
