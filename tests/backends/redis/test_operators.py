"""Messages for operators about faults, and about servers with odd content."""

import asyncio
import contextlib
import json
import socket
import ssl
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import disk_commands
import pytest

from kvoffload.backends import admin
from kvoffload.backends.memory import MemoryBackend, MemoryOptions
from tests.support.redis_engine import PATIENT, store
from tests.support.redis_server import BINARY, MISSING, RedisServer, free_port, make_certificates

pytestmark = pytest.mark.skipif(BINARY is None, reason=MISSING)
AT_EASE = [word for name, value in PATIENT.items() for word in ("-o", f"{name}={value}")]


kvoffload = partial(disk_commands.kvoffload, COLUMNS="400")


def failure(*words):
    """Return the single failed finding of a doctor."""
    done = kvoffload("doctor", *words, *AT_EASE, "--json")
    assert done.returncode == 1, done.stderr
    findings = json.loads(done.stdout)["findings"]
    (failed,) = [finding for finding in findings if finding["verdict"] == "failed"]
    assert " object at 0x" not in done.stdout
    return failed


def words_of(options):
    """Options as a command has them."""
    return [word for pair in options.items() for word in ("-o", "=".join(pair))]


def test_a_doctor_names_the_password_that_is_wrong_or_missing(server, tmp_path):
    server.cli("config", "set", "requirepass", "right")
    bare = f"redis://127.0.0.1:{server.port}"
    found = failure(bare)
    assert found["check"] == "password"
    assert "none is given" in found["remedy"]
    (tmp_path / "password").write_text("wrong")
    found = failure(bare, "-o", f"password_file={tmp_path}/password")
    assert found["check"] == "password"
    assert "password_file does not hold" in found["remedy"]


def test_a_doctor_names_rights_sockets_names_and_ports(server, login):
    server.cli("acl", "setuser", "kv", "on", ">p", "~kvoffload:*", "-@all")
    found = failure(server.url, *words_of(login("kv", "p")))
    assert found["check"] == "rights"
    assert "ACL SETUSER" in found["remedy"]
    assert "no such socket" in failure("unix:///nowhere.sock")["remedy"]
    assert "no such host name" in failure("redis://surely.invalid")["remedy"]
    assert "nothing listens" in failure(f"redis://127.0.0.1:{free_port()}")["remedy"]
    assert "nothing listens" in failure(f"redis+cluster://127.0.0.1:{free_port()}")["remedy"]


def test_a_doctor_says_what_each_sentinel_said(server, tmp_path):
    away = free_port()
    found = failure(f"redis+sentinel://127.0.0.1:{away}/m")
    assert f"127.0.0.1:{away}: " in found["detail"]
    assert "nothing listens" in found["remedy"]
    watched = f"sentinel monitor mine 127.0.0.1 {server.port} 1"
    sentinel = RedisServer(tmp_path / "sentinel", sentinel=[watched])
    try:
        found = failure(f"redis+sentinel://127.0.0.1:{sentinel.port}/other")
        assert "knows only ['mine']" in found["detail"]
        assert "service's name" in found["remedy"]
    finally:
        sentinel.stop()


def test_a_doctor_names_the_password_of_the_sentinels(server, tmp_path):
    watched = f"sentinel monitor mine 127.0.0.1 {server.port} 1"
    sentinel = RedisServer(tmp_path / "sentinel", sentinel=[watched, "requirepass right"])
    url = f"redis+sentinel://127.0.0.1:{sentinel.port}/mine"
    (tmp_path / "password").write_text("wrong")
    try:
        found = failure(url)
        assert found["check"] == "password"
        assert "wants a Sentinels' password" in found["remedy"]
        found = failure(url, "-o", f"sentinel_password_file={tmp_path}/password")
        assert "sentinel_password_file does not hold" in found["remedy"]
    finally:
        sentinel.stop()


def test_a_doctor_names_what_is_wrong_with_encryption(tmp_path):
    files = make_certificates(tmp_path / "certificates")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["cert"], files["key"])
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with contextlib.suppress(OSError), listener.accept()[0] as taken:
                context.wrap_socket(taken, server_side=True).close()

        port = listener.getsockname()[1]
        for url, check, remedy in (
            (f"rediss://127.0.0.1:{port}", "encryption", "ca_file"),
            (f"redis://127.0.0.1:{port}", "reachable", "rediss://"),
        ):
            thread = threading.Thread(target=serve)
            thread.start()
            found = failure(url)
            thread.join()
            assert (found["check"], remedy in found["remedy"]) == (check, True), found


def test_a_doctor_does_not_name_the_user_of_the_url(server, login):
    server.cli("acl", "setuser", "hunter", "on", ">p", "~kvoffload:*", "+@all")
    server.cli("acl", "setuser", "default", "off")
    words = ["-o", f"password_env={login('', 'p')['password_env']}"]
    shown = kvoffload("doctor", f"redis://hunter@127.0.0.1:{server.port}", *words).stdout
    assert "introduced as the user of the URL" in shown
    assert "hunter" not in shown


