"""The I/O server: opens stores, carries out an engine's jobs, tells what becomes present.

One server serves one engine over one socket: a *session*. All coroutines of backends run on its
event loop, and no other code. The engine's side keeps the deadlines; the server cancels on request
and answers a job when nothing touches its slots any more.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvoffload.errors import ConfigError
from kvoffload.io.chunk_jobs import ChunkJobs, same_length
from kvoffload.io.open_stores import (
    KEYS_PER_MESSAGE,
    OpenStore,
    close_stores,
    greet,
    open_stores,
    purge,
    text_of,
)
from kvoffload.io.protocol import (
    VERSION,
    Alive,
    Ask,
    Cancel,
    Forget,
    Forgotten,
    Frames,
    Load,
    Open,
    Opened,
    Presence,
    Present,
    Refused,
    Remove,
    Removed,
    Store,
    TierOpened,
    ToClient,
    frame,
)

log = logging.getLogger(__name__)
CHANGES_S = 0.05
"""Time between two looks at what changed in the stores."""
LISTING_S = 0.001
"""Time between two messages while a store lists what it has; without one it doubles."""
FIGURES_S = 0.5
"""Time between two messages of figures while no job ends; they also show that the server lives."""
END_S = 1.0
"""How long calls of stores may take to end, after their cancellation, before stores are closed."""
CLOSE_S = 5.0
TRY_AGAIN_S, LONGEST_S = 0.5, 30.0
"""Time before stores that could not be opened are tried again; it doubles up to the second."""


class Session:
    """Serves one engine; made and used on the event loop.

    Args:
        memory: the slab.
    """

    def __init__(self, memory: memoryview) -> None:
        self._jobs = ChunkJobs(memory, self.send, self._before_answer)
        self.loop = asyncio.get_running_loop()
        """Of the backends; other threads may call its ``call_soon_threadsafe``."""
        self._writer: asyncio.StreamWriter | None = None
        self._out: list[bytes] = []
        self._wanted: Open | None = None
        """The last message of what to open."""
        self._opening: asyncio.Task[None] | None = None
        """Opens stores while messages are read."""
        self._stores: dict[str, OpenStore] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._telling: set[asyncio.Task[Any]] = set()
        """Those of no use once the engine's end is closed."""

    async def serve(self, sock: socket.socket) -> None:
        """Serve until the engine's end is closed; then end its jobs and close the stores."""
        reader, self._writer = await asyncio.open_connection(sock=sock)
        frames = Frames(to_server=True)
        self._spawn_telling(self._tell_figures())
        try:
            while data := await reader.read(1 << 18):
                for message in frames.feed(data):
                    await self._take(message)
        except ConnectionError:
            pass
        finally:
            await self._end()

    def send(self, message: ToClient) -> None:
        """Send a message, in one piece with all messages of this turn of the loop."""
        self._out.append(frame(message))
        if len(self._out) == 1:
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(b"".join(self._out))
        self._out.clear()

    async def _take(self, message: Any) -> None:
        match message:
            case Load() | Store():
                answer = self._jobs.begin(message, self._stores.get(message.tier))
                self._spawn(self._answer(answer))
            case Cancel():
                self._jobs.cancel(message.job)
            case Ask():
                self._spawn_telling(self._ask(message))
            case Forget():
                if store := self._stores.get(message.tier):
                    store.forget(message.keys)
                self.send(Forgotten(message.tier, message.keys))
            case Remove():
                if store := self._stores.get(message.tier):
                    self._spawn(store.backend.remove(message.keys))
            case Open() if self._wanted is None or message.number > self._wanted.number:
                self._wanted, self._jobs.slot_bytes = message, message.slot_bytes
                if message.version != VERSION:
                    remedy = f"the engine speaks version {message.version}: install one kvoffload"
                    self.send(Refused(message.number, "io", VERSION, remedy))
                else:
                    await self._replace(message)

    async def _answer(self, answer: Coroutine[Any, Any, None]) -> None:
        """Answer a job; end the session if that fails, or the job's slots would never be free."""
        try:
            await answer
        except BaseException:
            if self._writer is not None:
                self._writer.transport.abort()
            raise

    # ---- stores ----

    async def _replace(self, wanted: Open) -> None:
        """Open stores in the place of those that are open; their calls end on them."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening], timeout=CLOSE_S)
        old, self._stores = list(self._stores.values()), {}
        if wanted.erases:
            self._jobs.cancel_all()  # or what they store would stay
        closing = self._spawn(close_stores(old, CLOSE_S))
        if wanted.erases:  # that may take long: until then jobs are answered, with misses
            self._opening = self._spawn_telling(self._open_in_time(wanted, closing))
        elif not await self._open(wanted, closing):  # orders that came with it wait
            self._opening = self._spawn_telling(self._open_in_time(wanted, closing, TRY_AGAIN_S))

    async def _open_in_time(
        self, wanted: Open, closing: "asyncio.Task[None]", pause_s: float = 0.0
    ) -> None:
        """Try to open stores until they are open."""
        await asyncio.sleep(pause_s)
        while not await self._open(wanted, closing):
            pause_s = min(LONGEST_S, max(TRY_AGAIN_S, 2 * pause_s))
            await asyncio.sleep(pause_s)

    async def _open(self, wanted: Open, closing: "asyncio.Task[None]") -> bool:
        """Open stores, and tell of them; return False if they cannot be opened now."""
        if wanted.erases:
            await asyncio.wait([closing])
        try:
            stores = await open_stores(wanted)
        except ConfigError as error:
            self.send(Refused(wanted.number, error.field, error.value, error.remedy))
            return False
        remains: list[str] = []
        if wanted.erases:
            try:
                remains = await purge(stores, wanted.forgotten)
            except BaseException:
                await close_stores(stores, CLOSE_S)
                raise
        elif wanted.forgotten:
            self._spawn(self._retire(closing, stores, wanted.forgotten))
        if wanted is not self._wanted:  # it hung until newer stores were wanted
            await close_stores(stores, CLOSE_S)
            return True
        self._stores = {store.name: store for store in stores}
        told = [TierOpened(each.name, each.index is not None, each.is_shared) for each in stores]
        self.send(Opened(wanted.number, told, remains))
        for store in stores:
            # The engine waits for a first word of each store.
            if store.index is not None:
                self.send(store.changes() or Presence(store.name, [], [], False))
            self._tell_figures_of(store)
            self._spawn_telling(greet(store, wanted.facts))
        self._spawn_telling(self._tell_changes(self._stores))
        return True

    async def _retire(
        self, closing: "asyncio.Task[None]", heirs: list[OpenStore], forgotten: list[str]
    ) -> None:
        """Once the old stores are closed, remove what no engine will ask for any more."""
        await asyncio.wait([closing])
        for text in await purge(heirs, forgotten):
            log.warning("what an old generation stored stays until it is evicted: %s", text)

    # ---- what stores have ----

    def _before_answer(self, order: Load | Store, store: OpenStore, ok: Sequence[int]) -> None:
        """Tell what a job changed, so that it is known when the job is answered."""
        if self._stores.get(store.name) is not store:
            return  # replaced by a renewal: its changes would count as those of the new store
        has_more = self._tell_changes_of(store)
        if has_more and isinstance(order, Store):
            # The index still lists what it had before; these chunks need not wait for it.
            stored = [key for key, good in zip(order.keys, ok, strict=True) if good]
            held = store.held(stored)
            for start in range(0, len(held), KEYS_PER_MESSAGE):
                added = held[start : start + KEYS_PER_MESSAGE]
                self.send(Presence(store.name, added, [], False))
        if not self._jobs:
            self._tell_figures_of(store)

    async def _ask(self, message: Ask) -> None:
        store = self._stores.get(message.tier)
        answers = [False] * len(message.keys)
        if store is not None and self._wanted is not None:
            try:
                asked = store.backend.contains(message.keys)
                found = await asyncio.wait_for(asked, self._wanted.lookup_timeout_s)
                answers = [bool(each) for each in same_length(found, message.keys)]
            except Exception as error:
                text = "%s: probing %d keys failed: %s"
                store.failures.warning(text, store.name, len(message.keys), text_of(error))
        if self._stores.get(message.tier) is not store:
            return  # replaced by a renewal, as above
        for start in range(0, len(answers), KEYS_PER_MESSAGE):
            part = slice(start, start + KEYS_PER_MESSAGE)
            self.send(Present(message.tier, message.keys[part], answers[part]))

    async def _tell_changes(self, stores: dict[str, OpenStore]) -> None:
        pause_s = LISTING_S  # stores have just opened: an engine may wait for what they have
        while self._stores is stores:
            is_listing = [self._tell_changes_of(store) for store in stores.values()]
            if self._writer is not None:
                await self._writer.drain()
            pause_s = LISTING_S if any(is_listing) else min(CHANGES_S, 2 * pause_s)
            await asyncio.sleep(pause_s)

    async def _tell_figures(self) -> None:
        late_s = 0.0
        while True:
            for store in list(self._stores.values()):
                self._tell_figures_of(store)
            self.send(Alive(late_s))
            due_s = self.loop.time() + FIGURES_S
            await asyncio.sleep(FIGURES_S)
            late_s = max(0.0, self.loop.time() - due_s)

    def _tell_changes_of(self, store: OpenStore) -> bool:
        """Tell a message's worth of changes and all removals; return whether there may be more."""
        if changes := store.changes():
            self.send(changes)
        removals = store.removals()
        for start in range(0, len(removals), KEYS_PER_MESSAGE):
            self.send(Removed(store.name, removals[start : start + KEYS_PER_MESSAGE]))
        return changes is not None and len(changes.added) + len(changes.removed) == KEYS_PER_MESSAGE

    def _tell_figures_of(self, store: OpenStore) -> None:
        if figures := store.figures():
            self.send(figures)

    # ---- the end ----

    async def _end(self) -> None:
        self._jobs.cancel_all()
        for task in self._telling:
            task.cancel()
        if self._opening is not None:  # it closes what it opened
            await asyncio.wait([self._opening], timeout=CLOSE_S)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=END_S)
        await close_stores(list(self._stores.values()), CLOSE_S)
        self._stores = {}
        if self._writer is not None:
            self._flush()
            self._writer.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = self.loop.create_task(work)
        self._tasks.add(task)  # the loop has only weak references to tasks
        task.add_done_callback(self._ended)
        return task

    def _spawn_telling(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = self._spawn(work)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("a task of the I/O server failed", exc_info=error)


def run_server(sock: socket.socket, memory: memoryview, attach: Callable[[Session], None]) -> None:
    """Serve an engine on this thread until the engine's end of the socket is closed.

    Args:
        sock: this end; closed afterwards.
        memory: the slab.
        attach: called with the session before it begins.
    """

    async def serve() -> None:
        session = Session(memory)
        attach(session)
        await session.serve(sock)

    loop = asyncio.new_event_loop()
    # For plug-ins' calls of run_in_executor. An executor of our own ends with the loop.
    executor = ThreadPoolExecutor(2, "kvoffload-io-file")
    loop.set_default_executor(executor)
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(serve())
    finally:
        sock.close()
        executor.shutdown(wait=False, cancel_futures=True)
        loop.close()
