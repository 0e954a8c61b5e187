"""The pool of one process of the failover benchmark, made so that whoever writes or reads too late is found out.

The content of a hand-off follows from its number, so both ends and every later life of them know it, and no two are
equal. A block that nobody holds is filled with a pattern.
"""

import numpy as np
from numpy.typing import NDArray

from bench.common.failover_messages import DECODE, Audited, Setup
from bench.common.transfer_peer import SECRET
from kv_cache.block_manager import BlockManager, IntegrityError
from kv_transfer.identity import Identity
from kv_transfer.region import MemoryRegion

Content = NDArray[np.uint8]
_PATTERN = 0xA5


class Pool:
    """The memory of one end and the `BlockManager` that owns its blocks. One thread."""

    def __init__(self, setup: Setup) -> None:
        self._layout, self._seed = setup.layout, setup.seed
        size_bytes = setup.layout.pool_bytes(setup.num_blocks)
        self.region = MemoryRegion.allocate(size_bytes, shared=setup.role == DECODE)
        self.manager = BlockManager(setup.num_blocks, setup.layout.block_size, prefix_caching=False)
        self._rows = np.frombuffer(self.region.buffer, np.uint8).reshape(setup.num_blocks, -1)
        self._rows[:] = _PATTERN
        self._unheld = set(range(setup.num_blocks))
        self._touched: set[int] = set()

    def identity(self, name: str, incarnation: bytes) -> Identity:
        """This end with this pool."""
        return Identity(name, incarnation, SECRET, self._layout, self.region)

    def take(self, number: int, num_blocks: int) -> list[int] | None:
        """Hold blocks; None when there are too few."""
        found = self.manager.allocate(str(number), num_blocks * self._layout.block_size, (), ())
        if found is None:
            return None
        blocks = list(found.block_table)
        self._look(blocks)
        self._unheld.difference_update(blocks)
        return blocks

    def give_back(self, blocks: list[int]) -> None:
        """Nobody holds these blocks any more: from now on nothing may write or read them."""
        self._rows[blocks] = _PATTERN
        self._unheld.update(blocks)

    def fill(self, number: int, blocks: list[int]) -> None:
        """Write the content of this hand-off."""
        self._rows[blocks] = self._content(number, blocks)

    def holds(self, number: int, blocks: list[int]) -> bool:
        """Whether the blocks have the content of this hand-off."""
        return bool(np.array_equal(self._rows[blocks], self._content(number, blocks)))

    def audit(self, open_handoffs: int) -> Audited:
        """Look at everything."""
        self._look(sorted(self._unheld))
        fault = ""
        try:
            self.manager.check_integrity()
        except IntegrityError as error:
            fault = str(error)
        usage = self.manager.usage()
        touched, self._touched = self._touched, set()
        return Audited(usage.total - usage.free, len(touched), open_handoffs, fault)

    def _look(self, blocks: list[int]) -> None:
        for block in blocks:
            if not (self._rows[block] == _PATTERN).all():
                self._touched.add(block)
                self._rows[block] = _PATTERN

    def _content(self, number: int, blocks: list[int]) -> Content:
        return content_of(self._seed, number, len(blocks), self._layout.block_bytes)


def content_of(seed: int, number: int, num_blocks: int, block_bytes: int) -> Content:
    """[num_blocks, block_bytes] that only this hand-off has."""
    data = np.random.default_rng((seed, number)).bytes(num_blocks * block_bytes)
    return np.frombuffer(data, np.uint8).reshape(num_blocks, block_bytes)
