"""The I/O server: opens stores, carries out an engine's jobs, tells what becomes present.

An engine is served over one socket: a *session*. A server has one session, or many that share
stores (:mod:`kvoffload.io.service`). All coroutines of backends run on its event loop, and no other
code. The engine's side keeps the deadlines; the server cancels on request and answers a job when
nothing touches its slots any more.
"""

import asyncio
import contextlib
import logging
import math
import socket
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import Any

from msgspec import DecodeError

from kvoffload.backends.log_rate import Throttle
from kvoffload.errors import ConfigError
from kvoffload.io.chunk_jobs import ChunkJobs, Moved, same_length
from kvoffload.io.cold_start import explain_cold_start
from kvoffload.io.engine_queue import EngineQueue
from kvoffload.io.open_stores import (
    CLOSE_S,
    KEYS_PER_MESSAGE,
    Opener,
    OpenStore,
    close_stores,
    greet,
    is_of_device,
    open_store,
    promised,
    purge,
    text_of,
    until_open,
)
from kvoffload.io.protocol import (
    MOST_BYTES,
    VERSION,
    Alive,
    Answered,
    Ask,
    Await,
    Borrow,
    Cancel,
    Ending,
    Expect,
    Forget,
    Forgotten,
    Load,
    Locate,
    Located,
    MessageReader,
    Open,
    Opened,
    Passed,
    PresenceChanges,
    Present,
    Refused,
    Release,
    Remove,
    Removed,
    Store,
    TierOpened,
    ToClient,
    Used,
    frame,
)

log = logging.getLogger(__name__)
CHANGES_S = 0.05
"""Time between two looks at what changed in the stores."""
LISTING_S = 0.001
"""Time between two looks after a store has listed what it has; it doubles while nothing changes."""
FIGURES_S = 0.5
"""Time between two messages of figures while no job ends; they also show that the server lives."""
END_S = 1.0
"""How long calls of stores may take to end, after their cancellation, before stores are closed."""
CLOGGED_BYTES = 1 << 20
"""An engine that lets so much wait is told no figures until it reads."""
MESSAGES_PER_TURN = 16
"""Messages of one engine that are taken before those of another one."""
TURN_S = 0.05
"""A message that takes more of the processor ends the turn; the next one waits for as long."""
BUSY_S = 0.01
"""Time between two such turns of an engine that is over its bound, and after a renewal."""
KEYS_PER_TASK = 64
"""A task takes as much memory as so many keys."""
PATIENT_S = 5.0
"""How long orders wait for their store that is being opened; one that hangs has misses then."""


