"""Fingerprints of KV pages on a GPU: the values of `kv_transfer.fingerprint.page`, computed where the bytes lie.

The hash is XXH3-64 with a seed, in its form for long inputs, as its specification has it
(https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md). Pages are multiples of 256 bytes, so the shorter forms
never occur. All arithmetic is modulo 2^64, on little-endian words of 8 bytes:

    page     | block of 1024 bytes | block of 1024 bytes | ... | last block: 256, 512, 768 or 1024 bytes |
    block    16 stripes of 64 bytes; a stripe has a word for each of 8 accumulators
    stripe s of a block adds, to accumulator l:   (low half x high half of word l ^ key s + l)  +  word l ^ 1
    scramble after each block but the last:       a = (a ^ a >> 47 ^ key 16 + l) x a prime
    at the end                                    fold the accumulators in pairs by 128-bit products, add, mix

What a block adds depends on no accumulator, so all its stripes are summed at once; only the scrambles form a chain.
One program is one warp and takes one page; a thread loads 16 bytes at a time. Parallelism comes from the pages.
"""

import functools

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kv_cache.layout import KVCacheLayout

_PRIME32_1 = tl.constexpr(0x9E3779B1)
_PRIME64_1 = tl.constexpr(0x9E3779B185EBCA87)
_PRIME_MX1 = tl.constexpr(0x165667919E3779F9)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_SPLITMIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_SPLITMIX_2 = tl.constexpr(0x94D049BB133111EB)

_WORD_BYTES = 8
_BLOCK_WORDS = tl.constexpr(128)
_BLOCK_STRIPES = tl.constexpr(16)
_STRIPE_WORDS = tl.constexpr(8)
_SCRAMBLE_WORD = tl.constexpr(16)
# Two keys do not begin at a word: that of the last stripe of a page at byte 121, and that of the end at byte 11.
_LAST_WORD, _LAST_BYTE = tl.constexpr(15), tl.constexpr(1)
_MERGE_WORD, _MERGE_BYTE = tl.constexpr(1), tl.constexpr(3)
_SECRET_WORDS = tl.constexpr(24)
_UNROLL = tl.constexpr(4)
_MAX_GRID_LAYERS = 65535

# The algorithm's constants: 24 words of secret, then the 8 accumulators to start from.
_CONSTANTS = (
    0xBE4BA423396CFEB8, 0x1CAD21F72C81017C, 0xDB979083E96DD4DE, 0x1F67B3B7A4A44072,
    0x78E5C0CC4EE679CB, 0x2172FFCC7DD05A82, 0x8E2443F7744608B8, 0x4C263A81E69035E0,
    0xCB00C391BB52283C, 0xA32E531B8B65D088, 0x4EF90DA297486471, 0xD8ACDEA946EF1938,
    0x3F349CE33F76FAA8, 0x1D4F0BC7C7BBDCF9, 0x3159B4CD4BE0518A, 0x647378D9C97E9FC8,
    0xC3EBD33483ACC5EA, 0xEB6313FAFFA081C5, 0x49DAF0B751DD0D17, 0x9E68D429265516D3,
    0xFCA1477D58BE162B, 0xCE31D07AD1B8F88F, 0x280416958F3ACB45, 0x7E404BBBCAFBD7AF,
    0x00000000C2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x0000000085EBCA77, 0x27D4EB2F165667C5, 0x000000009E3779B1,
)  # fmt: skip


def page_fingerprints(
    pool: Tensor, layout: KVCacheLayout, block_ids: Tensor, *, first_block: int, layers: range, base_seed: int
) -> Tensor:
    """Fingerprints of the pages of some blocks and layers, queued on the current stream; nothing is waited for.

    `pool`: any dtype, contiguous, at least 16-byte aligned, `[num_blocks][num_layers][page]` as `layout` has it, on a
    CUDA device. `block_ids`: int32 `[num_blocks]`, contiguous, on the same device, in the order of the prompt; block
    `first_block + i` of the prompt lies in block `block_ids[i]` of the pool. The ids are not checked: that would wait
    for the device. `layers`: consecutive. `base_seed`: of 64 bits, from `kv_transfer.fingerprint.seed`.

    Returns int64 `[num_blocks, len(layers)]`: the 64 bits of each fingerprint; `.cpu().numpy().view("uint64")` gives
    the values of `kv_transfer.fingerprint.page`. Raises ValueError for anything that is not as described.
    """
    _check(pool, layout, block_ids, layers, base_seed)
    found = torch.empty((block_ids.numel(), len(layers)), dtype=torch.int64, device=pool.device)
    if found.numel():
        _page_fingerprints[(block_ids.numel(), len(layers))](
            pool.reshape(-1).view(torch.int64),
            block_ids,
            _constants(pool.device),
            found,
            first_block,
            layers.start,
            layout.num_layers,
            base_seed,
            PAGE_WORDS=layout.page_bytes // _WORD_BYTES,
            num_warps=1,
        )
    return found


def _check(pool: Tensor, layout: KVCacheLayout, block_ids: Tensor, layers: range, base_seed: int) -> None:
    size_bytes = pool.numel() * pool.element_size()
    if not pool.is_contiguous() or size_bytes % layout.block_bytes or pool.data_ptr() % 16:
        raise ValueError(f"a pool must be contiguous, aligned to 16 bytes and of whole blocks, not {size_bytes} bytes")
    if block_ids.dtype != torch.int32 or block_ids.dim() != 1 or not block_ids.is_contiguous():
        raise ValueError(f"block ids must be a contiguous int32 vector, not {block_ids.dtype} {list(block_ids.shape)}")
    if block_ids.device != pool.device:
        raise ValueError(f"block ids are on {block_ids.device}, the pool is on {pool.device}")
    if layers.step != 1 or layers.start < 0 or layers.stop > min(layout.num_layers, _MAX_GRID_LAYERS):
        raise ValueError(f"{layers} are not consecutive layers of {layout.num_layers}")
    if not 0 <= base_seed < 1 << 64:
        raise ValueError(f"a seed has 64 bits, not {base_seed}")


