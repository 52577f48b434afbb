"""Chunks in a bucket: a tier that hosts share, and whose size has no limit.

An object holds one chunk behind its header, and one request moves it, straight from or into the
caller's memory. Stores create objects; only an object that no load can use is replaced. A bucket
that is slow, busy or refuses costs misses, and each request ends by its deadline. Operators read
``docs/guides/object.md``.

Modules from the wire up: ``bucket`` has the requests, ``failures`` what goes wrong with them.
``request_kind`` and ``share_breaker`` bound them. ``naming`` and
``manifest_index`` have the objects' names. ``options`` has the settings, ``admin`` and ``doctor``
operators' commands.
"""

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from kvoffload.backends.admin import Finding, throughput
from kvoffload.backends.base import (
    Described,
    ReadResult,
    Usage,
    WriteResult,
    Written,
    check_lengths,
)
from kvoffload.backends.blocking_pool import BlockingPool, run_once, start_once
from kvoffload.backends.flight_bounds import InFlight, Transfer
from kvoffload.backends.header import Header, check_key, parse_header
from kvoffload.backends.log_rate import LASTING_S, Throttle
from kvoffload.backends.object import naming
from kvoffload.backends.object.admin import ObjectAdmin, described
from kvoffload.backends.object.bucket import Bucket, Incoming, Put, Stored
from kvoffload.backends.object.doctor import IF_FAILED, IF_SLOW, examine
from kvoffload.backends.object.failures import BUSY, CANCELLED, TIMEOUT, Failed
from kvoffload.backends.object.manifest_index import ManifestIndex
from kvoffload.backends.object.options import ObjectOptions, weaknesses
from kvoffload.backends.object.request_kind import Requests
from kvoffload.backends.seals import Seal
from kvoffload.backends.threaded import ThreadedBackend
from kvoffload.config import human_bytes

log = logging.getLogger(__name__)

LOOKUPS_AT_ONCE = 32
"""Requests of lookups in flight; each takes the time of a round trip."""
LOOKUP_S = 1.0
"""The longest that a lookup may take: requests and waiting for their turn."""
SMALL_CHUNK_BYTES = 1 << 20
"""Below this, requests and not bytes decide speed and price."""
_MOST_USELESS = 1 << 16
"""Objects to replace that are remembered: a few mebibytes."""
_USELESS_S = 600.0
"""So long an object counts as absent that a load could not use, unless another one replaces it: the
fault may have been the network's."""
_DESCRIBE_EVERY_S = 86400.0
_MOST_CONFLICTS = 64
"""After so many in a row, with no store between that left an object, it is not other stores that
these met."""


class _Useless(NamedTuple):
    """An object that a load could not use."""

    version: str
    until_s: float
    """When it counts as present again; a store of its key replaces it also later."""


