"""The simulated network: connections whose frames are delayed, lost, doubled, cut or held back, one step at a time.

Payload travels in one of three ways:
* IN_BAND (tcp; ucx looks the same from here): behind its Write, and the receiver puts it into the pool;
* LANDED (shm): into the pool, and then the Write is sent;
* ANNOUNCED (nixl): the Write is sent, then it lands by itself; the receiver waits for that, or until its link ends.
"""

import dataclasses
import random
import zlib
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kv_cache.block_hash import BlockHash, BlockHasher
from kv_transfer.messages import HandoffMessage, Write
from tests.support.kv_pair import LAYOUT as _LAYOUT

if TYPE_CHECKING:
    from tests.support.sim_decode import DecodeLife
    from tests.support.sim_prefill import PrefillLife

LAYOUT = dataclasses.replace(_LAYOUT, num_layers=2)
LAYERS = LAYOUT.num_layers
LEASE_S = 6.0
ANSWER_S = 5.0
KEEPALIVE_S = 12.0
Page = tuple[int, int]  # (block, layer)


class Way(Enum):
    """How payload travels."""

    IN_BAND = "in-band"
    LANDED = "landed"
    ANNOUNCED = "announced"


@dataclass(frozen=True)
class Prompt:
    """A prompt, the names of its full blocks, and the value that each of its pages must hold."""

    tokens: tuple[int, ...]
    hashes: list[BlockHash]
    pages: list[list[int]]


@dataclass(frozen=True)
class SimTicket:
    """What the router carries from a decode to a prefill worker."""

    handoff_id: str
    attempt: int
    incarnation: bytes
    secret: bytes
    first_block: int
    block_ids: tuple[int, ...]
    prompt: Prompt
    decode: str


@dataclass
class Payload:
    """What one Write brings: a value for each page. `landed`: it is all in the pool. `cut`: its sender died in it."""

    pages: dict[Page, int] = field(default_factory=dict)
    landed: bool = False
    cut: bool = False


@dataclass
class Frame:
    """A message under way. Without one: the sender of the frame has closed its end."""

    message: HandoffMessage | None
    payload: Payload = field(default_factory=Payload)


@dataclass
class World:
    """What all parts of one schedule share."""

    random: random.Random
    way: Way
    faults: bool
    now: float = 0.0
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def one_sided(self) -> bool:
        return self.way is not Way.IN_BAND


@dataclass
class Wire:
    """One connection. `up` leads to the receiver, `down` to the sender; a blocked one holds its frames back.

    Each end: broken off by itself; told its table that it is lost (`failed`); closed for good.
    """

    number: int
    sender: "PrefillLife"
    receiver: "DecodeLife | None" = None
    asked_at: float = 0.0
    up: deque[Frame] = field(default_factory=deque)
    down: deque[Frame] = field(default_factory=deque)
    up_blocked: bool = False
    down_blocked: bool = False
    blocked_at: float = 0.0
    dead: bool = False
    receiving: tuple[Write, Payload, int] | None = None
    sender_broken: bool = False
    sender_failed: bool = False
    sender_closed: bool = False
    receiver_broken: bool = False
    receiver_failed: bool = False
    receiver_closed: bool = False

    def to_receiver(self, message: HandoffMessage | None, payload: Payload | None = None) -> None:
        """Send up. Nothing goes out of an end that is closed, or into a connection that is dead."""
        if not self.dead and not self.receiver_closed:
            self.up.append(Frame(message, payload or Payload()))

    def to_sender(self, message: HandoffMessage | None) -> None:
        if not self.dead and not self.sender_closed:
            self.down.append(Frame(message))

    def give_up(self) -> None:
        """Neither host hears from the other: keepalive ends the connection at both ends."""
        self.dead = True
        self.up.clear()
        self.down.clear()


def take(world: World, queue: deque[Frame]) -> Frame:
    """The next frame to arrive. With faults, now and then another one, or a wrong one, or one twice, or one never."""
    frame = queue.popleft()
    if not world.faults or frame.message is None:
        return frame
    draw = world.random.random()
    if world.way is Way.IN_BAND:
        corrupt(world, frame.payload)
    if draw < 0.02 and queue and queue[0].message is not None:
        queue[0], frame = frame, queue[0]
        world.seen["reordered"] += 1
    elif draw > 0.98:
        # Behind all others, but before the end of the connection.
        place = len(queue) - 1 if queue and queue[-1].message is None else len(queue)
        queue.insert(place, frame)
        world.seen["doubled"] += 1
    elif 0.94 < draw < 0.96 and queue and queue[0].message is not None:
        frame = queue.popleft()
        world.seen["dropped"] += 1
    return frame


def corrupt(world: World, payload: Payload) -> None:
    """With faults, now and then a page is not what was sent."""
    if world.faults and payload.pages and world.random.random() < 0.03:
        page = world.random.choice(list(payload.pages))
        payload.pages[page] ^= 1
        world.seen["corrupted"] += 1


def page_fingerprint(value: int | None, seed: int, block_index: int, layer: int) -> int:
    """Of one page that holds this value, for its place."""
    return hash((value or 0, seed, block_index, layer)) & 0xFFFFFFFFFFFFFFFF


def _prompt(tokens: tuple[int, ...]) -> Prompt:
    size = LAYOUT.block_size
    ends = [min(end, len(tokens)) for end in range(size, len(tokens) + size, size)]
    pages = [[zlib.crc32(repr((tokens[:end], layer)).encode()) + 1 for layer in range(LAYERS)] for end in ends]
    return Prompt(tokens, BlockHasher.for_layout(LAYOUT).hash_blocks(tokens, b""), pages)


def _prompts() -> list[Prompt]:
    """Some that share beginnings, so that both ends find parts of them cached, and of all lengths."""
    long = [tuple(range(base, base + 30)) for base in (0, 100, 200)]
    forks = [tokens[:8] + tuple(range(1000 + tokens[0], 1010 + tokens[0])) for tokens in long]
    return [_prompt(tokens[:length]) for tokens in long for length in (3, 8, 17, 30)] + [
        _prompt(fork) for fork in forks
    ]


PROMPTS = _prompts()
