"""Sampling noise as a pure function of (seed, position, token id).

There is no generator and no state, so the noise of a token is the same in every batch, thread, process, machine
and attempt: batching, migration and the prefill/decode split cannot change a sampled text.

The function, exactly, in unsigned integers that wrap (`^` exclusive or, `>>` logical shift):

    mix64(x):  x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9;  x ^= x >> 27;  x *= 0x94D049BB133111EB;  x ^= x >> 31
    mix32(x):  x ^= x >> 16;  x *= 0x85EBCA6B;          x ^= x >> 13;  x *= 0xC2B2AE35;          x ^= x >> 16

    key  = mix64(mix64(seed + G) + (position + 1) * G)     64 bits, once a row; G = 0x9E3779B97F4A7C15
    bits = mix32(mix32(token_id * 0x9E3779B1 + low32(key)) ^ high32(key))      32 bits, for each token
    u    = (2 * bits + 1) / 2**33                          exact in float64, never 0 and never 1
    gumbel = -log(-log(u))                                 float64

Everything up to `u` is exact, so any device can reproduce it bit by bit (a kernel needs one 64-bit multiply chain a
row and 32-bit multiplies a token); only the two logarithms depend on the math library, in the last place.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

_MASK64: Final = 0xFFFFFFFFFFFFFFFF
_MASK32: Final = 0xFFFFFFFF
_GOLDEN64: Final = 0x9E3779B97F4A7C15
_GOLDEN32: Final = np.uint32(0x9E3779B1)
_MIX32_A: Final = np.uint32(0x85EBCA6B)
_MIX32_B: Final = np.uint32(0xC2B2AE35)


def row_key(seed: int, position: int) -> tuple[int, int]:
    """The (low, high) 32-bit halves of the key of one row.

    `seed` is taken modulo 2**64. `position` is the index of the token being chosen in the whole sequence, prompt
    included, so that an answer continued elsewhere goes on with the same noise. Any thread.
    """
    key = _mix64((_mix64((seed + _GOLDEN64) & _MASK64) + (position + 1) * _GOLDEN64) & _MASK64)
    return key & _MASK32, key >> 32


def noise_bits(seed: int, position: int, token_ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """32 random bits for each token id [n]; a fresh array [n]. Distinct ids of one row never get equal bits."""
    low, high = row_key(seed, position)
    bits = token_ids * _GOLDEN32
    bits += np.uint32(low)
    _mix32_inplace(bits)
    bits ^= np.uint32(high)
    _mix32_inplace(bits)
    return bits


def uniform(seed: int, position: int, token_ids: NDArray[np.uint32]) -> NDArray[np.float64]:
    """A number in the open interval (0, 1) for each token id [n]; a fresh float64 array [n]."""
    return open_unit(noise_bits(seed, position, token_ids))


def open_unit(bits: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Each of the 2**32 values of `bits` [n] as the middle of its own slice of (0, 1), exactly; float64 [n]."""
    middles = bits.astype(np.float64)
    middles += 0.5
    middles *= 2.0**-32
    return middles


def gumbel(seed: int, position: int, token_ids: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Standard Gumbel noise for each token id [n]; a fresh float64 array [n], values within (-3.2, 22.9).

    The argmax of `logits + gumbel` is distributed as softmax(logits). Any thread.
    """
    noise = uniform(seed, position, token_ids)
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    return noise


def _mix64(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _mix32_inplace(bits: NDArray[np.uint32]) -> None:
    bits ^= bits >> np.uint32(16)
    bits *= _MIX32_A
    bits ^= bits >> np.uint32(13)
    bits *= _MIX32_B
    bits ^= bits >> np.uint32(16)
