"""A server on a thread of this process: how it ends, and what a lack of threads and files does."""

import asyncio
import contextlib
import errno
import os
import resource
import socket
import threading
from functools import partial

import pytest

from kvoffload.backends.disk.vfs import Vfs
from kvoffload.errors import ConfigError
from kvoffload.io import client, deadlines, greeting, server
from kvoffload.io.attached import AttachedServer
from kvoffload.io.client import IOClient
from kvoffload.io.protocol import Answered, Borrow, Load, MessageReader, Passed, Store, frame
from kvoffload.io.service import layered_store, service, shared_stores
from kvoffload.io.service.host_memory import HostMemory
from kvoffload.io.service.host_store import HostStore
from kvoffload.io.service.listener import Listener
from kvoffload.io.service.settings import read_serve_config
from kvoffload.metrics.names import ENGINES, ENGINES_LEAVING, LOAD_CHUNKS
from kvoffload.transfer.shared_memory import create_shared_memory
from tests.io.service.test_bad_input import KEYS as SLOTS
from tests.io.service.test_bad_input import Talk, serves
from tests.io.service.test_loans import Borrower
from tests.support.host_server import key_of
from tests.support.io_rig import opening

SLOT = 4096
KEYS = [key_of(0)]
OPEN = opening([("serve", "serve", {})], SLOT)


