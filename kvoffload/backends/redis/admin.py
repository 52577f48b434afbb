"""Survey, check and purge of whole servers: by SCAN in small steps, never by KEYS.

The commands use the bounded reader of the data path. So a server decides neither how much memory
a command takes, nor what a terminal shows.
"""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import compress, groupby
from typing import Any, TypeVar

from msgspec import ValidationError, convert

from kvoffload.backends.admin import (
    Check,
    Collected,
    Command,
    Garbage,
    Holding,
    Survey,
    Verified,
    counted,
    named,
)
from kvoffload.backends.base import MOST_DESCRIBED, Described, Usage
from kvoffload.backends.header import COMPACT_BYTES, parse_header
from kvoffload.backends.redis.connection import Address, Connection, Lost
from kvoffload.backends.redis.discovery import REDIRECTS, Slots, find_slots, masters
from kvoffload.backends.redis.handshake import CommandRefused, connected, expect, info_of
from kvoffload.backends.redis.namespace_info import (
    PREFIX,
    is_info,
    is_ours,
    namespace_of,
    namespace_prefix,
    read_facts,
)
from kvoffload.backends.redis.options import KEY_CONTEXT, Access
from kvoffload.backends.redis.resp import Filled, ServerError, encode
from kvoffload.backends.redis.sealer import Sealer
from kvoffload.backends.redis.value_check import StoredValue, ValueCheck
from kvoffload.backends.seals import Seal, is_of
from kvoffload.backends.secret_files import read_key
from kvoffload.backends.verification import Verification
from kvoffload.config import human_bytes
from kvoffload.errors import ConfigError

_STEP = 500
"""Names of one SCAN step, and of one removal: well below a millisecond of the server's time."""
PATIENCE_S = 10.0
"""For each connect of an operator's command, and for each command to a server."""
_MAX_DIGITS = 18
"""Digits of a server's number: below 2^63."""
MAX_FACTS_BYTES = 256 << 10
_MOST_FACTS_BYTES = 64 << 20
"""Facts that one survey reads, all together."""
_MOST_STEPS = 1 << 24
_MOST_NAMESPACES = 1 << 16
_MOST_VALUES = 1 << 23
LONGEST_S = 5.0
MOST_NAMES = 200_000
"""Names that the servers look at for the log line of a cold start, all together."""
_FEW = 100
"""Names of one SCAN of an engine, which take less than a millisecond to parse."""
_PAUSE_S = 0.001
_NO_EXPIRY = -1
"""A server's answer for a value without a time to live."""
_NO_STRING = frozenset({"WRONGTYPE"})
"""The error for a name that holds no string, as this backend never wrote one."""
_NOT_HERE = _NO_STRING | REDIRECTS
"""Of a name whose slot moves to another server, a survey reads nothing; a removal must know."""
_MOVING = (
    "chunks came to other servers meanwhile, so some may be left; run it again when none moves "
    "(of a cluster: redis-cli --cluster check)"
)
T = TypeVar("T")


