"""The next token of each row of logits: what `engine.sampler` chooses, on the GPU, with the same noise.

The tokens that top-k, top-p and min-p keep are, each by itself, the first ones in one order: larger logits first, lower
ids first among equals. So nothing needs to be sorted, nor does the border have to be found:

    1  the peak, and whether a token can be sampled at all; temperature 0 ends here
    2  top-k: the k-th largest logit, three bits of it at a time, by counting
    3  top-p: the mass of what top-k kept
    4  of the tokens not yet excluded, the one with the largest logit + noise
    5  it is chosen if it lies before the borders: if what comes before it in the order has less than `top_p` of the
       mass, and if it is at least `min_p` times as likely as the peak. If not, neither do those behind it: they and it
       are excluded, and 4 is next.

What is chosen has the largest sum of all that are kept, so it is the token that a sort would have led to. How often 4
is repeated depends on the row alone: about 1 / top_p times for logits with a peak, and each time excludes half of what
is left, on average, for logits without. One program takes one row, and reads it from the GPU's cache again and again.

Noise is bit for bit that of `engine.noise`. Sums that may win are computed in fp64, like the host's, so they differ
from them at most in the last place of a logarithm. Masses are sums of fp32 exponentials: a token at the border of
top-p may be kept here and not there, or the reverse, where the mass before it is within a millionth of the limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.sequence import SamplingParams

_BLOCK = 4096
_NUM_WARPS = 16
_MOST_TILES = 255
# The first of eleven digits of three bits has only two.
_TOP_SHIFT = tl.constexpr(30)
_MASK64 = (1 << 64) - 1

_GOLDEN64 = tl.constexpr(0x9E3779B97F4A7C15)
_MIX64_A = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX64_B = tl.constexpr(0x94D049BB133111EB)
_GOLDEN32 = tl.constexpr(0x9E3779B1)
_MIX32_A = tl.constexpr(0x85EBCA6B)
_MIX32_B = tl.constexpr(0xC2B2AE35)

# Far more than a sum in fp32 can be off where it matters: noise is within (-3.2, 22.9), so a token that is chosen has
# a logit, divided by the temperature, at most 26.1 below the peak.
_DOUBT = tl.constexpr(1e-3)
_LARGEST = tl.constexpr(3e38)
_ALL_BITS = tl.constexpr(0xFFFFFFFF)
_2_TO_MINUS_32 = tl.constexpr(2.0**-32)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """What each of R rows is sampled with, on the device of the logits. See `sampling_rows`."""

    temperature: Tensor  # fp64 [R]
    top_p: Tensor  # fp64 [R]
    min_p: Tensor  # fp64 [R]
    top_k: Tensor  # int32 [R]; 0: no limit
    seed: Tensor  # int64 [R], the bits of an unsigned number
    position: Tensor  # int64 [R], index of the token being chosen in the whole sequence


def sampling_rows(params: Sequence[SamplingParams], positions: Sequence[int], device: torch.device) -> SamplingRows:
    """The rows as tensors; copied without waiting for the device where it is another one. `positions`: one a row."""
    floats = torch.tensor([(row.temperature, row.top_p, row.min_p) for row in params], dtype=torch.float64)
    seeds = [_signed(row.seed & _MASK64) for row in params]
    integers = torch.tensor([[row.top_k for row in params], seeds, list(positions)], dtype=torch.int64)
    floats = floats.t().contiguous()
    if device.type == "cuda":
        floats, integers = floats.pin_memory(), integers.pin_memory()
    temperature, top_p, min_p = floats.to(device, non_blocking=True)
    top_k, seed, position = integers.to(device, non_blocking=True)
    return SamplingRows(temperature, top_p, min_p, top_k.to(torch.int32), seed, position)


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """int64 [R]: the token chosen in each row of `logits`; queued on the current stream.

    `logits`: fp32 [R, vocab] with contiguous rows, already adjusted (`engine.sampler.adjust_logits`: bias, minimum
    length, penalties), not changed. -1 stands for a row that cannot be sampled: it has a NaN or +inf, or no token is
    possible. A row's result depends on that row alone. Raises ValueError for shapes or dtypes that are not as
    described.
    """
    num_rows = len(logits)
    fits = logits.dim() == 2 and 0 < logits.shape[1] <= _MOST_TILES * _BLOCK
    if logits.dtype != torch.float32 or not fits or logits.stride(1) != 1:
        raise ValueError(f"logits must be fp32 [R, vocab] with contiguous rows, not {logits.dtype} {logits.shape}")
    for part in (rows.temperature, rows.top_p, rows.min_p, rows.top_k, rows.seed, rows.position):
        if part.shape != (num_rows,) or not part.is_contiguous() or part.device != logits.device:
            raise ValueError(f"{list(part.shape)} on {part.device} does not fit {num_rows} rows on {logits.device}")
    chosen = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        _sample[(num_rows,)](
            logits,
            chosen,
            rows.temperature,
            rows.top_p,
            rows.min_p,
            rows.top_k,
            rows.seed,
            rows.position,
            logits.stride(0),
            logits.shape[1],
            BLOCK=min(_BLOCK, max(32 * _NUM_WARPS, triton.next_power_of_2(logits.shape[1]))),
            num_warps=_NUM_WARPS,
        )
    return chosen


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


# Compiled once for a vocabulary, wherever the numbers of the rows lie.
@triton.jit(
    do_not_specialize_on_alignment=["chosen", "temperatures", "top_ps", "min_ps", "top_ks", "seeds", "positions"]
)
def _sample(
    logits: tl.tensor,
    chosen: tl.tensor,
    temperatures: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    top_ks: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    stride: tl.int64,
    vocab_size: tl.int32,
    BLOCK: tl.constexpr,
) -> None:
    """Program i: row i."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    peak, best, usable = _peak(logits, vocab_size, BLOCK)
    temperature = tl.load(temperatures + row)
    token = tl.where(usable, best, -1)
    if usable & (temperature > 0):
        top_k = tl.load(top_ks + row)
        top_p, min_p = tl.load(top_ps + row), tl.load(min_ps + row)
        per_unit = tl.minimum(1 / temperature, _LARGEST).to(tl.float32)
        nowhere = peak - float("inf")
        floor = nowhere
        if (top_k > 0) & (top_k < vocab_size):
            floor = _kth_largest(logits, top_k, vocab_size, BLOCK)
        target = tl.full((), float("inf"), tl.float64)
        if top_p < 1:
            mass = _mass_before(logits, peak, per_unit, floor, nowhere, best + vocab_size, vocab_size, BLOCK)
            target = top_p * mass

        # Tokens in front of (limit, limit_id), in the order, are not excluded yet.
        low, high = _row_key(tl.load(seeds + row).to(tl.uint64, bitcast=True), tl.load(positions + row))
        limit, limit_id = nowhere, best + vocab_size
        searching = token >= 0
        while searching:
            token = _noisiest(
                logits, peak, temperature, per_unit, floor, limit, limit_id, best, low, high, vocab_size, BLOCK
            )
            limit, limit_id = tl.load(logits + token), token
            likely = tl.exp((limit.to(tl.float64) - peak.to(tl.float64)) / temperature) >= min_p
            before = tl.full((), 0.0, tl.float64)
            if likely & (top_p < 1):
                before = _mass_before(logits, peak, per_unit, floor, limit, limit_id, vocab_size, BLOCK)
            searching = ((before >= target) | (likely == 0)) & (token != best)
    tl.store(chosen + row, token.to(tl.int64))


