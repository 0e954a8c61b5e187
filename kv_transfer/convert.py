"""Pages of one layout made from pages of another: what can be done, and doing it.

Block size: a page of the target collects the tokens that it covers, wherever they lie in the source's blocks. Heads: it
takes the slice that both store. Dtype: see quantise.py; equal ones are moved as bytes. What comes out depends on the
content alone, never on how it was cut into pieces. Token places from the end of the prompt on, and the padding, are
zero. MLA and other layouts without heads to slice have another axis order, and none but AXIS_ORDER is known here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from kv_cache.layout import AXIS_ORDER, KVCacheLayout, KVDtype, LayoutVerdict
from kv_transfer.page_arrays import PageArrays
from kv_transfer.quantise import Array, Tiles, convert, storage

_PIECE_ELEMENTS = 1 << 17
"""Converted at once: large enough for numpy's own cost a call not to count, small enough to stay in a core's cache."""

_ALL = slice(None)


def layout_refusal(source: KVCacheLayout, target: KVCacheLayout) -> str:
    """Why one sender with a pool of `source` cannot fill pages of `target`, with both layouts; empty if it can."""
    match = source.compare(target, "at the sender", "at the receiver")
    reasons = list(match.reasons) if match.verdict is LayoutVerdict.REFUSED else []
    unknown = {source.axis_order, target.axis_order} - {AXIS_ORDER}
    if unknown and not reasons:
        reasons.append(f"axis_order {', '.join(sorted(unknown))} is not known here")
    if not reasons and not source.kv_head_start <= target.kv_head_start < target.kv_head_end <= source.kv_head_end:
        reasons.append(
            f"kv heads are {source.shard} at the sender and {target.shard} at the receiver, and one hand-off has one "
            "sender, which must hold all of the receiver's"
        )
    if not reasons:
        return ""
    return f"the KV layouts differ: {'; '.join(reasons)}. Sender: {source}. Receiver: {target}"


def wire_layout(target: KVCacheLayout, wire_dtype: KVDtype | None) -> KVCacheLayout:
    """The layout of pages on their way to a pool of `target`. A wire dtype is for saving bytes: never a wider one."""
    if wire_dtype is None or wire_dtype.itemsize >= target.dtype.itemsize:
        return target
    return replace(target, dtype=wire_dtype)


def check_wire(wire: KVCacheLayout, pool: KVCacheLayout) -> str:
    """Why a receiver cannot turn pages of `wire` into pages of its `pool`; empty if it can: all but dtype is equal."""
    if pool.axis_order == AXIS_ORDER and replace(wire, dtype=pool.dtype) == pool:
        return ""
    return f"pages on the wire may differ from the pool's in dtype only. Wire: {wire}. Pool: {pool}"


def describe(source: KVCacheLayout, wire: KVCacheLayout, target: KVCacheLayout) -> str:
    """What is changed on the way, for receipts; empty when nothing is."""
    changes = []
    if source.block_size != target.block_size:
        changes.append(f"block_size {source.block_size} -> {target.block_size}")
    if wire.dtype is not target.dtype:
        back = "" if source.dtype is target.dtype else f" -> {target.dtype.value}"
        changes.append(f"dtype {source.dtype.value} -> {wire.dtype.value} on the wire{back}")
    elif source.dtype is not target.dtype:
        changes.append(f"dtype {source.dtype.value} -> {target.dtype.value}")
    if source.shard != target.shard:
        changes.append(f"kv heads {source.shard} -> {target.shard}")
    return ", ".join(changes)


class PageConverter:
    """Makes pages of `target` from a pool of `source`. Raises ValueError for layouts that cannot exchange blocks.

    A source that has only some of the target's heads fills only those; others with the rest, each a pool with its own
    converter, complete the page in any order. Stateless: any thread, several at once.
    """

    def __init__(self, source: KVCacheLayout, target: KVCacheLayout) -> None:
        match = source.compare(target, "at the source", "at the target")
        if match.verdict is LayoutVerdict.REFUSED or AXIS_ORDER not in (source.axis_order, target.axis_order):
            raise ValueError(f"pages cannot be converted ({match}). Source: {source}. Target: {target}")
        first = max(source.kv_head_start, target.kv_head_start)
        end = min(source.kv_head_end, target.kv_head_end)
        self._source, self._target = source, target
        self._from_heads = slice(first - source.kv_head_start, end - source.kv_head_start)
        self._to_heads = slice(first - target.kv_head_start, end - target.kv_head_start)

    def fill(
        self,
        pool: memoryview,
        local: Mapping[int, int],
        blocks: Sequence[int],
        layers: range,
        num_tokens: int,
        into: memoryview,
    ) -> None:
        """Write the target's pages of prompt blocks `blocks` (counted in the target's size) in these layers.

        `pool`: whole blocks of the source. `local`: where the source's blocks of the prompt are in it; all that hold
        one of the `num_tokens` tokens of these pages must be there (KeyError). `into`: the pages, block by block, and
        no more. Raises ValueError for memory of another size.
        """
        pages = PageArrays(self._target, into, len(layers))
        if pages.values.shape[0] != len(blocks):
            raise ValueError(f"{into.nbytes} bytes are not {len(blocks)} blocks of {len(layers)} pages")
        held = PageArrays(self._source, pool, self._source.num_layers)
        for some, of_layers in _pieces(pages):
            end = of_layers.stop + layers.start
            names, part = blocks[some], range(of_layers.start + layers.start, end)
            target = pages.tiles(some, of_layers, self._to_heads)
            if self._source.dtype is self._target.dtype:
                self._gather(held, local, names, part, num_tokens, target)
                continue
            shape = target.values.shape
            scales = np.empty(shape[:-1], np.float16) if self._source.dtype.has_scales else None
            rows = Tiles(self._source.dtype, np.empty(shape, storage(self._source.dtype)), scales)
            self._gather(held, local, names, part, num_tokens, rows)
            convert(rows, target)
        pages.padding[...] = 0

    def _gather(
        self,
        held: PageArrays,
        local: Mapping[int, int],
        blocks: Sequence[int],
        layers: range,
        num_tokens: int,
        into: Tiles,
    ) -> None:
        """Copy rows, as bytes, to the places that they have in the target's blocks; the rest of the places is zero."""
        bits = np.dtype(f"u{into.dtype.itemsize}")
        copies: list[tuple[Array, Array]] = [(held.values.view(bits), into.values.view(bits))]
        if held.scales is not None and into.scales is not None:
            copies.append((held.scales, into.scales))
        of_layers, from_size, to_size = (
            slice(layers.start, layers.stop),
            self._source.block_size,
            self._target.block_size,
        )
        for place, block in enumerate(blocks):
            start, end = block * to_size, min((block + 1) * to_size, num_tokens)
            at = start
            while at < end:
                index, offset = divmod(at, from_size)
                size = min(from_size - offset, end - at)
                to, where = slice(at - start, at - start + size), local[index]
                for source, target in copies:
                    rows = source[where, of_layers, :, self._from_heads, offset : offset + size]
                    target[place, :, :, :, to] = rows
                at += size
            for _, target in copies:
                target[place, :, :, :, max(0, end - start) :] = 0