ODD_FACTS = {"path": "a[/]b", "x": "[red]c[/red]", "note": "\x1b[31m:smile:\n"}


class SlowToConnect(MemoryBackend):
    """Takes 10 s on a clock of its own to connect, and then 0.1 s a call."""

    def __init__(self):
        super().__init__(MemoryOptions(), "n")
        self.now_s, self.connected = 0.0, False

    async def _spend(self, call, *given):
        self.now_s += 0.1 if self.connected else 10.0
        self.connected = True
        return await call(*given)

    async def contains(self, keys):
        return await self._spend(super().contains, keys)

    async def write(self, keys, chunks):
        return await self._spend(super().write, keys, chunks)

    async def read(self, keys, into):
        return await self._spend(super().read, keys, into)


async def test_a_doctor_measures_transfers_without_the_time_to_connect(monkeypatch):
    backend = SlowToConnect()
    clock = SimpleNamespace(perf_counter=lambda: backend.now_s)
    monkeypatch.setattr(admin, "time", clock)
    findings = await admin.throughput(backend, [], "", "")
    assert [finding.detail.split(" with")[0] for finding in findings] == [
        "store: 320.0 MiB/s",
        "load: 320.0 MiB/s",
    ]


def test_a_survey_passes_over_what_others_put_beside_the_chunks(server):
    asyncio.run(store(server.url, "ours", 3, ODD_FACTS))
    server.cli("set", "kvoffload:foreign", "x")
    server.cli("lpush", "kvoffload:list:xxh3:{0a}", "x")
    server.cli("lpush", "kvoffload:ours:xxh3:{0a}", "x")
    server.cli("lpush", "kvoffload:listed:facts", "x")
    server.cli("set", "kvoffload:bad:facts", "[" * 100_000)
    server.cli("set", "kvoffload:number:facts", '{"a": 1}')
    server.cli("eval", "redis.call('set', 'kvoffload:\\255x:xxh3:{0}', '1')", "0")
    done = kvoffload("inspect", server.url, "-v")
    assert done.returncode == 0, done.stderr
    assert r"note=\x1b[31m:smile:\x0a, path=a[/]b, x=[red]c[/red]" in done.stdout
    held = json.loads(kvoffload("inspect", server.url, "--json").stdout)["namespaces"]
    counted = {each["namespace"]: each["chunks"] for each in held}
    assert counted == {"ours": 3, "bad": 0, "number": 0}


def test_gc_takes_the_digits_that_inspect_shows(server):
    ours, near, other = "0123456789abcdef" * 4, "0123456789" + "f" * 54, "e" * 64
    for namespace in (ours, near, other):
        asyncio.run(store(server.url, namespace, 2, {"model": "m"}))

    def gc(wanted):
        done = kvoffload("gc", server.url, "--namespace", wanted, "--json")
        return json.loads(done.stdout)["removed"] if not done.returncode else done.stderr

    assert "no such namespace" in gc("nosuch")
    assert "2 namespaces begin like that" in gc("0123456789")
    assert "8 digits" in gc("eeeeeee")
    assert gc(ours[:16]) == 2
    assert gc("eeeeeeee") == 2
    assert gc(near) == 2
    assert kvoffload("gc", server.url, "--namespace", near).returncode == 2  # it is gone


def test_a_doctor_names_what_answers_in_place_of_what_the_url_says(server):
    for url, check, remedy in (
        (f"redis+sentinel://127.0.0.1:{server.port}/m", "topology", "no Sentinel"),
        (f"redis+cluster://127.0.0.1:{server.port}", "topology", "no part of a cluster"),
        (f"{server.url}/99", "database", "no database 99"),
    ):
        found = failure(url)
        assert found["check"] == check, found
        assert remedy in found["remedy"]
        assert "firewall" not in found["remedy"]


@pytest.mark.parametrize("kind", ["", "+cluster", "+sentinel"])
def test_a_doctor_notices_a_port_of_something_else(kind):
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as web:
        thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            path = "/m" if kind == "+sentinel" else ""
            found = failure(f"redis{kind}://127.0.0.1:{web.server_port}{path}")
        finally:
            web.shutdown()
            thread.join()
    # Some of its reply came, or the kernel took it back with the connection.
    assert found["check"] in ("protocol", "reachable"), found
    assert "not Redis" in found["remedy"], found
    assert "firewall" not in found["remedy"]


def test_a_doctor_hides_a_password_that_the_server_quotes(login):
    """Servers quote unknown commands."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with contextlib.suppress(OSError), listener.accept()[0] as taken:
                taken.recv(1000)
                taken.sendall(b"-ERR unknown command 'AUTH', args: 'verysecretindeed'\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        words = words_of(login("kv", "verysecretindeed"))
        found = failure(f"redis://127.0.0.1:{listener.getsockname()[1]}", *words)
        thread.join()
    assert "AUTH refused: ERR" in found["detail"]
    assert "verysecretindeed" not in json.dumps(found)
