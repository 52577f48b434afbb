"""What a server and an engine refuse, and that a refused engine harms no other."""

import array
import json
import math
import os
import socket
import struct
import subprocess
import sys
from typing import get_args

import msgspec
import pytest
from msgspec.structs import replace

from kvoffload.cli.server_check import server_findings
from kvoffload.config import parse_config
from kvoffload.errors import ConfigError
from kvoffload.io import greeting
from kvoffload.io.protocol import (
    HAD,
    VERSION,
    Answered,
    Ask,
    Await,
    Borrow,
    Cancel,
    Expect,
    Forget,
    Load,
    Locate,
    MessageReader,
    Open,
    Refused,
    Release,
    Remove,
    Store,
    ToServer,
    Used,
    frame,
)
from kvoffload.io.service.listener import Listener
from kvoffload.io.service.settings import read_serve_config
from kvoffload.policies.told_return import ToldReturn
from kvoffload.transfer.shared_memory import create_shared_memory
from tests.support.host_server import ROOT, HostServer, key_of
from tests.support.io_rig import opening

SLOT = 4096
KEYS = [key_of(i) for i in range(4)]
OPEN = opening([("serve", "serve", {})], SLOT)


@pytest.fixture(scope="module")
def one_server(tmp_path_factory):
    """A server that all tests of this module use, whatever they do to it."""
    server = HostServer(tmp_path_factory.mktemp("server"))
    yield server
    server.process.kill()
    server.process.wait()


class Talk:
    """An engine's end, without the client: sends what the test wants."""

    def __init__(self, path, slots=8):
        self.fd = create_shared_memory(slots * SLOT)
        self.ended, self._theirs = (each.detach() for each in socket.socketpair())
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(20)
        self.sock.connect(path)
        self._reader, self._heard = MessageReader(to_server=False), []

    def greet(self):
        greeting.greet(self.sock, self.fd, self._theirs)
        os.close(self._theirs)
        return self

    def send(self, *messages):
        self.sock.sendall(b"".join(map(frame, messages)))

    def hear(self, kind):
        """Return the next message of a kind; None at the end of the connection."""
        while True:
            for i, message in enumerate(self._heard):
                if isinstance(message, kind):
                    return self._heard.pop(i)
            if not (data := self.sock.recv(1 << 16)):
                return None
            self._heard += self._reader.feed(data)

    def is_ended(self):
        """Whether the server has ended the connection, and uses the slab no more."""
        try:
            while self.sock.recv(1 << 16):
                pass
        except ConnectionError:
            pass
        while os.read(self.ended, 1):  # the memory that it lends
            pass
        return True

    def close(self):
        self.sock.close()
        os.close(self.fd)
        os.close(self.ended)


@pytest.fixture
def talk(one_server, closing):
    def make():
        return closing(Talk(one_server.path))

    return make
    assert serves(Talk(one_server.path).greet())


def serves(talk):
    """Whether a server serves an engine of good manners."""
    talk.send(OPEN, Store(1, "serve", KEYS, [0, 1, 2, 3], SLOT))
    stored = talk.hear(Answered).ok
    talk.send(Load(2, "serve", KEYS, [4, 5, 6, 7], SLOT))
    loaded = talk.hear(Answered).ok
    talk.close()
    return set(stored) <= {1, HAD} and loaded == b"\1\1\1\1"


def with_fds(sock, data, fds):
    held = array.array("i", fds)
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, held)])


HEAD = struct.pack("<16sI", greeting.MAGIC, VERSION)
GREETING = HEAD + b"pod-1".ljust(80, b"\0")


