"""Steps of a small engine through TritonAttention: prompts, chunks and single tokens of three sequences, two layers.

Run as a program with a file for the answers, under Triton's interpreter: TRITON_INTERPRET=1 in the environment. The
answers are the outputs [tokens, q heads * head_dim] of each step and layer.
"""

import itertools
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.interface import LayerAttention
from engine.batch import Batch, BatchRow, build_batch
from kv_cache.layout import KVCacheLayout, KVDtype
from tests.support.attention_cases import attention

NUM_Q_HEADS = 4
LAYOUT = KVCacheLayout("m", "1", 2, 2, 32, 8, KVDtype.FP32)
LAYERS = (LayerAttention(0.2), LayerAttention(0.3, window=5, soft_cap=2.0))
_TABLES = ([3, 6, 1], [0, 7, 2], [5, 4, 8])
# Tokens that each sequence has after each step: the second step mixes a token, a chunk and a new prompt.
_LENGTHS = ((0, 0, 0), (9, 1, 0), (10, 6, 3))
_HEADS = NUM_Q_HEADS + 2 * LAYOUT.num_kv_heads


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """q, K and V side by side, fp32 [layers, sequences, tokens, heads, head_dim], and the turns of each position."""

    heads: Tensor
    rotation: Tensor


def drawn() -> Drawn:
    """The same every time."""
    draw = torch.Generator().manual_seed(5)
    longest = max(_LENGTHS[-1])
    heads = torch.randn((LAYOUT.num_layers, len(_TABLES), longest, _HEADS, LAYOUT.head_dim), generator=draw)
    angles = torch.randn((longest, LAYOUT.head_dim // 2), generator=draw)
    return Drawn(heads, torch.stack([angles.cos(), angles.sin()], dim=-1).flatten(1))


def _batches() -> list[tuple[Batch, list[int], list[int]]]:
    """Each step's batch, and the sequence and the position of each of its tokens."""
    steps = []
    for before, after in itertools.pairwise(_LENGTHS):
        active = [i for i in range(len(_TABLES)) if after[i] > before[i]]
        rows = [BatchRow([0] * (after[i] - before[i]), before[i], _TABLES[i]) for i in active]
        batch = build_batch(rows, LAYOUT.block_size)
        sequences = [active[row] for row in batch.row_order for _ in rows[row].token_ids]
        steps.append((batch, sequences, batch.positions.tolist()))
    return steps


def attended(device: str) -> list[Tensor]:
    """The outputs of the backend. Layer 0 turns q and k, layer 1 stores them as they are."""
    from engine.attention.triton import TritonAttention

    pool = torch.full((LAYOUT.pool_bytes(9),), 0xFF, dtype=torch.uint8, device=device)
    backend = TritonAttention(pool, LAYOUT, LAYERS)
    given = drawn()
    outputs = []
    for batch, sequences, positions in _batches():
        for layer in range(LAYOUT.num_layers):
            heads = given.heads[layer, sequences, positions].to(device)
            qk, v = heads[:, : -LAYOUT.num_kv_heads], heads[:, -LAYOUT.num_kv_heads :]
            if layer == 0:
                backend.rotate_and_store(layer, qk, v, given.rotation[positions].to(device), batch)
            else:
                backend.store(layer, qk[:, NUM_Q_HEADS:], v, batch)
            outputs.append(backend.attend(layer, qk[:, :NUM_Q_HEADS], batch).cpu())
    return outputs


def expected() -> list[Tensor]:
    """What the textbook says of each, fp64."""
    given = drawn()
    heads = given.heads.clone()
    turns = torch.view_as_complex(given.rotation.unflatten(1, (-1, 2)))[:, None]
    turned = torch.view_as_complex(heads[0, :, :, : -LAYOUT.num_kv_heads].unflatten(-1, (-1, 2)))
    heads[0, :, :, : -LAYOUT.num_kv_heads] = torch.view_as_real(turned * turns).flatten(-2)
    outputs = []
    for _, sequences, positions in _batches():
        for layer, spec in enumerate(LAYERS):
            outs = []
            for sequence, position in zip(sequences, positions, strict=True):
                seen = heads[layer, sequence, : position + 1]
                keys, values = seen[:, NUM_Q_HEADS:].transpose(0, 1).unflatten(0, (2, LAYOUT.num_kv_heads)).unbind(0)
                outs.append(attention(seen[-1:, :NUM_Q_HEADS], keys, values, spec).flatten(1))
            outputs.append(torch.cat(outs))
    return outputs


if __name__ == "__main__":
    torch.save(attended("cpu"), sys.argv[1])
