"""Runs of pages: joined, split and laid out without losing or doubling a byte."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_cache.layout import KVCacheLayout, KVDtype
from kv_transfer.pages import MAX_WRITE_BYTES, USUAL_WRITE_BYTES, PageRun, max_write_bytes, spans, split, views
from kv_transfer.transport_shm import copy_views
from tests.support.kv_pair import LAYOUT

BIG = KVCacheLayout("m", "r", num_layers=40, num_kv_heads=8, head_dim=128, block_size=64, dtype=KVDtype.FP32)
HUGE = KVCacheLayout("m", "r", num_layers=2, num_kv_heads=64, head_dim=128, block_size=128, dtype=KVDtype.FP32)


@pytest.mark.parametrize("layout", [LAYOUT, BIG, HUGE], ids=["small", "big", "huge"])
@settings(max_examples=40, deadline=None)
@given(data=st.data(), write_bytes=st.sampled_from([USUAL_WRITE_BYTES, MAX_WRITE_BYTES]))
def test_the_pieces_of_a_run_cover_it_once_and_fit_a_write(
    layout: KVCacheLayout, data: st.DataObject, write_bytes: int
) -> None:
    first, first_layer = data.draw(st.integers(0, 50)), data.draw(st.integers(0, layout.num_layers - 1))
    num_layers = data.draw(st.integers(1, layout.num_layers - first_layer))
    run = PageRun(range(first, first + data.draw(st.integers(1, 300))), range(first_layer, first_layer + num_layers))
    pieces = list(split(run, layout, write_bytes))
    pages = [(block, layer) for piece in pieces for block in piece.blocks for layer in piece.layers]
    assert len(pages) == run.num_pages
    assert set(pages) == {(block, layer) for block in run.blocks for layer in run.layers}
    most = max(write_bytes, layout.page_bytes)
    assert all(piece.num_pages * layout.page_bytes <= most <= max_write_bytes(layout) for piece in pieces)


def test_a_small_run_stays_whole() -> None:
    run = PageRun(range(100), range(LAYOUT.num_layers))
    assert run.num_pages * LAYOUT.page_bytes < USUAL_WRITE_BYTES
    assert list(split(run, LAYOUT, USUAL_WRITE_BYTES)) == [run]


@pytest.mark.parametrize(
    ("one", "other", "joined"),
    [
        (PageRun(range(2), range(1)), PageRun(range(2), range(1, 3)), PageRun(range(2), range(3))),
        (PageRun(range(2), range(3)), PageRun(range(2, 5), range(3)), PageRun(range(5), range(3))),
        (PageRun(range(2), range(1)), PageRun(range(2), range(2, 3)), None),
        (PageRun(range(2), range(1)), PageRun(range(1, 3), range(1, 2)), None),
        (PageRun(range(2, 4), range(1)), PageRun(range(2), range(1)), None),
        (PageRun(range(2), range(1)), PageRun(range(2, 3), range(1, 2)), None),
    ],
)
def test_runs_join_only_when_they_make_a_rectangle(one: PageRun, other: PageRun, joined: PageRun | None) -> None:
    assert one.joined(other) == joined


def test_whole_neighbouring_blocks_are_one_span_and_partial_ones_are_not() -> None:
    every = range(LAYOUT.num_layers)
    assert spans(LAYOUT, (4, 5, 6), every) == [(LAYOUT.page_offset(4, 0), 3 * LAYOUT.block_bytes)]
    assert len(spans(LAYOUT, (4, 6), every)) == 2
    assert len(spans(LAYOUT, (5, 4), every)) == 2
    assert len(spans(LAYOUT, (4, 5), range(1, LAYOUT.num_layers))) == 2


@settings(max_examples=40, deadline=None)
@given(cuts=st.tuples(st.lists(st.integers(0, 500), max_size=6), st.lists(st.integers(0, 500), max_size=6)))
def test_copying_between_differently_cut_views_moves_every_byte(cuts: tuple[list[int], list[int]]) -> None:
    source, target = bytearray(np.random.default_rng(3).bytes(500)), bytearray(500)

    def cut(data: bytearray, at: list[int]) -> list[memoryview]:
        borders = [0, *sorted(at), 500]
        return [memoryview(data)[a:b] for a, b in itertools.pairwise(borders)]

    copy_views(cut(source, cuts[0]), cut(target, cuts[1]))
    assert source == target


def test_views_alias_the_pool() -> None:
    pool = bytearray(LAYOUT.pool_bytes(3))
    for view in views(memoryview(pool), LAYOUT, (2, 0), range(1, 2)):
        view[:] = b"\1" * view.nbytes
    for block in range(3):
        for layer in range(LAYOUT.num_layers):
            start = LAYOUT.page_offset(block, layer)
            expected = 1 if layer == 1 and block != 1 else 0
            assert set(pool[start : start + LAYOUT.page_bytes]) == {expected}