def test_what_is_no_greeting_is_refused(talk):
    ended_at_once = [
        lambda t: t.sock.sendall(b"GET / HTTP/1.0\r\n\r\n" * 100),
        lambda t: t.sock.sendall(GREETING),
        lambda t: with_fds(t.sock, GREETING[:7], [t.fd, t._theirs]),
        lambda t: with_fds(t.sock, GREETING, [t.fd]),
        lambda t: with_fds(t.sock, GREETING, [t.fd] * 40),
        lambda t: with_fds(t.sock, GREETING, [t._theirs, t.fd]),
        lambda t: with_fds(t.sock, GREETING, [os.memfd_create("unsealed"), t._theirs]),
        lambda t: with_fds(t.sock, GREETING, [os.open(__file__, os.O_RDONLY), t._theirs]),
        lambda t: with_fds(t.sock, HEAD, [t.fd, t._theirs]),
        lambda t: with_fds(t.sock, GREETING[:-1], [t.fd, t._theirs]),
    ]
    for send in ended_at_once:
        engine = talk()
        send(engine)
        os.close(engine._theirs)
        assert engine.is_ended()


@pytest.mark.parametrize(
    "name",
    [b"", b"a b", b"a\nERROR all is lost", b'"} 1\nup{', b"caf\xc3\xa9", b"a\0b", b"a\n", b"\0a"],
)
def test_what_could_be_more_than_a_name_in_logs_and_metrics_is_refused(talk, one_server, name):
    engine = talk()
    with_fds(engine.sock, HEAD + name.ljust(80, b"\0"), [engine.fd, engine._theirs])
    os.close(engine._theirs)
    assert engine.is_ended()
    assert "an engine is refused: what it calls itself is no name" in one_server.log
    assert "all is lost" not in one_server.log


@pytest.mark.parametrize(
    ("host", "start"), [("vllm-0", "vllm-0-"), ('caf\xe9 \n"b', "caf____b-"), ("h" * 64, "h" * 64)]
)
def test_an_engine_has_a_name_that_servers_take(monkeypatch, host, start):
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert greeting.own_name() == f"{start.rstrip('-')}-{os.getpid()}"
    assert greeting._NAME.fullmatch(greeting.own_name().encode())
    assert len(greeting.own_name()) <= greeting._NAME_BYTES


def test_another_version_is_told_which_one_it_needs(talk):
    engine = talk()
    with_fds(engine.sock, struct.pack("<16sI", greeting.MAGIC, VERSION + 1), [engine.fd, 1])
    refused = engine.hear(Refused)
    assert refused.field == "serve"
    assert f"version {VERSION}, the engine {VERSION + 1}" in refused.remedy
    os.close(engine._theirs)


@pytest.mark.parametrize(
    "data",
    [
        (256 << 20).to_bytes(4, "little") + b"x" * 100,
        b"\xff\xff\xff\xff",
        b"\5\0\0\0hello",
        frame(replace(OPEN, tiers=OPEN.tiers * 65)),
    ],
    ids=["256 MB", "4 GB", "no message", "65 tiers"],
)
def test_what_is_no_message_ends_the_session_alone(talk, data):
    other = talk().greet()
    other.send(OPEN)
    engine = talk().greet()
    engine.sock.sendall(data)
    assert engine.is_ended()
    other.send(Store(1, "serve", KEYS, [0, 1, 2, 3], SLOT))
    assert set(other.hear(Answered).ok) <= {1, HAD}


def test_an_engine_that_ends_without_reading_its_answers_harms_no_later_one(
    talk, one_server, until
):
    """The kernel gives the next engine the number of its descriptor."""

    def num_descriptors():
        return len(os.listdir(f"/proc/{one_server.process.pid}/fd"))

    begun = len(one_server.log)
    for _ in range(3):
        before = num_descriptors()
        engine = talk().greet()
        engine.send(OPEN, *[Forget("serve", KEYS * 100)] * 40)  # more than the socket takes
        engine.sock.shutdown(socket.SHUT_WR)
        os.read(engine.ended, 1)
        until(lambda before=before: num_descriptors() <= before)
        assert serves(Talk(one_server.path).greet())
    assert "an engine is refused: [Errno" not in one_server.log[begun:]


