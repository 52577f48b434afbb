"""The open stores of an I/O server."""

import asyncio
import errno
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any, Protocol, TypeVar, runtime_checkable

from msgspec import convert

from kvoffload import registry
from kvoffload.backends.admin import Purges, duration
from kvoffload.backends.asynchronous import CLOSING
from kvoffload.backends.base import (
    Backend,
    LocalIndex,
    Observable,
    ReadsEach,
    Spares,
)
from kvoffload.backends.blocking_pool import run_once
from kvoffload.backends.log_rate import Throttle
from kvoffload.errors import ConfigError
from kvoffload.io.loans import Lends
from kvoffload.io.protocol import (
    Figures,
    Open,
    PresenceChanges,
    TierOpened,
    TierSettings,
    carried,
)
from kvoffload.policies.told_return import ToldReturn

log = logging.getLogger(__name__)
_A = TypeVar("_A")
_MOST = 1 << 53
"""Of a figure: Prometheus loses no digit, and sums fit into a message."""

CLOSE_S = 5.0
"""How long closing stores may take."""
TRY_AGAIN_S, LONGEST_S = 0.5, 30.0
"""Time before a store that could not be opened is tried again; it doubles up to the second."""
_TELL_EACH = 120
"""So many tries, an hour's, are between two tellings of one lasting reason at most."""
_OF_DEVICE = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
KEYS_PER_MESSAGE = 1024
"""Keys in one message to the engine's process, which decodes it in one go."""


@runtime_checkable
class ReadInPlace(Protocol):
    """A store with chunks that an engine of this host reads itself, where that takes no wait.

    Its class has an attribute ``reader``, which is called with what :meth:`in_place` returns. What
    that makes has a method ``read``, as that of the disk tier.
    """

    def in_place(self) -> dict[str, Any]:
        """Return what a reader needs to know; empty: there is none."""
        ...

    def places(self, keys: Sequence[bytes]) -> Sequence[Any]:
        """Return what the reader takes to find those of these chunks that are there; no I/O."""
        ...

    def used(self, keys: Sequence[bytes]) -> None:
        """Note a use of chunks, the head of a prefix first; does no I/O."""
        ...


