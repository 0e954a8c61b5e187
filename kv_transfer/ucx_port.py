"""One end of one ucx link: a UCX worker of its own, and the endpoint to the peer's.

A worker a link, because that is what can be ended: once a worker is destroyed, nothing that was asked of it reads or
writes memory any more, whatever the peer does, also if a network card does the writing. Nothing smaller is certain: a
receive that has been matched cannot be cancelled.

Nobody polls: bytes move only while a thread is in `finish`, and it sleeps at UCX's file descriptor when there are none.
"""

import contextlib
import ctypes
import os
import select
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kv_transfer.transport import LinkError
from kv_transfer.ucx_library import (
    BUSY,
    CUDA_MEMORY,
    HOST_MEMORY,
    IN_PROGRESS,
    OK,
    EndpointParams,
    ErrorCallback,
    ReceiveInfo,
    RequestParams,
    UcxContext,
    UcxError,
    WorkerParams,
    lanes_of,
)

MAX_UNANSWERED = 2
"""Messages, or writes, that may be on their way while the next is sent."""

_WHOLE_TAG = 2**64 - 1
_STEPS_AT_A_TIME = 32
_STEPS_OF_AN_END = 10_000  # Steps in which UCX may call requests off; a handful is usual.
_LONGEST_SLEEP_S = 3600.0


class Span(NamedTuple):
    """So many bytes of memory at an address; `kind` is HOST_MEMORY or CUDA_MEMORY."""

    address: int
    size_bytes: int
    kind: int


def span_of(memory: Any) -> Span:
    """Where memory lies: a buffer of bytes in host memory, or an array by the CUDA array interface, on its device.

    Both must be contiguous. Raises ValueError. The caller keeps the memory alive.
    """
    if isinstance(memory, memoryview):
        if memory.nbytes and not memory.readonly:  # The faster way; it matters when there are hundreds of pages.
            return Span(ctypes.addressof(ctypes.c_char.from_buffer(memory)), memory.nbytes, HOST_MEMORY)
        return Span(np.frombuffer(memory, np.uint8).__array_interface__["data"][0], memory.nbytes, HOST_MEMORY)
    facts = memory.__cuda_array_interface__
    item_bytes = np.dtype(facts["typestr"]).itemsize
    expected = item_bytes
    strides = facts.get("strides")
    for length, stride in zip(reversed(facts["shape"]), reversed(strides or ()), strict=False):
        if length != 1 and stride != expected:
            raise ValueError(f"device memory of shape {facts['shape']} with strides {strides} is not contiguous")
        expected *= length
    return Span(facts["data"][0], item_bytes * int(np.prod(facts["shape"], dtype=np.int64)), CUDA_MEMORY)


