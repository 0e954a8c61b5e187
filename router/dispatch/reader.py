"""Whoever takes the tokens of a request: its sink, kept apart from workers, whose failures mean something else."""

from router.generation import Sink, TokenBatch


class ReaderLeft(BaseException):
    """The sink failed with `error`. For the request that is as if its caller had gone away: nobody who handles failures
    of workers is to see it, and it ends as a cancellation does."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class Reader:
    """The sink of one request. Event-loop thread only."""

    def __init__(self, sink: Sink[TokenBatch]) -> None:
        self._sink = sink
        self._error: Exception | None = None

    def push(self, batch: TokenBatch) -> bool:
        """As `Sink.push`, but it never raises: it is called from the task of a worker's session, which has other
        requests."""
        try:
            return self._sink.push(batch)
        except Exception as error:
            self._error = error
            return False

    async def wants_more(self) -> bool:
        """As `Sink.wants_more`. Raises ReaderLeft for what the sink raises, here or in `push`."""
        if self._error is not None:
            error, self._error = self._error, None
            raise ReaderLeft(error)
        try:
            return await self._sink.wants_more()
        except Exception as error:
            raise ReaderLeft(error) from None
