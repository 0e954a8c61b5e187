"""How well a model foretells a text that it is given token by token, with its KV in a paged pool."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend
from engine.batch import BatchRow, build_batch
from engine.model_runner import Model, no_hook


@dataclass(frozen=True, slots=True, eq=False)
class Foretold:
    """Of each token of a text but the first: -ln of its probability (fp64 [T - 1]), and the likeliest token in its
    place (int64 [T - 1])."""

    surprise: Tensor
    likeliest: Tensor

    @property
    def perplexity(self) -> float:
        """e to the mean surprise."""
        return math.exp(float(self.surprise.mean()))


@torch.inference_mode()
def foretell(
    model: Model,
    attention: AttentionBackend,
    tokens: Sequence[int],
    block_table: Sequence[int],
    block_size: int,
    chunk_tokens: int,
) -> Foretold:
    """Compute the text in chunks. All K and V, those of a chunk's own tokens too, are read from the pool that
    `attention` has, in blocks `block_table`, which what was in them before does not matter to."""
    surprises, likeliest = [], []
    for start in range(0, len(tokens) - 1, chunk_tokens):
        chunk = tokens[start : min(start + chunk_tokens, len(tokens) - 1)]
        batch = build_batch([BatchRow(chunk, start, block_table, len(chunk))], block_size)
        logits = model.logits(model.forward(batch, attention, no_hook))
        following = torch.tensor(tokens[start + 1 : start + 1 + len(chunk)])
        logs = torch.log_softmax(logits.double(), dim=-1)
        surprises.append(-logs.gather(1, following.unsqueeze(1)).squeeze(1))
        likeliest.append(logits.argmax(dim=-1))
    return Foretold(torch.cat(surprises), torch.cat(likeliest))
