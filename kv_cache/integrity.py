"""The audit of a block manager: every count is counted again from the block tables, every map is read both ways.

Run whenever a worker is idle, and always in tests. It trusts nothing that it checks and changes nothing.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice

from kv_cache.block_pool import BlockPool
from kv_cache.prefix_index import CachedBlock, PrefixIndex

_MAX_FINDINGS = 20


class IntegrityError(Exception):
    """The block manager's state contradicts itself. `findings` has one sentence a contradiction, at most 20."""

    def __init__(self, findings: Sequence[str]) -> None:
        super().__init__("; ".join(findings))
        self.findings = tuple(findings)


def check(pool: BlockPool, tables: Mapping[str, Sequence[int]], quarantines: Mapping[int, Sequence[int]]) -> None:
    """Raise IntegrityError unless tables, quarantines, counts, free list and index all tell the same story.

    O(blocks of the pool + blocks held). Reads only.
    """
    holders = {f"sequence {seq_id!r}": table for seq_id, table in tables.items()}
    holders |= {f"quarantine {quarantine_id}": table for quarantine_id, table in quarantines.items()}
    # A block id out of range would make the other checks fail by themselves, so it is reported alone.
    _raise_if_any(_block_ids(pool, holders))
    _raise_if_any(
        chain(
            _reference_counts(pool, tables, quarantines),
            _states(pool),
            _usage(pool),
            _index_inverse(pool.index),
            _forest(pool),
            _eviction_order(pool.index),
            _chains(pool.index, holders),
        )
    )


def _raise_if_any(findings: Iterator[str]) -> None:
    found = list(islice(findings, _MAX_FINDINGS))
    if found:
        raise IntegrityError(found)


def _block_ids(pool: BlockPool, holders: Mapping[str, Sequence[int]]) -> Iterator[str]:
    index = pool.index
    named = {
        "the free list": pool.free_list,
        "the eviction order": list(index.unheld),
        "the homes of the index": [entry.block_id for entry in index.entries.values()],
        **holders,
    }
    for owner, blocks in named.items():
        for block, count in Counter(blocks).items():
            if not 0 <= block < pool.num_blocks:
                yield f"{owner}: block {block} does not exist in a pool of {pool.num_blocks}"
            elif count > 1:
                yield f"{owner}: block {block} occurs {count} times"
    for name, length in (
        ("table_refs", len(pool.table_refs)),
        ("quarantine_refs", len(pool.quarantine_refs)),
        ("entry_at", len(index.entry_at)),
    ):
        if length != pool.num_blocks:
            yield f"{name} has {length} places for {pool.num_blocks} blocks"


def _reference_counts(
    pool: BlockPool, tables: Mapping[str, Sequence[int]], quarantines: Mapping[int, Sequence[int]]
) -> Iterator[str]:
    in_tables = Counter(chain.from_iterable(tables.values()))
    in_quarantines = Counter(chain.from_iterable(quarantines.values()))
    for block in range(pool.num_blocks):
        if pool.table_refs[block] != in_tables[block]:
            yield f"block {block}: table_refs is {pool.table_refs[block]}, but {in_tables[block]} tables hold it"
        if pool.quarantine_refs[block] != in_quarantines[block]:
            yield (
                f"block {block}: quarantine_refs is {pool.quarantine_refs[block]}, "
                f"but {in_quarantines[block]} quarantines hold it"
            )


def _states(pool: BlockPool) -> Iterator[str]:
    """Each block is in exactly one of: held, free, cached; a free block has no name."""
    free = set(pool.free_list)
    unheld = pool.index.unheld
    for block in range(pool.num_blocks):
        held = pool.table_refs[block] > 0 or pool.quarantine_refs[block] > 0
        states = [
            name for name, is_in in (("held", held), ("free", block in free), ("cached", block in unheld)) if is_in
        ]
        if len(states) != 1:
            yield f"block {block} is {' and '.join(states) or 'lost: neither held, free nor cached'}"
        entry = pool.index.entry_at[block]
        if block in free and entry is not None:
            yield f"block {block} is free but still named {entry.hash.hex()}"
        if block in unheld and (entry is None or entry.block_id != block):
            yield f"block {block} is cached but not the home of an entry"


