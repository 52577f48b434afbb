"""Looking at, and emptying, what servers hold: by SCAN in small steps, never by KEYS."""

import contextlib
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from kvoffload.backends.admin import Aged, Holding, ServerTotal
from kvoffload.backends.base import Usage
from kvoffload.backends.redis.channel import Address
from kvoffload.backends.redis.discovery import SentinelResolver, fetch_slots
from kvoffload.backends.redis.options import Access, RedisOptions, Target
from kvoffload.backends.redis.redis_py import control_client
from kvoffload.errors import ConfigError

PREFIX = "kvoffload"
_STEP = 500
"""Names a SCAN looks at, and at most as many removed at once: well below a millisecond each."""
_PATIENCE_S = 10.0
_MAX_DIGITS = 18
"""Of a count that a server gives: below 2^63."""
_NO_EXPIRY = -1
"""A server's answer for a value without a time to live."""
_OURS = re.compile(rb"kvoffload:[!-9;-~]+:(?:facts|[0-9a-z-]+:\{[0-9a-f]+\})")
"""Names as they are made here, in ASCII. Whatever else begins like them is somebody else's."""


async def masters(target: Target, options: RedisOptions, access: Access) -> list[Address]:
    """Every server that holds a part of the data.

    Raises:
        OSError: none can be asked.
    """
    if target.kind == "sentinel":
        return [await SentinelResolver(target, options, access)()]
    if target.kind != "cluster":
        return [target.addresses[0]]
    failure: OSError = OSError("no seeds")
    for seed in target.addresses:
        try:
            slots = await fetch_slots(seed, options, access)
            return list(dict.fromkeys(address for _, _, address in slots))
        except (OSError, ValueError) as error:
            failure = OSError(f"{seed}: {error}")
            failure.__cause__ = error
    raise failure


@contextlib.asynccontextmanager
async def client_of(
    address: Address, options: RedisOptions, access: Access
) -> AsyncIterator[Redis]:
    """A client for one server; its errors come out as OSError."""
    client = control_client(address, options, access, _PATIENCE_S)
    try:
        yield client
    except RedisError as error:
        raise ConnectionError(f"{address}: {error}") from error
    finally:
        await client.aclose()


async def survey(target: Target, options: RedisOptions, access: Access) -> list[Holding]:
    """Say what the servers hold; see :class:`~kvoffload.backends.admin.Admin`."""
    chunks: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    facts: dict[str, dict[str, str]] = {}
    expiry = _Expiry()
    for address in await masters(target, options, access):
        async with client_of(address, options, access) as client:
            async for found in _scan(client, f"{PREFIX}:*"):
                names = [name for name in found if _OURS.fullmatch(name)]
                pipe = client.pipeline(transaction=False)
                for name in names:
                    (pipe.get if _is_facts(name) else pipe.strlen)(name)
                for name, value in zip(
                    names, await pipe.execute(raise_on_error=False), strict=True
                ):
                    if _is_foreign(value):
                        continue
                    if isinstance(value, RedisError):
                        raise value
                    namespace = _namespace_of(name)
                    if _is_facts(name):
                        facts[namespace] = _read_facts(value)
                    else:
                        chunks[namespace] += 1
                        sizes[namespace] += value
                await expiry.add(client, [name for name in names if not _is_facts(name)])
    return [
        Holding(
            namespace,
            facts.get(namespace, {}),
            chunks[namespace],
            sizes[namespace],
            expiry.latest_s(namespace),
        )
        for namespace in sorted(chunks.keys() | facts.keys())
    ]


class _Expiry:
    """When the last chunk of each namespace expires, as far as the user may ask."""

    def __init__(self) -> None:
        self._latest_ms: dict[str, float] = {}

    async def add(self, client: Redis, names: Sequence[bytes]) -> None:
        try:
            left_ms = await _of_each(client, "PTTL", names)
        except ResponseError:  # a user without this right
            left_ms = [_NO_EXPIRY] * len(names)
        for name, each in zip(names, left_ms, strict=True):
            namespace = _namespace_of(name)
            found_ms = math.inf if each == _NO_EXPIRY else each
            self._latest_ms[namespace] = max(self._latest_ms.get(namespace, 0), found_ms)

    def latest_s(self, namespace: str) -> float | None:
        latest_ms = self._latest_ms.get(namespace, math.inf)
        return None if latest_ms == math.inf else latest_ms / 1000


async def totals(target: Target, options: RedisOptions, access: Access) -> list[ServerTotal]:
    """Say how full the servers are; see :class:`~kvoffload.backends.admin.Admin`."""
    found = []
    for address in await masters(target, options, access):
        async with client_of(address, options, access) as client:
            with contextlib.suppress(ResponseError):  # a user without this right
                info: dict[str, Any] = await client.info("memory")
                used_bytes, limit_bytes = (
                    count_of(str(info.get(name, ""))) for name in ("used_memory", "maxmemory")
                )
                found.append(ServerTotal(str(address), used_bytes, limit_bytes or None))
    return found