@pytest.mark.parametrize("opens", [True, False], ids=["a store", "none"])
def test_a_job_with_the_number_of_one_in_flight_ends_the_session_alone(talk, one_server, opens):
    engine = talk().greet()
    engine.send(*[OPEN] * opens, *[Load(7, "serve", KEYS, [0, 1, 2, 3], SLOT)] * 2)
    assert engine.is_ended()
    assert "cannot be understood: job 7 is in flight" in one_server.log
    assert "Traceback" not in one_server.log


def test_slots_keys_and_names_that_cannot_be_are_misses(talk):
    engine = talk().greet()
    engine.send(OPEN)
    wrong = [
        Store(1, "serve", KEYS[:1], [8], SLOT),
        Store(2, "serve", KEYS[:1], [-1], SLOT),
        Store(3, "serve", KEYS[:1], [7], 2 * SLOT),
        Store(4, "serve", KEYS[:1], [0], -5),
        Store(5, "serve", [b"k" * 4000], [0], SLOT),
        Store(6, "no such tier", KEYS[:1], [0], SLOT),
        Store(7, "serve", KEYS, [0], SLOT),
        Store(11, "serve", KEYS, [0, 1, 2, 3], SLOT, [b"t"]),
        Load(8, "serve", KEYS[:1], [1 << 70 >> 8], SLOT),
        Load(9, "serve", KEYS[:1], [-1], SLOT),
        Load(10, "serve", KEYS, [0, 1, 2, 3], [SLOT]),
    ]
    for order in wrong:
        engine.send(order)
        assert not any(engine.hear(Answered).ok), order
    engine.send(Remove("none", KEYS), *[Await(-1, KEYS)] * 1000)
    engine.send(Store(20, "serve", KEYS, [0, 1, 2, 3], SLOT))
    assert set(engine.hear(Answered).ok) <= {1, HAD}


RETURN = ToldReturn(b"claim", KEYS, 5.0, 2)
OF_EACH_TYPE = [
    OPEN,
    Load(5, "serve", KEYS, [0, 1, 2, 3], SLOT, [b"t"] * 4, True),
    Load(5, "serve", KEYS, [0, 1, 2, 3], [SLOT] * 4),
    Store(5, "serve", KEYS, [0, 1, 2, 3], SLOT, [b"t"] * 4),
    Store(5, "serve", KEYS, [0, 1, 2, 3], [SLOT] * 4),
    Cancel(5),
    Borrow(),
    Release(5),
    Ask("serve", KEYS),
    Forget("serve", KEYS),
    Locate("serve", KEYS, 1),
    Used("serve", KEYS),
    Remove("serve", KEYS),
    Await(1, KEYS),
    Expect([RETURN]),
]
NUMBERS = [math.nan, math.inf, -math.inf, -1, -1.5, 1e300, -(1 << 63), (1 << 64) - 1]


def numbers_of(value, path=()):
    """The places of all numbers in a message as lists."""
    if isinstance(value, list):
        for i, each in enumerate(value):
            yield from numbers_of(each, (*path, i))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path


def wrong_numbers():
    for message in OF_EACH_TYPE:
        there = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
        for path in numbers_of(there):
            for number in NUMBERS:
                changed = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
                part = changed
                for i in path[:-1]:
                    part = part[i]
                part[path[-1]] = number
                yield type(message), path, msgspec.msgpack.encode(changed)


def test_each_type_of_message_is_tried_with_wrong_numbers():
    assert set(map(type, OF_EACH_TYPE)) == set(get_args(ToServer))
    fields = {
        f"{kind.__name__}.{kind.__struct_fields__[at[0] - 1]}" for kind, at, _ in wrong_numbers()
    }
    assert fields == {
        *("Open.version", "Open.chunk_bytes", "Open.slot_bytes", "Open.lookup_timeout_s"),
        *("Open.number", "Open.hint_share", "Load.job", "Load.slots", "Load.sizes"),
        *("Store.job", "Store.slots", "Store.sizes", "Cancel.job", "Release.loan"),
        *("Locate.number", "Await.request", "Expect.returns"),
    }


