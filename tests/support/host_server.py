"""The server of a host (``kvoffload serve``) as a process that tests start, kill and stop."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.support.preloaded import QUICK, Fork

ROOT = Path(__file__).parents[2]
STARTED_S = 60.0
KEYS = 200
CLIENT = """
import hashlib, os, random, signal, sys, threading, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # libraries start threads
from kvoffload.io.attached import AttachedServer
from kvoffload.io.client import IOClient
from kvoffload.io.protocol import Load, Store
from kvoffload.transfer.shared_memory import create_shared_memory
from kvoffload.transfer.slab import Slab
from tests.support.host_server import KEYS, SIZE, Job, key_of, payload_of
from tests.support.io_rig import opening

path, rng, point = sys.argv[1], random.Random(int(sys.argv[2])), sys.argv[3]
fd = create_shared_memory(16 * SIZE)
slab, wanted = Slab(16, SIZE, fd), opening([("serve", "serve", {})], SIZE)
client = IOClient(lambda: AttachedServer(path, fd), wanted, 9.0, 9.0, needs_server=False)
client.borrow()
print("attached", flush=True)
if point == "borrowed":  # its memory is on the way, or just mapped
    time.sleep(0.01 * rng.random())
    os.kill(os.getpid(), signal.SIGKILL)


def reach(name):
    if name == point and rng.random() < 0.5:
        os.kill(os.getpid(), signal.SIGKILL)


while True:
    first = rng.randrange(KEYS)
    keys, job = [key_of(first + i) for i in range(16)], Job()
    if rng.random() < 0.5:
        for i, key in enumerate(keys):
            slab.slot(i, SIZE)[:] = payload_of(key)
        client.begin(Store(0, "serve", keys, [*range(16)], SIZE), job)
        job.free.wait()
    else:
        job.has_loan = lambda: reach("lent")
        may_borrow = rng.random() < 0.8
        client.begin(Load(0, "serve", keys, [*range(16)], SIZE, [], may_borrow), job)
        reach("asked")
        job.free.wait()
        if job.loans and point in ("held", "forked"):
            if point == "forked" and os.fork() == 0:
                signal.pause()
            print("held", flush=True)
            signal.sigwait([signal.SIGUSR1])
        places = {i: slab.slot(i, SIZE) for i in range(16)}
        for loan in job.loans:
            starts = zip(loan.numbers, loan.starts)
            places.update((i, loan.memory.bytes[at : at + SIZE]) for i, at in starts)
        for i, there in places.items():
            if i == 8:
                reach("half")
            if job.ok[i] and there != payload_of(keys[i]):
                print("wrong", flush=True)
        for loan in job.loans:
            loan.end()
            reach("ended")
        if job.loans and point == "left":  # with a loan that ends only with the process
            client.begin(Load(0, "serve", keys, [*range(16)], SIZE, [], True), Job())
            client.close()
            os.kill(os.getpid(), signal.SIGKILL)
"""
"""Stores and loads chunks for ever, and says so if one is wrong.

It reads most of them in the server's memory. It is killed at a point, if one is named, or waits
there: for SIGUSR1, at ``forked`` with a child that lives on.
"""
CLIENT_POINTS = ("borrowed", "asked", "lent", "half", "ended", "left")
SIZE = 16 << 10
ENGINE = """
import json, os, sys
from tests.conftest import FakeRequest, make_kv_caches
from tests.support.small_engine import SmallEngine

engine = SmallEngine(make_kv_caches(), FakeRequest, serve=sys.argv[1])
for line in sys.stdin:
    name, *arguments = json.loads(line)
    told = getattr(engine, name)(*arguments)
    truth = [t.tolist() for t in engine.truth[arguments[0]]] if name == "store" else None
    print(json.dumps(told if truth is None else truth), flush=True)
