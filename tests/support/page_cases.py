"""Pools on which the page fingerprints of a device are compared with those of the host.

Run as a program with a file for the answers, it computes those of all cases under Triton's interpreter, which must be
chosen before the kernels are imported: TRITON_INTERPRET=1 in the environment.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kv_cache.layout import KVCacheLayout, KVDtype
from kv_transfer import fingerprint

NUM_LAYERS = 3
_NUM_BLOCKS = 5
_TOP = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Case:
    """`same`: all pages hold the same bytes."""

    layout: KVCacheLayout
    block_ids: tuple[int, ...] = (3, 0)
    first_block: int = 0
    layers: tuple[int, int] = (1, NUM_LAYERS)
    base_seed: int = 0x0123456789ABCDEF
    same: bool = False


def layout(page_bytes: int, dtype: KVDtype = KVDtype.BF16) -> KVCacheLayout:
    """One with pages of this size."""
    found = KVCacheLayout("m", "1", NUM_LAYERS, 1, page_bytes // (2 * 8 * dtype.itemsize), 8, dtype)
    assert dtype.has_scales or found.page_bytes == page_bytes
    return found


CASES = {
    # A last block of each length, alone and after blocks that are scrambled; more of these than are unrolled.
    **{f"{size} bytes": Case(layout(size), first_block=7) for size in (256, 512, 768, 1024, 1280, 2048, 4352, 24576)},
    "scales and padding": Case(layout(4096, KVDtype.INT8), first_block=1),
    "all layers": Case(layout(512), (4,), layers=(0, NUM_LAYERS)),
    "one page": Case(layout(512), (2,), layers=(0, 1), base_seed=1),
    "seed 0": Case(layout(1280), base_seed=0),
    "highest seed": Case(layout(1280), base_seed=_TOP),
    "seed of a hand-off": Case(layout(1280), base_seed=fingerprint.seed("handoff-1", 2)),
    "far into a prompt": Case(layout(512), first_block=(1 << 31) - 2),
    "in order": Case(layout(512), (1, 4)),
    "swapped": Case(layout(512), (4, 1)),
    "the same everywhere": Case(layout(1024), (0, 1, 2), layers=(0, NUM_LAYERS), same=True),
}


def pool_of(case: Case) -> np.ndarray:
    """The pool of a case: uint8, always the same."""
    size_bytes = case.layout.pool_bytes(_NUM_BLOCKS)
    if case.same:
        return np.full(size_bytes, 0xA5, np.uint8)
    return np.random.default_rng(1).integers(0, 256, size_bytes, np.uint8)


def on_host(case: Case) -> list[list[int]]:
    """The fingerprints as the transfer layer computes them: a list of layers for each block."""
    pool, layout = pool_of(case).data, case.layout

    def page(block_id: int, index: int, layer: int) -> int:
        start = layout.page_offset(block_id, layer)
        return fingerprint.page(pool[start : start + layout.page_bytes], case.base_seed, index, layer)

    numbered = list(enumerate(case.block_ids, start=case.first_block))
    return [[page(block_id, index, layer) for layer in range(*case.layers)] for index, block_id in numbered]


def on_device(case: Case, device: str) -> list[list[int]]:
    """The fingerprints as the kernel computes them."""
    from engine.kernels.fingerprint import page_fingerprints  # Not for those who import the cases only.

    found = page_fingerprints(
        torch.from_numpy(pool_of(case)).to(device),
        case.layout,
        torch.tensor(case.block_ids, dtype=torch.int32, device=device),
        first_block=case.first_block,
        layers=range(*case.layers),
        base_seed=case.base_seed,
    )
    values: list[list[int]] = found.cpu().numpy().view(np.uint64).tolist()
    return values


if __name__ == "__main__":
    answers = {name: on_device(case, "cpu") for name, case in CASES.items()}
    Path(sys.argv[1]).write_text(json.dumps(answers))
