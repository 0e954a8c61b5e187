"""What a soak reads from outside: memory of processes, and the counters that must be 0 at rest."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

_REST_TIMEOUT_S = 60.0
_LOOK_S = 0.2
_MIB = 1024 * 1024
# What must be 0 once nobody asks any more: metrics and the labels of those samples that count.
AT_REST: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "kvferry_requests_in_flight": {},
    "kvferry_requests_queued": {},
    "kvferry_queue_tokens": {},
    "kvferry_worker_requests_in_flight": {},
    "kvferry_worker_blocks": {"state": ("used", "quarantined")},
}


def resident_mib(pid: int) -> float:
    """Memory of a process that nobody else has: anonymous pages, and shared ones that it made (Linux)."""
    found = 0
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssShmem"):
            found += int(value.split()[0]) * 1024
    return found / _MIB


async def counters(http: httpx.AsyncClient) -> dict[str, float]:
    """The counters of AT_REST, summed by name, and the requests that came and have not ended."""
    text = (await http.get("/metrics")).text
    found = dict.fromkeys(AT_REST, 0.0)
    received = ended = 0.0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            wanted = AT_REST.get(sample.name)
            if wanted is not None and all(sample.labels[label] in values for label, values in wanted.items()):
                found[sample.name] += sample.value
            received += sample.value if sample.name == "kvferry_requests_received_total" else 0.0
            ended += sample.value if sample.name == "kvferry_requests_ended_total" else 0.0
    return {**found, "requests_without_end": received - ended}


async def at_rest(http: httpx.AsyncClient) -> dict[str, float]:
    """Wait until all are 0, but not for ever; what they are then. Reports come a few times a second."""
    deadline = time.monotonic() + _REST_TIMEOUT_S
    while True:
        found = await counters(http)
        if not any(found.values()) or time.monotonic() > deadline:
            return found
        await asyncio.sleep(_LOOK_S)
