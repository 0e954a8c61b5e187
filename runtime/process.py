"""The life of a service process: event loop, signals, the ready line, and dying with its launcher.

First SIGTERM or SIGINT (or the end of standard input, when asked to watch it): the `shutdown` event is set and the
service drains. Second signal: the process ends at once. The service decides how long draining may take.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable

import uvloop

_log = logging.getLogger(__name__)

FAST_EXIT_STATUS = 130
ORPHAN_EXIT_STATUS = 70
ORPHAN_GRACE_S = 10.0
SUCCESSOR_SIGNAL = signal.SIGUSR1
"""Tells a router that shares its ports that another one serves there now: it drains and leaves the rest to that one."""


def run_service(
    main: Callable[[asyncio.Event], Awaitable[int | None]],
    *,
    exit_on_stdin_close: bool = False,
    orphan_grace_s: float = ORPHAN_GRACE_S,
) -> int:
    """Run `main(shutdown)` on uvloop to its end; returns its result as an exit status (None is 0).

    `main` must watch `shutdown`, drain and return. A second SIGTERM or SIGINT ends the process at once with status
    130. With `exit_on_stdin_close` the end of standard input counts as the first signal, and a process that has not
    ended `orphan_grace_s` later ends at once with status 70, even if its event loop is stuck: it never outlives the
    launcher that held the other end. Exceptions of `main` pass through. Main thread only.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(main, exit_on_stdin_close, orphan_grace_s)) or 0


def write_ready_line(role: str, **fields: object) -> None:
    """Tell whoever started this process that it serves: one JSON line on standard output, flushed.

    `{"ready": true, "role": role, "pid": ..., **fields}`. Call once; nothing else may be written there.
    """
    line = json.dumps({"ready": True, "role": role, "pid": os.getpid(), **fields})
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def _run(
    main: Callable[[asyncio.Event], Awaitable[int | None]], exit_on_stdin_close: bool, orphan_grace_s: float
) -> int | None:
    loop = asyncio.get_running_loop()
    shutdown = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if shutdown.is_set():
            os._exit(FAST_EXIT_STATUS)
        _log.info("%s: draining; once more to stop at once", number.name)
        shutdown.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    if exit_on_stdin_close:
        _StdinWatch(loop, shutdown, orphan_grace_s).start()
    return await main(shutdown)


class _StdinWatch:
    """A daemon thread that waits for the end of standard input, so a stuck event loop cannot hide it.

    It reads the descriptor itself: a thread blocked in `sys.stdin` would hold a lock that interpreter shutdown wants.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, shutdown: asyncio.Event, grace_s: float) -> None:
        self._loop = loop
        self._shutdown = shutdown
        self._grace_s = grace_s

    def start(self) -> None:
        threading.Thread(target=self._watch, name="stdin-watch", daemon=True).start()

    def _watch(self) -> None:
        while _read_some():
            pass
        try:
            self._loop.call_soon_threadsafe(self._on_close)
        except RuntimeError:
            return  # the loop has closed: the service has ended by itself
        # The process normally ends during this wait; a daemon thread does not keep it.
        threading.Event().wait(self._grace_s)
        os._exit(ORPHAN_EXIT_STATUS)

    def _on_close(self) -> None:
        if not self._shutdown.is_set():
            _log.info("standard input closed: the launcher is gone, draining")
            self._shutdown.set()


def _read_some() -> bytes:
    try:
        return os.read(0, 4096)
    except OSError:  # closed or never open: nobody holds the other end
        return b""