@triton.jit
def _tile(
    logits: tl.tensor, start: tl.tensor, vocab_size: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(ids, logits) of one part of the vocabulary; there is nothing, -inf, behind its end."""
    ids = start + tl.arange(0, BLOCK)
    return ids, tl.load(logits + ids, mask=ids < vocab_size, other=-float("inf"))


@triton.jit
def _peak(logits: tl.tensor, vocab_size: tl.tensor, BLOCK: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(largest logit, the lowest id that has it, whether a token can be sampled)."""
    peaks = tl.full((BLOCK,), -float("inf"), tl.float32)
    best = tl.zeros((BLOCK,), tl.int32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids, values = _tile(logits, start, vocab_size, BLOCK)
        broken |= (values != values).to(tl.int32)
        better = values > peaks
        peaks = tl.where(better, values, peaks)
        best = tl.where(better, ids, best)
    peak = tl.max(peaks, 0)
    usable = (tl.max(broken, 0) == 0) & (peak > -float("inf")) & (peak < float("inf"))
    return peak, tl.min(tl.where(peaks == peak, best, vocab_size), 0), usable


@triton.jit
def _kth_largest(logits: tl.tensor, k: tl.tensor, vocab_size: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """A number that the k largest logits, and others only if they are equal to the last of these, are not below.

    Three bits at a time: each lane counts in the eight bytes of a word, so a vocabulary may have 255 tiles.
    """
    lowest = tl.full((), 0, tl.uint32)
    wanted = k
    shift = tl.full((), _TOP_SHIFT, tl.int32)
    while shift >= 0:
        counts = tl.zeros((BLOCK,), tl.uint64)
        for start in range(0, vocab_size, BLOCK):
            ids, values = _tile(logits, start, vocab_size, BLOCK)
            # Below the range, too, a digit is 8 or more, as it wraps around.
            digit = (_ordered(values) >> shift.to(tl.uint32)) - (lowest >> shift.to(tl.uint32))
            one = tl.full((BLOCK,), 1, tl.uint64) << (8 * (digit & 7)).to(tl.uint64)
            counts += tl.where((digit < 8) & (ids < vocab_size), one, 0)
        digit, above, inside = _digit_of_kth(counts, wanted)
        lowest += digit.to(tl.uint32) << shift.to(tl.uint32)
        wanted -= above
        # All in this range are wanted: where exactly the last one is does not matter.
        shift = tl.where(inside == wanted, -1, shift - 3)
    bits = tl.where(lowest >> 31 == 1, lowest ^ 0x80000000, lowest ^ _ALL_BITS)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _digit_of_kth(counts: tl.tensor, k: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(digit of the k-th largest, how many have a larger one, how many have this one), of bytes that count."""
    digit, above, inside = k * 0, k * 0, k * 0
    sum_above = k * 0
    for pair in tl.static_range(3, -1, -1):
        lower, upper = (counts >> (16 * pair)) & 0xFF, (counts >> (16 * pair + 8)) & 0xFF
        both = tl.sum(lower | (upper << 32), 0)
        for half in tl.static_range(1, -1, -1):
            count = ((both >> (32 * half)) & 0xFFFFFFFF).to(tl.int32)
            here = (sum_above < k) & (sum_above + count >= k)
            digit = tl.where(here, 2 * pair + half, digit)
            above = tl.where(here, sum_above, above)
            inside = tl.where(here, count, inside)
            sum_above += count
    return digit, above, inside


@triton.jit
def _ordered(values: tl.tensor) -> tl.tensor:
    """uint32 in the order of the fp32 values."""
    bits = tl.where(values == 0, 0.0, values).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ _ALL_BITS, bits | 0x80000000)


@triton.jit
def _mass_before(
    logits: tl.tensor,
    peak: tl.tensor,
    per_unit: tl.tensor,
    floor: tl.tensor,
    limit: tl.tensor,
    limit_id: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """fp64: how likely, together, tokens are that are not below the floor and in front of (limit, limit_id)."""
    masses = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        ids, values = _tile(logits, start, vocab_size, BLOCK)
        counted = (values >= floor) & _in_front(values, ids, limit, limit_id)
        masses += tl.where(counted, tl.exp((values - peak) * per_unit), 0.0)
    return tl.sum(masses.to(tl.float64), 0)


@triton.jit
def _in_front(values: tl.tensor, ids: tl.tensor, limit: tl.tensor, limit_id: tl.tensor) -> tl.tensor:
    return (values > limit) | ((values == limit) & (ids < limit_id))


@triton.jit
def _noisiest(
    logits: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    per_unit: tl.tensor,
    floor: tl.tensor,
    limit: tl.tensor,
    limit_id: tl.tensor,
    best: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The token not below the floor and in front of (limit, limit_id) with the largest logit / temperature + noise."""
    token = best
    largest = peak.to(tl.float64) - float("inf")
    for start in range(0, vocab_size, BLOCK):
        ids, values = _tile(logits, start, vocab_size, BLOCK)
        there = (values >= floor) & _in_front(values, ids, limit, limit_id)
        bits = _noise_bits(ids, low, high)
        rough = tl.where(there, (values - peak) * per_unit + _rough_gumbel(bits), -float("inf"))
        # Only parts of the vocabulary that may win are computed as the host does: a few, the first ones mostly.
        if tl.max(rough, 0) >= largest.to(tl.float32) - _DOUBT:
            scaled = (values.to(tl.float64) - peak.to(tl.float64)) / temperature
            middle = (bits.to(tl.float64) + 0.5) * _2_TO_MINUS_32
            sums = tl.where(there, scaled - tl.log(-tl.log(middle)), -float("inf"))
            top = tl.max(sums, 0)
            if top > largest:
                token = tl.min(tl.where(sums == top, ids, vocab_size), 0)
                largest = top
    return token


@triton.jit
def _rough_gumbel(bits: tl.tensor) -> tl.tensor:
    """The noise in fp32, off by less than 1e-4. Close to 1, log(u) is taken from 1 - u, which then has more digits."""
    middle = (bits.to(tl.float32) + 0.5) * _2_TO_MINUS_32
    rest = ((bits ^ _ALL_BITS).to(tl.float32) + 0.5) * _2_TO_MINUS_32
    return -tl.log(tl.where(rest < 0.0009765625, rest + 0.5 * rest * rest, -tl.log(middle)))


@triton.jit
def _noise_bits(ids: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """uint32: see `engine.noise`."""
    return _mix32(_mix32(ids.to(tl.uint32) * _GOLDEN32 + low) ^ high)


@triton.jit
def _row_key(seed: tl.tensor, position: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """(low, high) halves of the key of a row: see `engine.noise`."""
    key = _mix64(_mix64(seed + _GOLDEN64) + (position.to(tl.uint64) + 1) * _GOLDEN64)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def _mix64(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 30)) * _MIX64_A
    x = (x ^ (x >> 27)) * _MIX64_B
    return x ^ (x >> 31)


@triton.jit
def _mix32(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 16)) * _MIX32_A
    x = (x ^ (x >> 13)) * _MIX32_B
    return x ^ (x >> 16)
