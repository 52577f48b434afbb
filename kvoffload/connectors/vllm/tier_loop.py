"""The event loop of a secondary tier: its backend's coroutines run here, and no other code."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvoffload.backends.base import Backend, LocalIndex
from kvoffload.backends.presence import PresenceCache
from kvoffload.io.chunk_jobs import same_length

log = logging.getLogger(__name__)
_T = TypeVar("_T")

ANSWER_S = 2.0
"""How long an answer of ``contains`` is believed."""
FORGOTTEN_S = 60.0
"""How long a chunk that could not be loaded counts as absent. A store that keeps announcing it
would otherwise cost every request a failed load."""


class IOLoop:
    """An event loop in a daemon thread named ``kvoffload-io``. Its maker closes it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        # For plug-ins' calls of run_in_executor. An executor of our own ends with the loop.
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
        self._tasks.add(task)  # the loop has only weak references to tasks
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("a task of the I/O loop failed", exc_info=error)

    def call(self, work: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        """Run a coroutine and wait for its result: at start and shutdown only."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel all tasks, stop the loop and join the thread (at most ``timeout_s``)."""
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


def presence_on(
    io: IOLoop,
    backend: Backend,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> LocalIndex:
    """Let a new store connect; return its own index, or a presence cache over ``contains``.

    A question to the cache that has no answer by ``timeout_s`` counts as False.
    """
    if isinstance(backend, LocalIndex):
        io.start(lambda: _connect(backend))
        return backend

    async def probe() -> None:
        keys = cache.take_questions()
        if not keys:
            return
        try:
            answers = await asyncio.wait_for(backend.contains(keys), timeout_s)
            cache.answer(keys, same_length(answers, keys))
        except Exception as error:
            log.warning("probing %d keys failed: %s", len(keys), str(error) or type(error).__name__)
            cache.answer(keys, [False] * len(keys))

    cache = PresenceCache(
        lambda: io.start(probe), timeout_s, ANSWER_S, ANSWER_S, FORGOTTEN_S, clock
    )
    return cache


async def _connect(backend: Backend) -> None:
    try:
        await backend.contains([])
    except Exception as error:
        log.warning("the first call of a store failed: %s", str(error) or type(error).__name__)
