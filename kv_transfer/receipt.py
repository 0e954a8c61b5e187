"""What a sender says of a hand-off for the receipt, whoever it is: a prefill worker, or a decode worker that leaves."""

import math

from kv_transfer.events import SendStats
from kvferry_rpc.internal_pb2 import PrefillDone


def sent_half(stats: SendStats, exposed_from: float = -math.inf) -> PrefillDone:
    """How it went out. `exposed_from`: on the sender's clock, in seconds; until then work hides the transfer."""
    first, last = stats.first_write_at, stats.last_write_at
    transfer_s = exposed_s = 0.0
    if first is not None and last is not None:
        transfer_s, exposed_s = last - first, max(0.0, last - max(first, exposed_from))
    return PrefillDone(
        blocks_sent=stats.num_blocks,
        bytes_sent=stats.size_bytes,
        transport=stats.transport,
        checksum=stats.digest,
        transfer_ms=transfer_s * 1e3,
        exposed_transfer_ms=exposed_s * 1e3,
        transport_detail=stats.transport_detail,
        expected_transport=stats.expected_transport,
        conversion=stats.conversion,
    )
