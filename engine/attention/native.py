"""Attention in C (engine/native/attention.c): K and V are read where they lie in the pool, each once for all query
heads of a kv head, and a layer is one call.

What Python does in a layer is checking shapes and passing addresses; what does not change between layers is passed in
structures that are filled once a step.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend, LayerAttention
from engine.attention.torch_paged import TorchAttention
from engine.batch import Batch
from engine.native import Level, NativeKernels, NativeUnavailable, kernels
from engine.paged_cache import PagedCache
from kv_cache.layout import SCALE_BYTES, KVDtype

_CODES = {KVDtype.FP32: 0, KVDtype.FP16: 1, KVDtype.BF16: 2, KVDtype.FP8_E4M3: 3, KVDtype.INT8: 4}
_EVERYTHING = 1 << 40  # a window that is never full
_CACHE_LINE_BYTES = 64


def best_cpu_attention(cache: PagedCache, layers: Sequence[LayerAttention], threads: int = 1) -> AttentionBackend:
    """NativeAttention where its library can be loaded, else TorchAttention, which has torch's threads."""
    try:
        return NativeAttention(cache, layers, threads=threads)
    except NativeUnavailable:
        return TorchAttention(cache, layers)


class NativeAttention:
    """AttentionBackend for fp32 activations on the CPU, with fp32 accumulation. One caller at a time."""

    def __init__(
        self,
        cache: PagedCache,
        layers: Sequence[LayerAttention],
        *,
        library: NativeKernels | None = None,
        level: Level | None = None,
        threads: int = 1,
    ) -> None:
        """`layers`: one entry for each layer of the pool. `level`: an instruction set below the library's. `threads`:
        most that compute a call, the caller included; results are the same, to the bit, for any number.

        Raises NativeUnavailable without a library, ValueError for layers that do not fit the pool or a level too high.
        """
        library = library or kernels()
        layout = cache.layout
        self._level = int(library.level if level is None else level)
        if self._level > library.level:
            raise ValueError(f"this machine runs {library.instructions}, not level {self._level}")
        if len(layers) != layout.num_layers:
            raise ValueError(f"{len(layers)} layers given for a pool of {layout.num_layers}")
        address, number = ctypes.c_void_p, ctypes.c_int
        self._threads = threads
        self._store = library.function("kvferry_store", None, *(address,) * 6, number, number)
        self._attend = library.function("kvferry_attend", None, *(address,) * 6, number, number)
        scratch_bytes = library.function("kvferry_attend_scratch_bytes", ctypes.c_int64, ctypes.c_int64)
        self._cache = cache  # keeps the pool's memory
        self._kv_heads, self._head_dim = cache.num_kv_heads, layout.head_dim
        self._pool = _pool(cache)
        self._layers = (_Layer * len(layers))(*(_layer(i, layer) for i, layer in enumerate(layers)))
        self._step = _Step()
        self._planned_for: Batch | None = None
        self._q, self._v = _Heads(), _Heads()
        needed_bytes = threads * scratch_bytes(layout.head_dim) + _CACHE_LINE_BYTES
        self._scratch = torch.empty(needed_bytes, dtype=torch.uint8)
        self._out = torch.empty(0)
        at = self._scratch.data_ptr()
        self._scratch_at = at + -at % _CACHE_LINE_BYTES
        # Addresses of structures that stay where they are: an int is what ctypes passes fastest.
        self._pool_at, self._step_at = ctypes.addressof(self._pool), ctypes.addressof(self._step)
        self._q_at, self._v_at = ctypes.addressof(self._q), ctypes.addressof(self._v)
        first = ctypes.addressof(self._layers)
        self._layers_at = range(first, first + len(layers) * ctypes.sizeof(_Layer), ctypes.sizeof(_Layer))

    def store(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        """See AttentionBackend. Raises ValueError for tensors that do not fit the batch and the pool."""
        k, v = k.float(), v.float()
        # Other strides than the kernel's cost a copy here: no model of ours has them.
        self._put(
            layer, k if _has_whole_heads(k) else k.contiguous(), v if _has_whole_heads(v) else v.contiguous(), batch
        )

    def rotate_and_store(self, layer: int, qk: Tensor, v: Tensor, rotation: Tensor, batch: Batch) -> None:
        """See AttentionBackend. qk, v and rotation are fp32. Raises ValueError for tensors that do not fit the batch
        and the pool."""
        if rotation.shape != (batch.num_tokens, self._head_dim) or rotation.dtype is not torch.float32:
            raise ValueError(
                f"rotation must be fp32 [{batch.num_tokens}, {self._head_dim}], not {rotation.dtype} "
                f"{list(rotation.shape)}"
            )
        if not rotation.is_contiguous() or self._head_dim % 2:
            raise ValueError("rotation must be contiguous, and head_dim even")
        self._put(layer, qk, v, batch, rotation.data_ptr())

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """See AttentionBackend. q is fp32. Raises ValueError for a tensor that does not fit the batch and the pool."""
        self._plan(batch)
        self._describe(self._q, "q", q, batch)
        num_q_heads = q.shape[1]
        if num_q_heads % self._kv_heads:
            raise ValueError(f"{num_q_heads} q heads over {self._kv_heads} kv heads")
        width = num_q_heads * self._head_dim
        size = len(q) * width
        if self._out.numel() < size:
            with torch.inference_mode(False):  # an ordinary tensor serves callers in either mode
                self._out = torch.empty(size)
        self._attend(
            self._pool_at,
            self._layer_at(layer),
            self._step_at,
            self._q_at,
            self._out.data_ptr(),
            self._scratch_at,
            self._level,
            self._threads,
        )
        return self._out[:size].view(-1, width)

    def _put(self, layer: int, qk: Tensor, v: Tensor, batch: Batch, rotation_at: int | None = None) -> None:
        self._plan(batch)
        self._describe(self._q, "k", qk, batch)
        self._describe(self._v, "v", v, batch)
        if v.shape[1] != self._kv_heads or qk.shape[1] < self._kv_heads or (not rotation_at and qk.shape != v.shape):
            raise ValueError(f"{qk.shape[1]} and {v.shape[1]} heads given for a pool of {self._kv_heads} kv heads")
        layer_at = self._layer_at(layer)
        self._store(
            *(self._pool_at, layer_at, self._step_at, self._q_at, self._v_at, rotation_at),
            *(self._level, self._threads),
        )

    def _layer_at(self, layer: int) -> int:
        if not 0 <= layer < len(self._layers_at):
            raise ValueError(f"no layer {layer} in a pool of {len(self._layers_at)}")
        return self._layers_at[layer]

    def _describe(self, heads: "_Heads", name: str, tensor: Tensor, batch: Batch) -> None:
        """Let `heads` stand for fp32 [T, any, head_dim]."""
        if tensor.dtype is not torch.float32 or tensor.dim() != 3:
            raise ValueError(f"{name} must be fp32 [tokens, heads, head_dim], not {tensor.dtype} {list(tensor.shape)}")
        if tensor.shape[0] != batch.num_tokens or tensor.shape[2] != self._head_dim or not _has_whole_heads(tensor):
            raise ValueError(
                f"{name} of shape {list(tensor.shape)} and strides {list(tensor.stride())} does not fit "
                f"{batch.num_tokens} tokens of head_dim {self._head_dim}, heads contiguous"
            )
        heads.at = tensor.data_ptr()
        heads.stride = tensor.stride(0)
        heads.count = tensor.shape[1]

    def _plan(self, batch: Batch) -> None:
        """Fill the step's structure, once a batch. Raises ValueError for tensors that are not as Batch says."""
        if self._planned_for is batch:
            return
        step = self._step
        for name in ("slot_blocks", "slot_offsets", "opened_blocks", "block_tables", "context_lens", "query_start"):
            tensor: Tensor = getattr(batch, name)
            if tensor.dtype is not _BATCH_DTYPES[name] or not tensor.is_contiguous() or not tensor.is_cpu:
                raise ValueError(f"{name} must be contiguous {_BATCH_DTYPES[name]} on the CPU, not {tensor.dtype}")
            setattr(step, name, tensor.data_ptr())
        step.num_opened = len(batch.opened_blocks)
        step.table_width = batch.block_tables.shape[1]
        step.num_rows, step.num_tokens = batch.num_rows, batch.num_tokens
        self._planned_for = batch


class _Pool(ctypes.Structure):
    """`struct pool` of attention.c."""

    _fields_ = (
        ("bytes", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("block_bytes", "page_bytes", "k_offset", "v_offset")),
        *((name, ctypes.c_int64) for name in ("k_scale_offset", "v_scale_offset")),
        *((name, ctypes.c_int64) for name in ("kv_heads", "block_size", "head_dim", "dtype")),
    )


class _Layer(ctypes.Structure):
    """`struct layer` of attention.c."""

    _fields_ = (
        ("index", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("soft_cap", ctypes.c_double),
    )


_BATCH_DTYPES = {
    "slot_blocks": torch.int64,
    "slot_offsets": torch.int64,
    "opened_blocks": torch.int64,
    "block_tables": torch.int32,
    "context_lens": torch.int32,
    "query_start": torch.int32,
}


class _Step(ctypes.Structure):
    """`struct step` of attention.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _BATCH_DTYPES),
        *((name, ctypes.c_int64) for name in ("num_opened", "table_width", "num_rows", "num_tokens")),
    )


class _Heads(ctypes.Structure):
    """`struct heads` of attention.c."""

    _fields_ = (("at", ctypes.c_void_p), ("stride", ctypes.c_int64), ("count", ctypes.c_int64))


def _pool(cache: PagedCache) -> _Pool:
    layout, first = cache.layout, cache.heads.start
    tile_bytes, scale_bytes = layout.v_offset // layout.num_kv_heads, layout.block_size * SCALE_BYTES
    return _Pool(
        cache.address,
        *(layout.block_bytes, layout.page_bytes),
        *(layout.k_offset + first * tile_bytes, layout.v_offset + first * tile_bytes),
        *(layout.k_scale_offset + first * scale_bytes, layout.v_scale_offset + first * scale_bytes),
        *(cache.num_kv_heads, layout.block_size, layout.head_dim, _CODES[layout.dtype]),
    )


def _layer(index: int, layer: LayerAttention) -> _Layer:
    if layer.window is not None and layer.window < 1:
        raise ValueError(f"a window of {layer.window} tokens shows nothing")
    return _Layer(index, _EVERYTHING if layer.window is None else layer.window, layer.scale, layer.soft_cap or 0.0)


def _has_whole_heads(tensor: Tensor) -> bool:
    """Whether heads are contiguous, and tokens a constant stride apart."""
    strides = tensor.stride()
    return len(strides) == 3 and strides[2] == 1 and (strides[1] == tensor.shape[2] or tensor.shape[1] == 1)
