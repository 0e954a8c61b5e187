"""Rotary position embedding: the angles, exactly as transformers computes them, as a table."""

import math

import torch
from torch import Tensor

from engine.model_config import RopeConfig, RopeKind

_CHUNK_ROWS = 2048


class RotaryTable:
    """cos and sin of every position and frequency, filled in as far as positions ask.

    The table grows by whole chunks and never recomputes one, so a position turns by the same numbers in every process.
    """

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim)
        self._table = torch.empty(0, head_dim)

    def rows(self, positions: Tensor, num_positions: int) -> Tensor:
        """fp32 [T, head_dim] for int64 positions [T]: cos and sin of each pair's angle, side by side, on their device.

        `num_positions`: more than every position. The caller knows it; to ask the tensor would wait for its device.
        """
        while len(self._table) < num_positions:
            start = self._table.shape[0]
            angles = torch.arange(start, start + _CHUNK_ROWS).float().unsqueeze(1) * self._frequencies
            # Computed by the host: other devices have other last bits.
            rows = torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(1)
            self._table = torch.cat((self._table.to(positions.device), rows.to(positions.device)))
        return torch.index_select(self._table, 0, positions)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """fp32 [head_dim / 2], radians a token."""
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind is RopeKind.LINEAR:
        return frequencies / rope.factor
    if rope.kind is RopeKind.LLAMA3:
        return _llama3(rope, frequencies)
    return frequencies


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Keep the short waves, stretch the long ones by `factor`, and pass smoothly from one to the other between."""
    wavelengths = 2 * math.pi / frequencies
    longest_kept = rope.original_context_tokens / rope.high_freq_factor
    shortest_stretched = rope.original_context_tokens / rope.low_freq_factor
    kept_share = (rope.original_context_tokens / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - kept_share) * frequencies / rope.factor + kept_share * frequencies
    stretched = torch.where(wavelengths > shortest_stretched, frequencies / rope.factor, between)
    return torch.where(wavelengths < longest_kept, frequencies, stretched)
