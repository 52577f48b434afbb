"""Looking at, and emptying, what servers hold: by SCAN in small steps, never by KEYS."""

import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote, unquote

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from kvoffload.backends.redis_channel import Address
from kvoffload.backends.redis_control import control_client
from kvoffload.backends.redis_discovery import SentinelResolver, fetch_slots
from kvoffload.backends.redis_options import Access, RedisOptions, Target
from kvoffload.backends.upkeep import Aged, Holding
from kvoffload.errors import ConfigError

PREFIX = "kvoffload"
_STEP = 500
"""Names a SCAN looks at, and at most as many removed at once: well below a millisecond each."""
_PATIENCE_S = 10.0
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


@asynccontextmanager
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
    """Say what the servers hold; see :class:`~kvoffload.backends.upkeep.Surveys`."""
    chunks: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    facts: dict[str, dict[str, str]] = {}
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
                    namespace = unquote(name.split(b":")[1].decode())
                    if _is_facts(name):
                        facts[namespace] = _read_facts(value)
                    else:
                        chunks[namespace] += 1
                        sizes[namespace] += value
    return [
        Holding(namespace, facts.get(namespace, {}), chunks[namespace], sizes[namespace])
        for namespace in sorted(chunks.keys() | facts.keys())
    ]


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
    """Remove chunks by age; see :class:`~kvoffload.backends.upkeep.PurgesByAge`.

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


def _is_facts(name: bytes) -> bool:
    return name.endswith(b":facts")


def _read_facts(value: Any) -> dict[str, str]:
    try:
        return msgspec.json.decode(value or b"{}", type=dict[str, str])
    except (msgspec.DecodeError, ValueError, RecursionError):
        return {}