@functools.cache
def _constants(device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(_CONSTANTS, np.uint64).view(np.int64)).to(device)


# Compiled once for a page size, whatever the other arguments are.
@triton.jit(
    do_not_specialize=["first_block", "first_layer", "num_layers", "base_seed"],
    do_not_specialize_on_alignment=["block_ids"],
)
def _page_fingerprints(
    pool: tl.tensor,
    block_ids: tl.tensor,
    constants: tl.tensor,
    found: tl.tensor,
    first_block: tl.int32,
    first_layer: tl.int32,
    num_layers: tl.int32,
    base_seed: tl.uint64,
    PAGE_WORDS: tl.constexpr,
) -> None:
    """Program (i, j): the page of the i-th block and the j-th layer. Words are int64 `pool`, `constants`, `found`."""
    index = tl.program_id(0)
    layer = first_layer + tl.program_id(1)
    seed = _place(base_seed.to(tl.uint64), first_block + index, layer)
    page = pool + (tl.load(block_ids + index).to(tl.int64) * num_layers + layer) * PAGE_WORDS

    # A block is a tile [stripe, pair of accumulators, which of the pair].
    stripe = tl.arange(0, _BLOCK_STRIPES)[:, None, None]
    lane = 2 * tl.arange(0, _STRIPE_WORDS // 2)[:, None] + tl.arange(0, 2)[None, :]
    within = stripe * _STRIPE_WORDS + lane[None, :, :]
    key = _key(constants, stripe + lane[None, :, :], seed)
    scramble_key = _key(constants, lane + _SCRAMBLE_WORD, seed)
    accumulators = tl.load(constants + lane + _SECRET_WORDS).to(tl.uint64, bitcast=True)

    FULL_BLOCKS: tl.constexpr = (PAGE_WORDS - 1) // _BLOCK_WORDS
    for block in tl.range(0, FULL_BLOCKS, loop_unroll_factor=_UNROLL):
        words = tl.load(page + block * _BLOCK_WORDS + within).to(tl.uint64, bitcast=True)
        accumulators += tl.sum(_contribution(words, key), 0)
        accumulators = (accumulators ^ (accumulators >> 47) ^ scramble_key) * _PRIME32_1

    LAST_STRIPES: tl.constexpr = PAGE_WORDS // _STRIPE_WORDS - FULL_BLOCKS * _BLOCK_STRIPES
    last_key = _key_from_byte(constants, lane + _LAST_WORD, _LAST_BYTE, seed)
    key = tl.where(stripe == LAST_STRIPES - 1, last_key[None, :, :], key)
    there = within < LAST_STRIPES * _STRIPE_WORDS
    words = tl.load(page + FULL_BLOCKS * _BLOCK_WORDS + within, mask=there, other=0).to(tl.uint64, bitcast=True)
    accumulators += tl.sum(tl.where(there, _contribution(words, key), 0), 0)

    left, right = tl.split(accumulators ^ _key_from_byte(constants, lane + _MERGE_WORD, _MERGE_BYTE, seed))
    LENGTH_TERM: tl.constexpr = (PAGE_WORDS * 8 * _PRIME64_1) & 0xFFFFFFFFFFFFFFFF
    total = tl.sum((left * right) ^ tl.umulhi(left, right), 0) + LENGTH_TERM
    total = (total ^ (total >> 37)) * _PRIME_MX1
    tl.store(found + index * tl.num_programs(1) + tl.program_id(1), (total ^ (total >> 32)).to(tl.int64, bitcast=True))


@triton.jit
def _contribution(words: tl.tensor, key: tl.tensor) -> tl.tensor:
    """What each word of a block adds to the accumulator of its place."""
    mixed = words ^ key
    even, odd = tl.split(words)
    product = mixed.to(tl.uint32).to(tl.uint64) * (mixed >> 32).to(tl.uint32).to(tl.uint64)
    return product + tl.join(odd, even)


@triton.jit
def _key(constants: tl.tensor, word: tl.tensor, seed: tl.tensor) -> tl.tensor:
    """Words of the secret under this seed: it is added to the even ones and taken from the odd ones."""
    plain = tl.load(constants + word).to(tl.uint64, bitcast=True)
    return tl.where(word % 2 == 0, plain + seed, plain - seed)


@triton.jit
def _key_from_byte(constants: tl.tensor, word: tl.tensor, BYTE: tl.constexpr, seed: tl.tensor) -> tl.tensor:
    """The same, but from `BYTE` bytes further on."""
    return (_key(constants, word, seed) >> (8 * BYTE)) | (_key(constants, word + 1, seed) << (64 - 8 * BYTE))


@triton.jit
def _place(base_seed: tl.tensor, block_index: tl.tensor, layer: tl.tensor) -> tl.tensor:
    """The seed of one page, as `kv_transfer.fingerprint` makes it: splitmix64 of the base seed and the place."""
    mixed = base_seed + ((block_index.to(tl.uint64) << 16) | layer.to(tl.uint64)) * _GOLDEN
    mixed = (mixed ^ (mixed >> 30)) * _SPLITMIX_1
    mixed = (mixed ^ (mixed >> 27)) * _SPLITMIX_2
    return mixed ^ (mixed >> 31)
