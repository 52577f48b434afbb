"""Survey, check and purge of whole servers: by SCAN in small steps, never by KEYS.

The control plane uses redis-py with deadlines and without retries: by default redis-py retries a
dead server for about a minute.
"""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from kvoffload.backends.admin import (
    Check,
    Collected,
    Garbage,
    Holding,
    Survey,
    Verified,
    counted,
    named,
)
from kvoffload.backends.base import Usage
from kvoffload.backends.header import OTHER_VERSION
from kvoffload.backends.redis.channel import Address
from kvoffload.backends.redis.discovery import masters
from kvoffload.backends.redis.namespace_info import (
    PREFIX,
    is_info,
    is_ours,
    namespace_of,
    namespace_prefix,
    read_facts,
)
from kvoffload.backends.redis.options import Access, value_key
from kvoffload.backends.redis.value_check import StoredValue, ValueCheck
from kvoffload.backends.verification import Verification
from kvoffload.config import human_bytes
from kvoffload.errors import ConfigError

_STEP = 500
"""Names of one SCAN step, and of one removal: well below a millisecond of the server's time."""
_PATIENCE_S = 10.0
_MAX_DIGITS = 18
"""Digits of a server's number: below 2^63."""
_NO_EXPIRY = -1
"""A server's answer for a value without a time to live."""


@contextlib.asynccontextmanager
async def client_of(address: Address, access: Access) -> AsyncIterator[Redis]:
    """Open a redis-py client for one server; its errors become OSError."""
    options = access.options
    tls: dict[str, Any] = {}
    if access.tls is not None:
        tls = {
            "ssl": True,
            "ssl_check_hostname": True,
            "ssl_ca_certs": options.ca_file or None,
            "ssl_certfile": options.cert_file or None,
            "ssl_keyfile": options.key_file or None,
        }
    client = Redis(
        host=address.host,
        port=address.port,
        unix_socket_path=address.path or None,
        db=access.target.db,
        username=access.username or None,
        password=access.password() or None,
        socket_timeout=_PATIENCE_S,
        socket_connect_timeout=_PATIENCE_S,
        retry=Retry(NoBackoff(), 0),
        protocol=2,  # HELLO needs a right that the user may lack
        **tls,
    )
    try:
        yield client
    except RedisError as error:
        raise ConnectionError(f"{address}: {error}") from error
    finally:
        await client.aclose()


