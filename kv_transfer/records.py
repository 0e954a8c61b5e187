"""Plain facts about one hand-off that both sides and the state machines share."""

from dataclasses import dataclass

MAX_FIRST_TOKEN_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """What the prefill worker says once, at the end: how many KV positions are valid, and the first token.

    `first_token` is opaque here (a serialised kvferry.v1.TokenOutput), at most MAX_FIRST_TOKEN_BYTES long.
    `checksums` holds one 64-bit fingerprint for each block sent, in prompt order; the sender fills it in.
    """

    num_tokens: int
    first_token: bytes
    checksums: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SendStats:
    """The prefill worker's half of what a hand-off cost. Times are `clock.now()` of that worker, in seconds.

    `first_write_at` and `last_write_at` are None when there was nothing to send (all cached on the decode worker).
    `size_bytes` counts what was written, as it was on the wire. `digest` folds the fingerprints of all blocks sent;
    equal on both sides. `transport_detail`: what the transport's library chose; `expected_transport`: the one that
    should have worked; `conversion`: what was changed on the way. Each is empty when there is nothing to say.
    """

    transport: str
    num_blocks: int
    size_bytes: int
    first_write_at: float | None
    last_write_at: float | None
    acknowledged_at: float
    digest: bytes
    transport_detail: str = ""
    expected_transport: str = ""
    conversion: str = ""


@dataclass(frozen=True, slots=True)
class ReceiveStats:
    """The decode worker's half. Times are `clock.now()` of that worker, in seconds.

    `first_write_at`: the first payload was announced; `last_write_at`: the last one had landed and been fingerprinted;
    None when there was nothing to receive. `commit_received_at` to `verified_at` is the comparison alone. `size_bytes`
    counts pages as they lie in the pool, whatever they were on the wire. `verified` is False, and `digest` empty, only
    when the receiver was made with verify_checksums=False.
    """

    transport: str
    num_blocks: int
    size_bytes: int
    first_write_at: float | None
    last_write_at: float | None
    commit_received_at: float
    verified_at: float
    digest: bytes
    verified: bool