class Operator(Command):
    """What one command of an operator has open.

    Args:
        access: The servers.
        cipher: Decrypts the engines' values, if they are encrypted.
    """

    def __init__(self, access: Access, cipher: Seal | None = None) -> None:
        super().__init__(cipher)
        self.access = access
        self._connection: Connection | None = None

    def cancel(self) -> None:
        super().cancel()
        if (connection := self._connection) is not None:
            connection.abort("cancelled")

    @contextlib.contextmanager
    def connected(self, address: Address) -> Iterator[Connection]:
        """Open a connection to one server; its errors name the server."""
        self.pause()
        try:
            with connected(address, self.access, PATIENCE_S) as connection:
                self._connection = connection
                self.pause()
                yield connection
        except (Lost, CommandRefused) as error:
            said = _MOVING if getattr(error, "code", "") in REDIRECTS else str(error)
            raise ConnectionError(f"{address}: {said}") from error
        except OSError as error:
            raise ConnectionError(f"connecting to {address}: {error}") from error

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Raise OSError if slots moved in a scan: chunks of them may have gone round it.

        A slot whose move began in the scan and goes on after it is not seen.
        """
        before = self._slots()
        yield
        if self._slots() != before:
            raise ConnectionError(_MOVING)

    def _slots(self) -> Slots:
        return find_slots(self.access, self.access.target.addresses, whole=True)

    def scan(
        self,
        front: str,
        work: "OnNames",
        *,
        only_ours: bool = True,
        step: int = _STEP,
        most: int | None = None,
        pause_s: float = 0.0,
    ) -> None:
        """Call ``work`` with the names on all servers that begin so, some at a time.

        Args:
            front: of the names.
            work: ends the scan by True.
            only_ours: leave out names that this backend does not make.
            step: names that a server looks at for one reply.
            most: names that all servers together look at, at most.
            pause_s: between two steps.
        """
        addresses = masters(self.access)
        steps = _MOST_STEPS if most is None else most // step // len(addresses)
        for address in addresses:
            with self.connected(address) as connection:
                cursor = b"0"
                for _ in range(steps):
                    self.pause(pause_s)
                    cursor, found = _scan_step(connection, cursor, f"{front}*", step)
                    names = [name for name in found if is_ours(name) or not only_ours]
                    if names and work(connection, names):
                        return
                    if cursor == b"0":
                        break
                else:
                    if most is None:
                        raise Lost("endless", "a SCAN without end")


OnNames = Callable[[Connection, list[bytes]], object]


def _scan_step(
    connection: Connection, cursor: bytes, pattern: str, step: int
) -> tuple[bytes, list[bytes]]:
    """Return the next cursor and the names of one SCAN, each once; raises OSError."""
    words = b"SCAN", cursor, b"MATCH", pattern.encode(), b"COUNT", b"%d" % step
    (reply,) = connection.ask_all([encode(*words)], connection.reader.table)
    if isinstance(reply, ServerError):
        raise CommandRefused("SCAN", reply)
    try:
        cursor, found = convert(reply, tuple[bytes, list[bytes]])
    except ValidationError as error:
        raise ConnectionError("SCAN: an unexpected reply") from error
    return cursor, list(dict.fromkeys(found))


class RedisAdmin:
    """What operators do with all servers of a URL."""

    _access: Access
    _sealer: Sealer

    async def survey(self) -> Survey:
        """Return what is stored, and how full each server is whose INFO the user may read."""
        return await self._apart(_survey)

    async def purge(self, namespaces: Sequence[str]) -> int:
        return await self._apart(_purge, namespaces)

    async def collect(self, wanted: Garbage) -> Collected:
        """Remove a namespace, or the chunks that were not used for long."""
        return await self._apart(_collect, wanted)

    async def erase(self, tenant: bytes, wanted: Garbage) -> Collected:
        """Remove the chunks of a tenant, of one namespace or of all."""
        return await self._apart(_collect, wanted, tenant)

    async def verify(self, wanted: Check) -> Verified:
        """Read values one by one, without a change of when they expire or are evicted."""
        return await self._apart(_verify, wanted)

    async def _apart(self, work: Callable[..., T], *given: Any) -> T:
        """Do ``work(operator, *given)`` on a thread of its own."""
        return await Operator(self._access, self._sealer.cipher).run(work, *given)


def _survey(operator: Operator) -> Survey:
    held, servers, lines = _held(operator), [], []
    for address in masters(operator.access):
        with operator.connected(address) as connection:
            info = info_of(connection.ask(b"INFO", b"memory"))
        if not info:
            continue
        used, limit = count_of(info.get("used_memory", "")), count_of(info.get("maxmemory", ""))
        name, most = str(address), human_bytes(limit) if limit else "no limit"
        servers.append({"server": name, "used_bytes": used, "limit_bytes": limit or None})
        lines.append((name, f"{human_bytes(used)} used by all data, limit: {most}"))
    return Survey(held, {"servers": servers}, lines)


def _held(operator: Operator) -> list[Holding]:
    chunks: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    facts: dict[str, dict[str, str]] = {}
    latest_ms: dict[str, float] = {}

    def add(connection: Connection, names: list[bytes]) -> None:
        stored = [name for name in names if not is_info(name)]
        described = list(filter(is_info, names))
        for name, size in zip(
            described, _of_each(connection, b"STRLEN", described, _NOT_HERE), strict=True
        ):
            if size is not None:
                is_small = size <= MAX_FACTS_BYTES and sizes[""] + size <= _MOST_FACTS_BYTES
                value = small_value(connection, b"GET", name) if is_small else b""
                facts[namespace_of(name)] = read_facts(value)
                sizes[""] += len(value)
        for name, size, left_ms in zip(
            stored,
            _of_each(connection, b"STRLEN", stored, _NOT_HERE),
            _expiries(connection, stored),
            strict=True,
        ):
            namespace = namespace_of(name)
            if size is not None:
                latest_ms[namespace] = max(latest_ms.get(namespace, 0), left_ms)
                chunks[namespace] += 1
                sizes[namespace] += size
        if len(latest_ms) + len(facts) > _MOST_NAMESPACES:
            raise ConnectionError(f"more than {_MOST_NAMESPACES} namespaces")

    operator.scan(f"{PREFIX}:", add)
    holdings = []
    for each in sorted(chunks.keys() | facts.keys()):
        last_ms = latest_ms.get(each, math.inf)
        expires_s = None if last_ms == math.inf else last_ms / 1000
        holdings.append(Holding(each, facts.get(each, {}), chunks[each], sizes[each], expires_s))
    return holdings


def _purge(operator: Operator, namespaces: Sequence[str]) -> int:
    removed = Counter[str]()

    def remove(connection: Connection, names: list[bytes]) -> None:
        removed["values"] += sum(each or 0 for each in _of_each(connection, b"UNLINK", names))

    with operator.whole():
        for namespace in namespaces:
            operator.scan(namespace_prefix(namespace), remove, only_ours=False)
    return removed["values"]


Judge = Callable[[Connection, list[bytes]], list[bool | None]]
"""Tells of each chunk whether it is meant; None: that is not known."""


def _collect(operator: Operator, wanted: Garbage, tenant: bytes | None = None) -> Collected:
    judge, front, total = _judge_of(operator, wanted, tenant), f"{PREFIX}:", Counter[str]()
    if wanted.namespace is not None:
        held = {each.namespace: each for each in _held(operator)}
        meant = held[named(wanted.namespace, held)]
        front = namespace_prefix(meant.namespace)
        if judge is None:
            if not wanted.dry_run:
                _purge(operator, [meant.namespace])
            return Collected.of_chunks(meant.chunks, meant.stored_bytes, wanted, undated=0)
    if judge is None:
        remedy = "name one, or give --older-than; chunks that are not used expire by themselves"
        raise ConfigError("namespace", None, remedy)

    def remove(connection: Connection, names: list[bytes]) -> None:
        stored = [name for name in names if not is_info(name)]
        verdicts = judge(connection, stored)
        chosen = list(compress(stored, verdicts))
        sizes = _of_each(connection, b"STRLEN", chosen)
        removed = sizes if wanted.dry_run else _of_each(connection, b"UNLINK", chosen)
        gone = [size or 0 for size, each in zip(sizes, removed, strict=True) if each]
        total.update(chunks=len(gone), bytes=sum(gone), unsure=verdicts.count(None))

    with operator.whole():
        operator.scan(front, remove)
    chunks, stored_bytes, unsure = total["chunks"], total["bytes"], total["unsure"]
    if tenant is not None:
        return Collected.of_chunks(chunks, stored_bytes, wanted, unknown=unsure)
    why = (
        f"; {unsure} chunks stay: they live longer than ttl_s, so their age is unknown; give the "
        "ttl_s of the engines with -o"
    )
    return Collected.of_chunks(chunks, stored_bytes, wanted, why if unsure else "", undated=unsure)


def _judge_of(operator: Operator, wanted: Garbage, tenant: bytes | None) -> Judge | None:
    """Return what says which chunks are meant; None: all of them are."""
    age_s, ttl_s = wanted.unused_s, operator.access.options.ttl_s
    if tenant is not None:
        if age_s is None:
            return partial(_are_of, tenant, operator.cipher)
        remedy = "goes without --tenant on Redis, where chunks that are not used expire"
        raise ConfigError("older-than", f"{age_s:g} s", remedy)
    if age_s is None:
        return None
    if age_s >= ttl_s:
        remedy = f"a chunk expires after ttl_s, {ttl_s:g} s, without use; if the engines"
        raise ConfigError("older-than", f"{age_s:g} s", f"{remedy} have another: -o ttl_s=...")
    return partial(_are_unused, age_s, ttl_s)


def _are_of(
    tenant: bytes, cipher: Seal | None, connection: Connection, names: list[bytes]
) -> list[bool | None]:
    """Return which chunks are a tenant's, by their headers."""
    end = b"%d" % (COMPACT_BYTES - 1)
    commands = [encode(b"GETRANGE", name, b"0", end) for name in names]
    verdicts: list[bool | None] = []
    for answer in connection.ask_all(commands, connection.reader.value) if commands else ():
        _refuse(b"GETRANGE", answer)
        header = parse_header(answer) if isinstance(answer, memoryview) else "type"
        verdicts.append(is_of(header, tenant, cipher))
    return verdicts


