"""The control socket: whose it is, what it refuses, and what is left of it."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from kvoffload.connectors import control_server
from kvoffload.connectors.cache_lookup import PORTION, KeyedGroup, look_up
from kvoffload.connectors.control_server import ControlServer, Operated, Orders, Refused
from kvoffload.control import (
    Clear,
    Describe,
    EngineFacts,
    Folder,
    Lookup,
    engine_sockets,
    folders,
)
from kvoffload.errors import ConfigError
from kvoffload.messages import make_offload_key

pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="needs Linux")


class Stub(Operated):
    """An engine whose orders take some steps."""

    def __init__(self, steps=3):
        super().__init__()
        self.steps, self.cleared = steps, []

    def facts(self):
        return EngineFacts(os.getpid(), "a model", "", ["cpu", "disk"])

    def lookup(self, token_ids, salt):
        raise Refused(f"{len(token_ids)} tokens, salt {salt!r}")

    def clear(self, tier):
        for _ in range(self.steps):
            yield None
        self.cleared.append(tier)
        yield ""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("KVOFFLOAD_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run" / "kvoffload"


class Engine:
    """An engine that steps on a thread of its own, unless it hangs."""

    def __init__(self, stub, hangs=False):
        self.orders, self._stop = stub.orders, False
        self.server = ControlServer(stub)
        self._thread = threading.Thread(target=self._run)
        if not hangs:
            self._thread.start()

    def _run(self):
        while not self._stop:
            self.orders.step()
            time.sleep(0.001)

    def close(self):
        self._stop = True
        if self._thread.is_alive():
            self._thread.join()
        self.server.close()


@pytest.fixture
def start(run, closing):
    def start(*args, **more):
        return closing(Engine(*args, **more))

    return start


def test_folder_and_socket_are_private_and_nothing_is_left(run, start):
    engine = start(Stub())
    assert run.stat().st_mode & 0o777 == 0o700
    (sock,) = engine_sockets()
    assert sock.engine == str(os.getpid())
    assert sock.ask(Describe()).engine == Stub().facts()
    assert sock.ask(Lookup([1, 2], "s")).error == "2 tokens, salt 's'"
    assert sock.ask(Clear("tape")).error == "there is no tier 'tape'; tiers: cpu, disk"
    engine.close()
    assert not list(run.iterdir())
    assert not [t for t in threading.enumerate() if t.name == "kvoffload-control"]


def test_a_service_and_a_login_find_each_other(monkeypatch):
    monkeypatch.delenv("KVOFFLOAD_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    of_service = [f"/tmp/kvoffload-{os.geteuid()}"]
    assert folders() == of_service
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert folders() == ["/run/user/7/kvoffload", *of_service]
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert folders() == of_service
    monkeypatch.setenv("KVOFFLOAD_RUNTIME_DIR", "/run/kv")
    assert folders() == ["/run/kv/kvoffload"]


def test_engines_of_one_process_have_a_socket_each(run, start):
    for _ in range(3):
        start(Stub())
    pid = os.getpid()
    assert [each.engine for each in engine_sockets()] == [f"{pid}-1", f"{pid}-2", str(pid)]


def test_another_user_is_refused(run, start):
    """Also one that got past the folder: the kernel tells who it is."""
    if os.geteuid():
        pytest.skip("needs root, to be another user")
    engine = start(Stub(0))
    for path in (run.parents[0], run, *run.iterdir()):
        path.chmod(0o777)
    for folder in run.parents[1:]:
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o001)
    code = f"""
import os, socket
os.setgid(65534); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.connect({str(next(run.iterdir()))!r})
try:
    sock.sendall(b'{{"type":"clear","tier":""}}'); sock.shutdown(socket.SHUT_WR)
    print(sock.recv(100))
except OSError:
    print(b"")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "b''\n"
    assert engine.server._engine.cleared == []


