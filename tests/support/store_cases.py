"""What is stored into a pool of KV pages, and what must then be there."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kv_cache.layout import KVCacheLayout, KVDtype
from kv_transfer.page_arrays import PageArrays
from kv_transfer.quantise import Tiles, convert, storage

_NUM_BLOCKS = 6
_LAYER = 1
_ACTIVATIONS = {torch.float32: KVDtype.FP32, torch.float16: KVDtype.FP16, torch.bfloat16: KVDtype.BF16}
_TOLERANCES = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}

# A token of a sequence that goes on, the end of a full block and the begin of a new one, a padded row, a first token.
_STEP = ((1, 3), (4, 6), (4, 7), (2, 0), (2, 1), None, (3, 0))


@dataclass(frozen=True, slots=True)
class Case:
    """`slots`: (block, offset) of each token, None for a padded row. `special`: rows of values that are hard to keep.

    `num_q_heads` None: stored as it is, without turning anything.
    """

    kept: KVDtype
    activations: torch.dtype = torch.bfloat16
    num_q_heads: int | None = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 8
    slots: tuple[tuple[int, int] | None, ...] = _STEP
    special: bool = False

    @property
    def layout(self) -> KVCacheLayout:
        return KVCacheLayout("m", "1", 3, self.num_kv_heads, self.head_dim, self.block_size, self.kept)


CASES = {
    **{f"{kept.value} of bf16": Case(kept) for kept in KVDtype},
    **{f"{kept.value} of fp16": Case(kept, torch.float16) for kept in (KVDtype.FP16, KVDtype.BF16, KVDtype.INT8)},
    **{f"{kept.value} of fp32": Case(kept, torch.float32) for kept in (KVDtype.FP32, KVDtype.FP8_E4M3)},
    **{
        f"{kept.value} of hard values": Case(
            kept, torch.float32, None, 3, 16, slots=tuple((1, i) for i in range(5)), special=True
        )
        for kept in KVDtype
    },
    "fp16 of hard bf16": Case(KVDtype.FP16, num_q_heads=None, slots=((0, 0), (0, 1)), special=True),
    "a head_dim that is no power of two": Case(KVDtype.INT8, num_q_heads=3, num_kv_heads=3, head_dim=80),
    "many q heads, one kv head": Case(KVDtype.FP8_E4M3, num_q_heads=9, num_kv_heads=1, head_dim=256, slots=((1, 0),)),
    "many kv heads": Case(KVDtype.BF16, num_q_heads=None, num_kv_heads=9, head_dim=256, slots=((1, 6), None)),
    "a full block and no more": Case(KVDtype.INT8, slots=tuple((2, i) for i in range(8)), num_q_heads=None),
    "blocks side by side": Case(
        KVDtype.INT8, block_size=16, slots=(*((2, i) for i in range(14, 16)), (3, 0), (4, 0)), num_q_heads=None
    ),
}


def _hard_values(shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Rows of every size, with zeros of both signs, infinities, NaN, and numbers half-way between two codes."""
    values = random.standard_normal(shape, np.float32) * np.float32(2) ** random.integers(-150, 120, (*shape[:-1], 1))
    rows = values.reshape(-1, shape[-1])
    rows[0] = np.where(np.arange(shape[-1]) % 2, 0.0, -0.0)
    rows[1, 3] = np.inf
    rows[2, 5] = np.float32(np.nan)
    rows[3] = np.linspace(-3.4e38, 3.4e38, shape[-1])
    # With these largest values the scales are 1 in int8 and in fp8, so what is half-way stays half-way.
    rows[4] = np.append(np.arange(1 - shape[-1], 0) + 0.5, 127)
    rows[5] = 1e-9
    if len(rows) > 6:
        halves = [448, *(step * 2.0**-10 for step in range(1, 18, 2)), 17, -19, 21, -0.53125, 0.59375, 23]
        rows[6] = np.resize(halves, shape[-1])
        rows[7] = random.integers(0, 1 << 32, shape[-1], np.uint32).view(np.float32)
    return values