"""


FORKS_OF = []
"""The Python whose forks processes are, if there is one."""


def started(words, stdin, stdout, stderr):
    """Start Python with these words and streams, in the folder of this checkout."""
    if FORKS_OF:
        return Fork(FORKS_OF[0], [QUICK, *words], [stdin, stdout, stderr], cwd=ROOT)
    paths = [os.environ.get("PYTHONPATH", ""), str(ROOT), f"{ROOT}/tests/helpers"]
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", *words],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )


def key_of(number):
    return hashlib.sha256(b"%d" % number).digest() + bytes(4)


def payload_of(key):
    return hashlib.sha256(key).digest() * (SIZE // 32)


class Job:
    """Waits for the end of one job."""

    def __init__(self):
        self.ok, self.loans = b"", []
        self.over, self.free = threading.Event(), threading.Event()
        """Set once it is answered, and once its slots are free."""
        self.has_loan = lambda: None

    def arrived(self, numbers):
        pass

    def lent(self, loan):
        self.loans.append(loan)
        self.has_loan()

    def ended(self, ok, reason, settled, io_time_s):
        self.ok = ok
        self.over.set()
        if settled:
            self.free.set()

    def released(self):
        self.free.set()


class HostServer:
    """A server over a folder; its maker stops it.

    Args:
        folder: gets its socket, its settings and its log.
        manager: starts it as a program of its own, if one is given.
        settings: further ones, or others.
    """

    def __init__(self, folder, manager=None, **settings):
        self._manager = manager
        self.path = str(folder / "s")
        self.log_file = folder / "server.log"
        self._config = folder / "serve.json"
        given = {"socket": self.path, "memory": "16MiB", **settings}
        self.port = given.get("metrics_port")
        self.settings = given
        self.configure()
        self.start()

    def configure(self, **settings):
        """Write its settings, with other values; a running server has them after a SIGHUP."""
        self._config.write_text(json.dumps(self.settings | settings))

    def start(self):
        words = ["-m", "kvoffload", "serve", "--config", str(self._config)]
        with self.log_file.open("a") as log:
            if self._manager:
                command = [sys.executable, *words]
                self.process = self._manager.start(command, stdout=log, stderr=log, cwd=ROOT)
            else:
                self.process = started(words, None, log, log)
        end_s = time.monotonic() + STARTED_S
        while not self.is_listening():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < end_s, "the server does not start"
            time.sleep(0.01)

    def is_listening(self):
        with socket.socket(socket.AF_UNIX) as sock:
            return sock.connect_ex(self.path) == 0

    @property
    def log(self):
        return self.log_file.read_text()

    @property
    def slabs(self):
        """Memory files of engines that it has mapped."""
        maps = Path(f"/proc/{self.process.pid}/maps").read_text()
        return maps.count("memfd:kvoffload-slab")

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        """End it as a service manager does; return its exit code."""
        self.process.terminate()
        return self.process.wait(30)


class EngineInAProcess:
    """A small engine in a process of its own, attached to a server."""

    def __init__(self, path):
        words = ["-c", ENGINE, path]
        with open(os.devnull, "w") as log:
            self.process = started(words, subprocess.PIPE, subprocess.PIPE, log)

    def send(self, *call):
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()

    def do(self, *call):
        """Call a method of the engine; return what it returned, of a store the bytes."""
        self.send(*call)
        return json.loads(self.process.stdout.readline())

    def kill(self):
        self.process.kill()
        self.process.communicate()


class ClientProcess:
    """A process that stores and loads for ever, or until it is at a point; quick to start."""

    def __init__(self, path, seed, point=""):
        words = ["-c", CLIENT, path, str(seed), point]
        self.process = started(words, None, subprocess.PIPE, None)
        assert self.process.stdout.readline() == "attached\n"

    def await_loan(self):
        """Wait until it has chunks on loan, which it holds until :meth:`go_on`."""
        said = self.process.stdout.readline()
        assert said == "held\n", said

    def go_on(self):
        """Let it compare what it has on loan, stopped or not; wait until it has the next loan."""
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(signal.SIGUSR1)
        self.await_loan()

    def end(self):
        """Wait until it has killed itself; return what else it has said."""
        said = self.process.communicate()[0]
        assert self.process.returncode == -signal.SIGKILL
        return said

    def kill(self):
        """Kill it; return what else it has said."""
        self.process.kill()
        return self.process.communicate()[0]


def check_stopped_borrower(client, engine, until):
    """A client that is stopped with a loan holds up no store, has the right bytes, and ends it."""
    for i in range(8):  # more than the memory has room for
        engine.store(f"new {i}")
        assert engine.load(f"new {i}") == 10
    assert engine.client.tiers["serve"].usage.gauges["memory_lent_bytes"] > 0
    client.go_on()
    assert client.kill() == "", "wrong bytes"
    until(lambda: not engine.client.tiers["serve"].usage.gauges["memory_lent_bytes"])