def _usage(pool: BlockPool) -> Iterator[str]:
    used = sum(refs > 0 for refs in pool.table_refs)
    quarantined = sum(
        refs == 0 and quarantine > 0 for refs, quarantine in zip(pool.table_refs, pool.quarantine_refs, strict=True)
    )
    if pool.num_used != used:
        yield f"num_used is {pool.num_used}, but {used} blocks are in tables"
    if pool.num_quarantined != quarantined:
        yield f"num_quarantined is {pool.num_quarantined}, but {quarantined} blocks are only in quarantines"
    usage = pool.usage()
    total = usage.free + usage.cached + usage.used + usage.quarantined
    if total != usage.total:
        yield f"free + cached + used + quarantined is {total}, not {usage.total}: {usage}"


def _index_inverse(index: PrefixIndex) -> Iterator[str]:
    """hash -> block and block -> hash are inverse, twins included."""
    for block_hash, entry in index.entries.items():
        if entry.hash != block_hash:
            yield f"the entry under {block_hash.hex()} is named {entry.hash.hex()}"
        for block in (entry.block_id, *entry.twins):
            if index.entry_at[block] is not entry:
                yield f"block {block} does not point back to its entry {block_hash.hex()}"
        if entry.block_id in entry.twins:
            yield f"block {entry.block_id} is home and twin of {block_hash.hex()}"
    for block, entry_here in enumerate(index.entry_at):
        if entry_here is None:
            continue
        if index.entries.get(entry_here.hash) is not entry_here:
            yield f"block {block} is named {entry_here.hash.hex()}, which the index does not know"
        if block != entry_here.block_id and block not in entry_here.twins:
            yield f"block {block} is neither home nor twin of its entry {entry_here.hash.hex()}"


def _forest(pool: BlockPool) -> Iterator[str]:
    """Parents are indexed and held whenever a child is; children are counted; twins are held and their home too."""
    index = pool.index
    children: Counter[CachedBlock] = Counter()
    for entry in index.entries.values():
        if len(entry.token_ids) != index.block_size:
            yield f"block {entry.block_id} is stored with {len(entry.token_ids)} tokens, not {index.block_size}"
        cached = entry.block_id in index.unheld
        if entry.twins and cached:
            yield f"block {entry.block_id} is cached although its twins {list(entry.twins)} are held"
        for twin in entry.twins:
            if not pool.table_refs[twin] and not pool.quarantine_refs[twin]:
                yield f"block {twin} is a twin of block {entry.block_id} but nobody holds it"
        parent = entry.parent
        if parent is None:
            continue
        children[parent] += 1
        if index.entries.get(parent.hash) is not parent:
            yield f"block {entry.block_id} is indexed, but its parent {parent.hash.hex()} is not"
        elif not cached and parent.block_id in index.unheld:
            yield f"block {entry.block_id} is held, but its parent, block {parent.block_id}, is not"
    for entry in index.entries.values():
        if entry.num_children != children[entry]:
            yield f"block {entry.block_id}: num_children is {entry.num_children}, but {children[entry]} entries name it"


def _eviction_order(index: PrefixIndex) -> Iterator[str]:
    """No cached parent is evicted before its cached child."""
    place = {block: number for number, block in enumerate(index.unheld)}
    for entry in index.entries.values():
        if entry.parent is None or entry.block_id not in place or entry.parent.block_id not in place:
            continue
        if place[entry.parent.block_id] < place[entry.block_id]:
            yield f"block {entry.parent.block_id} would be evicted before its child, block {entry.block_id}"


def _chains(index: PrefixIndex, holders: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """In every table, the content before a stored block is that block's parent."""
    for holder, table in holders.items():
        before: CachedBlock | None = None
        for place, block in enumerate(table):
            entry = index.entry_at[block]
            broken = entry is not None and (entry.parent is not before or (place > 0 and before is None))
            if broken:
                yield f"{holder}: stored block {block} at place {place} does not follow its parent"
            before = entry
