"""Fingerprints see every byte and every place."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer import fingerprint
from tests.support.kv_pair import LAYOUT

POOL_BLOCKS = 4
GOLDEN_SEED = 8852546843227812767
GOLDEN_PAGE = 12392189827164188342
GOLDEN_BLOCK = 6707562772499047643
GOLDEN_DIGEST = "abccad42d03c940bc2b249bf5a4e1e3d"


def make_pool(seed: int = 1) -> bytearray:
    return bytearray(np.random.default_rng(seed).integers(0, 256, LAYOUT.pool_bytes(POOL_BLOCKS), dtype=np.uint8))


def checksums(pool: bytearray, block_ids: tuple[int, ...], base_seed: int, first_block: int = 0) -> list[int]:
    return [
        fingerprint.block(memoryview(pool), LAYOUT, block_id, base_seed, index)
        for index, block_id in enumerate(block_ids, start=first_block)
    ]


def test_the_function_does_not_change_by_accident() -> None:
    """Both ends of a link may be of different builds: these values are part of the protocol."""
    base_seed = fingerprint.seed("request/1/00ff", 1)
    page = fingerprint.page(memoryview(bytes(range(256))), base_seed, 3, 2)
    assert (base_seed, page) == (GOLDEN_SEED, GOLDEN_PAGE)
    assert fingerprint.fold_block([1, 2, 3], base_seed) == GOLDEN_BLOCK
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
    pages = {fingerprint.page(memoryview(bytes(256)), 1, block, layer) for block in range(50) for layer in range(50)}
    assert len(pages) == 2500


@pytest.mark.parametrize("other", [("h", 2), ("g", 1), ("h\0", 1), ("", 1)])
def test_another_hand_off_or_attempt_has_other_fingerprints(other: tuple[str, int]) -> None:
    assert fingerprint.seed(*other) != fingerprint.seed("h", 1)
    pool = make_pool()
    assert checksums(pool, (0,), fingerprint.seed(*other)) != checksums(pool, (0,), fingerprint.seed("h", 1))


def test_both_ways_to_the_fingerprint_of_blocks_agree() -> None:
    pool, base_seed = memoryview(make_pool()), 5
    size = LAYOUT.page_bytes
    pages = [
        fingerprint.page(pool[offset : offset + size], base_seed, block, layer)
        for block in range(POOL_BLOCKS)
        for layer in range(LAYOUT.num_layers)
        for offset in (LAYOUT.page_offset(block, layer),)
    ]
    folded = fingerprint.fold_blocks(pages, LAYOUT.num_layers, base_seed)
    assert list(folded) == checksums(bytearray(pool), (0, 1, 2, 3), base_seed)


def test_a_check_names_the_first_block_that_differs() -> None:
    pool, ids = make_pool(), (3, 1, 2)
    expected = checksums(pool, ids, 9, first_block=5)
    check = {"base_seed": 9, "first_block": 5, "expected": expected}
    digest, mismatch = fingerprint.check_blocks(memoryview(pool), LAYOUT, ids, **check)
    assert (digest, mismatch) == (fingerprint.digest(expected), "")
    pool[LAYOUT.page_offset(1, 1)] ^= 1
    digest, mismatch = fingerprint.check_blocks(memoryview(pool), LAYOUT, ids, **check)
    assert digest == b""
    assert "prompt block 6 " in mismatch
