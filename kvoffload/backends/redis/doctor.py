"""What an operator should know about a Redis before engines depend on it, each with a remedy."""

import ipaddress
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import MovedError, RedisError

from kvoffload.backends.admin import Finding
from kvoffload.backends.base import Backend
from kvoffload.backends.redis.admin import client_of, masters
from kvoffload.backends.redis.channel import Address
from kvoffload.backends.redis.diagnosis import RIGHTS, refusal
from kvoffload.backends.redis.discovery import ask
from kvoffload.backends.redis.options import Access, RedisOptions, Target
from kvoffload.config import human_bytes

OLDEST = (6, 2)
"""GETEX, which reads a chunk and prolongs its life in one command, came with this version."""
_PROBES = 50
_CHUNKS, _CHUNK_BYTES = 16, 2 << 20
_SLOW_BYTES_PER_S = 200e6


async def diagnose(
    target: Target, options: RedisOptions, access: Access, backend: Backend
) -> list[Finding]:
    """Examine every server behind a URL.

    Args:
        target: what its URL says.
        options: its settings.
        access: its credentials.
        backend: stores and loads for the throughput, and removes what it stored.
    """
    try:
        addresses = await masters(target, options, access)
    except (OSError, ValueError) as error:
        return [refusal(error, target, options, access)]
    findings: list[Finding] = []
    if target.kind:
        listed = ", ".join(str(address) for address in addresses)
        findings.append(Finding("topology", "ok", f"{target.kind}: {listed}"))
    examined = [await _examine(address, target, options, access) for address in addresses]
    findings += [finding for each in examined for finding in each]
    if any(len(each) > 1 for each in examined):  # a server answered
        findings += _secrets(options, access)
    if not any(finding.verdict == "failed" for finding in findings):
        findings += await _throughput(backend)
    return findings


async def _examine(
    address: Address, target: Target, options: RedisOptions, access: Access
) -> list[Finding]:
    try:
        async with client_of(address, options, access) as client:
            findings = [await _reachable(client, address)]
            findings.append(_encryption(address, target))
            findings.append(await _password(address, options, access))
            findings += await _rights(client)
            try:
                info: dict[str, Any] = await client.info()
            except RedisError:
                remedy = (
                    "allow +info: memory and policy can be checked, restarts are noticed sooner"
                )
                findings.append(Finding("info", "warning", "INFO is not allowed", remedy))
                return findings
            return findings + _by_info(info)
    except (OSError, ValueError) as error:
        return [refusal(error, target, options, access)]


async def _reachable(client: Redis, address: Address) -> Finding:
    await client.ping()
    times = []
    for _ in range(_PROBES):
        began = time.perf_counter()
        await client.ping()
        times.append(time.perf_counter() - began)
    median_ms, worst_ms = statistics.median(times) * 1e3, max(times) * 1e3
    detail = f"{address} answers in {median_ms:.2f} ms (median), {worst_ms:.2f} ms (worst)"
    if median_ms > 5:
        return Finding("latency", "warning", detail, "a tier shared by engines wants a server near")
    return Finding("latency", "ok", detail)


def _encryption(address: Address, target: Target) -> Finding:
    if target.tls:
        return Finding("encryption", "ok", "TLS, certificate and host name checked")
    if address.path or _is_loopback(address.host):
        return Finding("encryption", "ok", "none, and the data does not leave this machine")
    return Finding(
        "encryption",
        "warning",
        "chunks travel in the clear; prompts can be read out of them",
        "use rediss://, or a network nobody else is on",
    )


async def _password(address: Address, options: RedisOptions, access: Access) -> Finding:
    if access.password():
        if await _lets_in_anybody(address, options, access):
            return Finding(
                "password",
                "failed",
                "the server answers without a password, too: its default user needs none",
                "ACL SETUSER default off, in the server's configuration or ACL file as well",
            )
        of_url = "the user of the URL" if access.username else "default"
        return Finding("password", "ok", f"introduced as {options.username or of_url}")
    if address.path or _is_loopback(address.host):
        return Finding("password", "ok", "none, on this machine")
    return Finding(
        "password",
        "warning",
        "anyone who reaches the port reads and replaces chunks",
        f"ACL SETUSER kvoffload on >... {RIGHTS}; name it in username and password_file",
    )


async def _lets_in_anybody(address: Address, options: RedisOptions, access: Access) -> bool:
    try:
        return await ask(address, access, options.connect_timeout_s, ("", ""), b"PING") == b"PONG"
    except OSError:
        return False


def _secrets(options: RedisOptions, access: Access) -> list[Finding]:
    found = [
        Finding("secrets", "warning", weakness.problem, weakness.remedy)
        for weakness in access.weaknesses()
    ]
    if options.secret_file:
        return [*found, Finding("authenticity", "ok", "values are authenticated by secret_file")]
    problem = "values are not authenticated: whoever may write here injects prompts"
    remedy = "openssl rand -hex 32 > FILE, the same for all engines; name it in secret_file"
    return [*found, Finding("authenticity", "warning", problem, remedy)]


