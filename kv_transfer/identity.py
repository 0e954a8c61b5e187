"""Who a worker is to its peers, and the pool that it sends from or receives into."""

from dataclasses import dataclass, field

from kv_cache.layout import KVCacheLayout
from kv_transfer.region import MemoryRegion


@dataclass(frozen=True, slots=True)
class Identity:
    """One life of one worker process.

    `incarnation` is 16 random bytes made at start: a restarted worker is another peer. `cluster_secret` is proven,
    never sent. `pool` holds `num_blocks` blocks of `layout`, block 0 first. Raises ValueError on nonsense.
    """

    worker_id: str
    incarnation: bytes
    cluster_secret: bytes = field(repr=False)
    layout: KVCacheLayout
    pool: MemoryRegion

    def __post_init__(self) -> None:
        if not 1 <= len(self.worker_id) <= 256:
            raise ValueError("worker_id must have 1 to 256 characters")
        if len(self.incarnation) != 16:
            raise ValueError("incarnation must be 16 bytes")
        if not self.cluster_secret:
            raise ValueError("cluster_secret must not be empty")
        if self.num_blocks < 1:
            raise ValueError(f"a pool of {self.pool.size_bytes} bytes is smaller than one block")

    @property
    def num_blocks(self) -> int:
        """Blocks that fit the pool."""
        return self.pool.size_bytes // self.layout.block_bytes
