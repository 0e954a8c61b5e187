"""What is different in a model's operations when it is split over ranks: sums are over all ranks.

The residual stream x is the same on all ranks. A product over columns is each rank's part of a sum: rank 0 adds its
part to x, the others to zeros, and the sum of all that is the new x everywhere, to the same bit. So there is one
collective for attention and one for the MLP in each layer, and one more for the logits.
"""

from torch import Tensor

from engine.attention.interface import AttentionBackend
from engine.batch import Batch
from engine.model_runner import LayerHook
from engine.ops.interface import Gate, Linear, Ops
from engine.parallel.group import TensorParallel


class ShardedOps:
    """Ops of one rank, around the Ops that compute. All ranks of the group must run the same step."""

    def __init__(self, inner: Ops, group: TensorParallel, vocab_size: int) -> None:
        """`vocab_size`: of the whole model. The lm_head of rank r has the rows that `Shard.vocab` says."""
        self._inner = inner
        self._group = group
        self._vocab_size = vocab_size
        self._vocab_width = -(-vocab_size // group.size)
        self._stored: int | None = None
        self._on_layer: LayerHook | None = None

    def announce_when_summed(self, on_layer: LayerHook) -> LayerHook:
        """A hook for `Model.forward` that puts the call of `on_layer(l)` off to where *all* ranks have stored layer l.

        That is the sum which follows the layer's attention: a rank takes part in it only after it has stored and
        attended. Rank 0 alone has somebody to tell.
        """
        self._on_layer = on_layer
        return self._note_stored

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """See Ops. Every rank has the whole table."""
        return self._inner.embed(token_ids, table)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """See Ops."""
        return self._inner.linear(x, linear)

    def add_linear(self, x: Tensor, y: Tensor, linear: Linear) -> None:
        """See Ops."""
        if self._group.rank:
            x.zero_()
        self._inner.add_linear(x, y, linear)
        self._group.all_reduce(x)
        self._tell()

    def logits(self, x: Tensor, linear: Linear) -> Tensor:
        """See Ops. Whole on rank 0; the others return their own part."""
        part = self._inner.logits(x, linear)
        missing = self._vocab_width - part.shape[1]
        # A gather wants one shape; the last rank may have fewer tokens.
        sent = part.contiguous() if not missing else _widen(part, self._vocab_width)
        parts = self._group.gather(sent)
        if not parts:
            return part
        whole = sent.new_empty((len(x), self._vocab_size))
        for rank, received in enumerate(parts):
            columns = whole[:, rank * self._vocab_width : (rank + 1) * self._vocab_width]
            columns.copy_(received[:, : columns.shape[1]])
        return whole

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Ops."""
        return self._inner.rms_norm(x, weight, eps)

    def gated(self, gate_up: Tensor, gate: Gate) -> Tensor:
        """See Ops."""
        return self._inner.gated(gate_up, gate)

    def _note_stored(self, layer: int) -> None:
        self._stored = layer

    def _tell(self) -> None:
        layer, self._stored = self._stored, None
        if layer is not None and self._on_layer is not None:
            self._on_layer(layer)


class SharedHeadAttention:
    """Attention of a rank whose kv heads another rank has too, in one pool.

    Both zero the blocks that a step opens and store the same bytes. Whichever comes last, the slots hold these bytes
    once both are done, so nobody may read before: each layer costs a barrier.
    """

    def __init__(self, inner: AttentionBackend, group: TensorParallel) -> None:
        self._inner = inner
        self._group = group

    def store(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        """See AttentionBackend."""
        self._inner.store(layer, k, v, batch)

    def rotate_and_store(self, layer: int, qk: Tensor, v: Tensor, rotation: Tensor, batch: Batch) -> None:
        """See AttentionBackend."""
        self._inner.rotate_and_store(layer, qk, v, rotation, batch)

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """See AttentionBackend."""
        self._group.barrier()
        return self._inner.attend(layer, q, batch)


def _widen(part: Tensor, width: int) -> Tensor:
    wide = part.new_zeros((part.shape[0], width))
    wide[:, : part.shape[1]] = part
    return wide