class Session:
    """Serves one engine; made and used on the event loop.

    Args:
        memory: the slab.
        open_store: opens a tier that the engine names.
        most_bytes: a longer message ends the session.
        most_keys: bounds the keys of orders and questions that have not ended, and those of the
            engine's queue. An order beyond it is a miss at once.
        moved: called with each job, its verdicts, and the seconds that it took.
        pass_memory: passes memory of the server to an engine that asks for it; returns whether it
            could.
    """

    def __init__(
        self,
        memory: memoryview,
        open_store: Opener = open_store,
        most_bytes: int = MOST_BYTES,
        most_keys: float = math.inf,
        moved: Moved | None = None,
        pass_memory: Callable[[], bool] | None = None,
    ) -> None:
        self._open_store, self._pass_memory = open_store, pass_memory or _has_none
        self._messages = MessageReader(to_server=True, most_bytes=most_bytes)
        self._jobs = ChunkJobs(memory, self.send, self._before_answer, moved)
        self.loans = self._jobs.loans
        """What the engine reads in the server's memory: also after the session, until it leaves."""
        self.loop = asyncio.get_running_loop()
        """Of the backends; other threads may call its ``call_soon_threadsafe``."""
        self._writer: asyncio.StreamWriter | None = None
        self._is_ending = False
        """Whether :meth:`end` was called, perhaps before there is a writer."""
        self._out: list[bytes] = []
        self._wanted: Open | None = None
        """The last message of what to open."""
        self._opening: set[asyncio.Task[Any]] = set()
        """Opens stores, each by itself, while messages are read."""
        self._tries: dict[str, asyncio.Event] = {}
        """Tier → set once its first try to open has ended. Until then its orders wait."""
        self._waiting: dict[int, asyncio.Task[Any]] = {}
        """Job that waits for its store → what waits."""
        self._stores: dict[str, OpenStore] = {}
        self._left: dict[str, list[str]] = {}
        """Tier → namespaces that its next store is to remove, as the last one was closed."""
        self._most_keys = most_keys
        self._num_keys = 0
        """Those of orders and questions that have not ended, and some for each of these."""
        self._refused = Throttle(log)
        self.queue = EngineQueue(most_keys, self._spare)
        self._tasks: dict[asyncio.Task[Any], int] = {}
        """Each with its part of the number of keys."""
        self._telling: set[asyncio.Task[Any]] = set()
        """Those of no use once the engine's end is closed."""
        self._answering: set[asyncio.Task[Any]] = set()
        """Those that wait for calls which use the engine's memory."""

    async def serve(self, sock: socket.socket) -> None:
        """Serve until the engine's end is closed; then end its jobs and close the stores."""
        reader, self._writer = await asyncio.open_connection(sock=sock)
        if self._is_ending:
            self.end()
        self._spawn(self._tell_figures(), is_telling=True)
        try:
            num_taken = 0
            while data := await reader.read(1 << 18):
                begun_s = time.thread_time()
                for message in self._messages.feed(data):
                    self._take(message)
                    num_taken += 1
                    if isinstance(message, Open) and message.number:
                        await asyncio.sleep(BUSY_S)
                    elif (took_s := time.thread_time() - begun_s) > TURN_S:
                        await asyncio.sleep(took_s)
                    elif num_taken % MESSAGES_PER_TURN == 0:
                        await asyncio.sleep(BUSY_S if self._is_over_bound(KEYS_PER_TASK) else 0)
                    else:
                        continue
                    begun_s = time.thread_time()
                if self._is_clogged:  # or answers that the engine does not read would have no end
                    await self._writer.drain()
        except ConnectionError:
            # The stream has the same error: one that is not asked for it may log a traceback.
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()
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

    def _is_over_bound(self, more: int) -> bool:
        """Whether so many more keys are too many."""
        return self._num_keys + more > self._most_keys

    def _refuse(self, message: Load | Store | Ask | Remove) -> None:
        """Answer an order that is too much; a question has no answer, and is a miss in time."""
        text = "an engine has orders of %d keys that have not ended: further ones are misses"
        self._refused.warning(text, self._most_keys)
        if isinstance(message, Load | Store):
            self.send(Answered(message.job, bytes(len(message.keys)), "busy", 0.0))

    def _take(self, message: Any) -> None:
        match message:
            case Load() | Store() if (
                message.job in self._jobs.calls or message.job in self._waiting
            ):
                raise DecodeError(f"job {message.job} is in flight")
            case Load() | Store() | Ask() | Remove() if self._is_over_bound(_cost(message)):
                self._refuse(message)
            case Load() | Store():
                tried = self._tries.get(message.tier)
                if tried is None or tried.is_set():
                    self._begin(message, self._stores.get(message.tier))
                else:
                    task = self._spawn(_patiently(tried), _cost(message))
                    self._waiting[message.job] = task
                    # Called also if the task is cancelled before it begins.
                    task.add_done_callback(partial(self._begin_late, message, tried))
            case Cancel():
                if waiting := self._waiting.pop(message.job, None):
                    waiting.cancel()
                self._jobs.cancel(message.job)
            case Borrow():
                pass_memory, self._pass_memory = self._pass_memory, _has_none  # once a session
                if pass_memory():
                    self.loans.may_begin = True
                    self.send(Passed())
            case Release():
                self.loans.release(message.loan)
            case Ask():
                self._spawn(self._ask(message), _cost(message), is_telling=True)
            case Forget():
                if store := self._stores.get(message.tier):
                    store.forget(message.keys)
                self.send(Forgotten(message.tier, message.keys))
            case Locate():
                store = self._stores.get(message.tier)
                self.send(Located(message.number, store.places(message.keys) if store else []))
            case Used():
                if store := self._stores.get(message.tier):
                    store.used(message.keys)
            case Remove():
                if store := self._stores.get(message.tier):
                    self._spawn(store.backend.remove(message.keys), _cost(message))
            case Await():
                self.queue.take(message)
            case Expect() if self._wanted is not None:
                for store in self._stores.values():
                    store.expect(message.returns, self._wanted.hint_share)
            case Open() if self._wanted is None or message.number > self._wanted.number:
                self._wanted, self._jobs.slot_bytes = message, message.slot_bytes
                if message.version != VERSION:
                    remedy = f"the engine speaks version {message.version}: install one kvoffload"
                    self.send(Refused(message.number, "io", VERSION, remedy))
                else:
                    self._replace(message)

    def _begin_late(
        self, order: Load | Store, tried: asyncio.Event, waiting: "asyncio.Task[None]"
    ) -> None:
        """Begin a job once its store is open; without one, if it is late, refused or replaced."""
        # Else it was cancelled: perhaps when the task had ended, or was about to.
        is_wanted = self._waiting.pop(order.job, None) is waiting and not waiting.cancelled()
        # Not on a store of a later namespace: its bytes mean something else there.
        is_current = is_wanted and self._tries.get(order.tier) is tried
        store = self._stores.get(order.tier) if is_current else None
        self._begin(order, store)

    def _begin(self, order: Load | Store, store: OpenStore | None) -> None:
        if answer := self._jobs.begin(order, store):
            task = self._spawn(self._answer(answer), _cost(order))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _answer(self, answer: Coroutine[Any, Any, None]) -> None:
        """Answer a job; end the session if that fails, or the job's slots would never be free."""
        try:
            await answer
        except BaseException:
            if self._writer is not None:
                self._writer.transport.abort()
            raise

    # ---- stores ----

    def _replace(self, wanted: Open) -> None:
        """Open stores in the place of those that are open; their calls end on them."""
        self._end_waiting()
        opening, old, self._stores = self._opening, list(self._stores.values()), {}
        for task in opening:
            task.cancel()
        running = list[asyncio.Task[str]]()
        if any(wanted.erases(tier.name) for tier in wanted.tiers):
            running = self._jobs.cancel_all()  # or what they store would stay
        self.send(Opened(wanted.number, []))  # first: a constructor may block the loop
        self._tries = {tier.name: asyncio.Event() for tier in wanted.tiers}
        closing, places = self._spawn(_close(opening, old)), dict[str, int]()
        tiers = range(len(wanted.tiers))
        works = [self._open_in_time(wanted, i, places, closing, running) for i in tiers]
        self._opening = {self._spawn(work, is_telling=True) for work in works}

    def _end_waiting(self) -> None:
        for task in self._waiting.values():
            task.cancel()
        self._waiting.clear()

    async def _open_in_time(
        self,
        wanted: Open,
        i: int,
        places: dict[str, int],
        closing: "asyncio.Task[None]",
        running: "list[asyncio.Task[str]]",
    ) -> None:
        """Try to open a tier until it is open."""
        tier, name = wanted.tiers[i], wanted.tiers[i].name
        tried = self._tries[name]
        if wanted.erases(name):
            tried.set()
            await asyncio.wait([closing])

        def refused(error: Exception) -> None:
            if isinstance(error, ConfigError):
                without = promised(tier) if is_of_device(error) else None
                parts = error.field, error.value, error.remedy
                self.send(Refused(wanted.number, *parts, without))
            else:  # no thread is left, say: no setting is to blame
                log.error("%s cannot be opened yet", name, exc_info=error)
            tried.set()

        store = await until_open(name, partial(self._open_store, wanted, i, places), refused)
        await self._take_up(wanted, store, closing, running)
        tried.set()

    async def _take_up(
        self,
        wanted: Open,
        store: OpenStore,
        closing: "asyncio.Task[None]",
        running: "list[asyncio.Task[str]]",
    ) -> None:
        """Let jobs use a store that has opened, and tell of it.

        ``running`` are cancelled calls on the old stores, which ``closing`` closes.
        """
        remains: list[str] = []
        forgotten = wanted.forgotten.get(store.name, [])
        if wanted.erases(store.name):
            are_over = all(call.done() for call in running if call.get_name() == store.name)
            try:
                if why := await purge(store, forgotten):
                    remains.append(why)
            except BaseException:
                await close_stores([store], CLOSE_S)
                raise
            if not are_over:
                remains.append(f"{store.name}: a call that began before hangs, and may store yet")
            forgotten = []
        if left := [*self._left.pop(store.name, ()), *forgotten]:
            self._spawn(self._retire(closing, store, left))
        if wanted is not self._wanted:  # it hung until newer stores were wanted
            await close_stores([store], CLOSE_S)
            return
        self._stores[store.name] = store
        if self.queue.needs:  # at once: jobs that waited for the store may evict
            store.spare(self.queue.keys())
        has_index, in_place = store.index is not None, store.in_place()
        told = TierOpened(store.name, has_index, store.is_shared, in_place)
        self.send(Opened(wanted.number, [told], remains))
        # The engine waits for a first word of each store.
        if store.index is not None:
            self.send(store.changes() or PresenceChanges(store.name, [], [], False))
        self._tell_figures_of(store)
        self._spawn(greet(store, wanted.facts), is_telling=True)
        if not wanted.number:  # a renewal begins without chunks, as it should
            self._spawn(explain_cold_start(store, wanted), is_telling=True)
        self._spawn(self._tell_changes(store), is_telling=True)

    async def _retire(
        self, closing: "asyncio.Task[None]", heir: OpenStore, forgotten: list[str]
    ) -> None:
        """Once the old stores are closed, remove what no engine will ask for any more.

        A store that is closed meanwhile removes no more: the one in its place does.
        """
        await asyncio.wait([closing])
        remains = await purge(heir, forgotten)
        if (now := self._stores.get(heir.name)) is heir:
            if remains:
                log.warning("what an old generation stored stays until it is evicted: %s", remains)
        elif now is None:
            self._left.setdefault(heir.name, []).extend(forgotten)
        else:
            await self._retire(closing, now, forgotten)

    # ---- what stores have ----

    def _spare(self, needed: Collection[bytes]) -> None:
        for store in self._stores.values():
            store.spare(needed)

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
                self.send(PresenceChanges(store.name, added, [], False))
        if not self._jobs.calls:
            self._tell_figures_of(store)

    async def _ask(self, message: Ask) -> None:
        store = self._stores.get(message.tier)
        answers = [False] * len(message.keys)
        if store is not None and self._wanted is not None:
            within_s = self._wanted.lookup_timeout_s
            begun_s = time.monotonic()
            try:
                asked = store.backend.contains(message.keys)
                found = await asyncio.wait_for(asked, within_s)
                answers = [bool(each) for each in same_length(found, message.keys)]
            except Exception as error:
                text = "%s: a lookup of %d chunks failed, and they count as missing: %s"
                reason = text_of(error)
                took_s = time.monotonic() - begun_s
                if isinstance(error, TimeoutError) and took_s >= within_s:  # else it is the store's
                    reason = f"no answer within {within_s:g} s, the lookup_timeout_s"
                store.failures.warning(text, store.name, len(message.keys), reason)
        if self._stores.get(message.tier) is not store:
            return  # replaced by a renewal, as above
        for start in range(0, len(answers), KEYS_PER_MESSAGE):
            part = slice(start, start + KEYS_PER_MESSAGE)
            self.send(Present(message.tier, message.keys[part], answers[part]))

    async def _tell_changes(self, store: OpenStore) -> None:
        pause_s = LISTING_S  # it has just opened: an engine may wait for what it has
        while self._stores.get(store.name) is store:
            is_listing = self._tell_changes_of(store)
            if self._writer is not None:
                try:
                    await self._writer.drain()
                except ConnectionError:  # the engine has ended
                    return
            pause_s = LISTING_S if is_listing else min(CHANGES_S, 2 * pause_s)
            # Making a message takes longer than reading it: the engine has time between two.
            await asyncio.sleep(0 if is_listing else pause_s)

    async def _tell_figures(self) -> None:
        late_s = 0.0
        while True:
            if not self._is_clogged:
                for store in list(self._stores.values()):
                    self._tell_figures_of(store)
                self.send(Alive(late_s))
            due_s = self.loop.time() + FIGURES_S
            await asyncio.sleep(FIGURES_S)
            late_s = max(0.0, self.loop.time() - due_s)

    @property
    def _is_clogged(self) -> bool:
        """Whether much waits because the engine reads nothing, as one that is stopped."""
        writer = self._writer
        return writer is not None and writer.transport.get_write_buffer_size() > CLOGGED_BYTES

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
        self._end_waiting()
        self._jobs.cancel_all()
        for task in self._telling:
            task.cancel()
        if self._opening:  # they close what they opened
            await asyncio.wait(self._opening, timeout=CLOSE_S)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=END_S)
        await close_stores(list(self._stores.values()), CLOSE_S)
        self._stores = {}
        if self._writer is not None:
            self._flush()
            self._writer.close()
            try:
                async with asyncio.timeout(END_S):
                    await self._writer.wait_closed()
            except TimeoutError:
                # Or the loop would go on waiting for an engine that reads nothing. Its descriptor
                # is closed next, and an engine that gets the same number would be refused.
                self._writer.transport.abort()
            except ConnectionError:
                pass  # it is closed

    def end(self) -> None:
        """End the session: the engine reads so, unless it is clogged, and the end of the socket."""
        self._is_ending = True
        if self._writer is not None:
            self.send(Ending())
            self._flush()
            self._writer.transport.abort()

    async def settled(self) -> None:
        """Wait until nothing touches the engine's memory any more, however long that takes.

        A cancellation, as at the end of the loop, changes nothing: a call that hangs goes on.
        """
        while self._answering:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(self._answering)

    def _spawn(
        self, work: Coroutine[Any, Any, None], cost: int = 0, *, is_telling: bool = False
    ) -> "asyncio.Task[None]":
        task = self.loop.create_task(work)
        # Kept, because the loop has only weak references to tasks.
        self._tasks[task] = cost
        self._num_keys += cost
        if is_telling:
            self._telling.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._num_keys -= self._tasks.pop(task)
        self._telling.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("a task of the I/O server failed", exc_info=error)


def _cost(message: Load | Store | Ask | Remove) -> int:
    """Return what an order or a question takes until it ends, in keys."""
    return KEYS_PER_TASK + len(message.keys)


def _has_none() -> bool:
    """Pass no memory."""
    return False


async def _patiently(tried: asyncio.Event) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(tried.wait(), PATIENT_S)


async def _close(opening: Collection["asyncio.Task[Any]"], stores: Sequence[OpenStore]) -> None:
    """Close stores, after those that were being opened: these close what they opened."""
    if opening:
        await asyncio.wait(opening, timeout=CLOSE_S)
    await close_stores(stores, CLOSE_S)
