"""What a Redis in trouble costs: every fault, its outcome, and the time until hits are back.

``kvoffload bench redis_faults``. An engine's thread asks for chunks every few milliseconds, as a
scheduler does, through the I/O client. Loads and stores run on the I/O server's loop. Then Redis is
broken, and healed. Payloads are a function of the key: every byte loaded is checked. The rows are:

* seconds from healing to the first job that hits throughout (at most 2 s)
* the longest single call on the engine's thread (at most 20 ms)
* the longest job
* wrong bytes (none)
"""

import asyncio
import concurrent.futures
import itertools
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, report, row
from kvoffload import open_backend
from kvoffload.testing.backends import CHUNK_BYTES, filled, keys_of, payload_of, slots
from kvoffload.transfer.slab import Slab
from tests.support.io_loop import IOLoop
from tests.support.io_rig import client_over, loop_of
from tests.support.proxy import (
    Corrupt,
    CutAfter,
    Fault,
    FaultProxy,
    Garbage,
    HalfCloseAfter,
    HangAfter,
    Latency,
)
from tests.support.redis_server import BINARY, MISSING, RedisServer, redis_cluster

OUTAGE_S = 3.0
TICK_S = 0.005
LIMIT_S = 60.0
LOOKUP_TIMEOUT_S = 0.25
"""The default of the engine's setting."""


@dataclass
class Scene:
    """A tier to use, and how to break and heal it."""

    url: str
    break_it: Callable[[], object]
    heal: Callable[[], object]
    outage_s: float = OUTAGE_S


@dataclass
class Observed:
    """What an engine saw."""

    back_after_s: float = float("nan")
    calls_s: list[float] = field(default_factory=list)
    longest_job_s: float = 0.0
    wrong: int = 0
    raised: int = 0
    hits_during: int = 0
    chunks_during: int = 0


class Engine:
    """Looks up on this thread, loads and stores on the loop's, without ever waiting for a job."""

    def __init__(self, url: str) -> None:
        self.seen = Observed()
        self._backend = open_backend("redis", {"url": url}, "faults")
        stores = {"redis": self._backend}
        self._client = client_over(stores, Slab(1, CHUNK_BYTES), lookup_timeout_s=LOOKUP_TIMEOUT_S)
        self._tier = self._client.tiers["redis"]
        self._keys = keys_of(16, "faults")
        self._fresh = itertools.count()
        self._job: concurrent.futures.Future[tuple[int, int]] | None = None

    def close(self) -> None:
        self._client.close(LIMIT_S)

    def step(self) -> bool | None:
        """One scheduling step; says of a job that has just ended whether everything hit."""
        for key in self._keys:
            began = time.perf_counter()
            self._tier.holds(key)
            self.seen.calls_s.append(time.perf_counter() - began)
        healthy = None
        if self._job is None or self._job.done():
            if self._job is not None:
                healthy = self._ended(self._job)
            self._job = asyncio.run_coroutine_threadsafe(self._work(), loop_of(self._client))
        time.sleep(TICK_S)
        return healthy

    def _ended(self, job: "concurrent.futures.Future[tuple[int, int]]") -> bool:
        try:
            hits, chunks = job.result()
        except Exception:
            self.seen.raised += 1
            return False
        self.seen.hits_during += hits
        self.seen.chunks_during += chunks
        return hits == chunks

    async def _work(self) -> tuple[int, int]:
        """Load what should be there, store what is not, and something new."""
        began = time.perf_counter()
        into = slots(len(self._keys))
        good = await self._backend.read(self._keys, into)
        for key, slot, ok in zip(self._keys, into, good, strict=True):
            self.seen.wrong += ok and bytes(slot) != payload_of(key, CHUNK_BYTES)
        self.seen.longest_job_s = max(self.seen.longest_job_s, time.perf_counter() - began)
        began = time.perf_counter()
        missing = [key for key, ok in zip(self._keys, good, strict=True) if not ok]
        new = [*missing, *keys_of(2, f"new{next(self._fresh)}")]
        stored = await self._backend.write(new, filled(new))
        self.seen.longest_job_s = max(self.seen.longest_job_s, time.perf_counter() - began)
        return good.count(True) + sum(map(bool, stored[-2:])), len(good) + 2


