"""A model split over ranks gives the logits of the whole one, and leaves the same pool behind."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend
from engine.batch import Batch, BatchRow, build_batch
from engine.paged_cache import PagedCache
from engine.parallel.group import TensorParallel
from engine.prepare import prepare_model
from engine.prepared_model import PreparedModel
from engine.weight_dtypes import WeightDtype
from kv_cache.layout import KVCacheLayout, KVDtype
from tests.support.rank_threads import BLOCK_SIZE, WAIT_S, PoolOfAll, on_all_ranks
from tests.support.tiny_checkpoints import make_model, save_checkpoint

# Eight query heads; a vocabulary that two ranks cannot share evenly.
_SHAPE = {"num_attention_heads": 8, "head_dim": 8, "vocab_size": 97}
_TOKENS = [int(token) for token in torch.randint(3, 96, (50,), generator=torch.Generator().manual_seed(5))]
_TABLES = [[7, 2, 9, 4], [1, 8, 3], [6]]


def _prepare(
    directory: Path, variant: str, weight_dtype: WeightDtype = WeightDtype.FP32, **shape: Any
) -> PreparedModel:
    source = save_checkpoint(directory / "m", make_model(variant, **{**_SHAPE, **shape}))
    return prepare_model(source, directory / "cache", lambda *_: None, weight_dtype)


def _batches() -> list[Batch]:
    """Chunks, a cached prefix and single tokens; blocks are opened, filled and left half full."""
    steps = (
        [BatchRow(_TOKENS[:13], 0, _TABLES[0]), BatchRow(_TOKENS[20:27], 0, _TABLES[1])],
        [BatchRow(_TOKENS[13:18], 13, _TABLES[0]), BatchRow(_TOKENS[27:28], 7, _TABLES[1])],
        [BatchRow(_TOKENS[18:19], 18, _TABLES[0]), BatchRow(_TOKENS[28:29], 8, _TABLES[1]), BatchRow([5], 0, [6])],
    )
    return [build_batch(rows, BLOCK_SIZE) for rows in steps]


def _assert_same(prepared: PreparedModel, size: int) -> None:
    alone, split = PoolOfAll(prepared), PoolOfAll(prepared)
    expected, actual = alone.compute_alone(_batches()), split.compute_split(size, _batches())
    for want, got in zip(expected, actual, strict=True):
        assert want.std() > 0.3, "logits this flat would prove nothing"
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(split.tensor(), alone.tensor(), atol=1e-5, rtol=1e-5, equal_nan=True)
    assert not split.tensor().isnan().all()


@pytest.mark.parametrize(
    ("variant", "kv_heads", "size"),
    [
        ("llama_gqa", 2, 2),
        ("llama_gqa", 2, 4),
        ("llama_biases", 4, 4),
        ("llama_mqa", 1, 2),
        ("llama_tied", 2, 2),
        ("qwen2", 2, 2),
        ("qwen3_biases", 2, 2),
        ("gemma3_scaled_and_capped", 2, 2),
        ("qwen3_moe_mixed", 2, 2),
    ],
)
def test_ranks_together_compute_what_one_computes(tmp_path: Path, variant: str, kv_heads: int, size: int) -> None:
    _assert_same(_prepare(tmp_path, variant, num_key_value_heads=kv_heads), size)


@pytest.mark.parametrize(
    ("variant", "weight_dtype", "dtype"),
    [
        ("llama_gqa", WeightDtype.FP32, KVDtype.FP32),
        ("llama_tied", WeightDtype.INT8, KVDtype.FP32),
        ("llama_mqa", WeightDtype.BF16, KVDtype.INT8),
    ],
)
def test_ranks_with_the_best_code_for_this_cpu_compute_what_one_computes(
    tmp_path: Path, variant: str, weight_dtype: WeightDtype, dtype: KVDtype
) -> None:
    """In a quantised pool a number next to a rounding border may become another code."""
    prepared = _prepare(tmp_path, variant, weight_dtype)
    alone, split = PoolOfAll(prepared, dtype, fast=True), PoolOfAll(prepared, dtype, fast=True)
    expected, actual = alone.compute_alone(_batches()), split.compute_split(2, _batches())
    tolerance = 0.05 if dtype.has_scales else 1e-5
    for want, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, want, atol=tolerance, rtol=1e-5)


def test_a_rank_has_no_heads_beyond_those_of_the_pages() -> None:
    layout = KVCacheLayout("m", "r", 1, 2, 8, BLOCK_SIZE, KVDtype.FP32)
    for heads in (range(1, 3), range(1, 1), range(0, 2, 2)):
        with pytest.raises(ValueError, match="pages of 2 kv heads have no"):
            PagedCache(layout, 1, heads=heads)


class _Watched:
    """A backend that notes what it has stored, and can be held back before it stores."""

    def __init__(self, inner: AttentionBackend, hold: threading.Event | None = None) -> None:
        self.inner = inner
        self.hold = hold
        self.stored: list[int] = []
        self.attends = threading.Event()

    def store(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        raise AssertionError("nothing rotates k")

    def rotate_and_store(self, layer: int, qk: Tensor, v: Tensor, rotation: Tensor, batch: Batch) -> None:
        if self.hold is not None:
            assert self.hold.wait(WAIT_S)
            self.hold.clear()
        self.inner.rotate_and_store(layer, qk, v, rotation, batch)
        self.stored.append(layer)

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        self.attends.set()
        return self.inner.attend(layer, q, batch)


def test_a_layer_is_announced_only_when_all_ranks_have_stored_it(tmp_path: Path) -> None:
    """Rank 1 stores a layer only after rank 0 has begun to attend in it."""
    pool = PoolOfAll(_prepare(tmp_path, "llama_gqa"))
    ranks: dict[int, _Watched] = {}
    leader_attends = threading.Event()

    def wrap(rank: int, attention: AttentionBackend) -> AttentionBackend:
        ranks[rank] = _Watched(attention, leader_attends if rank else None)
        if rank == 0:
            ranks[0].attends = leader_attends
        return ranks[rank]

    announced: list[tuple[int, list[int]]] = []
    pool.compute_split(2, _batches()[:1], lambda layer: announced.append((layer, list(ranks[1].stored))), wrap)
    assert announced == [(0, [0]), (1, [0, 1])]


def test_a_head_that_two_ranks_have_is_read_only_when_both_have_stored_it(tmp_path: Path) -> None:
    pool = PoolOfAll(_prepare(tmp_path, "llama_mqa"))
    stored: list[set[int]] = [set(), set()]
    leader_stored = threading.Event()

    class Late(_Watched):
        """Rank 1 stores after rank 0 has; nobody may attend before both have."""

        def __init__(self, rank: int, inner: AttentionBackend) -> None:
            super().__init__(inner, leader_stored if rank else None)
            self.rank = rank

        def rotate_and_store(self, layer: int, qk: Tensor, v: Tensor, rotation: Tensor, batch: Batch) -> None:
            super().rotate_and_store(layer, qk, v, rotation, batch)
            stored[self.rank].add(layer)
            if self.rank == 0:
                leader_stored.set()

        def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
            assert all(layer in layers for layers in stored)
            return super().attend(layer, q, batch)

    pool.compute_split(2, _batches()[:1], wrap=Late)
    assert stored == [{0, 1}, {0, 1}]


def test_sums_gathers_and_barriers_meet_all_ranks() -> None:
    def work(group: TensorParallel) -> tuple[list[float], list[list[float]]]:
        mine = torch.tensor([float(group.rank + 1), 10.0])
        gathered = group.gather(mine)
        group.barrier()
        group.all_reduce(mine)
        return mine.tolist(), [part.tolist() for part in gathered]

    results = on_all_ranks(3, work)
    assert [summed for summed, _ in results] == [[6.0, 30.0]] * 3
    assert results[0][1] == [[1.0, 10.0], [2.0, 10.0], [3.0, 10.0]]
    assert results[1][1] == results[2][1] == []


def test_a_rank_that_does_not_come_is_an_error_and_no_wait_for_ever() -> None:
    gone = threading.Event()

    def work(group: TensorParallel) -> str:
        if group.rank == 1:
            assert gone.wait(WAIT_S)
            return ""
        with pytest.raises(RuntimeError) as caught:
            group.all_reduce(torch.zeros(3))
        gone.set()
        return str(caught.value)

    assert "Timed out" in on_all_ranks(2, work, step_timeout_s=0.2)[0]


def test_a_group_is_of_no_use_before_it_has_met_and_has_only_its_own_ranks() -> None:
    with pytest.raises(RuntimeError, match="not connected"):
        TensorParallel(0, 2).barrier()
    with pytest.raises(ValueError, match="rank 2 is none of 2"):
        TensorParallel(2, 2)
    assert TensorParallel(0, 2).backend_name == "gloo"
    assert TensorParallel(0, 2, torch.device("cuda:0")).backend_name == "nccl"
