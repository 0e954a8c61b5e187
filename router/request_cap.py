"""How many requests a router has at all, by whatever door they came."""

from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError


class RequestCap:
    """At most `limit` requests behind the front doors together, from the first byte of a body to the last of its
    answer. A context manager that is entered once for each of them. Event-loop thread only.

    The queues of the cluster have their own bounds; this one bounds what waits in front of them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.in_flight = 0

    def __enter__(self) -> None:
        """Raises KvferryError (OVERLOADED)."""
        if self.in_flight >= self._limit:
            message = f"There are {self._limit} requests here already."
            raise KvferryError(ErrorCode.OVERLOADED, message, retry_after_ms=1000)
        self.in_flight += 1

    def __exit__(self, *_: object) -> None:
        self.in_flight -= 1
