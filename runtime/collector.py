"""Python's garbage collector, and the many objects of large libraries that it need not look at."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG_OBJECTS = 20_000


@contextmanager
def loading() -> Iterator[None]:
    """Around the imports of a process that serves: what they make is never looked at by the collector.

    Modules, classes and functions stay until the process ends. While a library like torch makes hundreds of thousands
    of them, collections find nothing and take a tenth of the time; and each full collection later on would look at all
    of them again, in the middle of a step. Only reference cycles are the collector's business, so all else is freed as
    ever. Main thread, before there are others; a collector that is off stays off.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def settle_for_serving() -> None:
    """Called once, when a process is up: what it has now it keeps, and the collector is to look more seldom.

    A request makes thousands of objects and frees all but few of them by itself, so the default of a look every 700
    objects costs an eighth of a router's time and finds nothing. Main thread.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])
