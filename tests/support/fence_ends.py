"""Waits for a fence that end: what never ends fails its test."""

import time

from kvoffload.transfer.base import Fence


def ends(fence: Fence, timeout_s: float = 60.0) -> bool:
    """Return whether a fence is done within this time."""
    until_s = time.monotonic() + timeout_s
    while not fence.done():
        if time.monotonic() >= until_s:
            return False
        time.sleep(0.0002)
    return True
