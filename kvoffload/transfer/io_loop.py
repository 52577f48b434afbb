"""The one asyncio thread: every backend coroutine runs here, and nothing else does."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

log = logging.getLogger(__name__)
_T = TypeVar("_T")


class IOLoop:
    """An event loop in a daemon thread named ``kvoffload-io``. Whoever makes it closes it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        # For what is off the hot path (aiofiles); of our own, so that closing ends its threads.
        self._executor = ThreadPoolExecutor(2, "kvoffload-io-file")
        self.loop.set_default_executor(self._executor)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="kvoffload-io", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine function soon, without waiting: one crossing, no answer."""
        self.loop.call_soon_threadsafe(self._spawn, work)

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self.loop.create_task(work())
        self._tasks.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("a task of the I/O loop failed", exc_info=error)

    def call(self, work: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        """Run a coroutine and wait for its result: for start and shutdown, never while serving."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel what still runs, stop the loop, join the thread (at most ``timeout_s``)."""
        if self.loop.is_closed():
            return
        try:
            self.call(self._cancel_all(timeout_s), timeout_s + 1)
        except TimeoutError:
            log.warning(
                "I/O still hung after %.1f s at shutdown; its thread is abandoned", timeout_s
            )
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout_s)
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _cancel_all(self, timeout_s: float) -> None:
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