@pytest.mark.parametrize("kind", [*get_args(ToServer)], ids=lambda kind: kind.__name__)
def test_a_wrong_number_is_refused_by_the_name_of_its_field_or_harmless(
    talk, one_server, kind, until
):
    other, first = talk().greet(), len(one_server.log)
    other.send(OPEN)
    for _, path, body in (each for each in wrong_numbers() if each[0] is kind):
        engine = Talk(one_server.path).greet()
        if kind is not Open:
            engine.send(OPEN)
        begun = len(one_server.log)
        wrong = len(body).to_bytes(4, "little") + body
        after = frame(OPEN) + frame(Store(1000, "serve", KEYS, [4, 5, 6, 7], SLOT))
        engine.sock.sendall(wrong + after)  # in one piece: the session may end at the first
        said = engine.hear((Answered, Refused))
        while isinstance(said, Answered) and said.job != 1000:
            said = engine.hear(Answered)
        if said is None:
            told = f"cannot be understood: {kind.__name__}.{kind.__struct_fields__[path[0] - 1]}: "
            assert engine.is_ended()
            until(lambda told=told, begun=begun: told in one_server.log[begun:])
        elif isinstance(said, Refused):
            assert kind is Open, path
            assert said.field in ("io", "memory.capacity"), path
        else:
            assert set(said.ok) <= {0, 1, HAD}, path
        engine.close()
    other.send(Store(1, "serve", KEYS, [0, 1, 2, 3], SLOT))
    assert set(other.hear(Answered).ok) <= {1, HAD}
    assert serves(Talk(one_server.path).greet())
    assert "Traceback" not in one_server.log[first:]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"namespace": ""}, "namespace"),
        ({"namespace": "n" * 10_000}, "namespace"),
        ({"chunk_bytes": 1 << 40}, "memory.capacity"),
        ({"tiers": opening([("serve", "serve", {}), ("more", "serve", {})]).tiers}, "backends"),
    ],
)
def test_an_order_to_open_what_cannot_be_is_refused_by_name(talk, changed, field):
    engine = talk().greet()
    engine.send(replace(OPEN, **changed))
    assert engine.hear(Refused).field == field


def test_an_engine_of_another_user_is_refused(one_server):
    if os.geteuid():
        pytest.skip("becoming another user needs root")
    folder, name = os.path.split(one_server.path)
    os.chmod(one_server.path, 0o666)
    os.chmod(folder, 0o711)
    connect = (
        "import os, socket; s = socket.socket(socket.AF_UNIX); os.setuid(65534);"
        f"s.connect({name!r}); assert s.recv(1) == b''"
    )
    subprocess.run([sys.executable, "-c", connect], cwd=folder, check=True)
    assert "belongs to user 65534, not to 0" in one_server.log
    assert serves(Talk(one_server.path).greet())


def test_an_engine_is_told_that_the_server_is_another_users(one_server, monkeypatch):
    monkeypatch.setattr("kvoffload.control.peer", lambda _: (7, 12345))
    (finding,) = server_findings(one_server.path)
    assert "belongs to user 12345" in finding.detail
    assert finding.remedy == "run server, engines and commands as one user"


# ---- settings and sockets ----