class OpenStore:
    """One open store, and what it has yet to tell. A plug-in's exception is only logged."""

    def __init__(self, name: str, backend: Backend) -> None:
        self.name = name
        self.backend = backend
        # Asked once: each question to a protocol takes some 10 µs.
        self.reads_each = backend if isinstance(backend, ReadsEach) else None
        self.copies = self.reads_each is not None and _takes_tenants(self.reads_each.read_each)
        """Whether a load may store as well: in a store nearer than the one that has the chunk."""
        self.index = backend if isinstance(backend, LocalIndex) else None
        self.observable = backend if isinstance(backend, Observable) else None
        self.lends = backend if isinstance(backend, Lends) else None
        self._spares = backend if isinstance(backend, Spares) else None
        # Of its own class: another one may pass a store's attributes through, or change its bytes.
        has_reader = "reader" in vars(type(backend))
        self._in_place = backend if has_reader and isinstance(backend, ReadInPlace) else None
        self.is_shared = bool(getattr(backend, "is_shared", False))
        """Whether processes of this host that open it alike see each other's chunks."""
        self.is_told = False
        """Whether the engine knows all that the index knew at some time."""
        self._told: Figures | None = None
        self.failures = Throttle(log)
        """Logs what the store's calls raise."""

    def changes(self) -> PresenceChanges | None:
        """Return the next changes of the index; None if there are none."""
        if (index := self.index) is None:
            return None
        changes: list[tuple[bytes, bool]] = []
        call, was_told = "take_changes", self.is_told
        try:
            # What is of another type would end the engine's understanding of this process.
            changes = convert(index.take_changes(KEYS_PER_MESSAGE), list[tuple[bytes, bool]])
            call = "is_complete"
            self.is_told = bool(index.is_complete)
        except Exception as error:
            self.is_told = True  # it will tell no more: nothing need wait for it
            self._failed(call, error)
        if not changes and was_told == self.is_told:
            return None
        added = [key for key, present in changes if present]
        removed = [key for key, present in changes if not present]
        return PresenceChanges(self.name, added, removed, self.is_told)

    def held(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the keys that the index holds."""
        if (index := self.index) is None:
            return []
        try:
            return [key for key in keys if index.holds(key)]
        except Exception as error:
            self._failed("holds", error)
            return []

    def forget(self, keys: Sequence[bytes]) -> None:
        """Let the index answer False for these."""
        self._tell(self.index, "forget", keys)

    def in_place(self) -> dict[str, Any]:
        """Return what an engine must know to read chunks itself; empty: it cannot."""
        if self._in_place is None:
            return {}
        try:
            return carried(self._in_place.in_place(), dict[str, Any])
        except Exception as error:
            self._failed("in_place", error)
            return {}

    def places(self, keys: Sequence[bytes]) -> list[Any]:
        """Return where an engine finds chunks that it reads itself."""
        if self._in_place is None:
            return []
        try:
            return carried(self._in_place.places(keys), list[Any])
        except Exception as error:
            self._failed("places", error)
            return []

    def used(self, keys: Sequence[bytes]) -> None:
        """Tell the store what an engine has read itself."""
        self._tell(self._in_place, "used", keys)

    def spare(self, keys: Collection[bytes]) -> None:
        """Tell the store what requests in the engine's queue need."""
        self._tell(self._spares, "spare", keys)

    def expect(self, returns: Sequence[ToldReturn], share: float) -> None:
        """Tell the store when sessions need their chunks again."""
        self._tell(self._spares, "expect", returns, share)

    def removals(self) -> list[tuple[bytes, str]]:
        """Return the chunks that the store removed since the last call, and why."""
        if (store := self.observable) is None:
            return []
        try:
            return carried(store.take_removals(), list[tuple[bytes, str]])
        except Exception as error:
            self._failed("take_removals", error)
            return []

    def figures(self) -> Figures | None:
        """Return usage and counters; None if they are as they were told."""
        store = self.observable
        if store is None:
            return None
        try:
            resident, capacity, chunks, gauges = store.usage()
            usage = (
                None if resident is None else _number(resident),
                None if capacity is None else _number(capacity),
                None if chunks is None else _number(chunks),
                _numbers(gauges),
            )
            now = Figures(self.name, usage, _numbers(store.counters()))
        except Exception as error:
            self._failed("usage and counters", error)
            return None
        if now == self._told:
            return None
        self._told = now
        return now

    def _tell(self, store: object, call: str, *told: object) -> None:
        """Call a method of a store that has it; of one that has not, ``store`` is None."""
        if store is not None:
            try:
                getattr(store, call)(*told)
            except Exception as error:
                self._failed(call, error)

    def _failed(self, call: str, error: Exception) -> None:
        self.failures.warning("%s: %s failed: %r", self.name, call, error)


Opener = Callable[[Open, int, dict[str, int]], Awaitable[OpenStore]]
"""Opens a tier of a message; see :func:`open_store`."""


async def open_store(wanted: Open, i: int, places: dict[str, int]) -> OpenStore:
    """Open the tier of this number; one that may block opens on a thread of its own.

    Args:
        wanted: names the tiers.
        i: the tier's number.
        places: gets the store's place; has those of other open tiers, with their numbers.

    Raises:
        ConfigError: it cannot be opened, could hold no chunk, or is another one over again.
    """
    tier = wanted.tiers[i]
    store = OpenStore(tier.name, await open_tier(tier, wanted.namespace))
    try:
        if store.observable is not None:
            _check_fit(i, store.observable, wanted.chunk_bytes, places)
    except BaseException:
        await close_stores([store])  # it holds threads, descriptors and locks
        raise
    return store


async def until_open(
    name: str, open: Callable[[], Awaitable[_A]], refused: Callable[[Exception], None]
) -> _A:
    """Try to open a store until it is open.

    ``refused`` is called with each new error, and with one that lasts after 2, 4, 8... tries.
    """
    pause_s, tries, since_s, told = TRY_AGAIN_S, 1, time.monotonic(), ""
    while True:
        try:
            opened = await open()
            break
        except Exception as error:  # also of one that has no thread for it
            is_due = tries.bit_count() == 1 or tries % _TELL_EACH == 0
            if is_due or text_of(error) != told:
                told = text_of(error)
                refused(error)
        await asyncio.sleep(pause_s)
        pause_s, tries = min(LONGEST_S, 2 * pause_s), tries + 1
    if tries > 1:  # who has read of the refusals reads of their end, at the level of warnings
        away_s = time.monotonic() - since_s
        log.warning("the tier %s is open, at try %d, after %s", name, tries, duration(away_s))
    return opened


def is_of_device(error: BaseException | None) -> bool:
    """Return whether a device has caused an error, which is full or fails: no setting is wrong."""
    while error is not None:
        if isinstance(error, OSError):
            return error.errno in _OF_DEVICE
        error = error.__cause__
    return False


async def open_tier(tier: TierSettings, namespace: str) -> Backend:
    """Open a backend; one that may block opens on a thread of its own.

    Raises:
        ConfigError: it cannot be opened.
    """
    if _may_block(tier):
        return await _open_apart(tier, namespace)
    return _open(tier, namespace)


def promised(tier: TierSettings) -> TierOpened:
    """Return what the class of a store tells of it, before it is open."""
    made = _class_of(tier)
    has_index, is_shared = hasattr(made, "take_changes"), getattr(made, "is_shared", False)
    return TierOpened(tier.name, has_index, bool(is_shared))


def _may_block(tier: TierSettings) -> bool:
    return bool(getattr(_class_of(tier), "opens_apart", False))


def _class_of(tier: TierSettings) -> Any:
    try:
        return registry.load(registry.BACKENDS, tier.type)
    except ConfigError:
        return None  # opening it says why


async def _open_apart(tier: TierSettings, namespace: str) -> Backend:
    """Open a store on a thread, which closes it if it is wanted no more once it is open."""
    deciding, opened = threading.Lock(), list[OpenStore]()
    is_wanted = True

    def perform() -> Backend:
        backend = _open(tier, namespace)
        with deciding:
            opened.append(OpenStore(tier.name, backend))
            if is_wanted:
                return backend
        asyncio.run(close_stores(opened))
        raise ConfigError(tier.where.rstrip("."), tier.type, "opened too late")

    try:
        return await run_once(perform)
    except asyncio.CancelledError:
        with deciding:
            is_wanted = False
        await close_stores(opened)
        raise


def _open(tier: TierSettings, namespace: str) -> Backend:
    try:
        return registry.open_backend(tier.type, tier.options, namespace, where=tier.where)
    except ConfigError:
        raise
    except Exception as error:
        log.exception("%s: the store cannot be opened", tier.name)
        raise ConfigError(
            tier.where.rstrip("."), tier.type, f"cannot be opened: {error!r}"
        ) from error


def _check_fit(i: int, store: Observable, chunk_bytes: int, places: dict[str, int]) -> None:
    """Refuse a tier that could never hold a chunk, or that is another one over again."""
    try:
        store.check_fit(chunk_bytes)
        place = store.place
        first, second = sorted((i, places.setdefault(place, i) if place else i))
    except ConfigError as error:
        raise ConfigError(f"backends[{i}].{error.field}", error.value, error.remedy) from error
    except Exception as error:
        raise ConfigError(f"backends[{i}]", type(store).__name__, f"failed: {error!r}") from error
    if first != second:  # whichever of them opened first
        remedy = f"is where backends[{first}] keeps its chunks; one tier is enough there"
        raise ConfigError(f"backends[{second}]", place, remedy)


async def call_for(
    tenants: Sequence[bytes], call: Callable[..., Awaitable[_A]], keys: Sequence[bytes], *given: Any
) -> _A:
    """Write or read chunks, and say whose they are or for whom, where the store takes that.

    Raises:
        ValueError: there are tenants, and not one for each key.
        Exception: the store's.
    """
    if not tenants:
        return await call(keys, *given)
    if len(tenants) != len(keys):
        raise ValueError(f"{len(keys)} keys, but {len(tenants)} tenants")
    return await (call(keys, *given, tenants) if _takes_tenants(call) else call(keys, *given))


def _takes_tenants(call: Callable[..., Any]) -> bool:
    """Return whether a call takes more than the protocol's: another module's may not."""
    try:
        return "tenants" in signature(call).parameters
    except ValueError:  # as of one that is compiled
        return False


async def greet(store: OpenStore, facts: Mapping[str, str]) -> None:
    """Let a new store connect, and keep the facts behind its namespace."""
    try:
        await store.backend.contains([])
    except Exception as error:
        log.warning("the first call of a store failed: %s", text_of(error))
    if store.observable is not None:
        await store.observable.describe(facts)


async def close_stores(stores: Sequence[OpenStore], timeout_s: float = CLOSE_S) -> None:
    """Close stores, all at once, and wait at most so long."""
    tasks = {asyncio.create_task(_close(store), name=CLOSING): store.name for store in stores}
    if not tasks:
        return
    done, hung = await asyncio.wait(tasks, timeout=timeout_s)
    for task in done:
        if not task.cancelled() and (error := task.exception()):
            log.warning("%s: closing failed: %s", tasks[task], text_of(error))
    for task in hung:
        log.warning("%s: closing still hung after %g s", tasks[task], timeout_s)


async def _close(store: OpenStore) -> None:
    await store.backend.close()


def closings(loop: asyncio.AbstractEventLoop) -> set["asyncio.Task[Any]"]:
    """Return what still closes stores of a loop."""
    return {task for task in asyncio.all_tasks(loop) if task.get_name() == CLOSING}


async def purge(store: OpenStore, namespaces: Sequence[str]) -> str:
    """Remove namespaces from a store; return what remains, and why; empty: nothing does."""
    backend = store.backend
    if not isinstance(backend, Purges):
        return f"{store.name}: this store cannot remove a namespace"
    try:
        await backend.purge(namespaces)
    except Exception as error:
        return f"{store.name}: {text_of(error)}"
    return ""


def _numbers(named: Mapping[str, Any]) -> dict[str, int]:
    # Not each text of Python is one of Unicode.
    texts = {name: str(name).encode(errors="replace").decode() for name in named}
    return {texts[name]: _number(value) for name, value in named.items()}


def _number(value: Any) -> int:
    """Take a float or a number of numpy as well."""
    return max(-_MOST, min(int(value), _MOST))


def text_of(error: BaseException) -> str:
    """Return an error's message, or its name if it has none."""
    return str(error) or type(error).__name__
