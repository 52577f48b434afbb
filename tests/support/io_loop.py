"""An event loop on a thread of its own, for tests of a backend beside another thread."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class IOLoop:
    """An event loop in a daemon thread. Its maker closes it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._executor = ThreadPoolExecutor(2)
        self.loop.set_default_executor(self._executor)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def start(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Run a coroutine function soon, without waiting."""

        def spawn() -> None:
            task = self.loop.create_task(work())
            self._tasks.add(task)  # the loop has only weak references to tasks
            task.add_done_callback(self._tasks.discard)

        self.loop.call_soon_threadsafe(spawn)

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel all tasks, stop the loop and join the thread (at most ``timeout_s``)."""
        self.call(self._cancel_all(timeout_s), timeout_s + 1)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout_s)
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _cancel_all(self, timeout_s: float) -> None:
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
