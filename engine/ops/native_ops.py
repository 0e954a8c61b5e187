"""Operations in C (engine/native/ops.c and gemm.c), fp32 arithmetic on weights of any dtype where they lie."""

import ctypes
import mmap
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.native import Level, NativeKernels, NativeUnavailable, kernels
from engine.ops.interface import Gate, Linear, Ops
from engine.ops.torch_ops import TorchOps

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}  # `enum dtype` of weight.h

# From this many rows on, a product is one of gemm.c, which turns x first; with fewer that costs more than it gains.
# Sums are formed in another order there: below, and from there on, a row is the same to the bit whatever it is computed
# with and by how many threads.
_MANY_ROWS = 48
_MOST_TURNED_ROWS = 288  # `MOST_TOKENS` of gemm.c
_ROWS_STEP = 16
_PAGE_BYTES = 1 << 21  # of a huge page
_MAX_VIEWS = 4096

_int64, _pointer = ctypes.c_int64, ctypes.c_void_p


class _CWeight(ctypes.Structure):
    """`struct weight` of weight.h."""

    _fields_ = (
        ("data", _pointer),
        ("bias", _pointer),
        ("scales", _pointer),
        ("n", _int64),
        ("k", _int64),
        ("dtype", _int64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Weight:
    """A projection or an embedding as C takes it. Keeps the tensors alive."""

    linear: Linear
    c_weight: _CWeight
    address: int
    num_rows: int
    num_columns: int


class NativeOps:
    """Ops on CPU. One caller at a time. Tensors must be as Ops says; other dtypes and strides raise ValueError.

    Results live in memory that is kept and used again: fresh memory costs a page fault every 4 KiB. Only `embed` gives
    a new tensor.
    """

    def __init__(self, library: NativeKernels | None = None, level: Level | None = None, threads: int = 1) -> None:
        """`level`: instruction set to use, the best by default. `threads`: most that compute a call, the caller
        included; results are the same, to the bit, for any number.

        Raises NativeUnavailable without a library, ValueError for a level that this CPU does not have.
        """
        library = library or kernels()
        level = library.level if level is None else level
        if level > library.level:
            raise ValueError(f"this machine runs {library.instructions}, not level {level}")
        self.level, self._level, self._threads = level, int(level), threads
        product = (_pointer, _pointer, _int64, _pointer, *(_int64,) * 5)
        self._linear = library.function("kvferry_linear", None, *product)
        norm = (_pointer, _int64, _pointer, _int64, _pointer, *(_int64,) * 3, ctypes.c_float, *(_int64,) * 2)
        self._rms_norm = library.function("kvferry_rms_norm", None, *norm)
        gates = (_pointer, _int64, _pointer, *(_int64,) * 5)
        self._gated = library.function("kvferry_gated", None, *gates)
        self._embed = library.function("kvferry_embed", _int64, _pointer, _pointer, _int64, _pointer, _int64)
        self._gemm = library.function("kvferry_gemm", None, *product[:6], _int64, _pointer, _int64, _int64)
        self.many_rows = _MANY_ROWS
        self._turned = _AlignedRoom()
        self._linears: dict[Linear, _Weight] = {}
        self._tables: dict[int, _Weight] = {}
        self._products, self._logits, self._normed, self._gates = _Scratch(), _Scratch(), _Scratch(), _Scratch()

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """See Ops. Raises IndexError for an id beyond the table."""
        weight = self._tables.get(id(table))
        if weight is None:
            weight = self._tables[id(table)] = _weight(Linear(table))
        ids = token_ids.contiguous()
        if ids.dtype is not torch.int64:
            raise ValueError(f"token ids must be int64, not {ids.dtype}")
        out = torch.empty(len(ids), weight.num_columns)
        if self._embed(weight.address, ids.data_ptr(), len(ids), out.data_ptr(), self._level):
            raise IndexError(f"a token id is beyond the vocabulary of {weight.num_rows}")
        return out

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """See Ops."""
        return self._product(x, linear, self._products)

    def logits(self, x: Tensor, linear: Linear) -> Tensor:
        """See Ops."""
        return self._product(x, linear, self._logits)

    def add_linear(self, x: Tensor, y: Tensor, linear: Linear) -> None:
        """See Ops."""
        weight = self._linears.get(linear) or self._add(linear)
        rows, x_stride = _rows(x, weight.num_rows)
        y_rows, y_stride = _rows(y, weight.num_columns)
        if rows != y_rows:
            raise ValueError(f"{y_rows} rows cannot be added to {rows}")
        self._multiply(weight, (y.data_ptr(), y_stride), (x.data_ptr(), x_stride), rows, 1)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Ops."""
        shape = x.shape
        size = shape[-1]
        heads = shape[1] if len(shape) == 3 else 1
        strides = x.stride()
        per_head = len(weight.shape) == 2
        if x.dtype is not torch.float32 or strides[-1] != 1 or (len(shape) == 3 and strides[1] != size and heads > 1):
            raise ValueError(f"cannot normalise {x.dtype} {list(shape)} with strides {strides}")
        if weight.shape[-1] != size or (per_head and weight.shape[0] != heads) or not weight.is_contiguous():
            raise ValueError(f"a weight {list(weight.shape)} does not fit {list(shape)}")
        out, address = self._normed.take(shape)
        self._rms_norm(
            *(x.data_ptr(), strides[0], weight.data_ptr(), per_head, address, shape[0], heads, size, eps),
            *(self._level, self._threads),
        )
        return out

    def gated(self, gate_up: Tensor, gate: Gate) -> Tensor:
        """See Ops."""
        rows, stride = _rows(gate_up, gate_up.shape[1])
        size = gate_up.shape[1] // 2
        out, address = self._gates.take((rows, size))
        is_gelu = gate is Gate.GELU_TANH
        self._gated(gate_up.data_ptr(), stride, address, rows, size, is_gelu, self._level, self._threads)
        return out

    def _product(self, x: Tensor, linear: Linear, scratch: "_Scratch") -> Tensor:
        weight = self._linears.get(linear) or self._add(linear)
        rows, stride = _rows(x, weight.num_columns)
        out, address = scratch.take((rows, weight.num_rows))
        self._multiply(weight, (x.data_ptr(), stride), (address, weight.num_rows), rows, 0)
        return out

    def _multiply(self, weight: _Weight, x: tuple[int, int], y: tuple[int, int], rows: int, add: int) -> None:
        """y = x W^T + bias, or y += that (`add` 1); of x and y their addresses and strides."""
        if rows < self.many_rows:
            self._linear(weight.address, *x, *y, rows, add, self._level, self._threads)
            return
        turned = self._turned.take(_turned_bytes(rows, weight.num_columns))
        self._gemm(weight.address, *x, *y, rows, add, turned, self._level, self._threads)

    def _add(self, linear: Linear) -> _Weight:
        weight = self._linears[linear] = _weight(linear)
        return weight


class _Scratch:
    """Memory for one result at a time, of any shape."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)
        self._views: dict[tuple[int, ...], tuple[Tensor, int]] = {}

    def take(self, shape: tuple[int, ...]) -> tuple[Tensor, int]:
        """A contiguous fp32 tensor and its address. What was taken before is overwritten with it."""
        return self._views.get(shape) or self._make(shape)

    def _make(self, shape: tuple[int, ...]) -> tuple[Tensor, int]:
        size = 1
        for length in shape:
            size *= length
        with torch.inference_mode(False):  # an ordinary tensor serves callers in either mode
            if size > self._memory.numel():
                self._memory = torch.empty(size)
                self._views.clear()
            elif len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            view = self._memory[:size].view(shape)
        found = self._views[tuple(shape)] = (view, view.data_ptr())
        return found


class _AlignedRoom:
    """Memory for one call at a time, in huge pages if the system has any: it is read in strides of many pages."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._size_bytes = self._address = 0

    def take(self, size_bytes: int) -> int:
        """The address of at least so many bytes, on a page of its own."""
        if size_bytes > self._size_bytes:
            self._size_bytes = -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
            self._memory = memory = mmap.mmap(-1, self._size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return self._address


def best_cpu_ops(threads: int = 1) -> Ops:
    """NativeOps where its library can be loaded, else TorchOps, which has torch's threads."""
    try:
        return NativeOps(threads=threads)
    except NativeUnavailable:
        return TorchOps()


def _turned_bytes(rows: int, num_columns: int) -> int:
    """What gemm.c wants for x."""
    turned_rows = min(-(-rows // _ROWS_STEP) * _ROWS_STEP, _MOST_TURNED_ROWS)
    return turned_rows * num_columns * torch.float32.itemsize


def _rows(x: Tensor, num_columns: int) -> tuple[int, int]:
    """Number of rows of [T, num_columns], and how many floats they are apart."""
    stride, unit = x.stride()
    rows, columns = x.shape
    if columns != num_columns or unit != 1 or x.dtype is not torch.float32:
        raise ValueError(f"expected fp32 [T, {num_columns}], not {x.dtype} {list(x.shape)} with strides {x.stride()}")
    return rows, stride


def _weight(linear: Linear) -> _Weight:
    data, bias, scales = linear.weight, linear.bias, linear.scales
    if data.dtype not in _DTYPES or data.dim() != 2 or not data.is_contiguous():
        raise ValueError(f"weights must be a contiguous matrix of a known dtype, not {data.dtype} {list(data.shape)}")
    if (scales is not None) != (data.dtype is torch.int8):
        raise ValueError("int8 weights, and no others, have scales")
    rows, columns = data.shape
    for vector in (bias, scales):
        if vector is not None and (
            vector.dtype is not torch.float32 or vector.shape != (rows,) or not vector.is_contiguous()
        ):
            raise ValueError(f"bias and scales must be fp32 [{rows}], not {vector.dtype} {list(vector.shape)}")
    c_weight = _CWeight(
        data.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if scales is None else scales.data_ptr(),
        rows,
        columns,
        _DTYPES[data.dtype],
    )
    return _Weight(linear, c_weight, ctypes.addressof(c_weight), rows, columns)
