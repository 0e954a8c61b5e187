"""Names of blocks: fixed values, equal in every process, different for everything that must not be shared."""

import itertools
import struct
import subprocess
import sys
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache.block_hash import HASH_BYTES, HASH_VERSION, BlockHasher, hash_block, hash_blocks, root_hash
from kv_cache.layout import KVCacheLayout, KVDtype

HASHER = BlockHasher("smollm2", "abc123", 16, KVDtype.FP32)

# Written down once. If these change, HASH_VERSION must change: workers of both versions would disagree in silence.
GOLDEN_ROOT = "2711e5108309a35d9713a0b4f068446c"
GOLDEN_SALTED_ROOT = "09e0bfd8b5438964492fceab31fa8d23"
GOLDEN_CHAIN = ["b9cdc8224dccf2792ebe3bdde8fcdacb", "2d02e7057e3d1b2a3a32b0816acb78dc"]

PRINT_CHAIN = """
from kv_cache.block_hash import BlockHasher
from kv_cache.layout import KVDtype
hasher = BlockHasher("smollm2", "abc123", 16, KVDtype.FP32)
print(*[name.hex() for name in hasher.hash_blocks(range(40))])
"""


def test_names_have_their_golden_values() -> None:
    assert HASH_VERSION == 1
    assert HASHER.root().hex() == GOLDEN_ROOT
    assert HASHER.root(b"tenant-1").hex() == GOLDEN_SALTED_ROOT
    assert [name.hex() for name in HASHER.hash_blocks(range(40))] == GOLDEN_CHAIN


def test_the_golden_values_follow_from_the_definition_spelled_out() -> None:
    def with_length(part: bytes) -> bytes:
        return struct.pack("<Q", len(part)) + part

    parts = (struct.pack("<IQ", 1, 16), b"smollm2", b"abc123", b"fp32", b"")
    name = blake2b(b"".join(map(with_length, parts)), digest_size=16, person=b"kvferry-root").digest()
    assert name.hex() == GOLDEN_ROOT
    for start, golden in zip((0, 16), GOLDEN_CHAIN, strict=True):
        tokens = struct.pack("<16I", *range(start, start + 16))
        name = blake2b(name + tokens, digest_size=16, person=b"kvferry-block").digest()
        assert name.hex() == golden


@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
def test_names_are_the_same_in_another_process_with_another_hash_seed(hash_seed: str) -> None:
    paths = [path for path in sys.path if path]
    output = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {paths!r}\n{PRINT_CHAIN}"],
        env={"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert output.split() == GOLDEN_CHAIN


def test_everything_that_decides_about_the_kv_is_in_the_name() -> None:
    roots = [
        root_hash(*arguments)
        for arguments in itertools.product(
            ("smollm2", "qwen3"), ("abc", "def"), (16, 32), ("fp32", "bf16"), (b"", b"a", b"b")
        )
    ]
    assert len(set(roots)) == len(roots) == 48
    assert {len(root) for root in roots} == {HASH_BYTES}


def test_the_borders_between_the_parts_of_a_root_count() -> None:
    assert root_hash("ab", "c", 16, "fp32", b"") != root_hash("a", "bc", 16, "fp32", b"")
    assert root_hash("a", "b", 16, "fp32", b"salt") != root_hash("a", "b", 16, "fp32sa", b"lt")


def test_a_block_depends_on_its_parent_and_each_of_its_tokens_in_order() -> None:
    root, other_root = HASHER.root(), HASHER.root(b"other")
    names = {
        hash_block(parent, tokens)
        for parent in (root, other_root, hash_block(root, [1, 2, 3]))
        for tokens in ([1, 2, 3], [1, 2, 4], [3, 2, 1], [1, 2], [1, 2, 3, 0])
    }
    assert len(names) == 15


def test_a_block_without_tokens_is_no_root() -> None:
    assert hash_block(b"", []) != root_hash("", "", 0, "", b"")


def test_token_ids_that_do_not_fit_are_refused() -> None:
    assert len(hash_block(HASHER.root(), [0, 2**32 - 1])) == HASH_BYTES
    for token_ids in ([-1], [2**32]):
        with pytest.raises(ValueError, match="token ids"):
            hash_block(HASHER.root(), token_ids)


def test_a_hasher_needs_a_block_size() -> None:
    with pytest.raises(ValueError, match="block_size must be at least 1, not 0"):
        BlockHasher("m", "r", 0, KVDtype.FP32)


def test_the_hasher_of_a_layout_has_its_identity_and_all_shards_share_it() -> None:
    whole = KVCacheLayout("smollm2", "abc123", 30, 4, 64, 16, KVDtype.FP32)
    shard = KVCacheLayout("smollm2", "abc123", 30, 2, 64, 16, KVDtype.FP32, kv_head_start=2, total_kv_heads=4)
    assert BlockHasher.for_layout(whole).root() == BlockHasher.for_layout(shard).root() == HASHER.root()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=80), st.sampled_from([1, 2, 8, 16]))
def test_only_full_blocks_have_a_name_and_each_name_follows_from_the_one_before(tokens: list[int], size: int) -> None:
    root = HASHER.root()
    names = hash_blocks(root, tokens, size)
    assert len(names) == len(tokens) // size
    for index, (parent, name) in enumerate(itertools.pairwise([root, *names])):
        assert name == hash_block(parent, tokens[index * size : (index + 1) * size])


@given(st.lists(st.lists(st.integers(0, 9), max_size=40), max_size=6), st.binary(max_size=8))
def test_a_chain_extended_step_by_step_is_the_chain_of_the_whole(steps: list[list[int]], salt: bytes) -> None:
    tokens: list[int] = []
    names: list[bytes] = []
    for step in steps:
        tokens += step
        HASHER.extend(names, tokens, salt)
        assert names == HASHER.hash_blocks(tokens, salt)