class InAThread:
    """A server in this process."""

    def __init__(self, path, *roots):
        disks = [{"type": "disk", "root": str(root), "capacity": "64MiB"} for root in roots]
        self._settings = read_serve_config({"socket": path, "memory": "1MiB", "backends": disks})
        self._listener, self._is_started = Listener(path), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._is_started.wait(20)

    def _run(self):
        service.run_service(self._settings, self._listener.sock, self._started)
        self._listener.close()

    def _started(self, host):
        self.host, self._task = host, asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._is_started.set()

    def tell(self):
        """Tell it to end."""
        self._loop.call_soon_threadsafe(self._task.cancel)

    def close(self):
        """See it end."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self.tell()
        self._thread.join(20)
        assert not self._thread.is_alive()


def with_a_load_that_hangs(path, monkeypatch):
    """Attach an engine, and begin a load; return its connection, and what lets the load end."""
    monkeypatch.setattr(server, "END_S", 0.05)
    monkeypatch.setattr(service, "CLOSE_S", 0.1)
    monkeypatch.setattr(layered_store, "CLOSE_S", 0.1)
    is_reading, may_read, read = threading.Event(), threading.Event(), HostMemory.read

    def hanging(memory, *args):
        is_reading.set()
        assert may_read.wait(60)
        return read(memory, *args)

    monkeypatch.setattr(HostMemory, "read", hanging)
    attached = AttachedServer(path, create_shared_memory(2 * SLOT))
    attached.sock.settimeout(20)
    attached.sock.sendall(frame(OPEN) + frame(Store(1, "serve", KEYS, [0], SLOT)))
    reader, answers = MessageReader(to_server=False), []
    while not answers:
        answers += [m for m in reader.feed(attached.sock.recv(1 << 16)) if isinstance(m, Answered)]
    assert answers[0].ok == b"\1"
    attached.sock.sendall(frame(Load(2, "serve", KEYS, [1], SLOT)))
    assert is_reading.wait(20)
    return attached, may_read


def test_slots_are_free_only_once_a_call_that_hangs_as_the_server_ends_has_returned(
    tmp_path, monkeypatch, closing
):
    server = closing(InAThread(str(tmp_path / "s")))
    attached, may_read = with_a_load_that_hangs(str(tmp_path / "s"), monkeypatch)
    server.tell()
    assert not attached.wait(1.0), "a call may yet write into the slot"
    may_read.set()
    assert attached.wait(20)
    server.close()
    attached.sock.close()


@contextlib.contextmanager
def stored_farther(tmp_path, attach, until, slots):
    """Yield an engine whose chunks a farther disk has; its server has a nearer one by now."""
    path, near, far = str(tmp_path / "s"), tmp_path / "near", tmp_path / "far"
    with contextlib.closing(InAThread(path, far)):
        engine = attach(path, slots=slots)
        engine.store("a")
    with contextlib.closing(InAThread(path, near, far)):
        until(lambda: engine.died and engine.client.tiers["serve"].is_open)
        yield engine


@pytest.mark.parametrize(
    ("slots", "loaded", "later"), [(24, 10, ["b"]), (12, 6, [])], ids=["a store", "its own turns"]
)
def test_a_disk_that_hangs_stores_no_byte_of_what_an_engine_put_into_the_slots_later(
    tmp_path, monkeypatch, attach, until, slots, loaded, later
):
    """It was to store nearer what a farther disk had brought, after the load was given up."""
    path, near = str(tmp_path / "s"), tmp_path / "near"
    go_on, hung, pwritev = threading.Event(), [], Vfs.pwritev

    def hanging(fd, *args):
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(near)):
            hung.append(fd)
            assert go_on.wait(60)
        return pwritev(fd, *args)

    with stored_farther(tmp_path, attach, until, slots) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(Vfs, "pwritev", staticmethod(hanging))
            engine.wait_at_most(0.5)
            assert engine.load("a") == loaded
            assert hung
            told = {(name, *labels): value for name, labels, value in engine.client.samples()}
            assert told[LOAD_CHUNKS, "serve"] == loaded, "it counts when it is answered"
            for name in later:
                engine.store(name)
            go_on.set()
        engine.check()
    with contextlib.closing(InAThread(path, near)):
        engine.wait_at_most(30.0)
        assert until(lambda: engine.load("a")), "all chunks of it are right"


def test_a_load_in_turns_waits_for_the_slots_that_a_slow_nearer_disk_reads(
    tmp_path, monkeypatch, attach, until
):
    near = tmp_path / "near"
    monkeypatch.setattr(deadlines, "ARRIVED_S", 0.0)
    look, looks, pwritev = deadlines.IOJobs.look, [], Vfs.pwritev

    def looked(*args):
        looks.append(args)
        return look(*args)

    def slow(fd, *args):
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(near)):
            seen = len(looks)
            until(lambda: len(looks) > seen + 2)
        return pwritev(fd, *args)

    with stored_farther(tmp_path, attach, until, 12) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(deadlines.IOJobs, "look", looked)
            patched.setattr(Vfs, "pwritev", staticmethod(slow))
            assert engine.load("a") == 10
            engine.check()


def test_the_last_turn_of_a_load_does_not_wait_for_a_nearer_disk_that_hangs(
    tmp_path, monkeypatch, attach, until
):
    near = tmp_path / "near"
    go_on, hung, late, pwritev = threading.Event(), [], [], Vfs.pwritev

    def hanging(fd, buffers, *args):
        is_last = sum(map(len, buffers)) == 8192  # those before it have 24576 bytes
        if is_last and os.readlink(f"/proc/self/fd/{fd}").startswith(str(near)):
            hung.append(fd)
            if not go_on.wait(60):
                late.append(fd)
        return pwritev(fd, buffers, *args)

    with stored_farther(tmp_path, attach, until, 12) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(Vfs, "pwritev", staticmethod(hanging))
            engine.wait_at_most(600.0)
            assert engine.load("a") == 10
            assert hung
            assert not late
            go_on.set()
        engine.check()


def test_an_engine_that_is_stopped_with_loans_does_not_delay_the_end(
    tmp_path, monkeypatch, closing
):
    """It keeps its mapping, and the marks of its loans stay for the next server."""
    monkeypatch.setattr(service, "CLOSE_S", 60.0)
    monkeypatch.setattr(service, "keeps_memory", lambda: True)
    monkeypatch.setattr(service, "keep_memory", lambda fd: None)
    server = closing(InAThread(str(tmp_path / "s")))
    engine = Borrower(str(tmp_path / "s")).greet()  # which reads the end, and never says so
    engine.send(OPEN, Borrow(), Store(1, "serve", SLOTS, [0, 1, 2, 3], SLOT))
    assert engine.hear(Answered).ok == b"\1\1\1\1"
    engine.borrow(2)
    server.close()
    assert [record.is_lent for record in server.host.memory.file.records()] == [True] * 4
    engine.close()


def test_an_engine_that_has_left_is_counted_while_a_call_uses_its_memory(
    tmp_path, monkeypatch, closing, until
):
    host = closing(InAThread(str(tmp_path / "s"))).host
    attached, may_read = with_a_load_that_hangs(str(tmp_path / "s"), monkeypatch)

    def engines():
        told = {name: value for name, labels, value in host.samples() if not labels}
        return told.get(ENGINES), told.get(ENGINES_LEAVING)

    until(lambda: engines() == (1, 0))
    attached.sock.close()
    until(lambda: engines() == (0, 1))
    may_read.set()
    until(lambda: engines() == (0, 0))
    assert attached.wait(20)


def test_engines_whose_process_the_kernel_does_not_tell_have_names_of_their_own(
    tmp_path, monkeypatch, closing, until
):
    host = closing(InAThread(str(tmp_path / "s"))).host
    made = []

    def attach(name):
        monkeypatch.setattr(greeting, "own_name", lambda: name)
        made.append(AttachedServer(str(tmp_path / "s"), create_shared_memory(SLOT)))
        until(lambda: len(host.sessions) == len(made))

    attach("pod-a-1")
    monkeypatch.setattr(service, "check_user", lambda sock, user: 0)  # as of another container
    for name in ("pod-a-1", "pod-b-1", "pod-b-1"):
        attach(name)
    names = [traffic.name for traffic in host.sessions.values()]
    assert names == [str(os.getpid()), "pod-a-1", "pod-b-1", "pod-b-1-1"]
    for attached in made:
        attached.close()


def test_a_store_that_has_no_threads_is_opened_once_there_are_some(
    tmp_path, monkeypatch, closing, until
):
    monkeypatch.setattr(client, "MEET_S", 0.1)
    tries = []

    def scarce(*args):
        tries.append(args)
        if len(tries) == 1:
            raise RuntimeError("can't start new thread")
        return HostStore(*args)

    monkeypatch.setattr(shared_stores, "HostStore", scarce)
    path, slab_fd = str(tmp_path / "s"), create_shared_memory(2 * SLOT)
    closing(InAThread(path))
    engine = IOClient(lambda: AttachedServer(path, slab_fd), OPEN, 9.0, 9.0, needs_server=False)
    until(lambda: engine.tiers["serve"].is_complete and not engine._is_opening)
    engine.close()


def test_a_renewal_where_no_server_was_ever_there_says_that_nothing_is_open_yet(
    tmp_path, monkeypatch, closing
):
    """It is no OSError: that one says of a server that it serves what was to be removed."""
    monkeypatch.setattr(client, "MEET_S", 0.1)
    path, slab_fd = str(tmp_path / "s"), create_shared_memory(2 * SLOT)
    start = partial(AttachedServer, path, slab_fd)
    engine = closing(IOClient(start, OPEN, 9.0, 9.0, needs_server=False))
    with pytest.raises(ConfigError, match=r"no server.*took 0\.1 s to open the tiers"):
        engine.renew("2" * 64, {}, [], timeout_s=0.1)


@pytest.mark.parametrize("left", range(4))
def test_a_try_to_attach_that_lacks_descriptors_leaves_none_behind(tmp_path, left):
    fillers, (soft, hard) = [], resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.open(os.devnull, os.O_RDONLY))
        free = {fillers.pop() for _ in range(left)}
        for fd in free:
            os.close(fd)
        with pytest.raises(OSError, match=r"Too many open files|No such file"):
            AttachedServer(str(tmp_path / "no server"), 0)
        assert {os.dup(0) for _ in free} == free
    finally:
        for fd in (*fillers, *free):
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_memory_that_finds_no_descriptor_for_its_end_is_not_kept(tmp_path, monkeypatch, closing):
    closing(InAThread(str(tmp_path / "s")))
    attached = AttachedServer(str(tmp_path / "s"), create_shared_memory(2 * SLOT))
    attached.sock.settimeout(20)
    attached.sock.sendall(frame(OPEN) + frame(Borrow()))
    reader, messages = MessageReader(to_server=False), []
    while not any(isinstance(message, Passed) for message in messages):
        messages += reader.feed(attached.sock.recv(1 << 16))

    def dup(sock):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "dup", dup)
    before = os.listdir("/proc/self/fd")
    assert attached.lent_memory() is None
    assert os.listdir("/proc/self/fd") == before
    attached.close()


def connected(path):
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)  # without a timeout it waits for room in the queue
    sock.settimeout(20)
    return sock


@contextlib.contextmanager
def held(server):
    """Hold the loop of a server, so that it sees at once what is done meanwhile."""
    is_held, may_run = threading.Event(), threading.Event()
    server._loop.call_soon_threadsafe(lambda: (is_held.set(), may_run.wait(60)))
    assert is_held.wait(20)
    try:
        yield
    finally:
        may_run.set()


def test_connections_that_say_nothing_take_no_place_of_an_engine(tmp_path, monkeypatch, closing):
    monkeypatch.setattr(service, "GREETING_S", 600)
    path, most = str(tmp_path / "s"), service.MOST_SILENT
    server = closing(InAThread(path))
    silent = [connected(path) for _ in range(service.MOST_SESSIONS + 2 * most)]
    for sock in silent[:-most]:
        assert sock.recv(1) == b"", "the oldest ones are ended"
    with held(server):  # or it says nothing yet as it is accepted
        engine = Talk(path).greet()
    assert serves(engine)
    for sock in silent[-most:]:
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1)
    late = Talk(path)
    silent[-most].settimeout(20)
    assert silent[-most].recv(1) == b""  # one more that has said nothing yet
    assert serves(late.greet())
    for sock in silent:
        sock.close()


def test_connections_that_end_and_have_said_nothing_are_one_line(tmp_path, caplog):
    path = str(tmp_path / "s")
    with contextlib.closing(InAThread(path)):
        for _ in range(8):
            connected(path).close()
        assert serves(Talk(path).greet())
    assert "an engine is refused" not in caplog.text
    assert 1 <= caplog.text.count("it has ended, and had said nothing") < 8


def test_a_flood_of_silent_connections_before_an_engine_is_none_of_engines(
    tmp_path, monkeypatch, closing
):
    """The server was busy, and accepts all of them in one go."""
    monkeypatch.setattr(service, "MOST_SESSIONS", 8)
    monkeypatch.setattr(service, "MOST_SILENT", 4)
    path = str(tmp_path / "s")
    server = closing(InAThread(path))
    with held(server):
        silent = [connected(path) for _ in range(50)]
        engine = Talk(path).greet()
    assert serves(engine)
    for sock in silent:
        sock.close()


def test_an_engine_that_has_greeted_keeps_its_place_though_many_say_nothing(
    tmp_path, monkeypatch, closing
):
    monkeypatch.setattr(service, "MOST_SILENT", 2)
    path, silent, engines = str(tmp_path / "s"), [], []
    server = closing(InAThread(path))
    with held(server):
        for _ in range(4):
            engines.append(Talk(path))
            silent += [connected(path) for _ in range(5)]
        for engine in engines:
            engine.greet()
    assert all(serves(engine) for engine in engines)
    for sock in silent:
        sock.close()
