"""Engines, ranks and servers of a host that kill themselves at named points, by the thousand.

All are forks of one process that has imported what they need, so that each starts in milliseconds.
"""

import contextlib
import ctypes
import fcntl
import itertools
import logging
import multiprocessing
import os
import random
import signal
import sys
import time
from multiprocessing.connection import wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from types import SimpleNamespace

from kvoffload import registry
from kvoffload.errors import ConfigError
from kvoffload.io import attached, backoff, client, lent_memory
from kvoffload.io.attached import AttachedServer
from kvoffload.io.client import IOClient
from kvoffload.io.link import Link
from kvoffload.io.protocol import Ask, Cancel, Load, Store
from kvoffload.io.service.host_memory import BLOCK, HostMemory
from kvoffload.io.service.listener import Listener
from kvoffload.io.service.service import run_service
from kvoffload.io.service.settings import read_serve_config
from kvoffload.policies.lru import LRUPolicy
from kvoffload.transfer.shared_memory import create_shared_memory
from kvoffload.transfer.slab import Slab
from tests.support import kill_points
from tests.support.host_server import SIZE, Job, key_of, payload_of
from tests.support.io_rig import opening
from tests.support.service_manager import ServiceManager

_TAKEN = ("Opened", "PresenceChanges", "Passed", "Arrived", "Lent", "Answered", "Figures")
_SENT = ("Open", "Borrow", "Load", "Store", "Release", "Forget", "Await", "Remove")
ENGINE_POINTS = (
    "greet:begun", "greet:ended", "map:begun", "map:ended",
    # its client's thread reads and acts
    *(f"{name}:{moment}" for name in _TAKEN for moment in ("received", "taken")),
    # any thread sends
    *(f"{name}:{moment}" for name in _SENT for moment in ("unsent", "half", "sent")),
    # its own threads: a slot is half filled; a chunk on loan is half read
    "slot:half", "loan:half", "loan:ended", "leave:begun", "close:begun", "close:ended",
)  # fmt: skip
"""``<message or call>:<moment>`` in an engine's process; see :data:`kill_points.POINTS`."""
KEYS = 96
SLOTS = 8
STEPS = 300
PAUSE_S = 0.005
"""Engines that live leave the processor to those that die."""
OVER_S = 120.0
_NAMES = [f"{i:064}".encode() for i in range(4)] + [b"4" * 64]