def observe(scene: Scene) -> Observed:
    """Use the tier, break it, go on using it, heal it, and wait for hits."""
    with closing(Engine(scene.url)) as engine:
        _until_healthy(engine)
        engine.seen = Observed()
        breaking = threading.Thread(target=scene.break_it)
        breaking.start()
        over = time.monotonic() + scene.outage_s
        while time.monotonic() < over or breaking.is_alive():
            engine.step()
        healing = threading.Thread(target=scene.heal)
        healing.start()
        while healing.is_alive():
            engine.step()
        healed = time.monotonic()
        during = engine.seen.hits_during, engine.seen.chunks_during
        _until_healthy(engine)
        engine.seen.back_after_s = time.monotonic() - healed
        engine.seen.hits_during, engine.seen.chunks_during = during
        return engine.seen


def _until_healthy(engine: Engine) -> None:
    deadline = time.monotonic() + LIMIT_S
    in_a_row = 0
    while in_a_row < 2 and time.monotonic() < deadline:
        healthy = engine.step()
        if healthy is not None:
            in_a_row = in_a_row + 1 if healthy else 0


def nothing(server: RedisServer) -> None:
    """The server heals by itself, or it never was broken."""


ADMIN = ("-a", "changed", "--no-auth-warning")


def fill(server: RedisServer) -> None:
    used = server.cli("info", "memory").split("used_memory:")[1].split()[0]
    server.cli("config", "set", "maxmemory", used)


def restart(server: RedisServer) -> None:
    server.kill()
    server.start()


def lock_out(server: RedisServer) -> None:
    server.cli("config", "set", "requirepass", "changed")
    server.cli(*ADMIN, "client", "kill", "type", "normal")


Act = Callable[[RedisServer], object]


def command(*words: str) -> Act:
    """Send a server a command."""
    return lambda server: server.cli(*words)


SERVER: dict[str, tuple[Act, Act, float]] = {
    "killed, started again empty": (RedisServer.kill, RedisServer.start, OUTAGE_S),
    "restarted at once, empty": (restart, nothing, 0.0),
    "paused (SIGSTOP)": (RedisServer.pause, RedisServer.resume, OUTAGE_S),
    "paused (CLIENT PAUSE 3 s)": (command("client", "pause", "3000", "all"), nothing, OUTAGE_S),
    "full, refusing writes": (fill, command("config", "set", "maxmemory", "0"), OUTAGE_S),
    "made a replica": (
        command("replicaof", "127.0.0.1", "1"), command("replicaof", "no", "one"), OUTAGE_S,
    ),
    "password changed": (
        lock_out, command(*ADMIN, "config", "set", "requirepass", ""), OUTAGE_S,
    ),
    "flushed": (command("flushall"), nothing, 0.0),
    "all clients killed": (command("client", "kill", "type", "normal"), nothing, 0.0),
}  # fmt: skip
"""What happens to one server, how it is healed, and when."""


@contextmanager
def server_scene(acts: tuple[Act, Act, float], folder: Path) -> Iterator[Scene]:
    """Something happens to one server."""
    (break_it, heal, outage_s), server = acts, RedisServer(folder / "one")
    try:
        yield Scene(server.url, partial(break_it, server), partial(heal, server), outage_s)
    finally:
        server.stop()


