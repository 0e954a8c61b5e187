"""Blocks taken out of pools, put into them, and made into pages of other layouts; and what the transfer layer makes."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kv_cache.layout import KVCacheLayout, KVDtype
from kv_transfer.convert import PageConverter, requantise
from kv_transfer.page_arrays import PageArrays

_NUM_BLOCKS = 5
_TABLE = (3, 0, 4)
_LAYERS = range(1, 3)
_SOURCE = KVCacheLayout("m", "1", 3, 2, 16, 8, KVDtype.BF16)


@dataclass(frozen=True, slots=True)
class Copy:
    """Blocks of `_TABLE` moved as they are."""

    layout: KVCacheLayout
    into_pool: bool = False


@dataclass(frozen=True, slots=True)
class Conversion:
    """Blocks of a prompt of `num_tokens` tokens, which lies in `_TABLE`, as pages of `target`."""

    source: KVCacheLayout
    target: KVCacheLayout
    num_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arrival:
    """Pages of `wire` turned into blocks of `pool`."""

    wire: KVCacheLayout
    pool: KVCacheLayout


def _convert(source: KVDtype, target: KVDtype, block_size: int = 8) -> Conversion:
    """The begin and the end of a prompt that does not fill its last block."""
    into = replace(_SOURCE, dtype=target, block_size=block_size)
    return Conversion(replace(_SOURCE, dtype=source), into, 19, (0, 2) if block_size == 8 else (1,))


_HEADS = replace(_SOURCE, num_kv_heads=1, kv_head_start=1, total_kv_heads=2)
_WIDE = KVCacheLayout("m", "1", 3, 2, 80, 32, KVDtype.INT8)
_DTYPES = (
    (KVDtype.BF16, KVDtype.INT8),
    (KVDtype.BF16, KVDtype.FP8_E4M3),
    (KVDtype.BF16, KVDtype.FP32),
    (KVDtype.FP32, KVDtype.BF16),
    (KVDtype.FP32, KVDtype.FP16),
    (KVDtype.FP16, KVDtype.FP8_E4M3),
    (KVDtype.INT8, KVDtype.BF16),
    (KVDtype.INT8, KVDtype.FP32),
    (KVDtype.INT8, KVDtype.FP8_E4M3),
    (KVDtype.FP8_E4M3, KVDtype.FP16),
    (KVDtype.FP8_E4M3, KVDtype.INT8),
)

CASES: dict[str, Copy | Conversion | Arrival] = {
    "out of a pool": Copy(_SOURCE),
    "into a pool": Copy(replace(_WIDE, head_dim=128), into_pool=True),
    **{f"{source.value} to {target.value}": _convert(source, target) for source, target in _DTYPES},
    "smaller blocks to larger ones": _convert(KVDtype.BF16, KVDtype.BF16, 16),
    "with scales to larger ones": _convert(KVDtype.INT8, KVDtype.INT8, 16),
    "larger blocks to smaller ones": Conversion(
        replace(_WIDE, dtype=KVDtype.BF16), replace(_WIDE, dtype=KVDtype.FP8_E4M3, block_size=8), 50, (3, 4, 6)
    ),
    "larger blocks of more tokens than a tile has": Conversion(
        replace(_SOURCE, head_dim=128), replace(_SOURCE, head_dim=128, block_size=32), 20, (0,)
    ),
    "one of the heads": Conversion(_SOURCE, replace(_HEADS, dtype=KVDtype.INT8), 24, (2,)),
    "int8 pages arrive in a pool of bf16": Arrival(replace(_SOURCE, dtype=KVDtype.INT8), _SOURCE),
    "bf16 pages arrive in a pool of fp8": Arrival(_SOURCE, replace(_SOURCE, dtype=KVDtype.FP8_E4M3)),
}


def _pages(layout: KVCacheLayout, num_pages: int, num_layers: int) -> np.ndarray:
    """Bytes of pages: any that an allocation may hold, but values that are no rarity."""
    random = np.random.default_rng(11)
    memory = random.integers(0, 256, num_pages * layout.page_bytes, np.uint8)
    pages = PageArrays(layout, memory.data, num_layers)
    if layout.dtype.has_scales:
        assert pages.scales is not None
        pages.scales[...] = random.random(pages.scales.shape, np.float32) ** 8
        pages.scales[0, :, 0, 0, :3] = (0, np.nan, 6e4)
        pages.values[0, :, 0, 0, 3] = 0
    else:
        pages.values[...] = random.standard_normal(pages.values.shape, np.float32)
        pages.values[:, :, 0, :, :2, 0] = (np.inf, np.nan)
        pages.values[:, :, 1, :, :2] *= 3e3
    return memory


def _memory(case: Copy | Conversion | Arrival) -> tuple[np.ndarray, np.ndarray]:
    """The pool, and the staging buffer, before anything is moved."""
    if isinstance(case, Conversion):
        pool = _pages(case.source, 3 * _NUM_BLOCKS, 3)
        return pool, np.full(len(case.blocks) * len(_LAYERS) * case.target.page_bytes, 0xA5, np.uint8)
    layout = case.layout if isinstance(case, Copy) else case.pool
    wire = case.layout if isinstance(case, Copy) else case.wire
    return _pages(layout, 3 * _NUM_BLOCKS, 3), _pages(wire, len(_TABLE) * len(_LAYERS), len(_LAYERS))


def run(case: Copy | Conversion | Arrival, device: str) -> dict[str, Tensor]:
    """Pool and staging buffer after the kernel."""
    from engine.kernels import blocks  # Not for those who import the cases only.

    pool, staging = (torch.from_numpy(part).to(device) for part in _memory(case))
    table = torch.tensor(_TABLE, dtype=torch.int32, device=device)
    if isinstance(case, Copy):
        move = blocks.scatter_blocks if case.into_pool else blocks.gather_blocks
        move(pool, case.layout, table, _LAYERS, staging)
    elif isinstance(case, Arrival):
        blocks.requantise_blocks(staging, case.wire, pool, case.pool, table, _LAYERS)
    else:
        wanted = torch.tensor(case.blocks, dtype=torch.int32, device=device)
        blocks.convert_blocks(pool, case.source, table, case.num_tokens, wanted, case.target, _LAYERS, staging)
    return {"pool": pool.cpu(), "staging": staging.cpu()}


def check(case: Copy | Conversion | Arrival, result: dict[str, Tensor]) -> None:
    """Raises AssertionError where the bytes are not those of the transfer layer."""
    pool, staging = _memory(case)
    if isinstance(case, Conversion):
        local = dict(enumerate(_TABLE))
        converter = PageConverter(case.source, case.target)
        converter.fill(pool.data, local, case.blocks, _LAYERS, case.num_tokens, staging.data)
    else:
        size = (case.layout if isinstance(case, Copy) else case.pool).page_bytes
        runs = [pool[(block * 3 + _LAYERS.start) * size : (block * 3 + _LAYERS.stop) * size].data for block in _TABLE]
        if isinstance(case, Arrival):
            requantise(case.wire, case.pool, staging.data, runs)
        else:
            for place, pages in enumerate(runs):
                staged = staging[place * pages.nbytes : (place + 1) * pages.nbytes].data
                if case.into_pool:
                    pages[:] = staged
                else:
                    staged[:] = pages
    assert np.array_equal(result["staging"].numpy(), staging)
    assert np.array_equal(result["pool"].numpy(), pool)