def requantise(wire: KVCacheLayout, pool: KVCacheLayout, staged: memoryview, into: Sequence[memoryview]) -> None:
    """Turn consecutive pages of `wire` into the same pages of `pool`, in order, in the views `into`.

    Each view holds whole pages; together they are as many as in `staged`. Raises ValueError otherwise, before a byte
    is written, and for layouts that `check_wire` refuses. Any thread.
    """
    refusal = check_wire(wire, pool)
    if refusal:
        raise ValueError(refusal)
    if sum(view.nbytes for view in into) // pool.page_bytes * wire.page_bytes != staged.nbytes:
        raise ValueError(f"{staged.nbytes} bytes of {wire.dtype.value} pages do not fill the {pool.dtype.value} pages")
    targets = [PageArrays(pool, view, 1) for view in into]
    first = 0
    for target in targets:
        end = first + target.values.shape[0] * wire.page_bytes
        source = PageArrays(wire, staged[first:end], 1)
        for blocks, layers in _pieces(target):
            convert(source.tiles(blocks, layers, _ALL), target.tiles(blocks, layers, _ALL))
        target.padding[...] = 0
        first = end


def _pieces(pages: PageArrays) -> Iterator[tuple[slice, slice]]:
    """(blocks, layers) of parts of at most _PIECE_ELEMENTS, or one page, that cover the pages once."""
    num_blocks, num_layers = pages.values.shape[:2]
    pages_each = max(1, _PIECE_ELEMENTS // (pages.values[0, 0].size if num_blocks else 1))
    layers_each = min(num_layers, pages_each)
    blocks_each = max(1, pages_each // max(1, layers_each))
    for block in range(0, num_blocks, blocks_each):
        for layer in range(0, num_layers, layers_each):
            yield (
                slice(block, min(block + blocks_each, num_blocks)),
                slice(layer, min(layer + layers_each, num_layers)),
            )