def _are_unused(
    age_s: float, ttl_s: float, connection: Connection, names: list[bytes]
) -> list[bool | None]:
    """Return which chunks are so old: each use sets their time to live to ``ttl_s``."""
    newest_ms, ttl_ms = (ttl_s - age_s) * 1000, ttl_s * 1000
    left = [each or 0 for each in _of_each(connection, b"PTTL", names)]
    return [
        None if each == _NO_EXPIRY or each > ttl_ms else 0 <= each <= newest_ms for each in left
    ]


def _verify(operator: Operator, wanted: Check) -> Verified:
    secret = read_key(operator.access.options.secret_file, KEY_CONTEXT)
    check = ValueCheck(secret, operator.cipher)
    run = Verification(_values(operator), wanted, lambda value: value.stored_bytes)
    for address, values in groupby(sorted(run.chosen), lambda value: value.address):
        with operator.connected(address) as connection:
            connection.ask(b"CLIENT", b"NO-TOUCH", b"ON")  # since Redis 7.2, and a right
            for value in values:
                operator.pause(_verify_one(connection, value, check, run))
    lines = []
    if check.unauthenticated:
        lines.append(
            f"{counted(check.unauthenticated, 'chunk')} have an authentication code, of which "
            "only the checksum was checked; give the engines' secret_file with -o"
        )
    return run.report(lines, unauthenticated=check.unauthenticated)


