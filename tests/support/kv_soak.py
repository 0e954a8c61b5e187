"""Hand-offs of varied sizes over one link in a process of its own; prints by how many bytes it grew in each window.

python -m tests.support.kv_soak tcp [hand-offs a window]
"""

import gc
import json
import os
import random
import sys
from itertools import pairwise
from pathlib import Path

from kv_transfer.events import Committed
from tests.support.kv_pair import Pair, wiring

WINDOW = 150
_WINDOWS = 3
_NUM_BLOCKS = 128
_SIZES = (1, 2, 3, 5, 8, 13, 40, 100)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def hand_offs(pair: Pair, count: int, rng: random.Random) -> None:
    for index in range(count):
        size, first_block = rng.choice(_SIZES), rng.choice((0, 0, 1))
        ticket = pair.reserve(rng.sample(range(_NUM_BLOCKS), size), first_block=first_block)
        pair.send(ticket, rng.sample(range(_NUM_BLOCKS), first_block + size))
        if index % 10 == 0:
            pair.receiver.abort(ticket.handoff_id, "cancelled")
        received, _ = pair.outcome(ticket)
        assert isinstance(received, Committed) or index % 10 == 0, received
        pair.receiver.release(ticket.handoff_id)
        pair.forget()
    gc.collect()


def main(kind: str, window: int) -> None:
    rng, sizes = random.Random(69), []
    with Pair(num_blocks=_NUM_BLOCKS, **wiring(kind)) as pair:
        hand_offs(pair, 2 * window, rng)
        for _ in range(_WINDOWS + 1):
            sizes.append(resident_bytes())
            if len(sizes) <= _WINDOWS:
                hand_offs(pair, window, rng)
    sys.stdout.write(json.dumps([after - before for before, after in pairwise(sizes)]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else WINDOW)
