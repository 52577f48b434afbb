"""Either end meets what the other never sends: it ends, or goes on, and answers every job."""

import os
import socket
import threading

import pytest

from kvoffload.io import deadlines
from kvoffload.io.client import IOClient
from kvoffload.io.forms import ServerThread
from kvoffload.io.lent_memory import LentMemory
from kvoffload.io.protocol import (
    Answered,
    Arrived,
    Ask,
    Cancel,
    Forget,
    Lent,
    Load,
    MessageReader,
    Opened,
    Passed,
    PresenceChanges,
    Present,
    Refused,
    Remove,
    Store,
    TierOpened,
    frame,
)
from kvoffload.testing.backends import keys_of
from tests.support.io_rig import opening

KEYS = keys_of(4)
OPEN = opening([("memory", "memory", {})])


class Talk:
    """The engine's end of a server thread, without a client."""

    def __init__(self):
        self.memory = memoryview(bytearray(8 * 4096))
        self.server = ServerThread(self.memory)
        self.server.sock.settimeout(5)
        self._reader, self._heard = MessageReader(to_server=False), []

    def send(self, *messages):
        self.server.sock.sendall(b"".join(map(frame, messages)))

    def hear(self, kind):
        while True:
            while self._heard:
                if isinstance(message := self._heard.pop(0), kind):
                    return message
            self._heard += self._reader.feed(self.server.sock.recv(1 << 16))

    def close(self):
        self.server.sock.close()
        assert self.server.wait(5), "the server outlives its engine's end"


@pytest.fixture
def talk(closing):
    return closing(Talk())


def test_an_engine_that_dies_within_a_message_ends_the_server():
    orders = [
        Store(1, "memory", KEYS, [0, 1, 2, 3], 4096),
        Load(2, "memory", KEYS, [0, 1, 2, 3], 4096),
    ]
    stream = b"".join(map(frame, [OPEN, *orders, Cancel(1)]))
    threads = threading.active_count()
    for end in range(0, len(stream), 9):
        talk = Talk()
        talk.server.sock.sendall(stream[:end])
        talk.close()
    assert threading.active_count() <= threads


def test_messages_for_tiers_and_jobs_that_are_not_there_change_nothing(talk):
    talk.send(OPEN, Cancel(7), Forget("none", KEYS), Remove("none", KEYS), Ask("none", KEYS))
    assert talk.hear(Present).answers == [False] * 4
    talk.send(Load(1, "none", KEYS, [0, 1, 2, 3], 4096), Store(2, "none", KEYS, [0, 1, 2, 3], 4096))
    assert [talk.hear(Answered).reason for _ in range(2)] == ["no_store"] * 2
    talk.send(Store(3, "memory", KEYS, [0, 1, 2, 3], 4096))
    assert talk.hear(Answered).ok == b"\1" * 4
    talk.send(Cancel(3), Cancel(3), Load(4, "memory", KEYS, [0, 1, 2, 3], 4096))
    assert talk.hear(Answered).ok == b"\1" * 4


def test_a_load_before_the_stores_are_open_finds_none(talk):
    talk.send(Load(1, "memory", KEYS, [0, 1, 2, 3], 4096))
    assert talk.hear(Answered).reason == "no_store"


def test_another_version_is_refused(talk):
    other = opening([("memory", "memory", {})])
    other.version += 1
    talk.send(other)
    assert "install one kvoffload" in talk.hear(Refused).remedy


def test_slots_outside_the_slab_are_misses(talk):
    talk.send(OPEN, Store(1, "memory", KEYS, [0, 1, 2, 3], 4096))
    talk.hear(Answered)
    talk.send(Load(2, "memory", KEYS[:2], [7, 8], 4096))
    assert talk.hear(Answered).ok == b"\1\0"


class Liar:
    """A server that says what the test wants, once a job is ordered."""

    def __init__(self, *lies):
        self.sock, other = socket.socketpair()
        self._lies = lies
        self._thread = threading.Thread(target=self._run, args=[other])
        self._thread.start()

    def _run(self, sock):
        reader = MessageReader(to_server=True)
        with sock:
            while data := sock.recv(1 << 16):
                for message in reader.feed(data):
                    if type(message).__name__ == "Open":
                        hello = (
                            Opened(0, [TierOpened("memory", True, False)]),
                            PresenceChanges("memory", [], [], True),
                        )
                        sock.sendall(b"".join(map(frame, hello)))
                    elif isinstance(message, Load):
                        sock.sendall(b"".join(map(frame, self._lies)))

    def kill(self):
        pass

    def lent_memory(self):
        fd = os.memfd_create("lent")
        os.truncate(fd, 4096)
        ours, theirs = socket.socketpair()
        theirs.close()
        return LentMemory(fd, ours)

    def wait(self, timeout_s):
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


GOOD = Answered(1, b"\1" * 4, "", 0.1)


@pytest.mark.parametrize(
    ("lies", "answer", "dies"),
    [
        ([Answered(9, b"\1", "", 0.1), Arrived(9, [5]), GOOD], ("", True), False),
        ([GOOD, GOOD, Arrived(1, [0])], ("", True), False),
        ([Answered(1, b"\1" * 3, "", 0.1)], ("io_died", False), True),
        ([Arrived(1, [17])], ("io_died", False), True),
        ([PresenceChanges("none", KEYS, [], True)], ("io_died", False), True),
        ([Passed(), Lent(1, 0, [0, 1, 2, 3], [0] * 4), GOOD], ("io_died", False), True),
    ],
    ids=["unknown job", "answered twice", "too few", "no such chunk", "no such tier", "no loan"],
)
def test_a_client_answers_a_job_once_whatever_the_server_says(until, lies, answer, dies):
    answers, oks, places = [], [], ["a", "b", "c", "d"]

    class Listener(deadlines.Listener):
        def arrived(self, numbers):
            [places[n] for n in numbers]

        def ended(self, ok, reason, settled, io_time_s):
            oks.append(ok)
            answers.append((reason, settled))

        def released(self):
            answers.append("released")

    client = IOClient(lambda: Liar(*lies), OPEN, 5.0, 5.0)
    client.begin(Load(0, "memory", KEYS, [0, 1, 2, 3], 4096), Listener())
    expected = [answer, "released"] if dies else [answer]
    until(lambda: len(answers) >= len(expected))
    until(lambda: not client._is_opening)
    assert (answers, client.died) == (expected, int(dies))
    assert oks == [bytes([not dies]) * 4]
    client.close()