@pytest.mark.parametrize(
    ("path", "why"),
    [("s", "absolute"), ("/" + "s" * 107, "too long"), ("/a\0b", "absolute")],
)
def test_paths_that_no_socket_has_are_refused_at_both_ends(path, why):
    for read in (
        lambda: read_serve_config({"socket": path, "memory": "1GiB"}),
        lambda: parse_config({"cpu_bytes": 0, "serve": path}),
    ):
        with pytest.raises(ConfigError, match=why):
            read()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"memory": "1GiB"}, "socket"),
        ({"socket": "/s"}, "memory"),
        ({"socket": "/s", "memory": 4096}, "at least"),
        ({"socket": "/s", "memory": "1GiB", "policy": "mru"}, "no such plug-in"),
        ({"socket": "/s", "memory": "1GiB", "backends": [{"type": "disk"}]}, "root"),
        ({"socket": "/s", "memory": "1GiB", "backends": {"type": "disk"}}, "list"),
        ({"socket": "/s", "memory": "1GiB", "metrics_port": 0}, "65535"),
        ({"socket": "/s", "memory": "1GiB", "cpu_bytes": 1}, "unknown key"),
        ({"socket": "/s", "memory": "1GiB", "namespace_max": 4096}, "namespace_max .*at least"),
        ({"socket": "/s", "memory": "1GiB", "namespace_max": "2GiB"}, "namespace_max .*at most"),
        ({"socket": "/s", "memory": "1GiB", "namespace_min": "2GiB"}, "namespace_min .*at most"),
        ({"socket": "/s", "memory": "9MB", "namespace_min": "2MB", "namespace_max": "1MB"}, "_min"),
    ],
)
def test_settings_of_a_server_that_cannot_be_are_refused(settings, why):
    with pytest.raises(ConfigError, match=why):
        read_serve_config(settings)


def test_a_server_takes_the_place_of_backends():
    with pytest.raises(ConfigError, match="in the server's settings"):
        parse_config({"cpu_bytes": 0, "serve": "/s", "backends": [{"type": "memory"}]})


def test_a_socket_is_bound_where_nothing_lives_alone(tmp_path):
    path = tmp_path / "s"
    first = Listener(str(path))
    with pytest.raises(ConfigError, match="another server listens there"):
        Listener(str(path))
    first.close()
    path.write_text("a letter")
    with pytest.raises(ConfigError, match="no socket"):
        Listener(str(path))
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="no socket"):
        Listener(str(path))
    path.rmdir()
    (tmp_path / "other.lock").mkdir()
    with pytest.raises(ConfigError, match=r"Is a directory at .*other\.lock, which this user must"):
        Listener(str(tmp_path / "other"))
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ConfigError, match="another program"):
            Listener(str(path))
    second = Listener(str(path))  # the one before has died, and its file is there still
    assert os.stat(path).st_mode & 0o777 == 0o600
    second.close()
    assert not path.exists()
    with pytest.raises(ConfigError, match="there is no folder"):
        Listener(str(tmp_path / "no folder" / "s"))
    with pytest.raises(ConfigError, match="no file can be made in /proc: give a path in another"):
        Listener("/proc/s")


def test_a_socket_of_systemd_is_used_as_it_is(tmp_path):
    """As its socket activation does: descriptor 3, and two variables."""
    path, settings = str(tmp_path / "s"), tmp_path / "serve.json"
    settings.write_text(json.dumps({"socket": path, "memory": "16MiB"}))
    command = [sys.executable, "-m", "kvoffload", "serve", "--config", str(settings)]
    started = (
        "import os; os.dup2(int(os.environ['PASSED']), 3);"
        "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1');"
        f"os.execv({sys.executable!r}, {command!r})"
    )
    with (
        socket.socket(socket.AF_UNIX) as listening,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
    ):
        listening.bind(path)
        listening.listen()
        manager.bind(str(tmp_path / "notify"))
        fd = listening.fileno()
        environment = {"PASSED": str(fd), "NOTIFY_SOCKET": str(tmp_path / "notify")}
        server = subprocess.Popen(
            [sys.executable, "-c", started],
            pass_fds=[fd],
            cwd=ROOT,
            env={**os.environ, **environment},
        )
        try:
            assert serves(Talk(path).greet())
            assert manager.recv(100) == b"READY=1"
            server.terminate()
            assert server.wait(30) == 0
            assert manager.recv(100) == b"STOPPING=1"
            assert os.path.exists(path), "the socket is systemd's"
        finally:
            server.kill()
            server.wait()
