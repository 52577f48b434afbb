"""Waits with a timeout for the next item of a queue."""

from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")


def next_within(items: "SimpleQueue[T]", timeout_s: float | None) -> T:
    """Return the next item; without a timeout wait for it. For the one thread that takes items.

    ``SimpleQueue.get`` alone may wait for ever, with a timeout as well (CPython 3.11 and 3.12). If
    its lock is free it takes that and looks again. Where the time has passed meanwhile, what is
    left of it is less than nothing, and that means no limit. After a first look the lock is taken.

    Raises:
        Empty: there was none in time.
    """
    try:
        return items.get_nowait()
    except Empty:
        return items.get(timeout=timeout_s)