class UcxPort:
    """`stop` is for any thread; the rest for one thread at a time. A port that has failed stays closed."""

    def __init__(self, context: UcxContext) -> None:
        """Raises UcxError, OSError."""
        self._library = context.library
        self._c = context.library.c
        self._worker = self._new_worker(context)
        self._endpoint: int | None = None
        self._pending: deque[tuple[int, int | None]] = deque()  # Requests; of a receive, the size expected.
        self._answers: deque[int] = deque()
        self._flushes: deque[int] = deque()
        self._failure = ""
        self._on_error = ErrorCallback(self._lost)
        self._structures = {kind: _params_for(kind) for kind in (HOST_MEMORY, CUDA_MEMORY)}
        self._params = {
            kind: (ctypes.addressof(send), ctypes.addressof(receive))
            for kind, (send, receive) in self._structures.items()
        }
        self._stop_lock = threading.Lock()
        self._stopped = False
        self._stop_fd: int | None = None
        self._poller = select.poll()
        try:
            self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._poller.register(self._stop_fd, select.POLLIN)
            self._poller.register(self._event_fd(), select.POLLIN)
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self._worker is None

    def address(self) -> bytes:
        """What the peer passes to `connect`. Raises UcxError."""
        start, size = ctypes.c_void_p(), ctypes.c_size_t()
        self._library.check(
            self._c.ucp_worker_get_address(self._worker, ctypes.addressof(start), ctypes.addressof(size))
        )
        try:
            return ctypes.string_at(start.value or 0, size.value)
        finally:
            self._c.ucp_worker_release_address(self._worker, start)

    def connect(self, address: bytes) -> str:
        """Begin to reach the peer; what UCX chose for it. The address must be a worker's own. Raises UcxError."""
        endpoint = ctypes.c_void_p()
        params = EndpointParams(
            field_mask=EndpointParams.REMOTE_ADDRESS | EndpointParams.ERROR_MODE | EndpointParams.ERROR_HANDLER,
            address=address,
            # Or nobody would tell us that the peer is gone.
            error_mode=EndpointParams.ERROR_MODE_PEER,
            error_callback=ctypes.cast(self._on_error, ctypes.c_void_p),
        )
        self._library.check(self._c.ucp_ep_create(self._worker, ctypes.addressof(params), ctypes.addressof(endpoint)))
        self._endpoint = endpoint.value
        return lanes_of(self._library, endpoint.value or 0)

    def send(self, spans: Sequence[Span], tag: int) -> None:
        """Begin to send a message from each span, in order. Raises LinkError; then the port is closed."""
        send, endpoint = self._c.ucp_tag_send_nbx, self._endpoint
        with self._working():
            for span in spans:
                params = self._params[span.kind][0]
                request = self._library.request(send(endpoint, span.address, span.size_bytes, tag, params))
                if request is not None:
                    self._pending.append((request, None))

    def receive(self, spans: Sequence[Span], tag: int) -> None:
        """Begin to receive a message into each span, in order. Raises LinkError; then the port is closed."""
        with self._working():
            for span in spans:
                self._pending.append((self._receiving(span, tag), span.size_bytes))

    def expect_answer(self, into: Span, tag: int) -> None:
        """Begin to receive the peer's answer to what is sent next. As `receive`, but see `deliver`."""
        with self._working():
            self._answers.append(self._receiving(into, tag))

    def progress(self) -> None:
        """Move some bytes, if there are any to move, without waiting. Raises LinkError; then the port is closed."""
        with self._working():
            for _ in range(_STEPS_AT_A_TIME):
                if not self._c.ucp_worker_progress(self._worker):
                    return

    def finish(self, deadline: float, *, leave: int = 0) -> None:
        """Wait until what `send` and `receive` began is over, but for the last `leave` of it.

        Of messages sent, UCX may still hold the last bytes.

        `deadline` is a time of the monotonic clock. Raises LinkError, and then the port is closed: no memory is read or
        written for it any more.
        """
        info = ReceiveInfo()
        at, c, pending = ctypes.addressof(info), self._c, self._pending
        with self._working():
            while len(pending) > leave:
                request, size_bytes = pending[0]
                if size_bytes is None:
                    status = c.ucp_request_check_status(request)
                else:
                    status = c.ucp_tag_recv_request_test(request, at)
                if status == IN_PROGRESS:
                    self._step(deadline)
                    continue
                pending.popleft()
                c.ucp_request_free(request)
                self._library.check(status)
                if size_bytes is not None and info.size_bytes != size_bytes:
                    raise LinkError(f"{info.size_bytes} bytes came over ucx where {size_bytes} were announced")

    def deliver(self, deadline: float) -> None:
        """`finish`, and wait until the last bytes of what was sent have left this process.

        UCX knows when they have, unless it needs the peer's help for it, and the peer may be driving its UCX no longer:
        so the peer's answer will do as well. Answers to the last few messages may be outstanding on return.
        """
        self.finish(deadline)
        with self._working():
            flush = self._c.ucp_ep_flush_nbx(self._endpoint, self._params[HOST_MEMORY][0])
            request = self._library.request(flush)
            if request is not None:
                self._flushes.append(request)
            while True:
                self._collect(self._flushes)
                self._collect(self._answers)
                if not self._answers or (not self._flushes and len(self._answers) <= MAX_UNANSWERED):
                    return
                self._step(deadline)

    def stop(self) -> None:
        """Whoever is inside comes out with LinkError, now and from now on. Never blocks."""
        with self._stop_lock:
            self._stopped = True
            if self._stop_fd is not None:
                os.eventfd_write(self._stop_fd, 1)

    def close(self) -> None:
        """End it: on return no memory is read or written for it any more. Idempotent."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        left = [*(request for request, _ in self._pending), *self._answers, *self._flushes]
        for held in (self._pending, self._answers, self._flushes):
            held.clear()
        for request in left:
            self._c.ucp_request_cancel(worker, request)
        if self._endpoint is not None:
            params = RequestParams(mask=RequestParams.FLAGS, flags=RequestParams.FORCE)
            with contextlib.suppress(UcxError):
                closing = self._library.request(self._c.ucp_ep_close_nbx(self._endpoint, ctypes.addressof(params)))
                left += [closing] if closing is not None else []
        # Only so that UCX gets its requests back. Nothing depends on it: the next call ends them all.
        for _ in range(_STEPS_OF_AN_END):
            while left and self._c.ucp_request_check_status(left[-1]) != IN_PROGRESS:
                self._c.ucp_request_free(left.pop())
            if not left:
                break
            self._c.ucp_worker_progress(worker)
        self._c.ucp_worker_destroy(worker)
        with self._stop_lock:
            stop_fd, self._stop_fd = self._stop_fd, None
        if stop_fd is not None:
            os.close(stop_fd)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Whatever goes wrong inside ends the port."""
        if self._worker is None:
            raise LinkError("the link over ucx has ended")
        try:
            yield
        except UcxError as error:
            self.close()
            raise LinkError(f"ucx: {self._failure or error}") from error
        except BaseException:
            self.close()
            raise

    def _new_worker(self, context: UcxContext) -> int | None:
        worker = ctypes.c_void_p()
        params = WorkerParams(field_mask=WorkerParams.THREAD_MODE, thread_mode=WorkerParams.SERIALIZED)
        self._library.check(
            self._c.ucp_worker_create(context.handle, ctypes.addressof(params), ctypes.addressof(worker))
        )
        return worker.value

    def _event_fd(self) -> int:
        fd = ctypes.c_int()
        self._library.check(self._c.ucp_worker_get_efd(self._worker, ctypes.addressof(fd)))
        return fd.value

    def _lost(self, argument: int | None, endpoint: int | None, status: int) -> None:
        """UCX says that the peer cannot be reached any more. Called from within `ucp_worker_progress`."""
        self._failure = f"the peer is lost: {self._library.why(status)}"

    def _receiving(self, span: Span, tag: int) -> int:
        params = self._params[span.kind][1]
        pointer = self._c.ucp_tag_recv_nbx(self._worker, span.address, span.size_bytes, tag, _WHOLE_TAG, params)
        request = self._library.request(pointer)
        assert request is not None
        return request

    def _collect(self, requests: deque[int]) -> None:
        """Let go of those that are over, from the first on. Raises UcxError."""
        while requests:
            status = self._c.ucp_request_check_status(requests[0])
            if status == IN_PROGRESS:
                return
            self._c.ucp_request_free(requests.popleft())
            self._library.check(status)

    def _step(self, deadline: float) -> None:
        """Move some bytes, or sleep until there are any. Raises LinkError."""
        moved = 0
        while moved < _STEPS_AT_A_TIME and self._c.ucp_worker_progress(self._worker):
            moved += 1
        if self._failure:
            raise LinkError(f"ucx: {self._failure}")
        if self._stopped:
            raise LinkError("the ucx link was stopped")
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise LinkError("the peer took too long over ucx")
        if moved:
            return
        status = self._c.ucp_worker_arm(self._worker)
        if status == BUSY:  # Something came in meanwhile.
            return
        if status != OK:
            raise LinkError(f"ucx: {self._library.why(status)}")
        self._poller.poll(int(min(left_s, _LONGEST_SLEEP_S) * 1000) + 1)


def _params_for(kind: int) -> tuple[RequestParams, RequestParams]:
    """To send from memory of this kind, and to receive: with a request in any case, which knows what came."""
    mask = RequestParams.MEMORY_TYPE
    return (
        RequestParams(mask=mask, memory_type=kind),
        RequestParams(mask=mask | RequestParams.ALWAYS_A_REQUEST, memory_type=kind),
    )
