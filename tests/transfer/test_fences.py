"""Fences: their waits, their ends, their errors and the time of the copies."""

import logging
import threading

import pytest

from kvoffload.transfer.base import CopyFence
from kvoffload.transfer.cuda.fences import EngineFence, StreamFence, Timing


class Event:
    """A point in a stream, on a device clock of milliseconds."""

    def __init__(self, passed=False, at_ms=0.0, error=None):
        self.passed, self.at_ms, self.error, self.synchronized = passed, at_ms, error, False

    def query(self):
        if self.error is not None:
            raise self.error
        return self.passed

    def synchronize(self):
        self.synchronized = True

    def elapsed_time(self, end):
        if self.error is not None:
            raise self.error
        return end.at_ms - self.at_ms


@pytest.fixture
def fence():
    return StreamFence(lambda fence: None, lambda: None)


# ---- the engine's fence --------------------------------------------------------------------------


def test_who_waits_for_the_engines_fence_waits_for_its_event():
    event = Event()
    fence = EngineFence(event)
    assert not event.synchronized
    fence.wait()
    assert event.synchronized


def test_a_thread_reaches_a_fence_with_the_time_of_its_copies():
    fence = CopyFence()
    assert not fence.done()
    assert fence.copy_time_s == 0.0
    timer = threading.Timer(0.05, fence.reach, [None, 0.25])
    timer.start()
    fence.wait()
    assert (fence.done(), fence.error, fence.copy_time_s) == (True, None, 0.25)
    first = ValueError("first")
    fence.reach(first)
    fence.reach(ValueError("second"))
    assert (fence.done(), fence.error, fence.copy_time_s) == (True, first, 0.0)
    timer.join()


# ---- the fence of a transfer ---------------------------------------------------------------------


def test_the_time_of_a_copy_is_that_of_its_slowest_stream(fence):
    assert fence.copy_time_s == 0.0
    fence.all_enqueued(Timing(Event(at_ms=5.0)), [Event(True, 3.0), Event(True, 255.0)], None)
    assert fence.copy_time_s == 0.0  # not over yet
    fence.reach()
    assert fence.copy_time_s == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("engine_ms", "time_s"),
    [(40.0, 0.16), (30.0, 0.17), (25.0, 0.17), (10.0, 0.18), (0.0, 0.18)],
)
def test_what_a_load_copied_during_its_wait_for_the_engine_counts_and_the_wait_does_not(
    fence, engine_ms, time_s
):
    """Copies from 0 to 10 and from 20 to 30, and scatters to 180."""
    early = (Event(at_ms=0.0), Event(at_ms=10.0)), (Event(at_ms=20.0), Event(at_ms=30.0))
    fence.all_enqueued(Timing(Event(at_ms=engine_ms), early), [Event(True, 180.0)], None)
    fence.reach()
    assert fence.copy_time_s == pytest.approx(time_s)


def timed():
    return Timing(Event(), ((Event(), Event()),))


@pytest.mark.parametrize(
    ("timing", "events", "error"),
    [
        (Timing(), [Event(True, 9.0)], None),
        (timed(), [], None),
        (timed(), [Event(True, 9.0)], ValueError("failed")),
    ],
)
def test_a_copy_without_beginning_or_end_or_success_took_no_time(fence, timing, events, error):
    fence.all_enqueued(timing, events, error)
    fence.reach()
    assert fence.copy_time_s == 0.0


def test_a_time_that_the_device_does_not_tell_is_none_and_said(fence, caplog):
    gone = Event(error=RuntimeError("no timing"))
    fence.all_enqueued(Timing(gone), [Event(True)], None)
    with caplog.at_level(logging.WARNING):
        fence.reach()
    assert fence.copy_time_s == 0.0
    assert "no timing" in caplog.text