async def _rights(client: Redis) -> list[Finding]:
    name = f"kvoffload:doctor:{{{os.urandom(8).hex()}}}"
    steps: Mapping[str, Callable[[], Awaitable[Any]]] = {
        "psetex": lambda: client.psetex(name, 10_000, b"x"),
        "getex": lambda: client.getex(name, px=10_000),
        "exists": lambda: client.exists(name),
        "pexpire": lambda: client.pexpire(name, 10_000),
        "unlink": lambda: client.unlink(name),
    }
    refused = []
    for step, work in steps.items():
        try:
            await work()
        except MovedError:
            continue  # another server's slot: rights are checked before that
        except RedisError as error:
            refused.append(f"{step}: {error}")
    if not refused:
        return [Finding("rights", "ok", "every command the data path needs is allowed")]
    remedy = f"ACL SETUSER <user> {RIGHTS}; a read-only replica or a full server refuses psetex"
    return [Finding("rights", "failed", "; ".join(refused), remedy)]


def _by_info(info: Mapping[str, Any]) -> list[Finding]:
    return [_version(info), _role(info), _policy(info), _memory(info), _persistence(info)]


def _version(info: Mapping[str, Any]) -> Finding:
    text = str(info.get("redis_version", "0"))
    name = str(info.get("server_name", "redis"))
    if name == "valkey":
        return Finding("version", "ok", f"Valkey {info.get('valkey_version', text)}")
    numbers = tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())
    if numbers >= OLDEST:
        return Finding("version", "ok", f"Redis {text}")
    return Finding("version", "failed", f"Redis {text}", "needs 6.2 or newer: it lacks GETEX")


def _role(info: Mapping[str, Any]) -> Finding:
    role = str(info.get("role", "master"))
    if role == "master":
        return Finding("role", "ok", f"master, {info.get('connected_slaves', 0)} replicas")
    return Finding(
        "role", "failed", "a read-only replica", "give the master's address, or Sentinels"
    )


def _policy(info: Mapping[str, Any]) -> Finding:
    limit, policy = int(info.get("maxmemory", 0)), str(info.get("maxmemory_policy", "noeviction"))
    if not limit:
        return Finding(
            "policy",
            "warning",
            "no memory limit: it grows until the kernel ends it",
            "CONFIG SET maxmemory <bytes>, maxmemory-policy allkeys-lru",
        )
    detail = f"maxmemory {human_bytes(limit)}, {policy}"
    if policy == "noeviction":
        remedy = "a full server refuses every store; allkeys-lru (or volatile-lru if shared) evicts"
        return Finding("policy", "warning", detail, remedy)
    if policy.endswith("random"):
        return Finding(
            "policy", "warning", detail, "lru or lfu keeps what is used; random does not"
        )
    return Finding("policy", "ok", detail)


def _memory(info: Mapping[str, Any]) -> Finding:
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    system = int(info.get("total_system_memory", 0))
    detail = f"{human_bytes(used)} used, {int(info.get('evicted_keys', 0)):,} keys evicted so far"
    if system and max(limit, used) > 0.8 * system:
        remedy = "leave a fifth of the machine's memory for buffers, forks and fragmentation"
        return Finding("memory", "warning", f"{detail}, of {human_bytes(system)}", remedy)
    return Finding("memory", "ok", detail)


def _persistence(info: Mapping[str, Any]) -> Finding:
    if int(info.get("aof_enabled", 0)):
        remedy = "a cache needs no append-only file: every chunk is written to disk too"
        return Finding("persistence", "warning", "appendonly is on", f"{remedy}; appendonly no")
    if int(info.get("rdb_saves", 0)) or int(info.get("latest_fork_usec", 0)):
        remedy = "each snapshot forks and may double the memory used; save ''"
        return Finding("persistence", "warning", "snapshots are taken", remedy)
    return Finding("persistence", "ok", "none seen")


async def _throughput(backend: Backend) -> list[Finding]:
    keys = [os.urandom(36) for _ in range(_CHUNKS)]
    memory = [memoryview(bytearray(_CHUNK_BYTES)) for _ in keys]
    findings = []
    try:
        await backend.contains(keys)  # connects
        for what, work in (("store", backend.write), ("load", backend.read)):
            began = time.perf_counter()
            ok = await work(keys, memory)
            per_s = ok.count(True) * _CHUNK_BYTES / (time.perf_counter() - began)
            detail = f"{what}: {human_bytes(per_s)}/s with chunks of {human_bytes(_CHUNK_BYTES)}"
            if not all(ok):
                missed = f"{ok.count(False)} of {len(ok)} chunks failed; {detail}"
                remedy = "full, or slower than timeout_s and min_bandwidth allow"
                findings.append(Finding("throughput", "failed", missed, remedy))
            elif per_s < _SLOW_BYTES_PER_S:
                remedy = "recomputing may be faster; look at the network and the server's load"
                findings.append(Finding("throughput", "warning", detail, remedy))
            else:
                findings.append(Finding("throughput", "ok", detail))
        return findings
    finally:
        await backend.remove(keys)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
