"""Points in streams of a device, as handlers and engines see them."""

import logging
import threading
import time
from collections.abc import Sequence

from kvoffload.transfer.cuda.device import Event

log = logging.getLogger(__name__)

POLL_S = 0.001
"""Between two looks at an event that is waited for with a timeout: devices know no such wait."""


class EngineFence:
    """The engine's stream as it was when the fence was recorded."""

    error: BaseException | None = None

    def __init__(self, event: Event) -> None:
        self.event = event

    def done(self) -> bool:
        """See :meth:`kvoffload.transfer.base.Fence.done`."""
        return self.event.query()

    def wait(self, timeout_s: float | None = None) -> bool:
        """See :meth:`kvoffload.transfer.base.Fence.wait`."""
        if timeout_s is None:
            self.event.synchronize()
            return True
        end_s = time.monotonic() + timeout_s
        while not self.event.query():
            if time.monotonic() >= end_s:
                return False
            time.sleep(POLL_S)
        return True


class StreamFence:
    """The end of one transfer; its error, if something went wrong on the way."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._begun: Event | None = None
        self._events: Sequence[Event] | None = None
        self._is_reached = False
        self._changed = threading.Condition()

    # ---- for whoever waits ----

    def done(self) -> bool:
        """Ask the device, so that an engine that polls need not wait for a thread of ours."""
        if not self._is_reached and self._events is not None:
            try:
                if all(event.query() for event in self._events):
                    self.reach()
            except Exception as error:
                self.reach(error)
        return self._is_reached

    def wait(self, timeout_s: float | None = None) -> bool:
        """See :meth:`kvoffload.transfer.base.Fence.wait`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_reached, timeout_s)

    @property
    def copy_time_s(self) -> float:
        """See :meth:`kvoffload.transfer.base.CopyFence.copy_time_s`."""
        begun, events = self._begun, self._events
        if not self._is_reached or self.error is not None or begun is None or not events:
            return 0.0
        try:
            return max(begun.elapsed_time(event) for event in events) / 1e3
        except Exception as error:
            log.warning("the time of a copy is not known: %s", error)
            return 0.0

    # ---- for the threads that copy ----

    @property
    def events(self) -> Sequence[Event]:
        """Where the transfer ends on each stream it used; empty before all is enqueued."""
        return self._events or ()

    def all_enqueued(
        self, begun: Event | None, events: Sequence[Event], error: BaseException | None
    ) -> None:
        """Nothing more comes: the transfer ends when these are passed, and failed if ``error``."""
        with self._changed:
            self._begun = begun
            self.error = self.error or error
            self._events = events
            self._changed.notify_all()

    def reach(self, error: BaseException | None = None) -> None:
        """The end has come; harmless a second time."""
        with self._changed:
            self.error = self.error or error
            self._is_reached = True
            self._changed.notify_all()