class Engine:
    """Stores and loads chunks of known bytes, by slot and by copy, and checks each answer.

    Args:
        path: of the server's socket.
        namespace: its own chunks' one; ranks have different ones.
        reach: called at points of its own.
    """

    def __init__(self, path, namespace="0" * 64, reach=lambda point: None):
        self._fd = create_shared_memory(SLOTS * SIZE)
        self._slab, self._reach = Slab(SLOTS, SIZE, self._fd), reach
        wanted = opening([("serve", "serve", {})], SIZE, namespace=namespace)
        start = lambda: AttachedServer(path, self._fd)  # noqa: E731
        self.client = IOClient(start, wanted, 20.0, 20.0, needs_server=False)
        self.client.borrow()
        self._namespace = namespace
        self.num_good = 0
        """Chunks that were loaded."""

    def _payload(self, key):
        return payload_of(key + self._namespace.encode())

    def step(self, rng):
        """Do one thing, and wait for its answer."""
        first, act, tier = rng.randrange(KEYS), rng.random(), self.client.tiers["serve"]
        keys = [key_of(first + i) for i in range(SLOTS)]
        tier.take_removals()  # as connectors do: else thousands of them are kept
        if act < 0.08:
            self.client.awaits([(1, keys[:2] * (act < 0.05))])
        elif act < 0.16:
            tier.forget(keys[:1])
        elif act < 0.22:
            self.client.remove("serve", keys[:1])
        elif act < 0.25:
            self.client._link.send(client.frame(Ask("serve", keys[:1])))
        elif act < 0.55:
            self._store(keys)
        else:
            self._load(keys, by_slot=act < 0.88, is_cancelled=act < 0.6)

    def _store(self, keys):
        job = Job()
        for i, key in enumerate(keys):
            slot, data = self._slab.slot(i, SIZE), self._payload(key)
            slot[: SIZE // 2] = data[: SIZE // 2]
            self._reach("slot:half")
            slot[SIZE // 2 :] = data[SIZE // 2 :]
        self.client.begin(Store(0, "serve", list(keys), list(range(SLOTS)), SIZE), job)
        self._await(job)

    def _load(self, keys, by_slot, is_cancelled):
        job = Job()
        self.client.begin(
            Load(0, "serve", list(keys), list(range(SLOTS)), SIZE, may_lend=by_slot), job
        )
        if is_cancelled:
            number = max(list(self.client._jobs.unanswered), default=0)
            self.client._link.send(client.frame(Cancel(number)))
        self._await(job)
        places = {i: self._slab.slot(i, SIZE) for i in range(SLOTS)}
        for loan in job.loans:
            starts = zip(loan.numbers, loan.starts, strict=True)
            places.update((i, loan.memory.bytes[at : at + SIZE]) for i, at in starts)
        for i, there in places.items():
            if i == SLOTS // 2 and job.loans:
                self._reach("loan:half")
            assert not job.ok[i] or there == self._payload(keys[i]), "wrong bytes"
        self.num_good += sum(job.ok)
        for loan in job.loans:
            loan.end()
            self._reach("loan:ended")

    def _await(self, job):
        """Wait until its slots are free."""
        assert job.over.wait(OVER_S), "a request is lost"
        assert job.free.wait(OVER_S), "slots are lost"

    def close(self):
        self.client.close()
        os.close(self._fd)


# ---- processes ----


def _forks():
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([__name__])
    return forks


class Fork:
    """A process that runs a function with one end of a pipe; it is killed at the end, if not yet.

    Args:
        run: of this module's level.
        arguments: of the function, before the pipe.
    """

    def __init__(self, run, *arguments):
        forks, self._what = _forks(), arguments
        self.pipe, other = forks.Pipe()
        self.process = forks.Process(target=run, args=(*arguments, other), daemon=True)
        self.process.start()
        other.close()

    def died(self):
        """Wait for its death by its own hand; return what it has said, which should be nothing."""
        assert wait([self.process.sentinel], OVER_S), f"it goes on: {self._what}"
        self.process.join()
        said = []
        with contextlib.suppress(EOFError):
            while self.pipe.poll():
                said.append(self.pipe.recv())
        code = self.process.exitcode
        self.close()
        return "" if (said, code) == ([], -signal.SIGKILL) else f"{said}, exit code {code}"

    def ask(self, question):
        """Return its answer."""
        self.pipe.send(question)
        assert self.pipe.poll(OVER_S), f"no answer to {question}"
        return self.pipe.recv()

    def close(self):
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


def die_as_engine(path, point, seed, namespace, pipe):
    """Be an engine until the point kills it; else say what went wrong."""
    rng = random.Random(seed)
    engine_hooks(point, rng.randint(1, 3))
    try:
        engine = Engine(path, namespace, lambda name: _hooks.reach(name))
        for _ in range(3 if point.startswith(("leave", "close")) else STEPS):
            engine.step(rng)
        engine.client.begin(
            Load(0, "serve", [key_of(0)] * SLOTS, list(range(SLOTS)), SIZE, may_lend=True), Job()
        )
        engine.close()
        pipe.send(f"{point} was never reached")
    except BaseException as error:
        pipe.send(repr(error))
        raise


registry.load(registry.BACKENDS, "disk")  # once, for all forks
registry.load(registry.POLICIES, "lru")
_hooks = SimpleNamespace()


def engine_hooks(point, nth):
    """Let this process kill itself when it reaches a point for the nth time, or the only time."""
    seen = itertools.count(1)
    once = point.startswith(
        ("greet", "map", "Open", "Passed", "Borrow", "leave", "close", "Await", "Forget", "Remove")
    )

    def is_due(name):
        return name == point and (once or next(seen) >= nth)

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def reach(name):
        if is_due(name):
            die()

    def around(holder, call, name):
        inner = getattr(holder, call)

        def hooked(*args):
            reach(f"{name}:begun")
            result = inner(*args)
            reach(f"{name}:ended")
            return result

        setattr(holder, call, hooked)

    class Framed(bytes):
        """A message's bytes, with its name."""

    make, push, take = client.frame, Link.push, IOClient._take

    def hooked_frame(message):
        framed = Framed(make(message))
        framed.name = type(message).__name__
        reach(f"{framed.name}:unsent")
        return framed

    def hooked_push(self, data):
        name = getattr(data, "name", "Await")  # what tells of the queue is joined
        if is_due(f"{name}:half"):
            push(self, bytes(data[: len(data) // 2]))
            die()
        push(self, data)
        reach(f"{name}:sent")

    def hooked_take(self, message):
        name = type(message).__name__
        reach(f"{name}:received")
        take(self, message)
        reach(f"{name}:taken")

    _hooks.reach = reach
    client.frame, Link.push, IOClient._take = hooked_frame, hooked_push, hooked_take
    around(attached, "greet", "greet")
    around(lent_memory, "_mapped", "map")
    around(lent_memory.LentMemory, "leave", "leave")
    around(IOClient, "close", "close")


# ---- servers ----

SERVER_POINTS = (
    *(each for each in kill_points.POINTS if not each.startswith(("store:open", "retire"))),
    *kill_points.LOAN_POINTS,
    *kill_points.MEMORY_POINTS,
)
_ONCE = (
    "Open", "greet", "Borrow", "Passed", "Renewal", "purge", "close", "end", "Alive",
    "Ask", "Present", "Forget", "Remove", "Cancel",
)  # fmt: skip
"""What an engine reaches once, or seldom."""


def serve(settings, points, notify, log, pipe):
    """Be a server with kill points, whose memory a service manager keeps for the next one."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    os.environ.update(NOTIFY_SOCKET=notify, FDSTORE="1")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    memory_fd = recv_handle(pipe) if pipe.recv() else -1
    kill_points.hook(points)
    config = read_serve_config(settings)
    listener = Listener(config.socket)
    run_service(config, listener.sock, lambda service: pipe.send("ready"), memory_fd)


def live(path, seed, namespace, pipe):
    """Be an engine for ever; each question is answered at rest, and after "rest" it stays so."""
    rng = random.Random(seed)
    _hurry()
    try:
        engine = Engine(path, namespace)
        while True:
            asked = ""
            while pipe.poll() or asked == "rest":
                asked = pipe.recv()
                ctypes.CDLL(None).malloc_trim(0)  # what it holds is looked at now, and not its heap
                pipe.send((engine.num_good, engine.client.tiers["serve"].usage))
            engine.step(rng)
            time.sleep(PAUSE_S)
    except BaseException as error:
        pipe.send(repr(error))
        raise


def _hurry():
    """Look for the next server at once."""
    backoff.STEADY_S, backoff.SHORTEST_S, backoff.LONGEST_S = 0.0, 0.02, 0.1


def visit(path, seed, pipe):
    """Attach, work, renew the stores and leave, over and over."""
    rng = random.Random(seed)
    _hurry()
    try:
        for i in itertools.count():
            engine = Engine(path, f"{i % 2 + 2:064}")
            for _ in range(3):
                engine.step(rng)
                time.sleep(PAUSE_S)
            with contextlib.suppress(ConfigError, OSError):  # the server may die at any moment
                engine.client.renew("4" * 64, {}, ["4" * 64], 5.0)
            engine.close()
    except BaseException as error:
        pipe.send(repr(error))
        raise


class Server:
    """Servers, one after the other, over a folder; each is told where to kill itself."""

    def __init__(self, folder, **settings):
        self._folder = folder
        self.path, self.log = str(folder / "s"), folder / "server.log"
        self._settings = {"socket": self.path, **settings}
        self._points = kill_points.KillPoints(folder)
        self.manager = ServiceManager(folder)
        self.start()

    def start(self):
        self.manager.take_messages()
        notify = str(self._folder / "notify")
        self.fork = Fork(serve, self._settings, self._folder, notify, str(self.log))
        self.fork.pipe.send(bool(self.manager.kept))
        for _, fd in self.manager.kept:
            send_handle(self.fork.pipe, fd, self.fork.process.pid)
        assert self.fork.pipe.poll(OVER_S), self.log.read_text()[-3000:]
        assert self.fork.pipe.recv() == "ready"
        self.pid = self.fork.process.pid

    def arm(self, point, nth):
        self._points.arm(point, nth)

    def close(self):
        self.fork.close()
        self.manager.close()

    def check_memory(self):
        """Of a dead server's memory: each chunk has its bytes, each block is a chunk's or free."""
        self.manager.take_messages()
        ((_, fd),) = self.manager.kept
        copy = os.memfd_create("copy", os.MFD_ALLOW_SEALING)
        os.truncate(copy, os.fstat(fd).st_size)
        os.pwrite(copy, os.pread(fd, os.fstat(fd).st_size, 0), 0)
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        size = read_serve_config(self._settings).memory
        memory = HostMemory(size, LRUPolicy, keeps=True, fd=copy)
        assert memory.file.is_adopted
        found = {chunk.first for chunk in memory._old_loans}
        for parts in memory._tables.values():
            for key, chunk in ((k, c) for part in parts.values() for k, c in part.items()):
                found.add(chunk.first)
                there = bytes(memory._map[chunk.start : chunk.start + SIZE])
                assert any(there == payload_of(key + name) for name in _NAMES), "wrong bytes"
        assert memory.resident_bytes == len(found) * BLOCK, "slots are lost"
        return len(memory)


# ---- what must not grow ----


def held(pid):
    """What a process holds: descriptors, threads, memory files, and KiB of its private memory.

    Mappings without a file are the allocators' own, which come with threads and go late; what is
    in them is private memory.
    """
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return SimpleNamespace(
        descriptors=len(list((folder / "fd").iterdir())),
        threads=len(list((folder / "task").iterdir())),
        memory_files=(folder / "maps").read_text().count("/memfd:"),
        private_kib=int(status["RssAnon"].split()[0]),
    )


class Steady:
    """Checks that processes hold no more at the end than after half of the kills.

    The first hundred kills are no measure: threads start, and tables are made.
    """

    def __init__(self, kills, *pids):
        self._kills, self._pids = kills, pids
        self.half = []

    def look(self):
        """While no victim is there, after half of the kills."""
        self.half = [held(pid) for pid in self._pids]

    def check(self, until):
        """After the last one; return what they held, and hold now."""
        if self._kills > 200:
            with contextlib.suppress(AssertionError):
                until(lambda: not self._more())
            assert self._more() == []
            for before, now in zip(self.half, map(held, self._pids), strict=True):
                grown_kib = now.private_kib - before.private_kib
                assert grown_kib < 256 + self._kills / 4, (before, now)
        return self.half, [held(pid) for pid in self._pids]

    def _more(self):
        """What there is more of; a descriptor that is passed on, or a thread, is gone soon."""
        return [
            (what, before, now)
            for before, now in zip(self.half, map(held, self._pids), strict=True)
            for what in ("descriptors", "threads", "memory_files")
            if getattr(now, what) > getattr(before, what)
        ]


def kill_engines(server, kills, until, rank=False):
    """Let engines kill themselves, or ranks, each with another rank that lives a little longer."""
    survivor = Fork(live, server.path, 0, "0" * 64)
    steady = Steady(kills, server.process.pid, survivor.process.pid)
    try:
        for i in range(kills):
            point = ENGINE_POINTS[i % len(ENGINE_POINTS)]
            if i == kills // 2:
                until(lambda: server.slabs == 1)
                steady.look()
            namespace = f"{i % 2 * rank:064}"
            other = Fork(live, server.path, i, f"{1 - i % 2:064}") if rank else None
            said = Fork(die_as_engine, server.path, point, i, namespace).died()
            assert said == "", (point, said)
            if other is not None:
                other.ask("go on")
                other.close()
        until(lambda: server.slabs == 1)

        def are_all_blocks_accounted():
            usage = survivor.ask("rest")[1]
            lent = usage.gauges["memory_lent_bytes"]
            return (usage.resident_bytes, lent) == (usage.chunks * BLOCK, 0)

        until(are_all_blocks_accounted)
        return steady.check(until)
    finally:
        survivor.close()


def kill_servers(server, kills, until):
    """Let servers kill themselves, while two engines stay and others come and go."""
    engines = [Fork(live, server.path, i, f"{i:064}") for i in range(2)]
    visitor, rng = Fork(visit, server.path, 0), random.Random(kills)
    steady = Steady(kills, *(engine.process.pid for engine in engines))
    good, chunks = [0, 0], []
    try:
        for i in range(kills):
            point = SERVER_POINTS[i % len(SERVER_POINTS)]
            server.arm(point, 1 if point.startswith(_ONCE) else rng.randint(1, 3))
            said = server.fork.died()
            assert said == "", (point, said)
            chunks.append(server.check_memory())
            server.start()
            if i in (kills // 2, kills - 1):
                for k, engine in enumerate(engines):
                    until(lambda k=k, engine=engine: engine.ask("go on")[0] > good[k])
                    good[k] = engine.ask("rest")[0]
                if i == kills // 2:
                    steady.look()
                told = steady.check(until) if i == kills - 1 else None
                for engine in engines:
                    engine.ask("go on")
            assert not visitor.pipe.poll(), visitor.pipe.recv()
        return told, min(chunks[kills // 10 :])
    finally:
        for fork in (*engines, visitor):
            fork.close()
