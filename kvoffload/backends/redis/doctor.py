"""The doctor: checks of a Redis before engines depend on it, each with a remedy."""

import contextlib
import ipaddress
import os
import socket
import statistics
import time
from collections.abc import Mapping, Sequence

from kvoffload.backends.admin import Finding, first_of
from kvoffload.backends.redis.admin import Operator, count_of
from kvoffload.backends.redis.connection import Address, Connection, Lost
from kvoffload.backends.redis.discovery import ask, masters
from kvoffload.backends.redis.handshake import CommandRefused, expect, info_of
from kvoffload.backends.redis.options import Access
from kvoffload.backends.redis.resp import ServerError
from kvoffload.config import human_bytes
from kvoffload.errors import HIDDEN, ConfigError
from kvoffload.facts import escaped

OLDEST = (6, 2)
"""The first version with GETEX, which reads a chunk and prolongs its life in one command."""
_RIGHTS = "~kvoffload:* +getex +psetex +exists +pexpire +unlink +ping +info"
"""The rights of an engine's user."""
_CLUSTER_RIGHTS = " +cluster|slots +asking"
"""Those that a cluster needs as well."""
IF_FAILED = "full, or slower than timeout_s and min_bandwidth allow"
IF_SLOW = "recomputing may be faster; look at the network and the server's load"
_PINGS = 50
_DETAIL_CHARS = 1000
_HIDE_CHARS = 4
"""Shorter passwords stay in texts: hiding them would hide half the message."""


def examine(operator: Operator) -> list[Finding]:
    """Examine every server of a URL."""
    access = operator.access
    try:
        addresses = masters(access)
    except (OSError, ValueError) as error:
        return [_explain(error, access)]
    findings: list[Finding] = []
    if kind := access.target.kind:
        findings.append(Finding("topology", "ok", f"{kind}: {', '.join(map(str, addresses))}"))
    examined = [_examine(address, operator) for address in addresses]
    findings += [finding for each in examined for finding in each]
    if any(len(each) > 1 for each in examined):  # a server answered
        findings += _check_secrets(access, is_encrypted=operator.cipher is not None)
    return findings


def _examine(address: Address, operator: Operator) -> list[Finding]:
    access = operator.access
    try:
        with operator.connected(address) as connection:
            findings = [
                _check_latency(connection, address),
                _check_encryption(address, access),
                _check_password(address, access),
                _check_rights(connection, access.target.kind == "cluster"),
            ]
            reply = connection.ask(b"INFO")
            if isinstance(reply, ServerError):
                remedy = (
                    "allow +info: memory and policy can be checked, restarts are noticed sooner"
                )
                return [*findings, Finding("info", "warning", "INFO is not allowed", remedy)]
            return findings + _check_info(info_of(reply))
    except (OSError, ValueError) as error:
        return [_explain(error, access)]


def _check_latency(connection: Connection, address: Address) -> Finding:
    expect(connection, b"PING")
    times = []
    for _ in range(_PINGS):
        began = time.perf_counter()
        expect(connection, b"PING")
        times.append(time.perf_counter() - began)
    median_ms, worst_ms = statistics.median(times) * 1e3, max(times) * 1e3
    detail = f"{address} answers in {median_ms:.2f} ms (median), {worst_ms:.2f} ms (worst)"
    if median_ms > 5:
        return Finding("latency", "warning", detail, "a tier shared by engines needs a near server")
    return Finding("latency", "ok", detail)


def _check_encryption(address: Address, access: Access) -> Finding:
    if access.target.tls:
        return Finding("encryption", "ok", "TLS, certificate and host name checked")
    if _is_local(address):
        return Finding("encryption", "ok", "none, and the data does not leave this machine")
    problem = "the network carries chunks in the clear; they reveal prompts"
    return Finding("encryption", "warning", problem, "use rediss://, or a private network")


def _check_password(address: Address, access: Access) -> Finding:
    if access.password():
        if _accepts_no_password(address, access):
            return Finding(
                "password",
                "failed",
                "the server answers without a password, too: its default user needs none",
                "ACL SETUSER default off, in the server's configuration or ACL file as well",
            )
        of_url = "the user of the URL" if access.username else "default"
        return Finding("password", "ok", f"introduced as {access.options.username or of_url}")
    if _is_local(address):
        return Finding("password", "ok", "none, on this machine")
    remedy = f"ACL SETUSER kvoffload on >... {_RIGHTS}; name it in username and password_file"
    problem = "every client that reaches the port reads and replaces chunks"
    return Finding("password", "warning", problem, remedy)


