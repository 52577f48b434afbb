"""Work on a thread of its own: when it is asked for, or now and then."""

import contextlib
import threading
from collections.abc import Callable


class Background:
    """Runs ``work`` soon after :meth:`wake`, and no more often than it wants.

    The thread starts at the first :meth:`wake`.

    Args:
        name: The thread's.
        work: Returns the seconds until it may run again; must not raise.
        unasked_s: Run it so long after the last time, although it is not asked for.
    """

    def __init__(
        self, name: str, work: Callable[[], float], unasked_s: Callable[[], float | None]
    ) -> None:
        self._work, self._unasked_s = work, unasked_s
        self._wanted, self._ended = threading.Event(), threading.Event()
        self._starting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def wake(self) -> None:
        """Ask for the work; where the system has no more threads, the next call asks again."""
        self._wanted.set()
        if self._thread.ident is None:
            with self._starting:
                if self._thread.ident is None and not self._ended.is_set():
                    with contextlib.suppress(RuntimeError):
                        self._thread.start()

    def close(self) -> None:
        """Begin the work no more."""
        self._ended.set()
        self._wanted.set()

    def join(self) -> None:
        """After :meth:`close`: wait for the work in progress."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._wanted.wait(self._unasked_s())
            self._wanted.clear()
            if self._ended.is_set():
                return
            if self._ended.wait(self._work()):
                return
