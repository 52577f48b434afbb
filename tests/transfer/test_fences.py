"""Fences: their waits, their ends, their errors and the time of the copies."""

import logging
import threading
import time

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
    return StreamFence(lambda fence: None)


# ---- the engine's fence --------------------------------------------------------------------------


def test_the_engines_fence_is_done_when_its_event_is_passed():
    event = Event()
    fence = EngineFence(event)
    assert (fence.done(), fence.wait(0.0), fence.wait(0.02)) == (False, False, False)
    assert not event.synchronized
    event.passed = True
    assert (fence.done(), fence.wait(0.0), fence.wait(10.0)) == (True, True, True)
    assert fence.wait()
    assert event.synchronized
    assert fence.error is None


def test_a_wait_for_the_engine_ends_as_soon_as_it_is_there():
    event = Event()
    timer = threading.Timer(0.05, lambda: setattr(event, "passed", True))
    timer.start()
    began = time.monotonic()
    assert EngineFence(event).wait(60.0)
    assert 0.04 <= time.monotonic() - began < 30
    timer.join()


def test_a_thread_reaches_a_fence_with_the_time_of_its_copies():
    fence = CopyFence()
    assert (fence.done(), fence.wait(0.0), fence.wait(0.02)) == (False, False, False)
    assert fence.copy_time_s == 0.0
    timer = threading.Timer(0.05, fence.reach, [None, 0.25])
    timer.start()
    assert fence.wait(60.0)
    assert (fence.done(), fence.error, fence.copy_time_s) == (True, None, 0.25)
    first = ValueError("first")
    fence.reach(first)
    fence.reach(ValueError("second"))
    assert (fence.done(), fence.error, fence.copy_time_s) == (True, first, 0.0)
    timer.join()


# ---- the fence of a transfer ---------------------------------------------------------------------


def test_a_transfer_is_done_when_all_its_streams_have_passed_its_end(fence):
    one, two = Event(), Event(passed=True)
    assert not fence.done()
    fence.all_enqueued(Timing(), [one, two], None)
    assert (fence.done(), fence.wait(0.0), fence.wait(0.02)) == (False, False, False)
    one.passed = True
    assert fence.done()
    assert fence.wait()
    assert fence.error is None


def test_a_wait_without_a_limit_sleeps_on_every_stream_and_polls_none(fence):
    one, two = Event(), Event()
    timer = threading.Timer(0.05, fence.all_enqueued, [Timing(), [one, two], None])
    timer.start()
    assert fence.wait()
    assert (one.synchronized, two.synchronized) == (True, True)
    assert fence.done()
    timer.join()


def test_a_wait_on_a_device_that_is_gone_ends_with_its_error(fence):
    error = RuntimeError("the device is gone")

    class Gone(Event):
        def synchronize(self):
            raise error

    fence.all_enqueued(Timing(), [Event(), Gone()], None)
    assert fence.wait()
    assert (fence.done(), fence.error) == (True, error)


def test_a_device_that_cannot_tell_ends_the_transfer_with_its_error(fence):
    error = RuntimeError("the device is gone")
    fence.all_enqueued(Timing(), [Event(error=error)], None)
    assert fence.done()
    assert fence.error is error
    fence.reach(RuntimeError("a second one"))
    assert fence.error is error


def test_the_first_error_of_a_transfer_is_the_one_told(fence):
    first = ValueError("first")
    fence.all_enqueued(Timing(), [], first)
    fence.reach(ValueError("second"))
    assert (fence.done(), fence.error) == (True, first)


def test_a_wait_for_a_transfer_ends_when_it_is_reached(fence):
    timer = threading.Timer(0.05, fence.reach)
    timer.start()
    assert fence.wait(60.0)
    timer.join()


def test_the_time_of_a_copy_is_that_of_its_slowest_stream_without_the_wait_for_the_engine(fence):
    assert fence.copy_time_s == 0.0
    timing = Timing(Event(at_ms=5.0), Event(at_ms=25.0), Event(at_ms=125.0))
    fence.all_enqueued(timing, [Event(True, 130.0), Event(True, 355.0)], None)
    assert fence.copy_time_s == 0.0  # not over yet
    fence.reach()
    assert fence.copy_time_s == pytest.approx(0.25)


def timed():
    return Timing(Event(), Event(), Event())


@pytest.mark.parametrize(
    ("timing", "events", "error"),
    [
        (Timing(), [Event(True, 9.0)], None),
        (Timing(Event()), [Event(True, 9.0)], None),
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
    fence.all_enqueued(Timing(gone, gone, gone), [Event(True)], None)
    fence.reach()
    with caplog.at_level(logging.WARNING):
        assert fence.copy_time_s == 0.0
    assert "no timing" in caplog.text
