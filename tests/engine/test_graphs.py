"""Decode steps that are replayed for padded batches."""

import random

import pytest
import torch

from engine.batch import Batch, BatchRow, build_batch
from engine.execution.device import CpuDevice
from engine.execution.graphs import GraphPool, GraphShape, padded_sizes
from engine.execution.staging import Staging
from engine.model_runner import no_hook
from engine.paged_cache import PagedCache
from tests.support.device_engine import Captures, graph_pool, pool_bytes
from tests.support.toy_engine import MODEL, poisoned_cache
from tests.support.toy_model import VOCAB_SIZE

BLOCK, NUM_BLOCKS, MAX_ROWS = 8, 40, 11


def caches() -> tuple[PagedCache, PagedCache]:
    """Two pools with the same random KV in all blocks but the last, which stays NaN."""
    both = tuple(poisoned_cache(MODEL.layout(BLOCK), NUM_BLOCKS) for _ in range(2))
    draw = torch.Generator().manual_seed(1)
    for layer in range(MODEL.num_layers):
        for pages in (both[0].k(layer), both[0].v(layer)):
            pages[:-1] = torch.randn(pages[:-1].shape, generator=draw)
    pool_bytes(both[1]).copy_(pool_bytes(both[0]))
    return both[0], both[1]


def decoding(draw: random.Random, num_rows: int) -> Batch:
    """Single tokens of sequences that share no block."""
    free = list(range(NUM_BLOCKS - 1))
    draw.shuffle(free)
    rows = []
    for _ in range(num_rows):
        start = draw.randrange(3 * BLOCK)
        table = [free.pop() for _ in range(start // BLOCK + 1)]
        rows.append(BatchRow([draw.randrange(VOCAB_SIZE)], start, table))
    return build_batch(rows, BLOCK)


def direct(cache: PagedCache, batch: Batch) -> torch.Tensor:
    return MODEL.logits(MODEL.forward(batch, MODEL.backend(cache), no_hook))


def test_sizes_grow_by_eights_up_to_the_most() -> None:
    assert padded_sizes(1) == (1,)
    assert padded_sizes(6) == (1, 2, 4, 6)
    assert padded_sizes(8) == (1, 2, 4, 8)
    assert padded_sizes(30) == (1, 2, 4, 8, 16, 24, 30)


@pytest.mark.parametrize("reads_host", [True, False])
def test_replays_compute_and_store_what_a_direct_step_does_whatever_was_replayed_before(reads_host: bool) -> None:
    ours, theirs = caches()
    captures = Captures()
    graphs = graph_pool(MODEL, ours, MAX_ROWS, captures, CpuDevice(reads_host=reads_host))
    draw = random.Random(5)
    sizes = [7, 3, 11, 1, 2, 9, 4, 5]
    for num_rows in sizes:
        batch = decoding(draw, num_rows)
        assert graphs.fits(batch)
        graphs.load(batch)
        logits = graphs.replay(batch)
        torch.testing.assert_close(logits, direct(theirs, batch), rtol=1e-4, atol=1e-4)
    # NaN where nothing was written, in both.
    for layer in range(MODEL.num_layers):
        torch.testing.assert_close(ours.k(layer), theirs.k(layer), rtol=1e-4, atol=1e-4, equal_nan=True)
        torch.testing.assert_close(ours.v(layer), theirs.v(layer), rtol=1e-4, atol=1e-4, equal_nan=True)
    assert captures.rows_replayed == [8, 4, 11, 1, 2, 11, 4, 8]


def test_capturing_writes_nothing() -> None:
    ours, theirs = caches()
    captures = Captures()
    graphs = graph_pool(MODEL, ours, MAX_ROWS, captures)
    graphs.capture_all()
    assert torch.equal(pool_bytes(ours), pool_bytes(theirs))
    assert captures.rows_replayed == []


def test_token_ids_of_the_device_take_the_place_of_those_that_were_loaded() -> None:
    ours, theirs = caches()
    graphs = graph_pool(MODEL, ours, MAX_ROWS, Captures())
    batch = decoding(random.Random(2), 3)
    token_ids = batch.token_ids.clone()
    batch.token_ids.zero_()
    graphs.load(batch)
    logits = graphs.replay(batch, token_ids)
    batch.token_ids.copy_(token_ids)
    torch.testing.assert_close(logits, direct(theirs, batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "rows",
    [
        [BatchRow([1], 0, [0]), BatchRow([1, 2], 0, [1])],
        [BatchRow([1], 0, [0]), BatchRow([1], 0, [1], 0)],
        [BatchRow([1], 0, [i]) for i in range(MAX_ROWS + 1)],
        [BatchRow([1], 400, list(range(51)))],
    ],
    ids=["a chunk", "a token that is not sampled after", "too many rows", "too long a context"],
)
def test_other_batches_do_not_fit(rows: list[BatchRow]) -> None:
    assert not graph_pool(MODEL, caches()[0], MAX_ROWS, Captures()).fits(build_batch(rows, BLOCK))


def test_rows_of_padding_are_harmless_to_every_kernel() -> None:
    seen = []

    def step(batch: Batch) -> torch.Tensor:
        seen.append((batch.slot_mapping.tolist(), batch.context_lens.tolist(), batch.positions.tolist()))
        # Room for the longest context is planned for, whatever it is now.
        assert batch.starts == (399,) * len(batch.starts)
        assert bool((batch.block_tables >= 0).all())
        return torch.zeros((batch.num_rows, 1))

    device = CpuDevice()
    graphs = GraphPool(step, GraphShape(8, 400, BLOCK), device, Staging(device), device.capture)
    for rows in (7, 3):
        batch = build_batch([BatchRow([5], 2 + row, [row, 20 + row]) for row in range(rows)], BLOCK)
        graphs.load(batch)
        assert len(graphs.replay(batch)) == rows
    assert seen[0][0][7:] == seen[1][0][3:] == [-1]
    assert seen[0][1][7:] == seen[1][1][3:] == [1]
    assert seen[0][2][7:] == seen[1][2][3:] == [0]
