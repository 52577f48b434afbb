"""Survey, check and purge of a bucket: by listings, off the path of engines.

A survey lists all names. A purge of one namespace lists its part of each of 256 folders, because
names of chunks begin with a hash.
"""

import itertools
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

from kvoffload.backends.admin import (
    Check,
    Collected,
    Command,
    Garbage,
    Holding,
    Survey,
    Verified,
    named,
)
from kvoffload.backends.base import MOST_DESCRIBED, Described
from kvoffload.backends.header import (
    COMPACT_BYTES,
    Header,
    counted_as,
    parse_header,
)
from kvoffload.backends.object.bucket import Bucket, Stored
from kvoffload.backends.object.failures import Failed
from kvoffload.backends.object.naming import (
    FACTS,
    MANIFESTS,
    SHARDS,
    ChunkName,
    facts_name,
    namespace_tag,
    parse_chunk,
    read_facts,
)
from kvoffload.backends.object.options import ObjectOptions
from kvoffload.backends.seals import ChecksumSeal, Seal, is_of
from kvoffload.backends.verification import Verification

PATIENCE_S = 30.0
"""Of a request of a command."""
_RETRIES = 3
_AT_ONCE = 16
_HEADERS_A_TURN = 256
MOST_FACTS_BYTES = 256 << 10
MOST_NAMES = 10_000
"""Names that an engine looks at for the log line of a cold start: ten requests."""
_MOST_LISTED = 1 << 26
_MOST_CHUNKS = 1 << 22
"""Chunks that one verify can choose from: about 2 GiB of names."""
_MOST_CHUNK_BYTES = 1 << 30
"""A larger object is no chunk."""
T = TypeVar("T")


class Operator(Command):
    """What one command of an operator uses."""

    def __init__(self, options: ObjectOptions, cipher: Seal | None = None) -> None:
        super().__init__(cipher)
        self.options = options
        self.bucket = Bucket(options, PATIENCE_S, _RETRIES)

    def listed(self, folder: str = "") -> Iterator[Stored]:
        """Yield the objects of a folder, or all."""
        for number, each in enumerate(self.bucket.list(folder)):
            if number == _MOST_LISTED:
                raise ConnectionError("a listing without end")
            self.pause()
            yield each

    def chunks(self, tag: str | None = None) -> Iterator[tuple[Stored, ChunkName]]:
        """Yield the chunks of one namespace, or of all."""
        listings = [self.listed()]
        if tag is not None:
            listings = [self.listed(f"{shard}/{tag}") for shard in SHARDS]
        for listing in listings:
            for stored in listing:
                if (name := parse_chunk(stored.name)) is not None:
                    yield stored, name

    def facts(self, tag: str) -> tuple[str, dict[str, str]]:
        """Return the namespace behind the part in names, and its facts, as far as is known."""
        try:
            found = read_facts(self.bucket.fetch(facts_name(tag), MOST_FACTS_BYTES))
        except (FileNotFoundError, Failed):
            found = None
        if found is None or namespace_tag(found.namespace) != tag:
            return tag, {}
        return found.namespace, found.facts


class ObjectAdmin:
    """What operators do with a bucket."""

    _options: ObjectOptions
    _cipher: Seal | None = None

    async def survey(self) -> Survey:
        """List the bucket, and return what each namespace has."""
        return await self._apart(_survey)

    async def purge(self, namespaces: Sequence[str]) -> int:
        return await self._apart(_purge, [namespace_tag(each) for each in namespaces])

    async def collect(self, wanted: Garbage) -> Collected:
        """Remove a namespace, or the chunks that were stored long ago."""
        return await self._apart(_collect, wanted)

    async def erase(self, tenant: bytes, wanted: Garbage) -> Collected:
        """Remove the chunks of a tenant, after a read of each one's header."""
        return await self._apart(_collect, wanted, tenant)

    async def verify(self, wanted: Check) -> Verified:
        """Read objects one by one."""
        return await self._apart(_verify, wanted)

    async def _apart(self, work: Callable[..., T], *given: Any) -> T:
        """Do ``work(operator, *given)`` on a thread of its own."""

        def perform(operator: Operator) -> T:
            try:
                return work(operator, *given)
            except Failed as failed:
                why = failed.failure
            raise ConnectionError(f"{self._options.url}: {why}; {why.remedy}")

        return await Operator(self._options, self._cipher).run(perform)


class _Total(NamedTuple):
    chunks: int = 0
    nbytes: int = 0
    newest_s: float = 0.0


def _totals(operator: Operator) -> dict[str, _Total]:
    totals: defaultdict[str, _Total] = defaultdict(_Total)
    for stored, name in operator.chunks():
        chunks, nbytes, newest_s = totals[name.tag]
        newest_s = max(newest_s, stored.modified_s)
        totals[name.tag] = _Total(chunks + 1, nbytes + stored.nbytes, newest_s)
    for stored in operator.listed(FACTS):
        totals.setdefault(stored.name.rpartition("/")[2], _Total())
    return totals


def _survey(operator: Operator) -> Survey:
    now, ttl_s, held = time.time(), operator.options.ttl_s, []
    for tag, total in sorted(_totals(operator).items()):
        namespace, facts = operator.facts(tag)
        age_s = max(0.0, now - total.newest_s)  # some servers round times up, or are ahead
        expires_s = max(0.0, ttl_s - age_s) if total.chunks else None
        held.append(Holding(namespace, facts, total.chunks, total.nbytes, expires_s))
    return Survey(held, {"servers": [], "bucket": operator.options.url})