async def purge(
    target: Target, options: RedisOptions, access: Access, prefixes: Sequence[str]
) -> int:
    """Remove every name that begins with one of these; return how many there were."""
    removed = 0
    for address in await masters(target, options, access):
        async with client_of(address, options, access) as client:
            for prefix in prefixes:
                async for names in _scan(client, f"{prefix}*"):
                    pipe = client.pipeline(transaction=False)
                    for name in names:
                        pipe.unlink(name)
                    removed += sum(await pipe.execute())
    return removed


async def purge_unused(
    target: Target,
    options: RedisOptions,
    access: Access,
    age_s: float,
    namespace: str | None,
    *,
    dry_run: bool,
) -> Aged:
    """Remove chunks by age; see :class:`~kvoffload.backends.admin.Admin`.

    Each store and load sets a chunk's time to live to ``ttl_s``: what is missing of it is the age.
    """
    if age_s >= options.ttl_s:
        remedy = f"what nothing used for ttl_s, {options.ttl_s:g} s, has expired; if the engines"
        raise ConfigError("older-than", f"{age_s:g} s", f"{remedy} have another: -o ttl_s=...")
    total = Counter[str]()
    pattern = f"{PREFIX}:{'*' if namespace is None else quote(namespace, safe='') + ':*'}"
    for address in await masters(target, options, access):
        async with client_of(address, options, access) as client:
            async for found in _scan(client, pattern):
                names = [n for n in found if _OURS.fullmatch(n) and not _is_facts(n)]
                left_ms = await _of_each(client, "PTTL", names)
                total["undated"] += sum(
                    each == _NO_EXPIRY or each > options.ttl_s * 1000 for each in left_ms
                )
                old = [
                    name
                    for name, each in zip(names, left_ms, strict=True)
                    if 0 <= each <= (options.ttl_s - age_s) * 1000
                ]
                sizes = await _of_each(client, "STRLEN", old)
                gone = [bool(size) for size in sizes]
                if not dry_run:
                    gone = [bool(each) for each in await _of_each(client, "UNLINK", old)]
                total["chunks"] += sum(gone)
                total["bytes"] += sum(s for s, removed in zip(sizes, gone, strict=True) if removed)
    return Aged(total["chunks"], total["bytes"], total["undated"])


async def _of_each(client: Redis, command: str, names: Sequence[bytes]) -> list[int]:
    """Ask the same of each name; 0 for one that holds no string."""
    pipe = client.pipeline(transaction=False)
    for name in names:
        pipe.execute_command(command, name)
    answers = await pipe.execute(raise_on_error=False) if names else []
    for answer in answers:
        if isinstance(answer, RedisError) and not _is_foreign(answer):
            raise answer
    return [0 if _is_foreign(answer) else int(answer) for answer in answers]


async def _scan(client: Redis, pattern: str) -> AsyncIterator[list[bytes]]:
    cursor = 0
    while True:
        cursor, found = await client.scan(cursor, match=pattern, count=_STEP)
        if names := list(dict.fromkeys(name for name in found if isinstance(name, bytes))):
            yield names
        if not cursor:
            return


def _is_foreign(value: object) -> bool:
    """Whether a reply says that a name of ours holds no string: somebody else put it there."""
    return isinstance(value, ResponseError) and str(value).startswith("WRONGTYPE")


def _namespace_of(name: bytes) -> str:
    return unquote(name.split(b":")[1].decode())


def _is_facts(name: bytes) -> bool:
    return name.endswith(b":facts")


def _read_facts(value: Any) -> dict[str, str]:
    try:
        return msgspec.json.decode(value or b"{}", type=dict[str, str])
    except (msgspec.DecodeError, ValueError, RecursionError):
        return {}


def usage_of(infos: Sequence[Mapping[str, str]], db: int) -> Usage:
    """Add up what servers said of themselves (``INFO``)."""
    used = sum(count_of(info.get("used_memory", "")) for info in infos)
    limits = [count_of(info.get("maxmemory", "")) for info in infos]
    keys = sum(_keys(info, db) for info in infos)
    return Usage(used, sum(limits) if limits and all(limits) else None, keys)


def _keys(info: Mapping[str, str], db: int) -> int:
    """The number in ``db0:keys=12,expires=12,...``."""
    return count_of(info.get(f"db{db}", "").partition(",")[0].removeprefix("keys="))


def count_of(digits: str) -> int:
    """A count that a server gives; 0 for what is none, as 5,000 digits are."""
    return int(digits) if digits.isdecimal() and len(digits) <= _MAX_DIGITS else 0
