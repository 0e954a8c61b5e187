"""A pool and its copy in host memory."""

from collections.abc import Callable

import pytest
import torch

from engine.execution.device import CpuDevice
from engine.execution.mirror import PoolMirror
from kv_cache.layout import KVCacheLayout, KVDtype

LAYOUT = KVCacheLayout("m", "1", 3, 2, 8, 8, KVDtype.INT8)
NUM_BLOCKS = 6


def pools() -> tuple[PoolMirror, torch.Tensor, torch.Tensor]:
    size = LAYOUT.pool_bytes(NUM_BLOCKS)
    draw = torch.Generator().manual_seed(1)
    pool = torch.randint(0, 256, (size,), generator=draw, dtype=torch.uint8)
    host = torch.randint(0, 256, (size,), generator=draw, dtype=torch.uint8)
    shape = (NUM_BLOCKS, LAYOUT.num_layers, -1)
    return PoolMirror(CpuDevice(), pool, host, LAYOUT), pool.view(shape), host.view(shape)


def test_one_layer_of_some_blocks_is_copied_and_nothing_else() -> None:
    mirror, pool, host = pools()
    expected = host.clone()
    expected[[4, 1], 2] = pool[[4, 1], 2]
    mirror.layer_to_host([4, 1], 2).wait()
    assert torch.equal(host, expected)


@pytest.mark.parametrize("block_ids", [[], [3], [0, 1, 2, 3, 4, 5], [5, 0, 4, 2], [1, 2, 2, 3]])
def test_whole_blocks_are_copied_either_way_and_nothing_else(block_ids: list[int]) -> None:
    def copies(way: Callable[[PoolMirror], None], *, to_host: bool) -> None:
        mirror, pool, host = pools()
        source, target = (pool, host) if to_host else (host, pool)
        expected, unchanged = target.clone(), source.clone()
        expected[block_ids] = source[block_ids]
        way(mirror)
        assert torch.equal(target, expected)
        assert torch.equal(source, unchanged)

    copies(lambda mirror: mirror.to_host(block_ids), to_host=True)
    copies(lambda mirror: mirror.to_device(block_ids), to_host=False)


def test_a_copy_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be mirrored"):
        PoolMirror(CpuDevice(), torch.zeros(512, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8), LAYOUT)
