"""One rank's part of a model, put together: its weights, the operations that sum over ranks, its heads of the pool."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.attention.interface import AttentionBackend
from engine.models import load_model
from engine.models.transformer import Transformer
from engine.ops.interface import Ops
from engine.parallel.group import TensorParallel
from engine.parallel.ops import ShardedOps, SharedHeadAttention
from engine.parallel.shard import Shard
from engine.prepared_model import PreparedModel


@dataclass(frozen=True, slots=True)
class RankParts:
    """What runs a rank's share of a step. `ops` are those that `model` is written in."""

    model: Transformer
    ops: ShardedOps
    attention: AttentionBackend


def load_rank(
    prepared: PreparedModel, ops: Ops, group: TensorParallel, attention_of: Callable[[range], AttentionBackend]
) -> RankParts:
    """Load the part of `group.rank`; the group need not be connected yet.

    `ops` compute. `attention_of(heads)` makes a backend that sees these kv heads of a pool which all ranks share.
    Raises KvferryError for a model that cannot be split so, or whose weights do not do.
    """
    shard = Shard(prepared.config, group.rank, group.size)
    sharded = ShardedOps(ops, group, prepared.config.vocab_size)
    attention = attention_of(shard.kv_heads)
    return RankParts(
        model=load_model(prepared, sharded, shard),
        ops=sharded,
        attention=SharedHeadAttention(attention, group) if shard.replicates else attention,
    )