def _inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """pool, x and v as one matrix [T, heads, head_dim], rotation, slots."""
    random = np.random.default_rng(7)
    num_tokens = len(case.slots)
    pool = torch.from_numpy(random.integers(0, 256, case.layout.pool_bytes(_NUM_BLOCKS), np.uint8))
    shape = (num_tokens, (case.num_q_heads or 0) + 2 * case.num_kv_heads, case.head_dim)
    values = _hard_values(shape, random) if case.special else random.standard_normal(shape, np.float32)
    angles = random.random((num_tokens, case.head_dim // 2), np.float32) * np.float32(6)
    rotation = np.stack([np.cos(angles), np.sin(angles)], axis=-1).reshape(num_tokens, case.head_dim)
    slots = [-1 if place is None else place[0] * case.block_size + place[1] for place in case.slots]
    return pool, torch.from_numpy(values).to(case.activations), torch.from_numpy(rotation), torch.tensor(slots)


def run(case: Case, device: str) -> dict[str, Tensor]:
    """The pool and the matrix after the kernel."""
    from engine.kernels.store_kv import rotate_and_store_kv, store_kv  # Not for those who import the cases only.

    pool, x, rotation, slots = (part.to(device) for part in _inputs(case))
    v = x[:, -case.num_kv_heads :]
    if case.num_q_heads is None:
        store_kv(pool, case.layout, _LAYER, x[:, : case.num_kv_heads], v, slots.to(torch.int32))
    else:
        rotate_and_store_kv(pool, case.layout, _LAYER, x[:, : -case.num_kv_heads], v, rotation, slots)
    return {"pool": pool.cpu(), "x": x.cpu()}


def check(case: Case, result: dict[str, Tensor]) -> None:
    """Raises AssertionError where the result is not what the transfer layer would have made of the same rows."""
    pool, x, rotation, _ = _inputs(case)
    if case.num_q_heads is None:
        assert torch.equal(result["x"].view(torch.uint8), x.view(torch.uint8))
    else:
        turned = torch.tensor([place is not None for place in case.slots])
        _turn(x[:, : -case.num_kv_heads], rotation, turned)
        tolerance = _TOLERANCES[case.activations]
        torch.testing.assert_close(result["x"], x, rtol=tolerance, atol=2 * tolerance)
    expected = _stored(case, pool, result["x"])
    assert np.array_equal(result["pool"].numpy(), expected)


def _turn(qk: Tensor, rotation: Tensor, rows: Tensor) -> None:
    pairs = torch.view_as_complex(qk[rows].float().unflatten(2, (-1, 2)))
    turns = torch.view_as_complex(rotation[rows].view(len(pairs), 1, -1, 2))
    qk[rows] = torch.view_as_real(pairs * turns).flatten(2).to(qk.dtype)


def _stored(case: Case, pool: Tensor, x: Tensor) -> np.ndarray:
    """The bytes that the pool must have, for these rows of k and v."""
    expected = pool.numpy().copy()
    pages = PageArrays(case.layout, memoryview(expected), case.layout.num_layers)
    kind = _ACTIVATIONS[case.activations]
    written = [place for place in case.slots if place is not None]
    for token, place in enumerate(case.slots):
        if place is None:
            continue
        block, offset = place
        rows = x[token, -2 * case.num_kv_heads :].reshape(2, case.num_kv_heads, -1).contiguous()
        source = rows.view(torch.uint8).numpy().view(storage(kind))
        target = Tiles(
            case.kept,
            pages.values[block, _LAYER, :, :, offset],
            None if pages.scales is None else pages.scales[block, _LAYER, :, :, offset],
        )
        convert(Tiles(kind, source), target)
        if (block, 0) in written and (block, offset + 1) not in written:
            for part in (pages.values, pages.scales):
                if part is not None:
                    part[block, _LAYER, :, :, offset + 1 :] = 0
    return expected