class RedisAdmin:
    """What operators do with all servers of a URL."""

    _access: Access

    async def survey(self) -> Survey:
        """Return what is stored, and how full each server is whose INFO the user may read."""
        held, servers, lines = await self._held(), [], []
        for address in await masters(self._access):
            async with client_of(address, self._access) as client:
                with contextlib.suppress(ResponseError):
                    info: dict[str, Any] = await client.info("memory")
                    name, used = str(address), count_of(str(info.get("used_memory", "")))
                    limit = count_of(str(info.get("maxmemory", ""))) or None
                    servers.append({"server": name, "used_bytes": used, "limit_bytes": limit})
                    most = "no limit" if limit is None else human_bytes(limit)
                    lines.append((name, f"{human_bytes(used)} used by all data, limit: {most}"))
        return Survey(held, {"servers": servers}, lines)

    async def _held(self) -> list[Holding]:
        chunks: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        facts: dict[str, dict[str, str]] = {}
        latest_ms: dict[str, float] = {}

        async def add(client: Redis, names: list[bytes]) -> None:
            described = [name for name in names if is_info(name)]
            for name, text in zip(described, await _of_each(client, "GET", described), strict=True):
                if text is not None:
                    facts[namespace_of(name)] = read_facts(text)
            stored = [name for name in names if not is_info(name)]
            for name, size, left_ms in zip(
                stored,
                await _of_each(client, "STRLEN", stored),
                await _expiries(client, stored),
                strict=True,
            ):
                namespace = namespace_of(name)
                latest_ms[namespace] = max(latest_ms.get(namespace, 0), left_ms)
                if size is not None:
                    chunks[namespace] += 1
                    sizes[namespace] += size

        await self._scan(f"{PREFIX}:*", add)
        holdings = []
        for each in sorted(chunks.keys() | facts.keys()):
            last_ms = latest_ms.get(each, math.inf)
            expires_s = None if last_ms == math.inf else last_ms / 1000
            holdings.append(
                Holding(each, facts.get(each, {}), chunks[each], sizes[each], expires_s)
            )
        return holdings

    async def purge(self, namespaces: Sequence[str]) -> int:
        removed = Counter[str]()

        async def remove(client: Redis, names: list[bytes]) -> None:
            removed["values"] += sum(await _of_each(client, "UNLINK", names))

        for namespace in namespaces:
            await self._scan(f"{namespace_prefix(namespace)}*", remove, only_ours=False)
        return removed["values"]

    async def collect(self, wanted: Garbage) -> Collected:
        """Remove a namespace, or the chunks that were not used for long."""
        meant, total = None, Counter[str]()
        if wanted.namespace is not None:
            held = {each.namespace: each for each in await self._held()}
            meant = held[named(wanted.namespace, held)]
            total = Counter(chunks=meant.chunks, bytes=meant.stored_bytes)
        if wanted.unused_s is not None:
            name = meant and meant.namespace
            total = await self._remove_unused(wanted.unused_s, name, dry_run=wanted.dry_run)
        elif meant is None:
            remedy = "name one, or give --older-than; chunks that are not used expire by themselves"
            raise ConfigError("namespace", None, remedy)
        elif not wanted.dry_run:
            await self.purge([meant.namespace])
        summary = f"{counted(total['chunks'], 'chunk')}, {human_bytes(total['bytes'])}"
        if total["undated"]:
            summary += (
                f"; {total['undated']} chunks stay: they live longer than ttl_s, so their age is "
                "unknown; give the ttl_s of the engines with -o"
            )
        figures = {
            "dry_run": wanted.dry_run,
            "removed": total["chunks"],
            "freed_bytes": total["bytes"],
            "undated": total["undated"],
        }
        return Collected(summary, figures)

    async def _remove_unused(
        self, age_s: float, namespace: str | None, *, dry_run: bool
    ) -> Counter[str]:
        """Remove chunks by age: each use sets their time to live to ``ttl_s``.

        Returns:
            ``chunks`` and ``bytes`` removed, and chunks that stay because their age is unknown.
        """
        ttl_s = self._access.options.ttl_s
        if age_s >= ttl_s:
            remedy = f"a chunk expires after ttl_s, {ttl_s:g} s, without use; if the engines"
            raise ConfigError("older-than", f"{age_s:g} s", f"{remedy} have another: -o ttl_s=...")
        total = Counter[str]()

        async def remove_old(client: Redis, names: list[bytes]) -> None:
            stored = [name for name in names if not is_info(name)]
            left_ms = dict(zip(stored, await _of_each(client, "PTTL", stored), strict=True))
            total["undated"] += sum(
                each == _NO_EXPIRY or each > ttl_s * 1000 for each in left_ms.values()
            )
            old = [name for name in stored if 0 <= left_ms[name] <= (ttl_s - age_s) * 1000]
            sizes = await _of_each(client, "STRLEN", old)
            removed = sizes if dry_run else await _of_each(client, "UNLINK", old)
            gone = [size or 0 for size, each in zip(sizes, removed, strict=True) if each]
            total["chunks"] += len(gone)
            total["bytes"] += sum(gone)

        front = f"{PREFIX}:" if namespace is None else namespace_prefix(namespace)
        await self._scan(f"{front}*", remove_old)
        return total

    async def verify(self, wanted: Check) -> Verified:
        """Read values one by one, without a change of when they expire or are evicted."""
        check = ValueCheck(value_key(self._access.options.secret_file))
        run = Verification(await self._values(), wanted, lambda value: value.stored_bytes)
        for address, values in groupby(sorted(run.chosen), lambda value: value.address):
            async with client_of(address, self._access) as client:
                with contextlib.suppress(ResponseError):  # since Redis 7.2, and a right
                    await _of_each(client, "CLIENT NO-TOUCH", [b"ON"])
                for value in values:
                    await asyncio.sleep(await _verify(client, value, check, run))
        lines = []
        if check.unauthenticated:
            lines.append(
                f"{counted(check.unauthenticated, 'chunk')} have an authentication code, of which "
                "only the checksum was checked; give the engines' secret_file with -o"
            )
        return run.report(lines, unauthenticated=check.unauthenticated)

    async def _values(self) -> list[StoredValue]:
        """Return the chunks on all servers."""
        found: list[StoredValue] = []

        async def add(client: Redis, names: list[bytes]) -> None:
            stored = [name for name in names if not is_info(name)]
            sizes = await _of_each(client, "STRLEN", stored)
            found.extend(
                StoredValue(address, name, size or 0)
                for name, size in zip(stored, sizes, strict=True)
            )

        for address in await masters(self._access):
            await self._scan_one(address, f"{PREFIX}:*", add)
        return found

    async def _scan(
        self,
        pattern: str,
        work: Callable[[Redis, list[bytes]], Awaitable[None]],
        *,
        only_ours: bool = True,
    ) -> None:
        """Call ``work`` with the names on every server that fit a pattern, some at a time."""
        for address in await masters(self._access):
            await self._scan_one(address, pattern, work, only_ours=only_ours)

    async def _scan_one(
        self,
        address: Address,
        pattern: str,
        work: Callable[[Redis, list[bytes]], Awaitable[None]],
        *,
        only_ours: bool = True,
    ) -> None:
        async with client_of(address, self._access) as client:
            cursor = None
            while cursor != 0:
                cursor, found = await client.scan(cursor or 0, match=pattern, count=_STEP)
                names = dict.fromkeys(name for name in found if isinstance(name, bytes))
                if wanted := [name for name in names if is_ours(name) or not only_ours]:
                    await work(client, wanted)


