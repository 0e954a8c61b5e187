"""What hand-offs are compared with: that the plain use of a library moves the bytes, and where a load lies."""

import threading

import numpy as np
import pytest

from bench.common.plain_libraries import MESSAGE_BYTES, plain_end
from bench.common.plain_ways import Load
from kv_cache.layout import KVCacheLayout, KVDtype
from kv_transfer.end_facts import INSTALL, has_library
from kv_transfer.region import MemoryRegion

LAYOUT = KVCacheLayout("m", "r", num_layers=2, num_kv_heads=1, head_dim=16, block_size=16, dtype=KVDtype.FP32)


def test_neighbouring_blocks_are_one_run() -> None:
    size = LAYOUT.block_bytes
    load = Load(LAYOUT, (4, 5, 1), (0, 2, 3))
    assert load.runs(load.source) == [(4 * size, 2 * size), (size, size)]
    assert load.runs(load.destination) == [(0, size), (2 * size, 2 * size)]
    assert load.in_a_row().runs(load.in_a_row().source) == [(0, 3 * size)]


@pytest.mark.parametrize("library", [name for name in INSTALL if has_library(name)])
def test_the_plain_use_of_a_library_moves_every_byte_to_its_place(library: str) -> None:
    size = MESSAGE_BYTES + 3 * 4096
    with MemoryRegion.allocate(size, shared=False) as source, MemoryRegion.allocate(size, shared=False) as target:
        source.buffer[:] = np.random.default_rng(0).bytes(size)
        sender, receiver = (plain_end(library, pool, "127.0.0.1") for pool in (source, target))
        sender.meet(receiver.greeting())
        receiver.meet(sender.greeting())
        for here, there in (([(0, size)], [(0, size)]), ([(0, 4096), (9000, 4096)], [(70000, 4096), (4096, 4096)])):
            receiver.expect(there)
            sender.aim(here, there)
            receiver.ready()
            taking = threading.Thread(target=receiver.take)
            taking.start()
            sender.send()
            taking.join()
            for (start, length), (into, _) in zip(here, there, strict=True):
                assert target.buffer[into : into + length] == source.buffer[start : start + length]
        sender.close()
        receiver.close()
