"""The server of a host: attaching, loads from its memory, and many engines at once.

``kvoffload bench serve``. Loads stand against those of an engine's own I/O process from a disk tier
in memory, and against plain copies of as many bytes. Loads into a KV cache (on a CPU) are *by slot*
out of the server's memory, or *by copy* through slots of the engine. Several engines are processes
of their own, which load the same chunks at the same time.
"""

import itertools
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Row, best_of, caches_of, check_all, report, row, timed
from benchmarks.io_forms import Moved
from kvoffload.io.attached import AttachedServer
from kvoffload.io.client import IOClient
from kvoffload.io.forms import ServerProcess
from kvoffload.io.protocol import (
    VERSION,
    Answered,
    Borrow,
    Lent,
    Load,
    MessageReader,
    Open,
    Passed,
    PresenceChanges,
    Release,
    Store,
    TierSettings,
    frame,
)
from kvoffload.io.service.listener import Listener
from kvoffload.io.service.service import Service, run_service
from kvoffload.io.service.settings import read_serve_config
from kvoffload.messages import CPULoadStoreSpec, Fetch, GPULoadStoreSpec, OffloadKey
from kvoffload.testing.harness import keys_of
from kvoffload.transfer.cpu.copier import CpuCopier
from kvoffload.transfer.engine import TransferEngine
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.shared_memory import create_shared_memory
from kvoffload.transfer.slab import Slab
from tests.support.host_server import HostServer

TOTAL_BYTES = 128 << 20
SIZE = 2 << 20
PAGE = 32 << 10
ROUNDS = 9
ATTACHES = 100
LOANS = 1000
ENGINES = 8
LISTED = 1_000_000
NAMESPACE = "bench"
TIMEOUT_S = 60.0
IN_MEMORY = Path("/dev/shm")
WAYS = BY_SLOT, BY_COPY = "loads by slot", "loads by copy"