def _accepts_no_password(address: Address, access: Access) -> bool:
    try:
        return ask(address, access, access.options.connect_timeout_s, ("", ""), b"PING") == b"PONG"
    except OSError:
        return False


def _check_secrets(access: Access, *, is_encrypted: bool) -> list[Finding]:
    found = [Finding("secrets", "warning", *weakness) for weakness in access.weaknesses()]
    if is_encrypted:
        return [*found, Finding("authenticity", "ok", "encryption authenticates values")]
    if access.options.secret_file:
        return [*found, Finding("authenticity", "ok", "secret_file authenticates values")]
    problem = "values are not authenticated: every user with write access can inject prompts"
    remedy = (
        "openssl rand -hex 32 > FILE, the same for all engines; name it in secret_file, or in "
        "encryption, which also hides what is stored"
    )
    return [*found, Finding("authenticity", "warning", problem, remedy)]


def _check_rights(connection: Connection, is_cluster: bool) -> Finding:
    name = b"kvoffload:doctor:{%b}" % os.urandom(8).hex().encode()
    refused = []
    for command in (
        (b"PSETEX", name, b"10000", b"x"),
        (b"GETEX", name, b"PX", b"10000"),
        (b"EXISTS", name),
        (b"PEXPIRE", name, b"10000"),
        (b"UNLINK", name),
        *([(b"ASKING",)] if is_cluster else ()),
    ):
        reply = connection.ask(*command)
        # A MOVED names the server of the slot: this one checks rights first.
        if isinstance(reply, ServerError) and reply.code != "MOVED":
            refused.append(f"{command[0].decode().lower()}: {reply.text}")
    if not refused:
        return Finding("rights", "ok", "every command the data path needs is allowed")
    more = _CLUSTER_RIGHTS if is_cluster else ""
    remedy = (
        f"ACL SETUSER <user> {_RIGHTS}{more}; a read-only replica or a full server refuses psetex"
    )
    return Finding("rights", "failed", "; ".join(refused), remedy)


def _check_info(info: Mapping[str, str]) -> list[Finding]:
    """Check what the server tells of itself."""

    def number(name: str) -> int:
        return count_of(info.get(name, ""))

    version, role = info.get("redis_version", "0"), info.get("role", "master")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    valkey = info.get("server_name") == "valkey"
    limit, used, system = map(number, ("maxmemory", "used_memory", "total_system_memory"))
    policy = info.get("maxmemory_policy", "noeviction")
    limited = f"maxmemory {human_bytes(limit)}, {policy}"
    memory = f"{human_bytes(used)} used, {number('evicted_keys'):,} keys evicted so far"
    # A replica that joins makes the server fork, too. Before Redis 7 nothing tells them apart.
    are_of_replicas = "rdb_saves" in info and number("connected_slaves")
    has_forked = number("latest_fork_usec") and not are_of_replicas
    return [
        first_of(
            "version",
            (valkey, "ok", f"Valkey {info.get('valkey_version', version)}", ""),
            (numbers < OLDEST, "failed", f"Redis {version}",
             "needs 6.2 or newer: it lacks GETEX"),
            (True, "ok", f"Redis {version}", ""),
        ),
        first_of(
            "role",
            (role != "master", "failed", "a read-only replica",
             "give the master's address, or Sentinels"),
            (True, "ok", f"master, {number('connected_slaves')} replicas", ""),
        ),
        first_of(
            "policy",
            (not limit, "warning", "no memory limit: it grows until the kernel ends it",
             "CONFIG SET maxmemory <bytes>, maxmemory-policy allkeys-lru"),
            (policy == "noeviction", "warning", limited,
             "a full server refuses every store; allkeys-lru (or volatile-lru if shared) evicts"),
            (policy.endswith("random"), "warning", limited,
             "lru or lfu keeps the used chunks; random does not"),
            (True, "ok", limited, ""),
        ),
        first_of(
            "memory",
            (max(limit, used) > 0.8 * system > 0, "warning", f"{memory}, of {human_bytes(system)}",
             "leave a fifth of the machine's memory for buffers, forks and fragmentation"),
            (True, "ok", memory, ""),
        ),
        first_of(
            "persistence",
            (number("aof_enabled"), "warning", "appendonly is on",
             "a cache needs no append-only file, which writes every chunk to disk; appendonly no"),
            (number("rdb_saves") or has_forked, "warning",
             "the server takes snapshots",
             "each snapshot forks and may double the memory used; save ''"),
            (True, "ok", "none seen", ""),
        ),
    ]  # fmt: skip


