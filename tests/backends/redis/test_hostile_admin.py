"""Hostile servers and operators' commands: bounded memory, bounded and printable text."""

import asyncio
import contextlib
import gc
import os
import socket
import threading
from pathlib import Path

import pytest
from redis_fakes import FakeRedis, bulk, polite, table

from kvoffload import open_backend
from kvoffload.backends.admin import Check, Garbage
from tests.support.redis_engine import PATIENT, until

EVIL = b"-ERR \x1b[2J\rforged" + b"x" * 50_000
COMMANDS = {
    "survey": lambda backend: backend.survey(),
    "purge": lambda backend: backend.purge(["n"]),
    "collect": lambda backend: backend.collect(Garbage(unused_s=60.0)),
    "verify": lambda backend: backend.verify(Check(repair=True)),
    "described": lambda backend: backend.described(),
}


def resident_bytes():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.asynccontextmanager
async def opened(server):
    backend = open_backend("redis", {"url": f"redis://{server.address}", **PATIENT}, "n")
    try:
        yield backend
    finally:
        await backend.close()


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_slot_table_without_some_slots_is_an_error_and_no_part_of_the_keys(command):
    def answer(words):
        is_asked = words[0] == b"CLUSTER"
        return table((0, 8191, "127.0.0.1", server.port)) if is_asked else polite(words)

    async with FakeRedis(answer) as server:
        url = f"redis+cluster://{server.address}"
        backend = open_backend("redis", {"url": url, **PATIENT}, "n")
        server.commands.clear()
        with pytest.raises(OSError, match="8192 of 16384 slots have no server"):
            await COMMANDS[command](backend)
        assert not {b"SCAN", b"UNLINK"}.intersection(words[0] for words in server.commands)
        (finding,) = await backend.diagnose()
        assert (finding.check, finding.verdict) == ("topology", "failed")
        await backend.close()


class Flood:
    """A server that answers SCAN with bytes without end."""

    def __init__(self, head, body):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._head, self._body, self.sent = head, body, 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                with self._listener.accept()[0] as taken, contextlib.suppress(OSError):
                    while asked := taken.recv(4096):
                        taken.sendall(self._head if b"SCAN" in asked else b"+OK\r\n")
                        while b"SCAN" in asked:
                            taken.sendall(self._body)
                            self.sent += len(self._body)


FLOODS = {
    "a name without end": (b"*2\r\n$1\r\n0\r\n*1\r\n$400000000000\r\n", b"x" * (1 << 20)),
    "names without end": (b"*2\r\n$1\r\n0\r\n*100000000\r\n", b"$3\r\nabc\r\n" * 100_000),
    "long names": (b"*2\r\n$1\r\n0\r\n*100000\r\n", (b"$60000\r\n" + b"x" * 60_000 + b"\r\n") * 16),
    "a line without end": (b"+", b"x" * (1 << 20)),
}


@pytest.mark.parametrize("flood", FLOODS)
@pytest.mark.parametrize("command", ["survey", "purge", "described"])
async def test_a_scan_without_end_takes_no_memory(flood, command):
    """It filled the I/O process with gigabytes at each reset of an engine."""
    with contextlib.closing(Flood(*FLOODS[flood])) as server:
        async with opened(server) as backend:
            before = resident_bytes()
            with pytest.raises(OSError, match="protocol: "):
                await asyncio.wait_for(COMMANDS[command](backend), 60)
            assert resident_bytes() - before < 64 << 20
            assert server.sent < 64 << 20


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "described"])
async def test_an_error_of_a_server_is_short_and_printable(command):
    def answer(words):
        return EVIL + b"\r\n" if words[0] == b"SCAN" else polite(words)

    def short(words):
        return EVIL[:3000] + b"\r\n" if words[0] == b"SCAN" else polite(words)

    for said in (answer, short):
        async with FakeRedis(said) as server, opened(server) as backend:
            with pytest.raises(OSError, match=r"SCAN refused|protocol: ") as caught:
                await COMMANDS[command](backend)
            assert str(caught.value).isprintable()
            assert len(str(caught.value)) < 600


NAME = b"kvoffload:n:xxh3:{0a}"


@pytest.mark.parametrize(
    "odd",
    [
        b"-ERR \x1b[2J no\r\n",
        b"+text\r\n",
        b"$5\r\nhello\r\n",
        b"*0\r\n",
        b":" + b"9" * 30 + b"\r\n",
    ],
)
@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "described"])
async def test_odd_replies_to_other_commands_are_an_error_without_a_traceback(command, odd):
    scanned = b"*2\r\n$1\r\n0\r\n*1\r\n" + bulk(NAME)

    def answer(words):
        if words[0] == b"SCAN":
            return scanned
        return odd if words[0] in (b"STRLEN", b"PTTL", b"UNLINK", b"GET") else polite(words)

    async with FakeRedis(answer) as server, opened(server) as backend:
        with pytest.raises(OSError, match=server.address) as caught:
            await COMMANDS[command](backend)
        assert str(caught.value).isprintable()


async def test_a_value_that_is_only_announced_takes_no_memory():
    def answer(words):
        if words[0] == b"SCAN":
            return b"*2\r\n$1\r\n0\r\n*1\r\n" + bulk(NAME)
        if words[0] == b"STRLEN":
            return b":500000000\r\n"
        return b"$500000000\r\nabc" if words[0] == b"GET" else polite(words)

    async with FakeRedis(answer) as server, opened(server) as backend:
        before = resident_bytes()
        verifying = asyncio.ensure_future(COMMANDS["verify"](backend))
        await until(lambda: server.sent(b"GET") > 0)
        await asyncio.sleep(0.2)
        assert resident_bytes() - before < 64 << 20
        verifying.cancel()
        await asyncio.wait([verifying])


async def test_a_cancelled_command_ends_its_scan():
    """A reset that is given up removes nothing later."""

    def answer(words):
        return b"*2\r\n$1\r\n7\r\n*0\r\n" if words[0] == b"SCAN" else polite(words)

    async with FakeRedis(answer) as server, opened(server) as backend:
        purging = asyncio.ensure_future(backend.purge(["n"]))
        await until(lambda: len(server.commands) >= 20)
        purging.cancel()
        await asyncio.wait([purging])
        await asyncio.sleep(0.2)
        asked = len(server.commands)
        await asyncio.sleep(0.3)
        assert len(server.commands) == asked