def _values(operator: Operator) -> list[StoredValue]:
    """Return the chunks on all servers."""
    found: list[StoredValue] = []

    def add(connection: Connection, names: list[bytes]) -> None:
        stored, address = [name for name in names if not is_info(name)], connection.address
        sizes = _of_each(connection, b"STRLEN", stored, _NOT_HERE)
        pairs = zip(stored, sizes, strict=True)
        found.extend(StoredValue(address, name, size or 0) for name, size in pairs)
        if len(found) > _MOST_VALUES:
            raise ConnectionError(f"{address}: more than {_MOST_VALUES} chunks")

    operator.scan(f"{PREFIX}:", add)
    return found


def _verify_one(
    connection: Connection,
    value: StoredValue,
    check: ValueCheck,
    run: Verification[StoredValue],
) -> float:
    """Check one value; return the seconds to wait before the next one."""
    (answer,) = connection.ask_all([encode(b"GET", value.name)], connection.reader.value)
    _refuse(b"GET", answer, _NOT_HERE)
    is_other = isinstance(answer, ServerError) and answer.code == "WRONGTYPE"
    reason, read_bytes = "corrupt_type" if is_other else "missing", 0
    if isinstance(answer, memoryview):
        reason, read_bytes = check.fault(value.name, answer) or "", answer.nbytes

    def remove() -> None:
        expect(connection, b"UNLINK", value.name)

    return run.judge(value, value.path, reason, read_bytes, remove)