@contextmanager
def failover_scene(folder: Path) -> Iterator[Scene]:
    """The master dies; Sentinels promote its replica."""
    with ExitStack() as stack:

        def started(name: str, *arguments: str, **more: Any) -> RedisServer:
            server = RedisServer(folder / name, *arguments, **more)
            stack.callback(server.stop)
            return server

        master = started("master")
        replica = started("replica", "--replicaof", "127.0.0.1", str(master.port))
        watch = (
            f"sentinel monitor kv 127.0.0.1 {master.port} 2",
            "sentinel down-after-milliseconds kv 1000",
            "sentinel failover-timeout kv 3000",
        )
        sentinels = [started(f"sentinel{i}", sentinel=watch) for i in range(3)]
        while "slaves=1,sentinels=3" not in sentinels[0].cli("info", "sentinel"):
            time.sleep(0.1)

        def promoted() -> None:
            while "role:master" not in replica.cli("info", "replication"):
                time.sleep(0.02)

        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in sentinels)
        yield Scene(f"redis+sentinel://{hosts}/kv", master.kill, promoted, 0.5)


@contextmanager
def cluster_scene(folder: Path) -> Iterator[Scene]:
    """Pause one master of three; the other two go on."""
    with redis_cluster(folder) as servers:
        url = f"redis+cluster://127.0.0.1:{servers[0].port}"
        yield Scene(url, servers[2].pause, servers[2].resume, 1.5)


@contextmanager
def wire_scene(port: int, faults: list[Fault]) -> Iterator[Scene]:
    """Something happens between client and server, on every connection, again and again."""
    io = IOLoop()
    proxy = FaultProxy("127.0.0.1", port)
    io.call(proxy.__aenter__(), LIMIT_S)

    def set_faults(values: list[Fault]) -> None:
        proxy.to_client = values

    try:
        url = f"redis://127.0.0.1:{proxy.port}"
        yield Scene(url, lambda: set_faults(faults), lambda: set_faults([]))
    finally:
        io.call(proxy.__aexit__(None, None, None), LIMIT_S)
        io.close()


WIRE: dict[str, list[Fault]] = {
    "wire: 50-100 ms more latency": [Latency(0.05, jitter_s=0.05)],
    "wire: cut in a chunk": [CutAfter(100_000)],
    "wire: half closed in a chunk": [HalfCloseAfter(100_000)],
    "wire: hangs in a chunk": [HangAfter(100_000)],
    "wire: a byte changed": [Corrupt(100_000)],
    "wire: garbage in a chunk": [Garbage(100_000)],
}


def run() -> dict[str, Any]:
    """Every fault, one after the other."""
    if BINARY is None:
        raise SystemExit(f"kvoffload bench redis_faults: {MISSING}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as top:
        folders = (Path(top) / str(i) for i in itertools.count())
        for name, acts in SERVER.items():
            with server_scene(acts, next(folders)) as scene:
                rows += _rows(name, observe(scene))
        with failover_scene(next(folders)) as scene:
            rows += _rows("failover by Sentinels (from the promotion on)", observe(scene))
        with cluster_scene(next(folders)) as scene:
            rows += _rows("one of three cluster masters paused", observe(scene))
        server = RedisServer(next(folders))
        try:
            for name, faults in WIRE.items():
                with wire_scene(server.port, faults) as scene:
                    rows += _rows(name, observe(scene))
        finally:
            server.stop()
    return report("redis_faults", rows)


def _rows(name: str, seen: Observed) -> list[Row]:
    calls = sorted(seen.calls_s)
    hits = 100 * seen.hits_during / max(1, seen.chunks_during)
    return [
        row(f"{name}: hits are back after", seen.back_after_s, "s", 2.0, "the goal (at most)"),
        row(f"{name}: longest call of the engine", calls[-1] * 1e3, "ms", 20.0, "goal (at most)"),
        row(f"{name}: 99.9 % of its calls", calls[int(0.999 * len(calls))] * 1e3, "ms"),
        row(f"{name}: longest load or store", seen.longest_job_s, "s"),
        row(f"{name}: hits meanwhile", hits, "%"),
        row(f"{name}: wrong chunks, exceptions", seen.wrong + seen.raised, ""),
    ]


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
