"""The call to a prefill worker of one attempt: tokens and ticket there, the first token and half a receipt back.

If the plan names a source, the prefill worker may answer with a ticket of its own: it is carried to that decode worker,
and the rest is between the two.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

from kvferry_rpc.common_pb2 import ErrorCode
from kvferry_rpc.internal_pb2 import Export, KVSource, PrefillRequest, Ticket
from router.dispatch.decode_session import DecodeSession
from router.dispatch.inbox import Inbox
from router.dispatch.placement import Placement, Side
from router.dispatch.work import Work
from router.dispatch.worker_links import PrefillLink
from runtime.clock import Clock
from runtime.errors import KvferryError

# The workers end a request at its deadline themselves; the call's own limit is only for workers that do not.
_CALL_GRACE_S = 5.0

KVSender = Callable[[Ticket, Inbox], Coroutine[Any, Any, None]]
"""Has the KV of an attempt's tokens brought to the place that the ticket names, and puts what is heard of it into the
inbox. Ends without an exception but for its own cancellation."""


class PrefillCall:
    """`run` is a KVSender. Event-loop task only."""

    def __init__(
        self,
        work: Work,
        placement: Placement,
        link: PrefillLink | None,
        source: DecodeSession | None,
        clock: Clock,
    ) -> None:
        """`link` None: the worker went away, and `run` says so. `source` is the session with the worker that the plan
        has as its source, if any; without it nothing is pulled."""
        self._work = work
        self._placement = placement
        self._link = link
        self._source = source
        self._clock = clock

    async def run(self, ticket: Ticket, inbox: Inbox) -> None:
        """Compute the prompt into the ticket's place. The placement's place on the worker ends with the call."""
        worker_id = self._placement.plan.prefill_worker
        link, gone = self._link, _gone(f"prefill worker {worker_id} is gone")
        if link is None or link.is_gone:  # It may have gone while the ticket was awaited.
            inbox.put_prefill_failure(gone)
            return
        timeout_s = self._work.remaining_s(self._clock.now()) + _CALL_GRACE_S
        call = link.stub.Prefill(self._request(ticket), timeout=timeout_s)
        try:
            with link.watch(lambda: inbox.put_prefill_failure(gone)):
                async for event in call:
                    if event.WhichOneof("kind") == "pull":
                        self._export(event.pull)
                    else:
                        inbox.put_prefill(event)
            inbox.put_prefill_failure(_gone(f"prefill worker {worker_id} ended its stream without a result"))
        except grpc.RpcError as error:
            inbox.put_prefill_failure(_lost(error, f"prefill worker {worker_id}"))
        except asyncio.CancelledError:
            # Either the attempt is being closed, or the channel was closed below us because the worker detached.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            inbox.put_prefill_failure(gone)
        finally:
            call.cancel()
            failure = inbox.prefill_failure
            if failure is not None and failure.code == ErrorCode.OVERLOADED:
                self._placement.refused_by(Side.PREFILL)
            self._placement.release_prefill()

    def _request(self, ticket: Ticket) -> PrefillRequest:
        work = self._work
        request = PrefillRequest(
            request_id=work.request.request_id,
            attempt=work.attempt,
            prompt_token_ids=work.token_ids,
            num_output_tokens=work.num_output_tokens,
            sampling=work.request.sampling,
            cache_salt=work.request.cache_salt,
            ticket=ticket,
            deadline_ms=work.remaining_ms(self._clock.now()),
            traceparent=work.traceparent,
        )
        source = self._placement.plan.source
        if source is not None and self._source is not None:
            request.source.CopyFrom(KVSource(decode_worker=source.worker_id, num_tokens=source.num_tokens))
        return request

    def _export(self, ticket: Ticket) -> None:
        """Ask the source, once, for the blocks that the prefill worker wants. What becomes of it they settle alone."""
        source, self._source = self._source, None
        work = self._work
        tokens = work.token_ids
        num_tokens = (ticket.first_block + len(ticket.block_ids)) * ticket.layout.block_size
        if source is None or num_tokens > len(tokens):
            return
        export = Export(
            request_id=work.request.request_id,
            attempt=work.attempt,
            prompt_token_ids=tokens[:num_tokens],
            cache_salt=work.request.cache_salt,
            ticket=ticket,
            deadline_ms=work.remaining_ms(self._clock.now()),
        )
        source.export(export)


def _gone(message: str) -> KvferryError:
    return KvferryError(ErrorCode.UNAVAILABLE, message)


def _lost(error: grpc.RpcError, peer: str) -> KvferryError:
    """What a broken prefill call means. Refusals that a worker makes come as events; a call that ends with a status
    is a worker that is down, shutting down or not ours, and another may do better."""
    known = KvferryError.from_rpc(error, peer)
    if known.code in (ErrorCode.OVERLOADED, ErrorCode.INVALID_REQUEST, ErrorCode.DEADLINE_EXCEEDED):
        return known
    return KvferryError(ErrorCode.UNAVAILABLE, known.message)