async def _verify(
    client: Redis, value: StoredValue, check: ValueCheck, run: Verification[StoredValue]
) -> float:
    """Check one value; return the seconds to wait before the next one."""
    found, reason, is_gone = b"", None, False
    try:
        answer: Any = await client.get(value.name)
    except ResponseError as error:
        if not _is_foreign(error):
            raise
        reason = "corrupt_type"
    else:
        found, is_gone = answer or b"", answer is None
        reason = None if is_gone else check.fault(value.name, found)
    if reason == OTHER_VERSION:
        run.add_other_version()
    elif reason:
        if run.repairs:
            await client.unlink(value.name)
        why = "removed" if run.repairs else "left in place"
        run.add_damage(value.path, reason, why, removed=run.repairs)
    return run.add(len(found), value.stored_bytes, is_gone=is_gone)


async def _expiries(client: Redis, names: Sequence[bytes]) -> list[float]:
    """Return the milliseconds left of each value; infinite without an expiry or the right."""
    try:
        left_ms = await _of_each(client, "PTTL", names)
    except ResponseError:  # the user has no right to PTTL
        left_ms = [_NO_EXPIRY] * len(names)
    return [math.inf if each == _NO_EXPIRY else each for each in left_ms]


async def _of_each(client: Redis, command: str, names: Sequence[bytes]) -> list[Any]:
    """Send the same command for each name; None for a name that holds no string."""
    pipe = client.pipeline(transaction=False)
    for name in names:
        pipe.execute_command(command, name)
    answers = await pipe.execute(raise_on_error=False) if names else []
    for answer in answers:
        if isinstance(answer, RedisError) and not _is_foreign(answer):
            raise answer
    return [None if _is_foreign(answer) else answer for answer in answers]


def _is_foreign(value: object) -> bool:
    """Return True if a reply says that a name holds no string, so this backend did not write it."""
    return isinstance(value, ResponseError) and str(value).startswith("WRONGTYPE")


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
