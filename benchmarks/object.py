"""The object tier, raw sockets and obstore alone in turns on one loop server.

``kvoffload bench object``. The server keeps in memory what it is sent, in a process of its own. Raw
sockets send and receive the same bytes into the same slots, and verify nothing. Rows have the
processor time of the client for a gigabyte, and the rate of 32 loads at once.
"""

import asyncio
import os
import resource
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import obstore
from obstore.store import S3Store

from benchmarks.harness import Row, best_of, check_all, report, row, timed
from kvoffload import open_backend
from kvoffload.io.presence import PresenceCache
from tests.support.moto import login
from tests.support.redis_server import free_port, make_certificates

ROUNDS = 5
NAMES = 16
AT_ONCE = 8
LOADS_AT_ONCE = 32
LOOKUP_KEYS = 1000
CASES = ((2 << 20, False), (8 << 20, False), (32 << 20, False), (8 << 20, True))
"""Bytes of a chunk, TLS."""
HEAD = b'HTTP/1.1 200 OK\r\nETag: "x"\r\nLast-Modified: %s\r\nContent-Length: %d\r\n\r\n'


def serve(port: int, certificates: dict[str, str]) -> None:
    """Serve PUT, GET and HEAD of a few names, one thread a connection."""
    import threading

    context = None
    if certificates:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates["cert"], certificates["key"])
    objects: dict[bytes, bytearray] = {}
    stamp = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime()).encode()

    def answer(end: socket.socket) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            end = context.wrap_socket(end, server_side=True)
        received = b""
        while True:
            while b"\r\n\r\n" not in received:
                if not (more := end.recv(65536)):
                    return
                received += more
            head, received = received.split(b"\r\n\r\n", 1)
            verb, name = head.split(b" ", 2)[:2]
            if verb == b"PUT":
                length = head.lower().split(b"content-length:", 1)[1].split(b"\r\n")[0]
                content = objects.setdefault(name, bytearray(int(length)))
                view = memoryview(content)
                view[: len(received)] = received
                at, received = len(received), b""
                while at < len(view):
                    at += end.recv_into(view[at:], min(len(view) - at, 1 << 20))
                end.sendall(HEAD % (stamp, 0))
            elif name in objects:
                content = objects[name]
                end.sendall(HEAD % (stamp, len(content)))
                if verb == b"GET":
                    end.sendall(content)
            else:
                end.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    def quietly(end: socket.socket) -> None:
        try:
            answer(end)
        except OSError:
            end.close()

    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    while True:
        threading.Thread(target=quietly, args=(listener.accept()[0],), daemon=True).start()