@pytest.mark.parametrize("squat", ["open", "link", "file"])
def test_a_folder_that_others_made_is_refused(run, tmp_path, squat, caplog, monkeypatch):
    """Anyone may make the folder in /tmp; nothing is put there, and nothing of it believed."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    if squat == "open":
        run.mkdir()
        run.chmod(0o755)
    elif squat == "link":
        run.symlink_to(private)
    else:
        run.write_text("")
    monkeypatch.setattr(control_server, "folders", lambda: [str(run)])
    stub = Stub()
    stub.serve(True)
    assert stub._server is None
    assert "must be your folder with mode 0700" in caplog.text
    with pytest.raises(ConfigError, match="must be your folder"):
        Folder(str(run))
    assert not list(private.iterdir())


def test_a_squatted_folder_of_another_user_is_refused(run):
    if os.geteuid():
        pytest.skip("needs root, to make another user's folder")
    run.mkdir(mode=0o700)
    os.chown(run, 65534, 65534)
    with pytest.raises(ConfigError, match="must be your folder"):
        Folder(str(run), create=True)


def test_the_next_folder_is_taken_where_the_first_is_refused(run, tmp_path, monkeypatch):
    run.mkdir()
    run.chmod(0o755)
    both = [str(run), str(tmp_path / "second")]
    monkeypatch.setattr(control_server, "folders", lambda: both)
    monkeypatch.setattr("kvoffload.control.folders", lambda: both)
    server = Stub()
    server.serve(True)
    assert [each.folder for each in engine_sockets()] == both[1:]
    server.close()


def test_a_long_path_is_no_limit(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 120) / ("e" * 120)
    deep.mkdir(parents=True)
    monkeypatch.setenv("KVOFFLOAD_RUNTIME_DIR", str(deep))
    server = Stub()
    server.serve(True)
    (sock,) = engine_sockets()
    assert sock.ask(Describe()).engine.model == "a model"
    server.close()


CHILD = """
import os, sys, time
sys.path.insert(0, "tests/connectors")
from test_control_server import Stub
server = Stub()
server.serve(True)
is_engine = sys.argv[1] == "alone" or os.fork()
if not is_engine:
    server.close()  # as a worker that ends
if not is_engine or sys.argv[1] == "alone":
    print("ready", flush=True)
time.sleep(60)
os._exit(0)
"""


@pytest.mark.parametrize("kind", ["alone", "forks"])
def test_the_socket_of_a_killed_engine_is_removed_by_the_next(run, start, kind):
    """A forked worker that lives on has the engine's socket no more."""
    command = [sys.executable, "-c", CHILD, kind]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout.readline() == "ready\n"
    assert [each.engine for each in engine_sockets()] == [str(child.pid)]
    child.kill()
    child.wait()
    child.stdout.close()
    assert engine_sockets() == []
    assert [path.name for path in run.iterdir()] == [f"{child.pid}.sock"]
    start(Stub())
    assert [path.name for path in run.iterdir()] == [f"{os.getpid()}.sock"]
    if kind == "forks":
        os.killpg(child.pid, 9)


def raw(run, data, end=True):
    """Send bytes to the only engine; return its answer."""
    with Folder(str(run)) as folder, folder.connect(folder.names()[0], 30) as sock:
        try:
            sock.sendall(data)
            if end:
                sock.shutdown(socket.SHUT_WR)
            answer = b""
            while part := sock.recv(1 << 16):
                answer += part
        except OSError:
            return b""
        return answer


