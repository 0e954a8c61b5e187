"""The byte maths of a KV pool, and whether two pools can exchange blocks.

A pool is one contiguous allocation, `[num_blocks][num_layers][page]`. A page holds one block of one layer:

    +---------------------------------+---------------------------------+-----------------+-----------------+-----+
    | K [kv_heads, block_size, head]  | V [kv_heads, block_size, head]  | K scales        | V scales        | pad |
    +---------------------------------+---------------------------------+-----------------+-----------------+-----+
    0                                 v_offset                          k_scale_offset    v_scale_offset    page_bytes

Scales (fp16, `[kv_heads, block_size]` each) exist only for the quantised dtypes, so they travel with their block. The
pad rounds a page up to 256 bytes. Everything here is immutable; any thread may call.
"""

from dataclasses import dataclass, field
from enum import Enum

from kv_cache.block_hash import HASH_VERSION
from kvferry_rpc import common_pb2

AXIS_ORDER = "bl_k(htd)v(htd)s"
"""Block, layer, then within a page K by (head, token, dim), V likewise, scales last. The only order so far."""

PAGE_ALIGNMENT_BYTES = 256
SCALE_BYTES = 2

_MIN_BLOCK_SIZE = 8
_MAX_BLOCK_SIZE = 128


class KVDtype(Enum):
    """Element type of K and V in a pool."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8_E4M3 = "fp8_e4m3"
    INT8 = "int8"

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return _ITEM_BYTES[self]

    @property
    def has_scales(self) -> bool:
        """Whether each head and token carries an fp16 scale for K and one for V."""
        return self in (KVDtype.FP8_E4M3, KVDtype.INT8)


_ITEM_BYTES = {KVDtype.FP32: 4, KVDtype.FP16: 2, KVDtype.BF16: 2, KVDtype.FP8_E4M3: 1, KVDtype.INT8: 1}


class LayoutVerdict(Enum):
    """What two pools can do with each other's blocks."""

    IDENTICAL = "identical"
    CONVERTIBLE = "convertible"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class LayoutMatch:
    """Result of `KVCacheLayout.compare`.

    `reasons` has one clause a difference, each naming both values ("dtype is bf16 here and int8 there"): what forbids
    the exchange when REFUSED, what must be converted when CONVERTIBLE, nothing when IDENTICAL.
    """

    verdict: LayoutVerdict
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.verdict.value}: {'; '.join(self.reasons)}" if self.reasons else self.verdict.value


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """Everything two workers must agree on before the first byte moves. Raises ValueError for nonsense.

    `num_kv_heads` heads are stored here, from `kv_head_start` on, of the model's `total_kv_heads` (default: all of
    them). `block_size` is in tokens, a power of two from 8 to 128. `model_revision` is a digest of the weights.
    """

    model_id: str
    model_revision: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: KVDtype
    kv_head_start: int = 0
    total_kv_heads: int | None = None
    axis_order: str = AXIS_ORDER
    hash_version: int = HASH_VERSION
    # Worked out once: it is asked for with every block that moves.
    _page_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.total_kv_heads is None:
            object.__setattr__(self, "total_kv_heads", self.num_kv_heads)
        for name in ("model_id", "model_revision", "axis_order"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        for name in ("num_layers", "num_kv_heads", "head_dim", "hash_version"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        size = self.block_size
        if not _MIN_BLOCK_SIZE <= size <= _MAX_BLOCK_SIZE or size & (size - 1):
            raise ValueError(
                f"block_size must be a power of two from {_MIN_BLOCK_SIZE} to {_MAX_BLOCK_SIZE}, not {size}"
            )
        if self.kv_head_start < 0 or self.kv_head_end > self.model_kv_heads:
            raise ValueError(
                f"kv heads {self.kv_head_start}..{self.kv_head_end - 1} do not lie within the model's "
                f"{self.model_kv_heads} kv heads"
            )
        used = self.v_scale_offset + self._scale_bytes
        object.__setattr__(self, "_page_bytes", -(-used // PAGE_ALIGNMENT_BYTES) * PAGE_ALIGNMENT_BYTES)

    @property
    def model_kv_heads(self) -> int:
        """`total_kv_heads` as a plain int: the KV heads of the whole model."""
        return self.num_kv_heads if self.total_kv_heads is None else self.total_kv_heads

    @property
    def kv_head_end(self) -> int:
        """One past the last head stored here."""
        return self.kv_head_start + self.num_kv_heads

    @property
    def shard(self) -> str:
        """The heads stored here, for messages: "0..3"."""
        return f"{self.kv_head_start}..{self.kv_head_end - 1}"

    def __str__(self) -> str:
        return (
            f"{self.model_id} at revision {self.model_revision}, {self.num_layers} layers, kv heads {self.shard} of "
            f"{self.model_kv_heads}, head_dim {self.head_dim}, block_size {self.block_size}, {self.dtype.value}, axis "
            f"order {self.axis_order}, hash version {self.hash_version}"
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K, V and scales of one token over all layers, padding not counted."""
        scale = SCALE_BYTES if self.dtype.has_scales else 0
        return self.num_layers * 2 * self.num_kv_heads * (self.head_dim * self.dtype.itemsize + scale)

    @property
    def k_offset(self) -> int:
        """Byte offset of K within a page."""
        return 0

    @property
    def v_offset(self) -> int:
        """Byte offset of V within a page; also the bytes of K."""
        return self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize

    @property
    def k_scale_offset(self) -> int:
        """Byte offset of the scales of K within a page. Without scales: the end of V."""
        return 2 * self.v_offset

    @property
    def v_scale_offset(self) -> int:
        """Byte offset of the scales of V within a page. Without scales: the end of V."""
        return self.k_scale_offset + self._scale_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer: the smallest unit of transfer. A multiple of 256."""
        return self._page_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers: contiguous in the pool."""
        return self.num_layers * self.page_bytes

    def pool_bytes(self, num_blocks: int) -> int:
        """Bytes of a pool of `num_blocks` blocks."""
        return num_blocks * self.block_bytes

    def page_offset(self, block_id: int, layer: int) -> int:
        """Byte offset in the pool of the page of this block and layer.

        Raises IndexError for a negative block or a layer out of range. The size of the pool is not known here, so
        whoever takes a block id from a peer checks its upper bound.
        """
        if block_id < 0 or not 0 <= layer < self.num_layers:
            raise IndexError(f"no page for block {block_id}, layer {layer} (the model has {self.num_layers} layers)")
        return (block_id * self.num_layers + layer) * self.page_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens, the last one maybe partly."""
        return -(-num_tokens // self.block_size)

    def compare(self, other: "KVCacheLayout", here: str = "here", there: str = "there") -> LayoutMatch:
        """Whether blocks can move between a pool of this layout and one of `other`.

        The reasons call the places `here` and `there`.
        """

        def differ(name: str, ours: object, theirs: object) -> str:
            return f"{name} {ours} {here} and {theirs} {there}"

        refusals = [
            differ(f"{name} is", getattr(self, name), getattr(other, name))
            for name in _MUST_AGREE
            if getattr(self, name) != getattr(other, name)
        ]
        if self.kv_head_end <= other.kv_head_start or other.kv_head_end <= self.kv_head_start:
            refusals.append(f"{differ('kv heads are', self.shard, other.shard)}, with none in common")
        if refusals:
            return LayoutMatch(LayoutVerdict.REFUSED, tuple(refusals))
        conversions = []
        if self.block_size != other.block_size:
            conversions.append(differ("block_size is", self.block_size, other.block_size))
        if self.dtype is not other.dtype:
            conversions.append(differ("dtype is", self.dtype.value, other.dtype.value))
        if self.shard != other.shard:
            conversions.append(differ("kv heads are", self.shard, other.shard))
        verdict = LayoutVerdict.CONVERTIBLE if conversions else LayoutVerdict.IDENTICAL
        return LayoutMatch(verdict, tuple(conversions))

    def to_proto(self) -> common_pb2.KVCacheLayout:
        """The layout as it travels between processes."""
        return common_pb2.KVCacheLayout(
            model_id=self.model_id,
            model_revision=self.model_revision,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            kv_head_start=self.kv_head_start,
            total_kv_heads=self.model_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            dtype=self.dtype.value,
            axis_order=self.axis_order,
            hash_version=self.hash_version,
        )

    @classmethod
    def from_proto(cls, message: common_pb2.KVCacheLayout) -> "KVCacheLayout":
        """The layout a peer sent. Raises ValueError when it makes no sense or names a dtype unknown here."""
        return cls(
            model_id=message.model_id,
            model_revision=message.model_revision,
            num_layers=message.num_layers,
            num_kv_heads=message.num_kv_heads,
            head_dim=message.head_dim,
            block_size=message.block_size,
            dtype=KVDtype(message.dtype),
            kv_head_start=message.kv_head_start,
            total_kv_heads=message.total_kv_heads,
            axis_order=message.axis_order,
            hash_version=message.hash_version,
        )

    @property
    def _scale_bytes(self) -> int:
        return self.num_kv_heads * self.block_size * SCALE_BYTES if self.dtype.has_scales else 0


_MUST_AGREE = (
    "model_id",
    "model_revision",
    "num_layers",
    "total_kv_heads",
    "head_dim",
    "axis_order",
    "hash_version",
)