class Engine:
    """A client over a slab of its own.

    Args:
        path: of the server; empty for an I/O process with these tiers.
    """

    def __init__(self, path: str, tiers: list[TierSettings], total: int = TOTAL_BYTES) -> None:
        self.count = total // SIZE
        self.keys = keys_of(self.count)
        fd = self._fd = create_shared_memory(self.count * SIZE)
        self.slab = Slab(self.count, SIZE, fd)
        for slot in range(self.count):
            self.slab.slot(slot, SIZE)[:] = os.urandom(4096) * (SIZE // 4096)
        opening = Open(VERSION, tiers, NAMESPACE, {}, SIZE, SIZE, 5.0)
        begun_s = time.perf_counter()
        self.client = IOClient(
            (lambda: AttachedServer(path, fd)) if path else (lambda: ServerProcess(fd)),
            opening,
            TIMEOUT_S,
            TIMEOUT_S,
            needs_server=not path,
        )
        self.attached_s = time.perf_counter() - begun_s
        self.tier = tiers[0].name
        tensors = [torch.ones((self.count, PAGE), dtype=torch.int8) for _ in range(SIZE // PAGE)]
        caches = caches_of(tensors)
        layout = ChunkLayout(caches, 1)
        self._copier = CpuCopier(caches, self.slab, layout)
        parts = self.client, self.slab, layout, self._copier
        self._engines = {by: TransferEngine(*parts, keeps_slots=by == BY_COPY) for by in WAYS}

    def move(self, verb: str) -> float:
        """Load or store all chunks in one job; return the seconds that it takes."""
        kind = Load if verb == "load" else Store
        order = kind(0, self.tier, self.keys, list(range(self.count)), SIZE)

        def move() -> None:
            moved = Moved()
            self.client.begin(order, moved)
            moved.wait()

        return timed(move)

    def load(self, by: str) -> float:
        """Load all chunks into the KV cache; return the seconds that it takes."""
        keys, begun_s = tuple(OffloadKey(key) for key in self.keys), time.perf_counter()
        fetch = Fetch(self.tier, tuple(range(self.count)), keys)
        source = CPULoadStoreSpec(range(self.count), [fetch])
        engine = self._engines[by]
        engine.transfer_async(0, (source, GPULoadStoreSpec(np.arange(self.count))))
        engine.wait([0])
        check_all(engine.get_finished()[0].ok)
        return time.perf_counter() - begun_s

    def close(self) -> None:
        self._copier.close()
        self.client.close()
        os.close(self._fd)


SERVE = [TierSettings("serve", "serve", {}, "")]
ECHO = """
import socket, sys
sock = socket.socket(fileno=int(sys.argv[1]))
while data := sock.recv(1 << 16):
    sock.sendall(data)
"""
LOOP_ECHO = """
import asyncio, socket, sys
async def echo():
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=int(sys.argv[1])))
    while data := await reader.read(1 << 18):
        writer.write(data)
asyncio.run(echo())
"""


def run(total_bytes: int = TOTAL_BYTES) -> dict[str, Any]:
    """Measure with a server over a scratch folder."""
    gigabytes = total_bytes / 1e9
    with tempfile.TemporaryDirectory() as scratch, served(Path(scratch)) as server:
        with closing(Engine(server.path, SERVE, total_bytes)) as engine:
            engine.move("store")
            rows = [*_attaching(server), *_loading(engine, server.process.pid, gigabytes)]
            rows += _by_slot(engine, server.process.pid, gigabytes)
            rows += _lending(server.path, engine.keys)
        rows += _first_loads(server, total_bytes)
        rows += _many(server, total_bytes)
    return report("serve", rows + _listing())


@contextmanager
def served(folder: Path) -> Iterator[HostServer]:
    """Run a server with memory alone."""
    server = HostServer(folder, memory="1GiB")
    try:
        yield server
    finally:
        server.stop()


def _attaching(server: HostServer) -> list[Row]:
    times = []
    for _ in range(ATTACHES):
        engine = Engine(server.path, SERVE, SIZE)
        times.append(engine.attached_s * 1e3)
        engine.close()
    # The server gives way to engines: the median tells how long it waits for a core.
    return [
        row("attach, stores open, best", min(times), "ms"),
        row("attach, stores open, p50", statistics.median(times), "ms"),
    ]


def _loading(engine: Engine, pid: int, gigabytes: float) -> list[Row]:
    """Alternate the server, an I/O process over a tier in memory, and plain copies."""
    folder = IN_MEMORY if IN_MEMORY.is_dir() else None
    root = tempfile.mkdtemp(prefix="kvoffload-bench-", dir=folder)
    options = {"root": f"{root}/kv", "min_free": 0, "io": "buffered", "trust_parent_folders": True}
    source = bytes(engine.count * SIZE)
    try:
        with closing(
            Engine("", [TierSettings("disk", "disk", options, "")], engine.count * SIZE)
        ) as own:
            own.move("store")
            before_s, loads, owns, copies = cpu_s(pid), [], [], []
            for _ in range(ROUNDS):
                owns.append(own.move("load"))
                copies.append(
                    timed(partial(own.slab.slot(0, len(source)).__setitem__, slice(None), source))
                )
                loads.append(engine.move("load"))
            spent_s = (cpu_s(pid) - before_s) / ROUNDS
    finally:
        shutil.rmtree(root)
    best, own_s, copy_s = min(loads), min(owns), min(copies)
    return [
        row("load, 2 MiB", gigabytes / best, "GB/s", gigabytes / own_s, "own process, tmpfs"),
        row("load, 2 MiB", gigabytes / best, "GB/s", gigabytes / copy_s, "plain copy"),
        row("server's processor time of a load", spent_s / gigabytes, "s/GB"),
    ]


def _by_slot(engine: Engine, pid: int, gigabytes: float) -> list[Row]:
    """Alternate loads into a KV cache by slot and by copy."""
    took_s: dict[str, list[float]] = {by: [] for by in WAYS}
    spent_s = dict.fromkeys(WAYS, 0.0)
    for _ in range(ROUNDS):
        for by in WAYS:
            before_s = cpu_s(pid)
            took_s[by].append(engine.load(by))
            spent_s[by] += (cpu_s(pid) - before_s) / ROUNDS
    slot, copy = (gigabytes / min(took_s[by]) for by in WAYS)
    spent, by_copy = (spent_s[by] / gigabytes for by in WAYS)
    return [
        row("load into a KV cache by slot, 2 MiB", slot, "GB/s", copy, "by copy"),
        row("server's processor time of it", spent, "s/GB", by_copy, "by copy"),
    ]


def _lending(path: str, keys: list[bytes]) -> list[Row]:
    """Alternate round trips of a loan of all chunks and of as many bytes that come back."""
    fd = create_shared_memory(SIZE)
    server = AttachedServer(path, fd)
    sock, reader, numbers = server.sock, MessageReader(to_server=False), itertools.count(1)
    sock.settimeout(TIMEOUT_S)

    def hear(*kinds: type) -> list[Any]:
        """Return the first message of each kind."""
        heard = dict[type, Any]()
        while len(heard) < len(kinds):
            heard |= {type(m): m for m in reader.feed(sock.recv(1 << 16)) if type(m) in kinds}
        return list(map(heard.__getitem__, kinds))

    def order(number: int) -> bytes:
        return frame(Load(number, "serve", keys, [0] * len(keys), SIZE, may_lend=True))

    def lend() -> None:
        sock.sendall(order(next(numbers)))
        lent, _ = hear(Lent, Answered)
        assert len(lent.numbers) == len(keys)
        sock.sendall(frame(Release(lent.loan)))

    def echoed(mine: socket.socket) -> None:
        data = order(next(numbers))
        mine.sendall(data)
        assert len(mine.recv(len(data), socket.MSG_WAITALL)) == len(data)

    sock.sendall(frame(Open(VERSION, SERVE, NAMESPACE, {}, SIZE, SIZE, 5.0)) + frame(Borrow()))
    hear(Passed, PresenceChanges)
    with _echo(ECHO) as plain, _echo(LOOP_ECHO) as looped:
        echoes = partial(echoed, plain), partial(echoed, looped)
        lend_s, *echo_s = best_of(lend, *echoes, rounds=LOANS)
    server.close()
    os.close(fd)
    what = f"loan of {len(keys)} chunks, round trip, best"
    limits = "socket's echo", "echo of an event loop"
    return [
        row(what, 1e6 * lend_s, "µs", 1e6 * limit_s, name)
        for limit_s, name in zip(echo_s, limits, strict=True)
    ]


@contextmanager
def _echo(code: str) -> Iterator[socket.socket]:
    """Give the end of a socket whose other end a process echoes."""
    mine, theirs = socket.socketpair()
    mine.settimeout(TIMEOUT_S)
    command = [sys.executable, "-c", code, str(theirs.fileno())]
    with theirs:
        echo = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    with mine:
        yield mine
    echo.wait()


def _first_loads(server: HostServer, total_bytes: int) -> list[Row]:
    """Compare the first loads of engines that have just attached with their third ones."""
    rows, took_s = [], dict[str, list[list[float]]]()
    for by in WAYS * ROUNDS:
        engine = Engine(server.path, SERVE, total_bytes)
        took_s.setdefault(by, []).append([engine.load(by) for _ in range(3)])
        engine.close()
    for by, times in took_s.items():
        first, _, third = (1e3 * statistics.median(each) for each in zip(*times, strict=True))
        rows.append(row(f"{by}: a new engine's first, p50", first, "ms", third, "its third"))
    return rows


def _many(server: HostServer, total_bytes: int) -> list[Row]:
    """Compare what one engine loads in some seconds with what several load together."""
    rows = []
    for by in WAYS:
        one, many = (sum(_rates(server, count, total_bytes, by)) for count in (1, ENGINES))
        rows.append(row(f"{by} by {ENGINES} engines together", many, "GB/s", one, "one engine"))
    return rows


def _rates(server: HostServer, count: int, total_bytes: int, by: str) -> list[float]:
    with ExitStack() as stack:
        words = (server.path, str(total_bytes), by)
        engines = [stack.enter_context(ready("benchmarks.serve", *words)) for _ in range(count)]
        with ThreadPoolExecutor(count) as pool:
            return [
                float(said) for said, _ in pool.map(lambda each: each.communicate("go\n"), engines)
            ]


@contextmanager
def ready(module: str, *words: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a module in a process of its own, which has said that it is ready; end it then."""
    command = [sys.executable, "-m", module, *words]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def _listing() -> list[Row]:
    """Attach engines to a server that has many chunks: how long until each has the whole list."""
    rows, what = [], f"list of {LISTED:,} chunks"
    with ExitStack() as stack:
        path = stack.enter_context(tempfile.TemporaryDirectory()) + "/s"
        server = stack.enter_context(ready("benchmarks.serve", path))
        for which in ("first engine", "second engine"):
            before_s, begun_s = cpu_s(server.pid), time.perf_counter()
            engine = stack.enter_context(closing(Engine(path, SERVE, SIZE)))
            attached_ms = 1e3 * engine.attached_s
            rows.append(row(f"attach to {LISTED:,} chunks, {which}", attached_ms, "ms"))
            while not engine.client.tiers["serve"].is_complete:
                time.sleep(0.001)
            rows.append(row(f"{what}, {which}", time.perf_counter() - begun_s, "s"))
            spent_s = cpu_s(server.pid) - before_s
            rows.append(row(f"server's processor time of it, {which}", spent_s, "s"))
    return rows


def be_a_server(path: str) -> None:
    """Serve, at a socket, chunks without bytes in the namespace of :class:`Engine`."""
    block = 16 << 10
    settings = {"socket": path, "memory": LISTED * block, "policy": "lru", "lend": False}

    def started(service: Service) -> None:
        number = service.memory.number_of(NAMESPACE)
        for key in keys_of(LISTED):
            service.memory.write(number + key, b"", memoryview(bytes(1)))
        print("ready", flush=True)

    run_service(read_serve_config(settings), Listener(path).sock, started)


def be_an_engine(path: str, total_bytes: int, by: str, seconds: float = 2.0) -> None:
    """Attach, wait for a line, load for some seconds, and print the rate in GB/s."""
    engine = Engine(path, SERVE, total_bytes)
    engine.load(by)
    print("ready", flush=True)
    sys.stdin.readline()
    begun_s, loaded = time.perf_counter(), 0
    while time.perf_counter() < begun_s + seconds:
        engine.load(by)
        loaded += engine.count * SIZE
    print(loaded / 1e9 / (time.perf_counter() - begun_s))
    engine.close()


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has taken, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        be_a_server(sys.argv[1])
    else:
        be_an_engine(sys.argv[1], int(sys.argv[2]), sys.argv[3])
