"""The fixture that waits for a condition; the ordinary suite and ``tests/gpu`` both import it."""

import time

import pytest


@pytest.fixture
def until():
    """``until(f)`` calls f until it returns something true, and returns that; fails after 120 s."""
    return wait


def wait(probe, timeout_s=120.0):
    """See :func:`until`."""
    end = time.monotonic() + timeout_s
    while True:
        if found := probe():
            return found
        assert time.monotonic() < end, "timed out"
        time.sleep(0.001)
