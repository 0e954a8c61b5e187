"""The live page's data, as JSON fields. Times are seconds on the router's clock, as `now` is, to a millisecond."""

from collections.abc import Iterable, Sequence
from typing import Any

from router.observation.live_requests import Phase, RequestView
from router.observation.recent import WINDOW_S, Percentiles
from router.observation.request_fields import request_fields
from router.policy import Health
from router.workers.worker_registry import Departure, WorkerView

MAX_LIVE_SHOWN = 200
MAX_ENDED_SHOWN = 100
LOST, LEFT = "lost", "left"


def worker_fields(views: Sequence[WorkerView], departures: Iterable[Departure], now: float) -> list[dict[str, Any]]:
    """Attached workers and those that have gone in the last minute, in the order of roles and names.

    `state` of one that has gone is `left` if it drained, else `lost`; `gone_s`: how long ago. An attached worker that
    had gone has a `gone_s` too.
    """
    gone = {departure.view.worker_id: departure for departure in departures if now - departure.at < WINDOW_S}
    fields = []
    for view in views:
        earlier = gone.pop(view.worker_id, None)
        gone_s = now - earlier.at if earlier is not None and earlier.view.health is not Health.DRAINING else None
        fields.append(_worker(view, view.health.value, gone_s))
    for departure in gone.values():
        state = LEFT if departure.view.health is Health.DRAINING else LOST
        fields.append(_worker(departure.view, state, now - departure.at))
    return sorted(fields, key=lambda worker: (worker["role"] != "prefill", worker["id"]))


def shown_requests(views: Sequence[RequestView], now: float) -> list[dict[str, Any]]:
    """Those in flight, the oldest first, then those that ended in the last minute, the last one first."""
    live = [view for view in views if not view.phase.is_end]
    ended = [view for view in views if view.phase.is_end and now - view.since < WINDOW_S]
    return [_request(view) for view in (*live[:MAX_LIVE_SHOWN], *ended[:MAX_ENDED_SHOWN])]


def first_token_at(view: RequestView) -> float | None:
    """When the first token came; None when none has come. Strict hand-off gives it out only when `decode` begins."""
    begins = (begin.began_at for begin in view.phases if begin.phase in (Phase.TRANSFER, Phase.DECODE))
    return next(begins, None)


def time_per_token_s(view: RequestView, now: float) -> float | None:
    """Mean time of the tokens after the first one; None while there is none."""
    began_at = first_token_at(view)
    if began_at is None or view.output_tokens < 2:
        return None
    ended_at = view.since if view.phase.is_end else now
    return (ended_at - began_at) / (view.output_tokens - 1)


def percentile_fields(times: Percentiles) -> dict[str, Any]:
    """Milliseconds, to a microsecond."""
    p50, p99 = (None if value is None else round(value, 3) for value in (times.p50_ms, times.p99_ms))
    return {"p50_ms": p50, "p99_ms": p99, "count": times.count}


def _worker(view: WorkerView, state: str, gone_s: float | None) -> dict[str, Any]:
    load = view.load
    return {
        "id": view.worker_id,
        "role": view.role,
        "state": state,
        "gone_s": None if gone_s is None else round(gone_s, 3),
        "blocks": {
            "total": view.register.num_blocks,
            "free": load.blocks_free,
            "cached": load.blocks_cached,
            "used": load.blocks_used,
            "quarantined": load.blocks_quarantined,
        },
        "block_size": view.register.layout.block_size,
        "running": load.sequences_running,
        "waiting": load.sequences_waiting,
        "receiving": load.sequences_receiving,
        "bytes_moved": load.bytes_moved,
    }


def _request(view: RequestView) -> dict[str, Any]:
    receipt = view.receipt
    return {
        **request_fields(view),
        "phases": [[begin.phase.value, round(begin.began_at, 3), begin.worker] for begin in view.phases],
        "bytes_sent": receipt.bytes_sent if receipt is not None else None,
    }
