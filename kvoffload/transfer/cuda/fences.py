"""Points in the streams of a device."""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvoffload.transfer.base import CopyFence
from kvoffload.transfer.cuda.torch_device import CudaEvent

log = logging.getLogger(__name__)
LATE_S = 10.0
"""How long a call of the driver may take before the log tells of it."""


class EngineFence:
    """The engine's stream as it was when the fence was recorded."""

    def __init__(self, event: CudaEvent) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()


class Timing(NamedTuple):
    """Timed events of a transfer."""

    begun: CudaEvent | None = None
    """Its first copy begins. A load whose copies do not wait for the engine's work begins when its
    first kernel has waited for that; None before this is recorded."""
    early: tuple[tuple[CudaEvent, CudaEvent], ...] = ()
    """Begins and ends of copies that may run before ``begun``."""

    def begun_at(self, event: CudaEvent) -> "Timing":
        """Set the begin, if it is not set."""
        return self if self.begun is not None else self._replace(begun=event)

    def seconds_to(self, ends: Sequence[CudaEvent]) -> float:
        """Seconds of the copies up to the last end, without waits for the engine's work."""
        begun = self.begun
        if begun is None or not ends:
            return 0.0
        time_ms = max(0.0, *(begun.elapsed_time(end) for end in ends))
        for begin, end in self.early:
            time_ms += max(0.0, min(begin.elapsed_time(end), begin.elapsed_time(begun)))
        return time_ms / 1e3


class StreamFence(CopyFence):
    """The end of one transfer on all streams that it used.

    A thread that polls it or waits for it asks the device.

    Args:
        watch: has the fence polled from now on, because a call of :meth:`when_reached` waits.
        tell_late: called while a thread polls or waits, and the work is not enqueued.
    """

    def __init__(
        self, watch: "Callable[[StreamFence], None]", tell_late: Callable[[], None]
    ) -> None:
        super().__init__()
        self._watch, self._tell_late = watch, tell_late
        self._timing = Timing()
        self._events: Sequence[CudaEvent] | None = None

    def done(self) -> bool:
        if self._is_reached:
            return True
        if self._events is None:
            self._tell_late()
            return False
        try:
            if all(event.query() for event in self._events):
                self.reach()
        except Exception as error:
            self.reach(error)
        return self._is_reached

    def when_reached(self, call: Callable[[], None]) -> None:
        super().when_reached(call)
        if not self._is_reached:
            self._watch(self)

    def wait(self) -> None:
        with self._changed:
            while not self._changed.wait_for(self._is_enqueued, LATE_S):
                self._tell_late()
        try:
            for event in self._events or ():
                event.synchronize()
        except Exception as error:
            self.reach(error)
        else:
            self.reach()

    def _is_enqueued(self) -> bool:
        return self._is_reached or self._events is not None

    def reach(self, error: BaseException | None = None, copy_time_s: float = 0.0) -> None:
        if not (error or self.error or self._events is None):
            try:
                copy_time_s = self._timing.seconds_to(self._events)
            except Exception as unknown:
                log.warning("the time of a copy is not known: %s", unknown)
        super().reach(error, copy_time_s)

    def all_enqueued(
        self, timing: Timing, events: Sequence[CudaEvent], error: BaseException | None
    ) -> None:
        """Set the events at which the transfer ends; it has failed if there is an ``error``."""
        with self._changed:
            self._timing = timing
            self.error = self.error or error
            self._events = events
            self._changed.notify_all()