def _is_local(address: Address) -> bool:
    try:
        return bool(address.path) or ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return address.host == "localhost"


# ---- servers that cannot be examined -------------------------------------------------------------

_TLS_REMEDY = (
    "is the port a TLS port, does ca_file hold the issuer of the server's certificate, is it for "
    "this name and in date, and does the server ask for cert_file and key_file?"
)


def _explain(error: BaseException, access: Access) -> Finding:
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) and cause not in causes:
        causes.append(cause)
    check, remedy = _explanation(causes, access)
    text = str(error) or type(error).__name__
    for password in (access.password, access.sentinel_password):  # servers quote commands
        with contextlib.suppress(ConfigError):
            if len(secret := password()) >= _HIDE_CHARS:
                text = text.replace(secret, HIDDEN)
    return Finding(check, "failed", escaped(text, _DETAIL_CHARS), remedy)


def _explanation(causes: Sequence[BaseException], access: Access) -> tuple[str, str]:
    """Return the failed check and its remedy: first what a server answered, then why none did."""

    def caused_by(kind: type[BaseException]) -> bool:
        return any(isinstance(each, kind) for each in causes)

    refused = [each for each in causes if isinstance(each, CommandRefused)]
    codes = {"NOAUTH" if each.command == "AUTH" else each.code for each in refused}
    text, target = str(causes[0]), access.target
    more = _CLUSTER_RIGHTS if target.kind == "cluster" else ""
    more += " +select" if target.db else ""
    path, tls = bool(target.addresses[0].path), target.tls
    hint = f"; {_TLS_REMEDY}" if tls else ""  # a plain port waits for more bytes of a TLS hello
    general = "check host, port, firewall and that the server runs"
    is_late = any(isinstance(e, TimeoutError) or str(e) == "no reply in time" for e in causes)
    closed = caused_by(ConnectionResetError) or any("closed" in str(each) for each in causes)
    rows = (
        (codes & {"NOAUTH", "WRONGPASS"}, "password", _password_remedy(text, access)),
        ("NOPERM" in codes, "rights", f"ACL SETUSER <user> {_RIGHTS}{more}"),
        ("LOADING" in codes, "reachable",
         "it is reading its snapshot: wait; and a cache needs none (save '')"),
        ("cluster support disabled" in text, "topology",
         "this server is no part of a cluster: write redis://host:port"),
        ("slots have no server" in text, "topology",
         "redis-cli --cluster check lists them; each server needs its cluster-announce-hostname"),
        (any(each.command == "SENTINEL" for each in refused), "topology",
         "this server is no Sentinel: write redis://host:port, or give Sentinels"),
        ("DB index is out of range" in text, "database",
         f"the server has no database {target.db}: CONFIG GET databases returns their number; "
         "the first is 0, behind the host"),
        (any(isinstance(each, Lost) and each.reason == "protocol" for each in causes),
         "protocol", "the server is not Redis: check the port (default 6379)"),
        (caused_by(socket.gaierror), "reachable",
         "no such host name is known here: check the spelling, and the resolver"),
        (path and caused_by(FileNotFoundError), "reachable",
         "there is no such socket: compare with unixsocket in the server's configuration"),
        (path and caused_by(PermissionError), "reachable",
         "this user may not use the socket: unixsocketperm 770, and the server's group"),
        (path, "reachable", "no server listens on this socket: start the server"),
        (target.kind == "sentinel" and not any(isinstance(e, OSError) for e in causes[1:]),
         "reachable", "check the service's name, and that its master runs"),
        (caused_by(ConnectionRefusedError), "reachable",
         "nothing listens there: check host and port, and that the server runs"),
        (is_late, "reachable", f"{general}{hint}"),
        (tls, "encryption", _TLS_REMEDY),
        (closed, "reachable",
         "it closes connections: a TLS port, which needs rediss://, or not Redis"),
        (True, "reachable", general),
    )  # fmt: skip
    return next((check, remedy) for applies, check, remedy in rows if applies)


def _password_remedy(text: str, access: Access) -> str:
    sentinel = "Sentinel" in text
    prefix, kind = ("sentinel_", "Sentinels' password") if sentinel else ("", "password")
    given = [f"{prefix}{name}" for name in ("password_env", "password_file")]
    if source := next((name for name in given if getattr(access.options, name)), ""):
        where = f"{source} does not hold the {kind} of this user"
    else:
        where = f"the server wants a {kind}, and none is given"
    return f"{where}: set {prefix}username and {prefix}password_file; ACL LIST shows the users"