def small_value(connection: Connection, command: bytes, name: bytes) -> bytes:
    """Read a value; only the beginning of one above :data:`MAX_FACTS_BYTES`. Raises OSError.

    Of one that is far too long nothing is received: the connection closes.
    """
    memory = memoryview(bytearray(MAX_FACTS_BYTES))
    read = partial(connection.reader.chunk, memory, [])
    (reply,) = connection.ask_all([encode(command, name)], read)
    _refuse(command, reply, _NOT_HERE)
    if reply is Filled.OVERSIZE:
        connection.close("oversize")
    return bytes(memory).rstrip(b"\0")  # JSON has no zero bytes


def _expiries(connection: Connection, names: Sequence[bytes]) -> list[float]:
    """Return the milliseconds left of each value; infinite without an expiry or the right."""
    try:
        left_ms = _of_each(connection, b"PTTL", names, _NOT_HERE)
    except CommandRefused:  # the user has no right to PTTL
        left_ms = [_NO_EXPIRY] * len(names)
    return [math.inf if each in (None, _NO_EXPIRY) else each for each in left_ms]


def _of_each(
    connection: Connection,
    command: bytes,
    names: Sequence[bytes],
    passed: Set[str] = _NO_STRING,
) -> list[int | None]:
    """Send the same command for each name; None for one with an error that is passed over."""
    if not names:
        return []
    commands = b"".join([encode(command, name) for name in names])
    (answers,) = connection.ask_all([commands], partial(connection.reader.numbers, len(names)))
    for answer in answers:
        _refuse(command, answer, passed)
    return [None if isinstance(answer, ServerError) else answer for answer in answers]


def _refuse(command: bytes, reply: object, passed: Set[str] = _NO_STRING) -> None:
    """Raise OSError for an error, but not for one that is passed over."""
    if isinstance(reply, ServerError) and reply.code not in passed:
        raise CommandRefused(command.decode(), reply)


def described(operator: Operator, namespace: str) -> list[Described]:
    """Describe namespaces, the largest first: the own one alone if it has chunks.

    An engine's user needs no right to SCAN: without it, nothing is found.

    Raises:
        OSError: a server cannot be reached, or refuses.
    """
    until_s = time.monotonic() + LONGEST_S
    chunks, facts_at = Counter[str](), dict[str, Address]()

    def note(connection: Connection, names: list[bytes]) -> bool:
        for name in names:
            if is_info(name):
                facts_at[namespace_of(name)] = connection.address
            else:
                chunks[namespace_of(name)] += 1
        return bool(chunks[namespace]) or time.monotonic() > until_s

    try:
        operator.scan(f"{PREFIX}:", note, step=_FEW, most=MOST_NAMES, pause_s=_PAUSE_S)
    except ConnectionError as error:
        refused = error.__cause__
        if not (isinstance(refused, CommandRefused) and refused.command == "SCAN"):
            raise
    if count := chunks[namespace]:
        return [Described(namespace, {}, count)]
    largest = [each for each, _ in chunks.most_common() if each in facts_at]
    wanted, found = largest[:MOST_DESCRIBED], list[Described]()
    for address in dict.fromkeys(facts_at[each] for each in wanted):
        with operator.connected(address) as connection:
            for each in wanted:
                if facts_at[each] == address:
                    name = f"{namespace_prefix(each)}facts".encode()
                    # The command with which engines load, for which they have the right.
                    facts = read_facts(small_value(connection, b"GETEX", name))
                    found.append(Described(each, facts, chunks[each]))
                if connection.lost:
                    break  # a value was far too long
    return found


def usage_of(infos: Sequence[Mapping[str, str]], db: int) -> Usage:
    """Sum up the servers' ``INFO``."""
    used = sum(count_of(info.get("used_memory", "")) for info in infos)
    limits = [count_of(info.get("maxmemory", "")) for info in infos]
    # db0:keys=12,expires=12,...
    databases = [info.get(f"db{db}", "").partition(",")[0] for info in infos]
    keys = sum(count_of(each.removeprefix("keys=")) for each in databases)
    return Usage(used, sum(limits) if limits and all(limits) else None, keys)


def count_of(digits: str) -> int:
    """Parse a server's number; 0 for a malformed one."""
    return int(digits) if digits.isdecimal() and len(digits) <= _MAX_DIGITS else 0