@pytest.mark.parametrize(
    "data",
    [
        b"[]",
        b"\xff\x00",
        b'{"type":"lookup","token_ids":[-1]}',
        b'{"type":"lookup","token_ids":[4294967296]}',
        b'{"type":"lookup","token_ids":["1"]}',
        b'{"type":"clear","tier":3}',
        b'{"type":"clear","tiers":""}',
        b'{"type":"exec"}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_question_is_refused_and_the_next_one_answered(run, start, data):
    start(Stub(0))
    assert json.loads(raw(run, data))["error"]
    assert json.loads(raw(run, b'{"type":"clear"}'))["error"] == ""


def test_too_much_and_too_slow_are_cut_off(run, start, monkeypatch):
    monkeypatch.setattr("kvoffload.control.MOST_BYTES", 1 << 20)
    monkeypatch.setattr(control_server, "HELLO_S", 0.2)
    start(Stub(0))
    assert raw(run, b" " * (2 << 20)) == b""
    begun_s = time.monotonic()
    assert raw(run, b'{"type":', end=False) == b""
    assert time.monotonic() - begun_s < 60
    assert json.loads(raw(run, b'{"type":"clear"}'))["error"] == ""


def test_an_engine_that_takes_no_step_has_done_nothing(run, start, monkeypatch):
    monkeypatch.setattr(control_server, "ORDER_S", 0.4)
    stub = Stub(0)
    engine = start(stub, hangs=True)
    (sock,) = engine_sockets()
    assert sock.ask(Clear()).error.startswith("nothing was done: the engine takes no step")
    engine.orders.step()
    assert stub.cleared == [], "the operator was told that nothing was done"


def test_an_order_that_takes_too_long_is_said(run, start, monkeypatch):
    monkeypatch.setattr(control_server, "ORDER_S", 2.0)
    start(Stub(1 << 60))
    (sock,) = engine_sockets()
    assert sock.ask(Clear()).error == "not done after 1 s; what has begun goes on"


def test_a_step_that_outlasts_its_order_does_not_end_the_next_one():
    """The operator of the next order was told that the engine takes no step."""
    orders, has_begun, goes_on = Orders(), threading.Event(), threading.Event()

    def slow():
        has_begun.set()
        goes_on.wait(10.0)
        yield "late"

    def impatient():
        with pytest.raises(Refused, match="not done"):
            orders.carry_out(slow(), 1.5)

    engine = threading.Thread(target=lambda: [orders.step(), orders.step()])
    first = threading.Thread(target=impatient)
    first.start()
    while orders.order is None:
        time.sleep(0.001)
    engine.start()
    assert has_begun.wait(10.0)
    first.join()
    orders.wake = goes_on.set
    assert orders.carry_out(iter(("done",)), 10.0) == "done"
    engine.join()


def test_an_order_that_raises_is_told_and_ends(run, start):
    class Broken(Stub):
        def clear(self, tier):
            yield None
            raise RuntimeError("broken")

    start(Broken())
    (sock,) = engine_sockets()
    for _ in range(2):
        assert "RuntimeError('broken')" in sock.ask(Clear()).error


# ---- looking up ----


def keys(count):
    return [make_offload_key(i.to_bytes(32, "big"), 0) for i in range(count)]


def test_each_step_looks_up_a_portion_and_waits_for_slow_tiers():
    prompt = keys(3 * PORTION - 10)
    asked, told = [], set(prompt[: PORTION + 5])

    def explain(part):
        asked.append(len(part))
        return ["CPU" if key == prompt[0] else "evicted" for key in part]

    def holds(key):
        return None if len(asked) % 2 else key in told

    manager = SimpleNamespace(explain=explain, tiers=[SimpleNamespace(name="slow", holds=holds)])
    group = KeyedGroup(prompt, 4, True)
    *steps, found = look_up(1, [group], manager, has_host=True)
    assert steps == [None] * 6
    assert max(asked) == PORTION
    (group,) = found.groups
    assert (group.tiers["cpu"].leading, group.tiers["slow"].leading) == (1, PORTION + 5)
    assert (group.any.leading, group.missing) == (PORTION + 5, "evicted")


def test_an_engine_may_remove_its_socket_while_another_looks_at_it(run, monkeypatch):
    with Folder(str(run), create=True) as folder:
        gone = f"{os.getpid()}-9.sock"

        def names(folder):
            return [gone]  # it was there when the folder was listed

        monkeypatch.setattr(Folder, "names", names)
        sock, name = folder.listen()
        sock.close()
        folder.remove(name)
