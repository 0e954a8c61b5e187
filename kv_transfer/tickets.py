"""What a ticket must say for a prompt in this pool to be handed off by it."""

from kv_cache.layout import KVCacheLayout
from kv_transfer.convert import layout_refusal
from kv_transfer.outbound import OutboundHandoff
from kvferry_rpc import internal_pb2
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError


def outbound_handoff(
    ticket: internal_pb2.Ticket, pool: KVCacheLayout, num_tokens: int, deadline: float
) -> OutboundHandoff:
    """The hand-off of a prompt from this pool that the ticket has a place for. `link` is left for the caller to set.

    Raises ValueError for a ticket that is for another prompt or makes no sense; KvferryError (HANDOFF_FAILED) when
    pages of the pool cannot become those of the ticket's.
    """
    if ticket.lease_ms < 1:
        raise ValueError("the ticket has no lease")
    layout, end = KVCacheLayout.from_proto(ticket.layout), ticket.first_block + len(ticket.block_ids)
    if num_tokens < 1 or layout.blocks_for(num_tokens) != end:
        raise ValueError(
            f"the ticket is for {end} blocks of {layout.block_size} tokens, the prompt has {num_tokens} tokens"
        )
    refusal = layout_refusal(pool, layout)
    if refusal:
        raise KvferryError(ErrorCode.HANDOFF_FAILED, refusal)
    return OutboundHandoff(
        handoff_id=ticket.handoff_id,
        attempt=ticket.attempt,
        incarnation=ticket.incarnation,
        secret=ticket.secret,
        first_block=ticket.first_block,
        block_ids=tuple(ticket.block_ids),
        lease_s=ticket.lease_ms / 1000,
        deadline=deadline,
        link=0,
        layout=layout,
        pool=pool,
        num_tokens=num_tokens,
    )
