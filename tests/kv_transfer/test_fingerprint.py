"""Fingerprints see every byte and every place."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer import fingerprint
from kv_transfer.pages import views
from tests.support.kv_pair import LAYOUT

POOL_BLOCKS = 4
GOLDEN_SEED = 8852546843227812767
GOLDEN_PAGE = 12392189827164188342
GOLDEN_BLOCK = 6707562772499047643
GOLDEN_DIGEST = "abccad42d03c940bc2b249bf5a4e1e3d"


def make_pool(seed: int = 1) -> bytearray:
    return bytearray(np.random.default_rng(seed).integers(0, 256, LAYOUT.pool_bytes(POOL_BLOCKS), dtype=np.uint8))


def checksums(pool: bytearray, block_ids: tuple[int, ...], base_seed: int, first_block: int = 0) -> list[int]:
    layers = range(LAYOUT.num_layers)
    seeds = fingerprint.page_seeds(base_seed, range(first_block, first_block + len(block_ids)), layers)
    found = fingerprint.pages(views(memoryview(pool), LAYOUT, block_ids, layers), LAYOUT.page_bytes, seeds)
    return list(fingerprint.fold_blocks(found, LAYOUT.num_layers, base_seed))


def test_the_function_does_not_change_by_accident() -> None:
    """Both ends of a link may be of different builds: these values are part of the protocol."""
    base_seed = fingerprint.seed("request/1/00ff", 1)
    page = fingerprint.page(memoryview(bytes(range(256))), base_seed, 3, 2)
    assert (base_seed, page) == (GOLDEN_SEED, GOLDEN_PAGE)
    assert fingerprint.fold_blocks([1, 2, 3], 3, base_seed) == (GOLDEN_BLOCK,)
    assert fingerprint.digest([1, 2, 3]).hex() == GOLDEN_DIGEST


@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, LAYOUT.block_bytes - 1), bit=st.integers(0, 7))
def test_every_bit_counts(position: int, bit: int) -> None:
    pool = make_pool()
    before = checksums(pool, (0,), 1)
    pool[position] ^= 1 << bit
    assert checksums(pool, (0,), 1) != before


def test_the_right_bytes_in_the_wrong_place_do_not_match() -> None:
    pool = bytearray(LAYOUT.pool_bytes(POOL_BLOCKS))  # All blocks and layers alike: only the place tells them apart.
    same = checksums(pool, (0, 1, 2, 3), 1)
    assert len(set(same)) == 4
    assert len(set(fingerprint.page_seeds(1, range(50), range(50)))) == 2500


@pytest.mark.parametrize("other", [("h", 2), ("g", 1), ("h\0", 1), ("", 1)])
def test_another_hand_off_or_attempt_has_other_fingerprints(other: tuple[str, int]) -> None:
    assert fingerprint.seed(*other) != fingerprint.seed("h", 1)
    pool = make_pool()
    assert checksums(pool, (0,), fingerprint.seed(*other)) != checksums(pool, (0,), fingerprint.seed("h", 1))


@settings(max_examples=60, deadline=None)
@given(base_seed=st.integers(0, 2**64 - 1), block=st.integers(0, 2**30), layer=st.integers(0, 200))
def test_the_seed_of_a_page_is_that_of_its_place_alone(base_seed: int, block: int, layer: int) -> None:
    """Computed one by one, in plain integers, as the specification says it."""
    mask = 2**64 - 1

    def place(block: int, layer: int) -> int:
        mixed = (base_seed + (block << 16 | layer) * 0x9E3779B97F4A7C15) & mask
        mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & mask
        mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & mask
        return mixed ^ mixed >> 31

    blocks, layers = range(block, block + 3), range(layer, layer + 2)
    assert fingerprint.page_seeds(base_seed, blocks, layers) == [place(b, x) for b in blocks for x in layers]


@pytest.mark.parametrize("dtype", [list, lambda values: np.array(values, np.uint64)])
def test_values_may_be_python_or_numpy_integers(dtype: Callable[[list[int]], Any]) -> None:
    values = [0, 1, 2**63, 2**64 - 1]
    assert fingerprint.fold_blocks(dtype(values), 2, 5) == fingerprint.fold_blocks(values, 2, 5)
    assert fingerprint.digest(dtype(values)) == fingerprint.digest(values)
    assert fingerprint.fold_blocks([], 2, 5) == ()


@pytest.mark.parametrize("size", [0, 255, 511, 768])
def test_views_that_are_not_the_pages_named_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="2 seeds for views of"):
        fingerprint.pages([memoryview(bytes(size))], 256, [1, 2])


def test_pages_may_lie_in_one_view_or_in_many() -> None:
    content = memoryview(make_pool())[: 6 * 256]
    whole = fingerprint.pages([content], 256, range(6))
    parts = [content[:256], content[256 : 4 * 256], content[4 * 256 :]]
    assert fingerprint.pages(parts, 256, range(6)) == whole
    assert whole == [xxhash.xxh3_64_intdigest(content[n * 256 : n * 256 + 256], n) for n in range(6)]