class Bench:
    """The server, and the sides that move chunks of one size."""

    def __init__(self, folder: Path, size: int, tls: bool) -> None:
        self.size, self.port = size, free_port()
        self.files = make_certificates(folder) if tls else {}
        words = [sys.executable, "-m", "benchmarks.object", str(self.port)]
        words += [f"{name}={path}" for name, path in self.files.items()]
        self._server = subprocess.Popen(words)
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                break
            except OSError:
                time.sleep(0.02)
        self.context = ssl.create_default_context(cafile=self.files["ca"]) if tls else None
        scheme = "https" if tls else "http"
        self.options = {
            "url": "s3://bench/kv",
            "endpoint": f"{scheme}://{'localhost' if tls else '127.0.0.1'}:{self.port}",
            "timeout_s": 60.0,
            "threads": AT_ONCE,
            "max_inflight_bytes": 4 << 30,
            **login(),
            **({"ca_file": self.files["ca"]} if tls else {}),
        }
        self.count = max(NAMES, (256 << 20) // size)
        slab = np.random.default_rng(0).integers(0, 256, (NAMES, size), np.uint8)
        self.slots = [memoryview(slab[i]) for i in range(NAMES)]
        self.keys = [b"%036d" % i for i in range(NAMES)]
        self.gb = self.count * size / 1e9
        self._free: list[socket.socket] = []

    def close(self) -> None:
        for end in self._free:
            end.close()
        self._server.kill()
        self._server.wait()

    # ---- raw sockets ----

    def _connection(self) -> socket.socket:
        if self._free:
            return self._free.pop()
        end = socket.create_connection(("127.0.0.1", self.port))
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self.context.wrap_socket(end, server_hostname="localhost") if self.context else end

    def _head(self, end: socket.socket) -> bytes:
        head = b""
        while b"\r\n\r\n" not in head:
            head += end.recv(2048)
        return head.split(b"\r\n\r\n", 1)[1]

    def raw_put(self, i: int) -> None:
        end = self._connection()
        text = b"PUT /raw/%d HTTP/1.1\r\nContent-Length: %d\r\n\r\n"
        end.sendall(text % (i % NAMES, self.size))
        end.sendall(self.slots[i % NAMES])
        self._head(end)
        self._free.append(end)

    def raw_get(self, i: int) -> None:
        end, slot = self._connection(), self.slots[i % NAMES]
        end.sendall(b"GET /raw/%d HTTP/1.1\r\n\r\n" % (i % NAMES))
        rest = self._head(end)
        slot[: len(rest)] = rest
        at = len(rest)
        while at < self.size:
            at += end.recv_into(slot[at:], min(self.size - at, 1 << 20))
        self._free.append(end)

    def on_threads(self, work: Callable[[int], None], threads: int = AT_ONCE) -> None:
        with ThreadPoolExecutor(threads) as pool:
            for future in [pool.submit(work, i) for i in range(self.count)]:
                future.result()

    # ---- the tier ----

    async def tier(self, backend: Any, verb: str) -> None:
        call = backend.write if verb == "put" else backend.read
        for start in range(0, self.count, NAMES):
            some = min(NAMES, self.count - start)
            check_all(await call(self.keys[:some], self.slots[:some]))

    def sides(self) -> dict[str, float]:
        """Return the least processor time a gigabyte of each side."""
        best: dict[str, float] = {}

        def turn(name: str, work: Callable[[], object]) -> None:
            before = cpu_s()
            work()
            best[name] = min(best.get(name, float("inf")), (cpu_s() - before) / self.gb)

        with opened(self.options) as (runner, backend):
            for _ in range(ROUNDS):
                turn("raw put", lambda: self.on_threads(self.raw_put))
                turn("raw get", lambda: self.on_threads(self.raw_get))
                turn("put", lambda: runner.run(self.tier(backend, "put")))
                turn("get", lambda: runner.run(self.tier(backend, "get")))
        return best

    def many_loads(self) -> tuple[float, float]:
        """Return the rates of 32 loads at once: the tier's, and obstore's alone."""
        alone = S3Store(
            "bench", prefix="kv", endpoint=self.options["endpoint"], region="us-east-1",
            access_key_id="a", secret_access_key="b", unsigned_payload=True,
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=60)},
            client_options={"allow_http": True}, virtual_hosted_style_request=False,
        )  # fmt: skip

        def get(i: int) -> None:
            obstore.get(alone, f"alone/{i % NAMES}").bytes()

        for i in range(NAMES):
            obstore.put(alone, f"alone/{i}", self.slots[i], use_multipart=False)
        ours = theirs = 0.0
        indices = [i % NAMES for i in range(LOADS_AT_ONCE)]
        keys, slots = [self.keys[i] for i in indices], [self.slots[i] for i in indices]
        gigabytes = LOADS_AT_ONCE * self.size / 1e9
        with opened(self.options | {"threads": LOADS_AT_ONCE}) as (runner, backend):
            runner.run(self.tier(backend, "put"))
            for _ in range(ROUNDS):
                took_s = timed(lambda: check_all(runner.run(backend.read(keys, slots))))
                ours = max(ours, gigabytes / took_s)
                with ThreadPoolExecutor(LOADS_AT_ONCE) as pool:
                    list(pool.map(get, range(LOADS_AT_ONCE)))  # connects
                    took_s = timed(lambda: list(pool.map(get, range(LOADS_AT_ONCE))))
                theirs = max(theirs, gigabytes / took_s)
        return ours, theirs

    def lookup_s(self) -> float:
        """Return the best time for a key of a lookup that asks the bucket for all its keys."""
        keys = [b"%036d" % i for i in range(LOOKUP_KEYS)]
        with opened(self.options) as (runner, backend):
            (best_s,) = best_of(lambda: runner.run(backend.contains(keys)), rounds=ROUNDS)
        return best_s / LOOKUP_KEYS


@contextmanager
def opened(options: dict[str, Any]) -> Iterator[tuple[asyncio.Runner, Any]]:
    """Open the tier and a loop to use it on."""
    with asyncio.Runner() as runner:
        backend = open_backend("object", options, "bench")
        runner.run(backend.contains([]))
        yield runner, backend
        runner.run(backend.close())


def cpu_s() -> float:
    """Return the processor time of this process, that of the kernel for it included."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def engine_thread_s() -> float:
    """Return the time of a lookup on the engine's thread for a key whose answer is known."""
    cache = PresenceCache(lambda: None, 60.0, 60.0)
    keys = [os.urandom(36) for _ in range(LOOKUP_KEYS)]
    for i, key in enumerate(keys):
        cache.set(key, i % 2 == 0)
    (best_s,) = best_of(lambda: [cache.holds(key) for key in keys], rounds=20)
    return best_s / LOOKUP_KEYS


def run(cases: tuple[tuple[int, bool], ...] = CASES) -> dict[str, Any]:
    """Measure every size, in the clear and under TLS."""
    rows: list[Row] = []
    for size, tls in cases:
        with tempfile.TemporaryDirectory() as folder:
            with closing(Bench(Path(folder), size, tls)) as bench:
                rows += _rows(bench, f"{size >> 20} MiB{', TLS' if tls else ''}", tls)
    known_us = engine_thread_s() * 1e6
    rows.append(row("lookup of a known chunk, engine's thread", known_us, "µs", 2.0, "the bar"))
    return report("object", rows)


def _rows(bench: Bench, shape: str, tls: bool) -> list[Row]:
    best, rows = bench.sides(), []
    for verb in ("put", "get"):
        case = f"{verb}, {shape}, processor time of the client"
        rows.append(row(case, best[verb], "s/GB", best[f"raw {verb}"], "raw sockets"))
    if not tls:
        ours, alone = bench.many_loads()
        rows.append(row(f"{LOADS_AT_ONCE} loads at once, {shape}", ours, "GB/s", alone, "obstore"))
    if bench.size == 2 << 20 and not tls:
        rows.append(row("lookup by request, each of 1,000 keys", bench.lookup_s() * 1e6, "µs"))
    return rows


if __name__ == "__main__":
    serve(int(sys.argv[1]), dict(word.split("=", 1) for word in sys.argv[2:]))
