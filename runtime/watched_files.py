"""A value made from files, made anew when they change: how certificates and keys are rotated without a restart."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from runtime.clock import Clock

LOOK_INTERVAL_S = 1.0

_log = logging.getLogger(__name__)

T = TypeVar("T")
# Time of change, inode, device and size of each file; None for one that cannot be looked at.
_Signature = tuple[tuple[int, int, int, int] | None, ...]


class WatchedFiles(Generic[T]):
    """The last good value of `make`, which reads `paths`. Any thread.

    Whoever asks looks at the files, at most once every `interval_s`: there is no task and no thread to stop. A change
    that `make` cannot read keeps the value there was and is logged, once for each change; so the moment in which a new
    certificate lies beside the old key does no harm.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        make: Callable[[], T],
        clock: Clock,
        *,
        what: str,
        interval_s: float = LOOK_INTERVAL_S,
    ) -> None:
        """Raises what `make` raises: OSError or ValueError. `what` names the value in log lines."""
        self._paths = tuple(paths)
        self._make = make
        self._clock = clock
        self._what = what
        self._interval_s = interval_s
        self._lock = threading.Lock()
        # Looked at before they are read: what changes in between is a change.
        self._seen = _signature(self._paths)
        self._next_look = clock.now() + interval_s
        self._value = make()

    def get(self) -> T:
        """The value of the files as they are, or the last one that could be made. Reads files when they changed."""
        now = self._clock.now()
        with self._lock:
            if now >= self._next_look:
                self._next_look = now + self._interval_s
                self._look()
            return self._value

    def _look(self) -> None:
        signature = _signature(self._paths)
        if signature == self._seen:
            return
        self._seen = signature
        try:
            self._value = self._make()
        except (OSError, ValueError) as error:
            _log.error("%s: the change is not taken over, what there was stays: %s", self._what, error)
            return
        _log.info("%s: read anew", self._what)


def _signature(paths: Sequence[Path]) -> _Signature:
    return tuple(map(_file_signature, paths))


def _file_signature(path: Path) -> tuple[int, int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_dev, stat.st_size