class ObjectBackend(ThreadedBackend, ObjectAdmin):
    """The backend.

    Args:
        options: See :class:`ObjectOptions`.
        namespace: Chunks of other namespaces are invisible.

    Raises:
        ConfigError: A secret or certificate is unreadable, or the client refuses a setting.
    """

    Options = ObjectOptions
    is_shared = True

    def __init__(self, options: ObjectOptions, namespace: str) -> None:
        self._options, self._namespace = options, namespace
        self._bucket = Bucket(options, options.timeout_s)
        self._heads = Bucket(options, min(LOOKUP_S, options.timeout_s))
        for problem, remedy in weaknesses(options):
            log.warning("object: %s; %s", problem, remedy)
        super().__init__(
            namespace,
            threads=options.threads,
            store_threads=options.threads,
            # Waiting for room, the request, and a look at an object that another one met.
            stall_s=2 * options.timeout_s + min(LOOKUP_S, options.timeout_s) + 1,
            name="object",
        )
        self._lookups = BlockingPool(
            "kvoffload-ObjectBackend-lookup", LOOKUPS_AT_ONCE, 2 * LOOKUP_S + 1
        )
        self._tag = naming.namespace_tag(namespace)
        check = self._heads.check
        self._lookup_requests = Requests("lookup", self.count, check)
        self._reads = Requests("read", self.count, check)
        self._writes = Requests("write", self.count, check)
        self._in_flight = InFlight(
            int(options.max_inflight_bytes), self._go_on, patience_s=options.timeout_s
        )
        self._cancelled: set[int] = set()
        """Threads whose caller is gone."""
        self._changing = threading.Lock()
        self._useless: OrderedDict[bytes, _Useless] = OrderedDict()
        """Keys whose objects no load can use: the next store replaces them."""
        self._versions: dict[int, str] = {}
        """The version of the object that a thread receives."""
        self._damaged = Throttle(log)
        self._conflicts = 0
        """The latest stores, in a row, after whose conflict there was no object."""
        self._refused = Throttle(log, LASTING_S)
        self._facts: bytes = b""
        self._describe_at_s = 0.0
        self._manifest: ManifestIndex | None = None
        if options.manifest:
            self._manifest = ManifestIndex(self._bucket, self._tag, options.ttl_s)

    def encrypt_with(self, seal: Seal) -> None:
        super().encrypt_with(seal)
        self._cipher = seal

    def __repr__(self) -> str:
        return f"ObjectBackend({self._options.url!r}, {self._namespace!r})"

    # ---- lookups -------------------------------------------------------------------------------

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Ask for each key, some at once; a key whose turn comes too late counts as absent."""
        if self.is_closed:
            return [False] * len(keys)
        if not keys:
            await self._on_lookup_threads(1, self._greet)
            return []
        manifest = self._manifest
        if manifest is not None and manifest.is_complete:
            return [key in manifest and not self._is_useless(key) for key in keys]
        until_s = time.monotonic() + LOOKUP_S

        def look(i: int) -> bool:
            if time.monotonic() > until_s:
                self.count("lookup_late")
                return False
            return self.has(keys[i])

        return await self._on_lookup_threads(len(keys), look)

    def has(self, key: bytes) -> bool:
        if self.is_closed:
            return False
        if self._manifest is not None and key in self._manifest:
            return not self._is_useless(key)
        return self._is_there(key)

    def _is_there(self, key: bytes) -> bool:
        """Ask the bucket."""
        name = naming.chunk_name(self._tag, key)
        try:
            found = self._lookup_requests.ask(lambda: self._heads.head(name))
        except (Failed, FileNotFoundError):
            return False
        return not (self._is_expired(key, found) or self._is_useless(key, found.version))

    async def _on_lookup_threads(self, items: int, work: Callable[[int], bool]) -> list[bool]:
        answers = [False] * items

        def attempt(i: int) -> bool:
            try:
                return work(i)
            except Exception as error:
                self.note_failure("read", error)
                return False

        def gave_up(left: int, first: bool) -> None:
            self.count("lookup_late", left)

        await self._lookups.fill(answers, attempt, gave_up)
        return answers

    def _greet(self, i: int) -> bool:
        """Say early what is wrong with bucket or credentials; open connections."""
        self._test(self._lookup_requests)
        return True

    def _test(self, kind: Requests) -> None:
        with contextlib.suppress(Failed):  # it was counted, and said
            kind.ask(self._heads.check, is_test=True)

    # ---- chunks --------------------------------------------------------------------------------

    async def write(
        self, keys: Sequence[bytes], chunks: Sequence[memoryview], tenants: Sequence[bytes] = ()
    ) -> list[Written]:
        check_lengths(keys, chunks)
        for key in keys:
            check_key(key)
        return await super().write(keys, chunks, tenants)

    def load(self, key: bytes, into: memoryview) -> ReadResult:
        try:
            result = super().load(key, into)
        finally:
            version = self._versions.pop(threading.get_ident(), "")
        if result is ReadResult.HIT:
            self.count("read_ok")
        elif result in (ReadResult.MISSING, ReadResult.CORRUPT):
            if result is ReadResult.CORRUPT:
                text = "object: an object is not the chunk asked for; the next store replaces it"
                self._damaged.warning(text)
            if version:  # damaged, of another version, or under another key
                self._note_useless(key, version)
            elif self._manifest is not None:
                self._manifest.discard(key)
        return result

    def get(self, key: bytes, header: memoryview, into: memoryview) -> bool | ReadResult:
        def transfer() -> bool:
            with self._room(Transfer("load", into.nbytes)):
                return self._receive(key, header, into)

        try:
            return self._reads.ask(transfer)
        except FileNotFoundError:
            return False
        except Failed as failed:
            return failed.failure.result

    def put(self, key: bytes, header: bytes, chunk: memoryview) -> Written:
        name, replace = naming.chunk_name(self._tag, key), key in self._useless

        def transfer() -> Put:
            with self._room(Transfer("store", chunk.nbytes)):
                return self._bucket.put(name, [header, chunk], replace=replace)

        try:
            put = self._writes.ask(transfer)
            if put is Put.PRESENT and self._manifest is not None and key not in self._manifest:
                self._is_there(key)  # no lookup has asked for it: it may have expired
                if replace := key in self._useless:
                    put = self._writes.ask(transfer)
        except Failed:
            return False
        if put is Put.CONFLICT and not self._is_there(key):
            self.count("write_conflict")
            self._conflicts += 1
            if self._conflicts >= _MOST_CONFLICTS:
                text = "object: each store is refused as if it met another one (409 or 304); %s"
                self._refused.warning(text, "look at the server's log, and at proxies on the way")
            return False
        self._conflicts = 0
        is_new = put is Put.STORED
        self.count("write_present" if not is_new else "write_replaced" if replace else "write_ok")
        if replace:
            with self._changing:
                self._useless.pop(key, None)
        if self._manifest is not None:
            self._manifest.add(key)
        self._renew_facts()
        return is_new or WriteResult.PRESENT

    def delete(self, key: bytes) -> None:
        try:
            self._writes.ask(lambda: self._bucket.delete(naming.chunk_name(self._tag, key)))
        except Failed:
            return
        if self._manifest is not None:
            self._manifest.discard(key)

    def interrupt(self, thread: int) -> None:
        self._cancelled.add(thread)
        self._in_flight.wake()

    @contextlib.contextmanager
    def _room(self, transfer: Transfer) -> Iterator[None]:
        """Wait for room for a chunk, and hold it."""
        self._cancelled.discard(threading.get_ident())
        try:
            self._in_flight.enter(transfer)
        except TimeoutError:
            raise Failed(BUSY) from None
        try:
            yield
        finally:
            self._in_flight.leave(transfer)

    def _go_on(self, transfer: Transfer) -> None:
        """Raise :class:`Failed` on a thread whose caller is gone."""
        if threading.get_ident() in self._cancelled:
            raise Failed(CANCELLED)

    def _receive(self, key: bytes, header: memoryview, into: memoryview) -> bool:
        """Receive an object as far as it may be the chunk; return False for one that expired."""
        until_s, me = time.monotonic() + self._options.timeout_s, threading.get_ident()
        incoming = self._bucket.receive(naming.chunk_name(self._tag, key))
        stored = incoming.stored
        self._versions[me] = stored.version
        if self._is_expired(key, stored):
            return False
        if stored.nbytes != len(header) + into.nbytes:
            if _receive_header(incoming, header):
                self._versions.pop(me)  # right, and of another length: a load of that finds it
            return True
        done = 0
        for piece in incoming.pieces():
            if me in self._cancelled:
                raise Failed(CANCELLED)
            if time.monotonic() > until_s:
                raise Failed(TIMEOUT)
            _place(piece, done, header, into)
            done += len(piece)
        return True

    def _is_expired(self, key: bytes, stored: Stored) -> bool:
        if time.time() - stored.modified_s <= self._options.ttl_s:
            return False
        if not self._is_useless(key, stored.version):
            self.count("expired")
            self._note_useless(key, stored.version)
        return True

    def _is_useless(self, key: bytes, version: str = "") -> bool:
        """Return whether a load of this version, or of what there was, failed a short while ago."""
        noted = self._useless.get(key)
        return (
            noted is not None
            and time.monotonic() < noted.until_s
            and version in ("", noted.version)
        )

    def _note_useless(self, key: bytes, version: str) -> None:
        with self._changing:
            self._useless[key] = _Useless(version, time.monotonic() + _USELESS_S)
            if len(self._useless) > _MOST_USELESS:
                self._useless.popitem(last=False)

    # ---- what it tells of itself ---------------------------------------------------------------

    def usage(self) -> Usage:
        """Return what is known without a listing: how much the bucket has is unknown.

        Begins a test of a bucket that was left alone, because an idle engine asks for no chunk.
        """
        for kind in (self._lookup_requests, self._reads):
            if kind.breaker.is_due and not self.is_closed:
                start_once(partial(self._test, kind))
        kinds = (self._lookup_requests, self._reads, self._writes)
        open_ones = {kind for kind in kinds if kind.breaker.is_open}
        gauges = {
            "up": int(not (open_ones & {self._lookup_requests, self._reads})),
            "breakers_open": len(open_ones),
            "inflight_bytes": self._in_flight.nbytes,
        }
        if self._manifest is not None:
            gauges["manifest_keys"] = len(self._manifest)
        return Usage(None, None, None, gauges)

    @property
    def place(self) -> str:
        """The bucket: a second tier in it would store each chunk twice."""
        return f"{self._options.url} {self._options.endpoint}".strip()

    def check_fit(self, chunk_bytes: int) -> None:
        if chunk_bytes < SMALL_CHUNK_BYTES:
            text = (
                "object: chunks of %s: below 1 MiB requests decide speed and price, not bytes; "
                "set blocks_per_chunk for chunks of 8 to 32 MiB"
            )
            log.warning(text, human_bytes(chunk_bytes))

    async def describe(self, facts: Mapping[str, str]) -> None:
        """Store the facts of the namespace, and again each day that chunks are stored."""
        if self.is_closed:
            return
        self._facts = msgspec.json.encode(naming.Described(self._namespace, dict(facts)))
        self._describe_at_s = time.monotonic() + _DESCRIBE_EVERY_S
        await run_once(self._put_facts)

    async def described(self) -> list[Described]:
        """Look at a part of the bucket's names."""
        return [] if self.is_closed else await self._apart(described, self._namespace)

    async def diagnose(self) -> list[Finding]:
        """Examine the bucket; then store and load, if nothing failed."""
        return await throughput(self, await self._apart(examine), IF_FAILED, IF_SLOW)

    def _renew_facts(self) -> None:
        if self._facts and time.monotonic() > self._describe_at_s:
            self._describe_at_s = time.monotonic() + _DESCRIBE_EVERY_S
            start_once(self._put_facts)

    def _put_facts(self) -> None:
        try:
            self._bucket.put(naming.facts_name(self._tag), [self._facts], replace=True)
        except Failed as failed:
            log.debug("object: the facts of the namespace could not be stored: %s", failed)

    async def purge(self, namespaces: Sequence[str]) -> int:
        removed = await super().purge(namespaces)
        if self._manifest is not None and self._namespace in namespaces:
            self._manifest.clear()
        return removed

    # ---- the end -------------------------------------------------------------------------------

    async def closing(self) -> None:
        if self._manifest is not None:
            self._manifest.close()

    def release(self) -> None:
        self._lookups.close()
        if self._manifest is not None:
            self._manifest.join()


def _receive_header(incoming: Incoming, header: memoryview) -> bool:
    """Receive the header alone, because the slot does not take what is behind it.

    Returns:
        Whether the object has all of the chunk that it begins; if not, the header stays zeros.
    """
    piece = next(incoming.pieces(), memoryview(b""))  # the rest is not received
    found = parse_header(piece[: len(header)])
    is_whole = isinstance(found, Header) and (
        found.header_bytes + found.payload_bytes == incoming.stored.nbytes
    )
    if is_whole:
        header[:] = piece[: len(header)]
    return is_whole


def _place(piece: memoryview, at: int, header: memoryview, into: memoryview) -> None:
    """Copy what arrived to its place in the header and the chunk behind it."""
    front = header[at : at + len(piece)]
    front[:] = piece[: len(front)]
    rest, start = piece[len(front) :], max(0, at - len(header))
    into[start : start + len(rest)] = rest
