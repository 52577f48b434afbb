"""Points in the streams of a device."""

import logging
import time
from collections.abc import Sequence

from kvoffload.transfer.base import CopyFence
from kvoffload.transfer.cuda.device import Event

log = logging.getLogger(__name__)

POLL_S = 0.001
"""Time between two polls of an event in a wait with a timeout, which devices do not have."""


class EngineFence:
    """The engine's stream as it was when the fence was recorded."""

    error: BaseException | None = None

    def __init__(self, event: Event) -> None:
        self.event = event

    def done(self) -> bool:
        return self.event.query()

    def wait(self, timeout_s: float | None = None) -> bool:
        if timeout_s is None:
            self.event.synchronize()
            return True
        end_s = time.monotonic() + timeout_s
        while not self.event.query():
            if time.monotonic() >= end_s:
                return False
            time.sleep(POLL_S)
        return True


class StreamFence(CopyFence):
    """The end of one transfer on all streams that it used."""

    def __init__(self) -> None:
        super().__init__()
        self._begun: Event | None = None
        self._events: Sequence[Event] | None = None

    def done(self) -> bool:
        # Asks the device, so that an engine that polls does not wait for a thread of ours.
        if not self._is_reached and self._events is not None:
            try:
                if all(event.query() for event in self._events):
                    self.reach()
            except Exception as error:
                self.reach(error)
        return self._is_reached

    @property
    def copy_time_s(self) -> float:
        begun, events = self._begun, self._events
        if not self._is_reached or self.error is not None or begun is None or not events:
            return 0.0
        try:
            return max(begun.elapsed_time(event) for event in events) / 1e3
        except Exception as error:
            log.warning("the time of a copy is not known: %s", error)
            return 0.0

    @property
    def events(self) -> Sequence[Event]:
        """The transfer's end on each stream it used; empty before all copies are enqueued."""
        return self._events or ()

    def all_enqueued(
        self, begun: Event | None, events: Sequence[Event], error: BaseException | None
    ) -> None:
        """Set the events at which the transfer ends; it has failed if there is an ``error``."""
        with self._changed:
            self._begun = begun
            self.error = self.error or error
            self._events = events
            self._changed.notify_all()
