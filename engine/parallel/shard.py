"""What one rank has of a model: which heads, which rows and columns of each prepared tensor.

    qkv         rows      its q heads; its kv heads, K and V                               copied (three pieces)
    attention   columns   what its q heads give                                            copied
    gate_up     rows      its share of the intermediate size, of both halves               copied (two pieces)
    down        columns   the same share; of experts, every rank has a share of each       copied
    lm_head     rows      its share of the vocabulary, the last rank maybe less            a view of the mapped file
    embed, norms, router  all of it                                                        a view of the mapped file

With more ranks than kv heads, several ranks have the same kv head. Biases and int8 scales of rows go with their rows.
A product over columns is a part of a sum, so its bias is added by rank 0 alone; its scales, one an output, are whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.model_config import ModelConfig, ModelShape, unusable
from kv_cache.layout import KVCacheLayout

_EMBED, _LM_HEAD = "embed", "lm_head"


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` of `size`. Raises KvferryError for a model that does not split so (see `check_split`)."""

    whole: ModelConfig
    rank: int
    size: int

    def __post_init__(self) -> None:
        check_split(self.whole, self.size)

    @property
    def q_heads(self) -> range:
        """Query heads computed here."""
        return _part(self.whole.num_q_heads, self.rank, self.size)

    @property
    def kv_heads(self) -> range:
        """KV heads computed, stored and read here."""
        if self.replicates:
            head = self.rank * self.whole.num_kv_heads // self.size
            return range(head, head + 1)
        return _part(self.whole.num_kv_heads, self.rank, self.size)

    @property
    def replicates(self) -> bool:
        """Whether another rank has the same kv heads."""
        return self.size > self.whole.num_kv_heads

    @property
    def vocab(self) -> range:
        """Tokens whose logits are computed here. All ranks but the last ones have `vocab_width` of them."""
        start = min(self.rank * self.vocab_width, self.whole.vocab_size)
        return range(start, min(start + self.vocab_width, self.whole.vocab_size))

    @property
    def vocab_width(self) -> int:
        """Tokens a rank, rounded up."""
        return -(-self.whole.vocab_size // self.size)

    @property
    def config(self) -> ModelConfig:
        """The shape of the decoder that this rank runs. Its lm_head is never the embedding: it has fewer rows."""
        return replace(
            self.whole,
            num_q_heads=len(self.q_heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=self.whole.intermediate_size // self.size,
            tied_embeddings=False,
        )

    def layout(self, whole: KVCacheLayout) -> KVCacheLayout:
        """The layout of a pool that holds this rank's kv heads only: for ranks with memory of their own, as GPUs are.

        On a CPU all ranks share one pool of the `whole` layout.
        """
        return replace(
            whole,
            num_kv_heads=len(self.kv_heads),
            kv_head_start=whole.kv_head_start + self.kv_heads.start,
            total_kv_heads=whole.model_kv_heads,
        )

    def weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of the tensors of a prepared model, by their names.

        Rows are read from the mapped file only where they are copied. Raises KvferryError for a tensor that nobody
        knows how to split.
        """
        parts = {name: self._part_of(name, tensor) for name, tensor in tensors.items()}
        if self.whole.tied_embeddings:
            for name, tensor in tensors.items():
                if name.startswith(f"{_EMBED}."):
                    lm_head = f"{_LM_HEAD}.{name.removeprefix(f'{_EMBED}.')}"
                    parts[lm_head] = self._part_of(lm_head, tensor)
        return {name: part for name, part in parts.items() if part is not None}

    def _part_of(self, name: str, tensor: Tensor) -> Tensor | None:
        """None = this rank does without."""
        module, kind = name.split(".")[-2:]
        match module:
            case "qkv":
                return _rows(tensor, self._qkv_rows())
            case "gate_up":
                width = len(tensor) // 2
                inner = _part(width, self.rank, self.size)
                return _rows(tensor, (inner, range(width + inner.start, width + inner.stop)))
            case "attention_out":
                return self._columns(tensor, kind, _times(self.q_heads, self.whole.head_dim))
            case "down":
                return self._columns(tensor, kind, _part(tensor.shape[-1], self.rank, self.size))
            case "lm_head":
                return tensor[self.vocab.start : self.vocab.stop]
            case _ if module in (_EMBED, "router") or module.endswith("norm"):
                return tensor
        raise unusable(f"this version cannot split {name} over {self.size} ranks: use --tensor-parallel=1")

    def _qkv_rows(self) -> tuple[range, ...]:
        config, head_dim = self.whole, self.whole.head_dim
        k_start = config.num_q_heads * head_dim
        v_start = k_start + config.num_kv_heads * head_dim
        kv = _times(self.kv_heads, head_dim)
        return (
            _times(self.q_heads, head_dim),
            range(k_start + kv.start, k_start + kv.stop),
            range(v_start + kv.start, v_start + kv.stop),
        )

    def _columns(self, tensor: Tensor, kind: str, columns: range) -> Tensor | None:
        if kind == "bias":
            return tensor if self.rank == 0 else None
        if kind == "scales":
            return tensor
        # Kernels want rows without gaps, and a copy has them.
        return tensor[:, columns.start : columns.stop].contiguous()


def check_split(shape: ModelShape, size: int) -> None:
    """Raises KvferryError (INVALID_REQUEST), with the sizes that do, unless `size` ranks can share the model."""
    if size == 1:
        return
    if not isinstance(shape, ModelConfig):
        raise unusable(f"a {shape.family} runs through transformers and cannot be split: use --tensor-parallel=1")
    if size not in (sizes := possible_sizes(shape)):
        raise unusable(
            f"a model with {shape.num_q_heads} attention heads, {shape.num_kv_heads} kv heads and an intermediate "
            f"size of {shape.intermediate_size} cannot be split over {size} ranks: --tensor-parallel may be "
            f"{', '.join(map(str, sizes))}"
        )


def possible_sizes(shape: ModelShape) -> tuple[int, ...]:
    """Numbers of ranks that can share a model, ascending: each has whole heads, and as many as any other. A model
    without native code cannot be split."""
    if not isinstance(shape, ModelConfig):
        return (1,)
    q_heads, kv_heads = shape.num_q_heads, shape.num_kv_heads
    widths = [shape.intermediate_size, *([shape.experts.intermediate_size] if shape.experts else [])]
    return tuple(
        size
        for size in range(1, q_heads + 1)
        if q_heads % size == 0
        and (kv_heads % size == 0 or size % kv_heads == 0)
        and all(width % size == 0 for width in widths)
    )


def _part(count: int, rank: int, size: int) -> range:
    each = count // size
    return range(rank * each, (rank + 1) * each)


def _times(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _rows(tensor: Tensor, pieces: tuple[range, ...]) -> Tensor:
    return torch.cat([tensor[piece.start : piece.stop] for piece in pieces])
