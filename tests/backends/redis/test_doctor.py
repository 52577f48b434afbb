"""The doctor's findings at their limits: replies of a server, and errors without one."""

import asyncio
import errno
import itertools
import re
import socket

import pytest
from redis_fakes import FakeRedis, bulk, polite

from kvoffload.backends.admin import throughput
from kvoffload.backends.memory import MemoryBackend, MemoryOptions
from kvoffload.backends.redis import doctor as redis_doctor
from kvoffload.backends.redis.admin import Operator
from kvoffload.backends.redis.connection import Lost
from kvoffload.backends.redis.handshake import CommandRefused
from kvoffload.backends.redis.options import Access, RedisOptions
from kvoffload.backends.redis.resp import ServerError

GIB = 1 << 30
SOUND = {
    "redis_version": "7.2.4",
    "role": "master",
    "connected_slaves": "2",
    "maxmemory": str(GIB),
    "maxmemory_policy": "allkeys-lru",
    "used_memory": str(GIB // 2),
    "evicted_keys": "12345",
    "total_system_memory": str(4 * GIB),
    "aof_enabled": "0",
    "rdb_saves": "0",
    "latest_fork_usec": "0",
}

FORKED = {"latest_fork_usec": "7"}


def access_of(url, **settings):
    return Access(RedisOptions(url=url, **settings))


async def examined(answer, host="127.0.0.1", **settings):
    """Return the findings about a server that replies with ``answer``."""
    async with FakeRedis(answer) as server:
        settings = {"connect_timeout_s": 10.0, **settings}
        access = access_of(f"redis://{host}:{server.port}", **settings)
        findings = await asyncio.to_thread(redis_doctor.examine, Operator(access))
        backend = MemoryBackend(MemoryOptions(), "doctor")
        return await throughput(backend, findings, redis_doctor.IF_FAILED, redis_doctor.IF_SLOW)


def answering(info, /, **refused):
    """Return the replies of a server with this INFO that refuses some commands."""
    text = "".join(f"{name}:{value}\r\n" for name, value in info.items())

    def answer(words):
        if error := refused.get(words[0].decode().lower()):
            return b"-%b\r\n" % error
        return bulk(text.encode()) if words[0].upper() == b"INFO" else polite(words)

    return answer


async def of_server(**info):
    return {f.check: f for f in await examined(answering({**SOUND, **info}))}


async def test_a_sound_server_has_no_fault():
    findings = await of_server()
    assert {name: finding.verdict for name, finding in findings.items()} == {
        "latency": "ok",
        "encryption": "ok",
        "password": "ok",
        "rights": "ok",
        "version": "ok",
        "role": "ok",
        "policy": "ok",
        "memory": "ok",
        "persistence": "ok",
        "authenticity": "warning",
        "throughput": findings["throughput"].verdict,
    }
    assert findings["encryption"].detail == "none, and the data does not leave this machine"
    assert findings["password"].detail == "none, on this machine"
    assert findings["version"].detail == "Redis 7.2.4"
    assert findings["role"].detail == "master, 2 replicas"
    assert findings["policy"].detail == "maxmemory 1.0 GiB, allkeys-lru"
    assert findings["memory"].detail == "512.0 MiB used, 12,345 keys evicted so far"
    assert findings["persistence"].detail == "none seen"
    assert "secret_file" in findings["authenticity"].remedy
    assert all(f.remedy == "" for f in findings.values() if f.verdict == "ok")


@pytest.mark.parametrize(
    ("check", "info", "verdict", "detail"),
    [
        ("version", {"redis_version": "6.2.0"}, "ok", "Redis 6.2.0"),
        ("version", {"redis_version": "6.1.9"}, "failed", "Redis 6.1.9"),
        ("version", {"redis_version": "5.9"}, "failed", "Redis 5.9"),
        ("version", {"redis_version": "10.0.1"}, "ok", "Redis 10.0.1"),
        ("version", {"redis_version": "unknown"}, "failed", "Redis unknown"),
        (
            "version",
            {"redis_version": "5.0", "server_name": "valkey", "valkey_version": "8.1.0"},
            "ok",
            "Valkey 8.1.0",
        ),
        ("role", {"role": "slave"}, "failed", "read-only replica"),
        ("policy", {"maxmemory": "0"}, "warning", "no memory limit"),
        ("policy", {"maxmemory_policy": "noeviction"}, "warning", "1.0 GiB, noeviction"),
        ("policy", {"maxmemory_policy": "volatile-random"}, "warning", "volatile-random"),
        ("policy", {"maxmemory_policy": "volatile-lfu"}, "ok", "volatile-lfu"),
        ("memory", {"total_system_memory": str(GIB + GIB // 4)}, "ok", "512.0 MiB used"),
        ("memory", {"total_system_memory": str(GIB + GIB // 4 - 8)}, "warning", "of 1.2 GiB"),
        (
            "memory",
            {"maxmemory": "0", "used_memory": str(2 * GIB), "total_system_memory": str(2 * GIB)},
            "warning",
            "of 2.0 GiB",
        ),
        ("memory", {"total_system_memory": "0"}, "ok", "12,345 keys"),
        ("persistence", {"aof_enabled": "1"}, "warning", "appendonly is on"),
        ("persistence", {"rdb_saves": "1"}, "warning", "takes snapshots"),
        ("persistence", FORKED | {"connected_slaves": "0"}, "warning", "takes snapshots"),
        ("persistence", FORKED, "ok", "none seen"),  # as for a replica that joined
    ],
)
async def test_each_field_of_info_has_a_finding(check, info, verdict, detail):
    finding = (await of_server(**info))[check]
    assert finding.verdict == verdict
    assert detail in finding.detail
    assert bool(finding.remedy) == (verdict != "ok")


async def test_a_fork_of_a_server_that_counts_no_snapshots_counts_as_one():
    before_7 = SOUND | FORKED
    del before_7["rdb_saves"]
    found = {finding.check: finding for finding in await examined(answering(before_7))}
    assert found["persistence"].detail == "the server takes snapshots"


async def test_a_server_without_info_is_still_examined():
    findings = await examined(answering(SOUND, info=b"NOPERM no"))
    found = {finding.check: finding for finding in findings}
    assert found["info"].verdict == "warning"
    assert "+info" in found["info"].remedy
    assert "version" not in found
    assert [finding.check for finding in findings].count("throughput") == 2
    findings = {f.check: f for f in await examined(answering({}))}
    assert findings["version"].detail == "Redis 0"
    assert findings["role"].detail == "master, 0 replicas"
    assert findings["memory"].detail == "0 B used, 0 keys evicted so far"
    assert findings["policy"].verdict == "warning"


async def test_refused_commands_are_named_and_prevent_the_measurement():
    refused = {"psetex": b"OOM full", "unlink": b"NOPERM no", "getex": b"MOVED 7 127.0.0.1:1"}
    findings = await examined(answering(SOUND, **refused))
    found = {finding.check: finding for finding in findings}
    assert found["rights"].verdict == "failed"
    # A redirect is no refusal: the server checks rights first.
    assert re.fullmatch(r"psetex: .*full; unlink: .*no", found["rights"].detail)
    assert "throughput" not in found


async def test_a_server_on_another_machine_needs_encryption_and_a_password():
    found = {f.check: f for f in await examined(answering(SOUND), host="0.0.0.0")}
    assert found["encryption"].verdict == found["password"].verdict == "warning"
    assert "rediss://" in found["encryption"].remedy
    assert "ACL SETUSER" in found["password"].remedy
    found = {f.check: f for f in await examined(answering(SOUND), host="localhost")}
    assert found["encryption"].verdict == found["password"].verdict == "ok"


@pytest.mark.parametrize(("ms", "verdict"), [(5, "ok"), (6, "warning")])
async def test_a_slow_server_is_a_warning(monkeypatch, ms, verdict):
    readings = itertools.cycle([0.0, ms / 1000])
    monkeypatch.setattr(redis_doctor.time, "perf_counter", lambda: next(readings))
    found = await examined(answering(SOUND))
    (latency,) = [finding for finding in found if finding.check == "latency"]
    assert latency.verdict == verdict
    assert latency.detail.endswith(f"answers in {ms:.2f} ms (median), {ms:.2f} ms (worst)")


class Measured(MemoryBackend):
    """Refuses some stores and counts the removed chunks."""

    refused, removed = 0, 0

    async def write(self, keys, chunks):
        answers = await super().write(keys, chunks)
        return [i >= self.refused and good for i, good in enumerate(answers)]

    async def remove(self, keys):
        self.removed += len(keys)
        await super().remove(keys)


@pytest.mark.parametrize(
    ("seconds", "refused", "verdicts", "detail"),
    [
        (0.16, 0, ["ok", "ok"], "store: 200.0 MiB/s with chunks of 2.0 MiB"),
        (0.17, 0, ["warning", "warning"], "store: 188.2 MiB/s with chunks of 2.0 MiB"),
        (0.1, 3, ["failed", "ok"], "3 of 16 chunks failed; store: 260.0 MiB/s"),
    ],
)
async def test_transfers_are_measured_and_their_chunks_removed(
    monkeypatch, seconds, refused, verdicts, detail
):
    readings = iter([0.0, seconds, 0.0, seconds])
    monkeypatch.setattr(redis_doctor.time, "perf_counter", lambda: next(readings))
    backend = Measured(MemoryOptions(), "doctor")
    backend.refused = refused
    findings = await throughput(backend, [], redis_doctor.IF_FAILED, redis_doctor.IF_SLOW)
    assert [finding.verdict for finding in findings] == verdicts
    assert findings[0].detail.startswith(detail)
    assert all(bool(f.remedy) == (f.verdict != "ok") for f in findings)
    assert (backend.removed, backend.usage().chunks) == (16, 0)


# ---- servers that cannot be examined -------------------------------------------------------------


def explained(error, url="redis://host", cause=None, **settings):
    error.__cause__ = cause
    finding = redis_doctor._explain(error, access_of(url, **settings))
    assert finding.verdict == "failed"
    return finding


def refused_by(command, text):
    return CommandRefused(command, ServerError.parse(text))


@pytest.mark.parametrize(
    ("error", "url", "check", "remedy"),
    [
        (socket.gaierror(-2, "unknown"), "redis://h", "reachable", "no such host name"),
        (ConnectionRefusedError(), "redis://h", "reachable", "nothing listens there"),
        (TimeoutError(), "redis://h", "reachable", "check host, port, firewall"),
        (ConnectionResetError(), "redis://h", "reachable", "needs rediss://"),
        (Lost("closed"), "redis://h", "reachable", "needs rediss://"),
        (Lost("timeout", "no reply in time"), "redis://h", "reachable", "check host, port, fire"),
        (ConnectionError("odd"), "redis://h", "reachable", "check host, port, firewall"),
        (ConnectionError("odd"), "rediss://h", "encryption", "ca_file"),
        (FileNotFoundError(), "unix:///s", "reachable", "no such socket"),
        (PermissionError(), "unix:///s", "reachable", "may not use the socket"),
        (ConnectionRefusedError(), "unix:///s", "reachable", "no server listens on this socket"),
        (ConnectionError("x"), "redis+sentinel://h/m", "reachable", "the service's name"),
        (refused_by("PING", b"NOPERM x"), "redis://h", "rights", "+info"),
        (refused_by("PING", b"NOPERM x"), "redis+cluster://h", "rights", "+cluster|slots"),
        (refused_by("PING", b"NOPERM x"), "redis://h/3", "rights", "+select"),
        (refused_by("PING", b"LOADING x"), "redis://h", "reachable", "reading its snapshot"),
        (refused_by("SENTINEL", b"ERR x"), "redis+sentinel://h/m", "topology", "no Sentinel"),
        (refused_by("AUTH", b"ERR x"), "redis://h", "password", "none is given"),
        (refused_by("PING", b"WRONGPASS x"), "redis://h", "password", "none is given"),
        (Lost("protocol", "protocol: x"), "redis://h", "protocol", "not Redis"),
    ],
)
def test_a_failed_connect_and_an_error_reply_are_explained(error, url, check, remedy):
    finding = explained(error, url)
    assert finding.check == check
    assert remedy in finding.remedy


def test_a_timeout_under_tls_may_be_a_plain_port():
    assert "TLS port" in explained(TimeoutError(), "rediss://h").remedy
    assert "TLS port" not in explained(TimeoutError(), "redis://h").remedy


def test_the_cause_of_an_error_decides():
    behind = ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    error = ConnectionError("no Sentinel names a master")
    finding = explained(error, "redis+sentinel://h/m", cause=behind)
    assert finding.remedy.startswith("nothing listens there")
    assert finding.detail == "no Sentinel names a master"
    circular = ConnectionError("a")
    circular.__cause__ = ConnectionError("b")
    circular.__cause__.__cause__ = circular
    assert redis_doctor._explain(circular, access_of("redis://h")).check == "reachable"


def test_a_remedy_names_only_the_rights_that_the_url_needs():
    remedy = explained(refused_by("PING", b"NOPERM x"), "redis://h").remedy
    assert "+select" not in remedy
    assert "cluster" not in remedy


def test_a_password_of_four_characters_is_hidden_and_a_shorter_one_is_no_secret(login):
    assert explained(ConnectionError("of pass"), **login("u", "pass")).detail == "of ***"
    assert explained(ConnectionError("of pas"), **login("u", "pas")).detail == "of pas"
    assert explained(ConnectionError(), "redis://h").detail == "ConnectionError"


def test_a_source_of_a_password_is_named(monkeypatch, tmp_path):
    (tmp_path / "pw").write_text("password")
    monkeypatch.setenv("KV", "password")
    for settings, text in (
        ({"password_env": "KV"}, "password_env does not hold the password"),
        ({"password_file": f"{tmp_path}/pw"}, "password_file does not hold the password"),
    ):
        error = refused_by("AUTH", b"WRONGPASS x")
        assert explained(error, **settings).remedy.startswith(text)