def _purge(operator: Operator, tags: Sequence[str]) -> int:
    removed = 0
    for tag in tags:
        with ThreadPoolExecutor(_AT_ONCE) as pool:

            def empty(folder: str) -> int:
                return operator.bucket.delete_all([each.name for each in operator.listed(folder)])

            folders = [f"{shard}/{tag}" for shard in SHARDS] + [f"{MANIFESTS}/{tag}"]
            removed += sum(pool.map(empty, folders))
        operator.bucket.delete(facts_name(tag))
    return removed


def _collect(operator: Operator, wanted: Garbage, tenant: bytes | None = None) -> Collected:
    """Remove a namespace, or chunks by their age and by what their headers tell of a tenant."""
    tag, age_s = None, wanted.unused_s
    if wanted.namespace is not None:
        totals = _totals(operator)
        known = {operator.facts(each)[0]: each for each in totals}
        tag = known[named(wanted.namespace, known)]
        if age_s is None and tenant is None:
            if not wanted.dry_run:
                _purge(operator, [tag])
            return Collected.of_chunks(totals[tag].chunks, totals[tag].nbytes, wanted)
    if age_s is None:
        age_s = operator.options.ttl_s if tenant is None else -math.inf
    oldest_s, total = time.time() - age_s, Counter[str]()

    def chosen() -> Iterator[str]:
        old = (each for each, _ in operator.chunks(tag) if each.modified_s <= oldest_s)
        judged: Iterable[tuple[Stored, bool | None]] = ((each, True) for each in old)
        if tenant is not None:
            judged = _judged(operator, old, tenant)
        for each, is_meant in judged:
            total["unknown"] += is_meant is None
            if is_meant:
                total.update(chunks=1, nbytes=each.nbytes)
                yield each.name

    if wanted.dry_run:
        deque(chosen(), maxlen=0)
    else:
        operator.bucket.delete_all(chosen())
    removed = total["chunks"], total["nbytes"]
    if tenant is not None:
        return Collected.of_chunks(*removed, wanted, unknown=total["unknown"])
    if not wanted.dry_run:
        folder = MANIFESTS if tag is None else f"{MANIFESTS}/{tag}"
        told = (each.name for each in operator.listed(folder) if each.modified_s <= oldest_s)
        operator.bucket.delete_all(told)
    return Collected.of_chunks(*removed, wanted)


def _judged(
    operator: Operator, chunks: Iterator[Stored], tenant: bytes
) -> Iterator[tuple[Stored, bool | None]]:
    """Yield each chunk, and whether it is the tenant's; None: its header does not tell it."""

    def verdict(stored: Stored) -> bool | None:
        operator.pause()
        if stored.nbytes < COMPACT_BYTES:
            return None  # of an empty one a server refuses to return a part
        try:
            header = parse_header(operator.bucket.header(stored.name))
        except FileNotFoundError:
            return False
        return is_of(header, tenant, operator.cipher)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        while some := list(itertools.islice(chunks, _HEADERS_A_TURN)):
            yield from zip(some, pool.map(verdict, some), strict=True)


def _verify(operator: Operator, wanted: Check) -> Verified:
    chunks = list(itertools.islice(operator.chunks(), _MOST_CHUNKS + 1))
    if len(chunks) > _MOST_CHUNKS:
        raise ConnectionError(f"more than {_MOST_CHUNKS} chunks are too many for one verify")
    run = Verification(chunks, wanted, lambda chunk: chunk[0].nbytes)
    for stored, name in run.chosen:
        operator.pause()
        read_bytes, fault = 0, "corrupt_size"
        try:
            if stored.nbytes <= _MOST_CHUNK_BYTES:
                content = bytearray(operator.bucket.fetch(stored.name, _MOST_CHUNK_BYTES))
                read_bytes = len(content)
                fault = _fault(memoryview(content), name, operator.cipher)
        except FileNotFoundError:
            fault = "missing"
        remove = partial(operator.bucket.delete, stored.name)
        operator.pause(run.judge((stored, name), stored.name, fault, read_bytes, remove))
    return run.report()


def _fault(content: memoryview, name: ChunkName, cipher: Seal | None) -> str:
    """Return why loads with this cipher miss an object; empty if they do not."""
    header, payload = content[:COMPACT_BYTES], content[COMPACT_BYTES:]
    found = parse_header(header)
    namespace = found.namespace if isinstance(found, Header) else b""
    if namespace and not namespace.hex().startswith(name.tag):
        return counted_as("namespace")
    reason = (cipher or ChecksumSeal()).fault(header, payload, name.key, namespace)
    return "" if reason is None else counted_as(reason)


def described(operator: Operator, namespace: str) -> list[Described]:
    """Describe namespaces from a part of the names, the own one alone if it has chunks.

    Names of chunks begin with a hash, so the first names are a sample.
    """
    own, chunks, last = namespace_tag(namespace), Counter[str](), ""
    for looked_at, stored in enumerate(operator.listed()):
        if (name := parse_chunk(stored.name)) is not None:
            chunks[name.tag], last = chunks[name.tag] + 1, stored.name
        if looked_at == MOST_NAMES:
            break
    else:
        last = SHARDS[-1]
    if not chunks:
        return []
    scale = len(SHARDS) / (int(last[:2], 16) + 1)
    if count := chunks[own]:
        return [Described(namespace, {}, round(count * scale))]
    found = []
    for tag, count in chunks.most_common(MOST_DESCRIBED):
        other, facts = operator.facts(tag)
        found.append(Described(other, facts, round(count * scale)))
    return found
