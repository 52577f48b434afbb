"""The Redis backend, ``redis-benchmark`` and redis-py in turns on one server.

``kvoffload bench redis``. Every side moves values of the same size over as many connections. Stores
go to names that the server lacks; loads come from 64 names that it has. Ours verifies every chunk,
and moves it from and into a slab of 64 slots. ``redis-benchmark`` verifies nothing and reuses one
buffer. LMCache's C++ client takes part where that package is installed. The server's own limit is
measured with readers whose kernel discards all bytes.
"""

import asyncio
import functools
import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import redis
import redis.asyncio
from redis._parsers import _RESP2Parser

from benchmarks.harness import Row, check_all, report, row, timed
from kvoffload import open_backend
from tests.support.redis_server import BINARY, MISSING, RedisServer, make_certificates

ROUNDS = 15
NAMES = 64
LOOKUP_KEYS = 1000
PATIENT = {"timeout_s": 30.0, "connect_timeout_s": 30.0}


class Side:
    """One client: what it stores, what it loads, and the processor time it takes for it."""

    def __init__(self) -> None:
        self.best_s = {"store": float("inf"), "load": float("inf")}
        self.cpu_s = {"store": float("inf"), "load": float("inf")}

    def turn(self, what: str, work: Callable[[], float]) -> None:
        """Measure one round; ``work`` returns its seconds."""
        began = time.process_time()
        took_s = work()
        self.cpu_s[what] = min(self.cpu_s[what], time.process_time() - began)
        self.best_s[what] = min(self.best_s[what], took_s)


@functools.cache
def lmcache_client() -> Any:
    """LMCache's ``resp`` client, if that package is installed; its package itself needs a GPU."""
    found = importlib.util.find_spec("lmcache")
    if found is None or not found.submodule_search_locations:
        return None
    import torch  # noqa: F401 - its extension is linked against it

    top = Path(found.submodule_search_locations[0])
    loaded = {}
    package = types.ModuleType("lmcache")
    sys.modules["lmcache"] = package
    for name, pattern in (
        ("lmcache.lmcache_redis", "lmcache_redis*.so"),
        ("lmcache_resp_client", "v1/storage_backend/resp_client.py"),
    ):
        spec = importlib.util.spec_from_file_location(name, next(top.glob(pattern)))
        assert spec is not None
        assert spec.loader is not None
        loaded[name] = importlib.util.module_from_spec(spec)
        sys.modules[name] = loaded[name]
        spec.loader.exec_module(loaded[name])
    return loaded["lmcache_resp_client"].RESPClient


