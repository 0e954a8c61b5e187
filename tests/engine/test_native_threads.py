"""Threads that share the work of a call in C: the same results to the bit, and no trace where one was asked for."""

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend, LayerAttention
from engine.attention.native import NativeAttention
from engine.native import NativeUnavailable, kernels
from engine.ops.interface import Gate, Linear
from engine.ops.native_ops import NativeOps
from engine.paged_cache import PagedCache
from kv_cache.layout import KVDtype
from tests.support.paged_rows import Backend, PagedRows


def _is_built() -> bool:
    try:
        kernels()
    except NativeUnavailable:
        return False
    return True


pytestmark = pytest.mark.skipif(not _is_built(), reason="the C kernels were not built")
_THREADS = (1, 2, 3)


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _same(results: Sequence[Tensor]) -> None:
    for result in results[1:]:
        assert torch.equal(result, results[0])


# Few and many tokens, rows that fill no vector and no piece, and so many tokens that they are taken in turns.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 4003, 300), (5, 1001, 770), (100, 203, 131)])
def test_products_do_not_depend_on_the_threads(dtype: torch.dtype, tokens: int, rows: int, columns: int) -> None:
    weight, scales = _numbers(rows, columns), None
    if dtype is torch.int8:
        weight, scales = (weight * 30).clamp(-127, 127), _numbers(rows, seed=1).abs()
    linear = Linear(weight.to(dtype), _numbers(rows, seed=2), scales)
    x, products, sums = _numbers(tokens, columns, seed=3), [], []
    for threads in _THREADS:
        ops = NativeOps(threads=threads)
        for _ in range(3):
            products.append(ops.linear(x, linear).clone())
            sums.append(torch.ones(tokens, rows))
            ops.add_linear(sums[-1], x, linear)
    _same(products)
    _same(sums)


@pytest.mark.parametrize("tokens", [1, 70])
def test_norms_and_gates_do_not_depend_on_the_threads(tokens: int) -> None:
    x, weight = _numbers(tokens, 6, 200), _numbers(6, 200, seed=1)
    per_head, whole, gated = [], [], []
    for threads in _THREADS:
        ops = NativeOps(threads=threads)
        for _ in range(3):
            per_head.append(ops.rms_norm(x, weight, 1e-5).clone())
            whole.append(ops.rms_norm(x.view(tokens, -1), weight.view(-1), 1e-5).clone())
            gated.append(ops.gated(x.view(tokens, -1), Gate.SILU).clone())
    _same(per_head)
    _same(whole)
    _same(gated)
    torch.testing.assert_close(whole[-1], torch.rms_norm(x.view(tokens, -1), (1200,), weight.view(-1), 1e-5))


def _with(threads: int) -> Backend:
    def backend(cache: PagedCache, layers: Sequence[LayerAttention]) -> AttentionBackend:
        return NativeAttention(cache, layers, threads=threads)

    return backend


@pytest.mark.parametrize("dtype", [KVDtype.FP32, KVDtype.INT8])
@pytest.mark.parametrize(
    ("heads", "work"),
    [((6, 2), [(300, 1)] * 8), ((6, 2), [(0, 70), (150, 40), (200, 1)]), ((7, 1), [(100, 60)]), ((4, 4), [(3, 1)])],
)
def test_attention_does_not_depend_on_the_threads(
    dtype: KVDtype, heads: tuple[int, int], work: list[tuple[int, int]]
) -> None:
    results, pools = [], []
    for threads in _THREADS:
        rows = PagedRows(heads, 16, work, dtype, head_dim=64, backend=_with(threads))
        results += [torch.cat(rows.attend()) for _ in range(3)]
        pools.append(
            torch.cat([rows.cache.k(1).flatten().view(torch.uint8), rows.cache.v(1).flatten().view(torch.uint8)])
        )
        rows.check()
    _same(results)
    _same(pools)


def test_callers_may_want_helpers_at_the_same_time() -> None:
    linear, x = Linear(_numbers(1003, 400)), _numbers(6, 400, seed=1)
    expected = NativeOps().linear(x, linear)

    def products(_: int) -> list[Tensor]:
        ops = NativeOps(threads=3)
        return [ops.linear(x, linear).clone() for _ in range(10)]

    with ThreadPoolExecutor(4) as callers:
        for found in callers.map(products, range(4)):
            _same([expected, *found])


_PROCESS = """
import ctypes, os, time
from pathlib import Path
from engine.native import kernels
number, address = ctypes.c_int64, ctypes.c_void_p
norm = kernels().function("kvferry_rms_norm", None, address, number, address, number, address, number, number, number,
                          ctypes.c_float, number, number)
tokens, size = 64, 4096
x, weight, out = ((ctypes.c_float * n)(*([2.0] * n)) for n in (tokens * size, size, tokens * size))

def compute(threads):
    ctypes.memset(out, 0, ctypes.sizeof(out))
    norm(x, size, weight, 0, out, tokens, 1, size, 0.0, 0, threads)
    return set(out) == {2.0}

def tasks():
    stats = [task.joinpath("stat").read_text() for task in Path("/proc/self/task").iterdir()]
    return [stat.rsplit(")", 1)[1].split()[0] for stat in stats]

assert compute(1) and len(tasks()) == 1, "one thread was asked for"
assert compute(3) and len(tasks()) == 3
assert compute(3) and compute(2) and compute(1) and len(tasks()) == 3, "helpers stay"
while sorted(tasks()) != ["R", "S", "S"]:
    time.sleep(0.01)
child = os.fork()
if not child:
    os._exit(0 if len(tasks()) == 1 and compute(3) and len(tasks()) == 3 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "a fork has no helpers, and gets its own"
"""


def test_threads_are_started_when_wanted_and_sleep_when_not_and_a_fork_has_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _PROCESS],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
