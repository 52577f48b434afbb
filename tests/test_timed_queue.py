"""Waits for a queue end in time, also where those of Python's own class do not."""

import threading
import time
from queue import Empty, SimpleQueue

import pytest

from kvoffload.timed_queue import next_within


def test_an_item_comes_and_a_wait_without_one_ends():
    items = SimpleQueue()
    items.put(1)
    assert next_within(items, 0.0) == 1
    with pytest.raises(Empty):
        next_within(items, 0.01)
    threading.Timer(0.05, items.put, [2]).start()
    assert next_within(items, 60.0) == 2
    threading.Timer(0.05, items.put, [3]).start()
    assert next_within(items, None) == 3


def wait_often(items, take, until_s):
    """Wait for next to no time, with the queue's lock free each time."""
    rounds = 0
    while time.monotonic() < until_s:
        items.put(None)
        items.get()
        with pytest.raises(Empty):
            take(items)
        rounds += 1
    assert rounds > 1000


def ends(take, seconds):
    """Whether such waits all end."""
    items = SimpleQueue()
    until_s = time.monotonic() + seconds
    thread = threading.Thread(target=wait_often, args=(items, take, until_s), daemon=True)
    thread.start()
    thread.join(seconds + 2)
    if is_stuck := thread.is_alive():
        items.put(None)  # it goes on, and fails: that is no Empty
    thread.join()
    return not is_stuck


def test_no_wait_lasts_for_ever_though_its_time_is_over_before_it_begins():
    assert ends(lambda items: next_within(items, 1e-9), 2)