class Bench:
    """A server, the sides, and the values they move.

    Args:
        folder: the server's.
        size: bytes of a value.
        count: values every side moves in a turn. Turns are short, so that other work of the machine
            disturbs the best turn less.
        connections: of every side but redis-py, which has one.
        tls: whether to encrypt.
    """

    def __init__(self, folder: Path, size: int, count: int, connections: int, tls: bool) -> None:
        self.size, self.count, self.connections = size, count, connections
        self.total_gb = size * count / 1e9
        self.flags: list[str] = []
        self.options: dict[str, Any] = {"connections": connections, **PATIENT}
        self.python: dict[str, Any] = {}
        self.server = RedisServer(folder)
        self.options["url"] = self.server.url
        if tls:
            files = make_certificates(folder / "certificates")
            port = self.server.port
            self.server.stop()
            self.server = RedisServer(
                folder, "--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no",
                "--tls-cert-file", files["cert"], "--tls-key-file", files["key"],
                "--tls-ca-cert-file", files["ca"], port=port,
            )  # fmt: skip
            self.flags = ["--tls", "--cacert", files["ca"]]
            self.options |= {"url": f"rediss://localhost:{port}", "ca_file": files["ca"]}
            self.python = {"ssl": True, "ssl_ca_certs": files["ca"]}
        # More slots than fit a cache, as in a host slab; each name has its own slot when loading.
        self.slab = np.random.default_rng(0).integers(0, 256, (NAMES, size), np.uint8)
        self.into = np.zeros((NAMES, size), np.uint8)
        self.keys = [b"%032d" % i for i in range(count)]
        self.client = redis.Redis("localhost", self.server.port, **self.python)
        kind = redis.SSLConnection if tls else redis.Connection
        self.plain = redis.Redis(
            connection_pool=redis.ConnectionPool(
                kind, host="localhost", port=self.server.port, parser_class=_RESP2Parser,
                **{name: value for name, value in self.python.items() if name != "ssl"},
            )
        )  # fmt: skip

    def close(self) -> None:
        self.client.close()
        self.plain.close()
        self.server.stop()

    def run(self) -> dict[str, Side]:
        """Let the sides take turns, each beginning with an empty server."""
        names = ("kvoffload", "redis-benchmark", "redis-py", "without hiredis", "asyncio")
        sides = {name: Side() for name in names}
        ours, theirs, python, plain, aio = sides.values()
        if not self.flags:
            sides["limit"] = Side()
        lmcache = None if self.flags else lmcache_client()
        if lmcache is not None:
            sides["lmcache"] = peer = Side()
        with asyncio.Runner() as runner:
            backend = runner.run(self._opened())
            for _ in range(ROUNDS):
                self.client.flushall()
                for what, *how in (
                    ("store", backend.write, self.slab),
                    ("load", backend.read, self.into),
                ):
                    ours.turn(what, lambda: timed(lambda: runner.run(self._ours(*how))))  # noqa: B023
                self.client.flushall()
                theirs.turn("store", lambda: self._peer("set", 10**9))
                self.client.flushall()
                python.turn("store", lambda: timed(self._python_set))
                theirs.turn("load", lambda: self._peer("get", NAMES))
                python.turn("load", lambda: timed(lambda: self._python_get(self.client)))
                plain.turn("load", lambda: timed(lambda: self._python_get(self.plain)))
                if not self.flags:
                    sides["limit"].turn("load", self._discard)
                aio.turn("load", lambda: runner.run(self._asyncio_get()))
                if lmcache is not None:
                    self.client.flushall()
                    for what, took_s in runner.run(self._lmcache(lmcache)).items():
                        peer.best_s[what] = min(peer.best_s[what], took_s)
            runner.run(backend.close())
        return sides

    async def _asyncio_get(self) -> float:
        client = redis.asyncio.Redis(port=self.server.port, **self.python)
        await client.ping()
        started = time.perf_counter()
        for start in range(0, self.count, self.connections):
            some = range(start, min(self.count, start + self.connections))
            await asyncio.gather(*(client.get(f"key:{i % NAMES:012d}") for i in some))
        took_s = time.perf_counter() - started
        await client.aclose()
        return took_s

    async def _lmcache(self, client_class: Any) -> dict[str, float]:
        """Its C++ client, as many workers as connections; it checks nothing it reads."""
        client = client_class("127.0.0.1", self.server.port, self.connections)
        names = [f"key:{i:012d}" for i in range(self.count)]
        source, target = (
            [memoryview(slots[i % NAMES]) for i in range(self.count)]
            for slots in (self.slab, self.into)
        )
        started = time.perf_counter()
        await client.batch_set(names, source)
        stored = time.perf_counter()
        await client.batch_get(names, target)
        loaded = time.perf_counter()
        client.close()
        return {"store": stored - started, "load": loaded - stored}

    async def _opened(self) -> Any:
        backend = open_backend("redis", self.options, "bench")
        await backend.contains(self.keys[:1])
        return backend

    async def _ours(self, move: Any, slab: Any) -> None:
        slots = [memoryview(slab[i % NAMES]) for i in range(self.count)]
        for start in range(0, self.count, NAMES):
            part = slice(start, start + NAMES)
            check_all(await move(self.keys[part], slots[part]))

    def _python_set(self) -> None:
        for i in range(self.count):
            self.client.set(f"key:{i:012d}", memoryview(self.slab[i % NAMES]))

    def _python_get(self, client: redis.Redis) -> None:
        for i in range(self.count):
            if len(client.get(f"key:{i % NAMES:012d}") or b"") != self.size:
                raise RuntimeError("redis-py lost a value")

    def _discard(self) -> float:
        """Ask for values and have the kernel throw them away: no copy and no look at them."""
        share = self.count // self.connections
        port = self.server.port
        ends = [socket.create_connection(("localhost", port)) for _ in range(self.connections)]

        def drain(end: socket.socket) -> None:
            void = bytearray(self.size)  # is never written to
            reply_bytes = self.size + len(b"$%d\r\n\r\n" % self.size)
            for i in range(share + 1):  # one ahead of what is awaited
                if i < share:
                    end.sendall(b"GET key:%012d\r\n" % (i % NAMES))
                left = reply_bytes if i else 0
                while left:
                    left -= end.recv_into(void, min(left, self.size), socket.MSG_TRUNC)

        readers = [threading.Thread(target=drain, args=(end,)) for end in ends]
        started = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        took_s = time.perf_counter() - started
        for end in ends:
            end.close()
        return took_s

    def _peer(self, test: str, names: int) -> float:
        command = [
            "redis-benchmark", "-h", "localhost", "-p", str(self.server.port), *self.flags,
            "-t", test, "-d", str(self.size), "-n", str(self.count),
            "-c", str(self.connections), "-r", str(names), "--csv",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        requests_per_s = float(done.stdout.splitlines()[-1].split(",")[1].strip('"'))
        return self.count / requests_per_s

    def lookups_s(self) -> tuple[float, float]:
        """Best time to look up 1,000 keys; then the time for each while the breaker is open."""

        async def lookups() -> float:
            backend = open_backend("redis", self.options, "bench")
            keys = [b"%036d" % i for i in range(LOOKUP_KEYS)]
            best_s = float("inf")
            for _ in range(20):
                started = time.perf_counter()
                await backend.contains(keys)
                best_s = min(best_s, time.perf_counter() - started)
            await backend.close()
            return best_s

        async def shut_out() -> float:
            options = {"url": "redis://127.0.0.1:1", "lookup_timeout_s": 0.2}
            backend: Any = open_backend("redis", options, "bench")
            keys = [b"%036d" % i for i in range(LOOKUP_KEYS)]
            while not backend.usage().gauges["breakers_open"]:
                await backend.read(keys[:1], [memoryview(bytearray(1))])
            started = time.perf_counter()
            await backend.contains(keys)
            took_s = time.perf_counter() - started
            await backend.close()
            return took_s / len(keys)

        return asyncio.run(lookups()), asyncio.run(shut_out())


CASES = (
    (2 << 20, 64, 4, False),
    (2 << 20, 64, 1, False),
    (256 << 10, 512, 4, False),
    (2 << 20, 64, 4, True),
)
"""Bytes of a value, values in a turn, connections, TLS."""


def run(cases: Sequence[tuple[int, int, int, bool]] = CASES) -> dict[str, Any]:
    """Measure every size, in the clear and under TLS."""
    if BINARY is None or shutil.which("redis-benchmark") is None:
        raise SystemExit(f"kvoffload bench redis: {MISSING}, and redis-benchmark")
    rows: list[Row] = []
    for size, count, connections, tls in cases:
        with tempfile.TemporaryDirectory() as folder:
            with closing(Bench(Path(folder), size, count, connections, tls)) as bench:
                rows += _rows(bench, tls)
                if size < 1 << 20:
                    rows += _lookups(*bench.lookups_s())
    return report("redis", rows)


def _rows(bench: Bench, tls: bool) -> list[Row]:
    sides = bench.run()
    ours, python = sides["kvoffload"], sides["redis-py"]
    shape = f"{bench.size >> 10} KiB, {bench.connections} connections{', TLS' if tls else ''}"
    rows = []
    for what, verb in (("store", "SET"), ("load", "GET")):
        value = bench.total_gb / ours.best_s[what]
        peers = {
            f"redis-benchmark {verb}": "redis-benchmark",
            f"redis-py {verb.lower()}": "redis-py",
            "redis-py get, without hiredis": "without hiredis",
            "redis-py get, asyncio": "asyncio",
            "what the server can send": "limit",
            f"LMCache resp (C++) {what}": "lmcache",
        }
        for name, side in peers.items():
            if side in sides and sides[side].best_s[what] < float("inf"):
                limit = bench.total_gb / sides[side].best_s[what]
                rows.append(row(f"{what}, {shape}", value, "GB/s", limit, name))
        case = f"{what}, {shape}, processor time of the client"
        spent, limit = (side.cpu_s[what] / bench.total_gb for side in (ours, python))
        rows.append(row(case, spent, "s/GB", limit, "redis-py's"))
    return rows


def _lookups(lookup_s: float, open_s: float) -> Sequence[Row]:
    return [
        row(f"look up {LOOKUP_KEYS} keys", lookup_s * 1e3, "ms", 5.0, "the goal (at most)"),
        row("look up 1 key, server left alone", open_s * 1e6, "µs", 20.0, "the goal (at most)"),
    ]


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
