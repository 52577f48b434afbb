"""One blocking connection, in the clear and under TLS: replies, silence, slowness, and its end."""

import contextlib
import socket
import ssl
import threading
import time

import pytest

from kvoffload.backends.redis.connection import Address, Connection, Lost
from kvoffload.backends.redis.resp import Filled, encode
from tests.support.redis_server import make_certificates

TIMEOUT_S = 0.75
LIMIT_S = 60.0
PING = encode(b"PING")


@pytest.fixture(scope="module")
def contexts(tmp_path_factory):
    """The TLS contexts of a server and of its client."""
    files = make_certificates(tmp_path_factory.mktemp("certificates"))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files["cert"], files["key"])
    return server, ssl.create_default_context(cafile=files["ca"])


class Pair:
    """A connection to a socket of the test's."""

    def __init__(self, contexts, timeout_s=TIMEOUT_S, floor_bytes=1000):
        self.connection = Connection(timeout_s, floor_bytes)
        self._taken = []
        with socket.create_server(("127.0.0.1", 0)) as listener:
            accepting = threading.Thread(target=self._accept, args=(listener, contexts))
            accepting.start()
            address = Address("localhost", listener.getsockname()[1])
            tls = contexts[1] if contexts else None
            self.connection.open(address, tls, time.monotonic() + LIMIT_S)
            accepting.join()
        self.connection.opened()
        (self.far,) = self._taken

    def _accept(self, listener, contexts):
        taken = listener.accept()[0]
        if contexts:
            taken = contexts[0].wrap_socket(taken, server_side=True)
        self._taken.append(taken)

    def close(self):
        self.connection.close()
        self.far.close()


@pytest.fixture(params=["plain", "tls"])
def pair(request, contexts):
    pair = Pair(contexts if request.param == "tls" else None)
    yield pair
    pair.close()


class Asking(threading.Thread):
    """Sends a PING and reads the reply; keeps the outcome, and how long it took."""

    def __init__(self, connection, nbytes=None):
        super().__init__()
        self._connection, self._nbytes = connection, nbytes
        self.outcome, self.memory = None, bytearray(nbytes or 0)
        self.start()

    def run(self):
        began = time.monotonic()
        try:
            if self._nbytes is None:
                self.outcome = self._connection.ask(b"PING")
            else:
                self._connection.send(PING)
                view = memoryview(self.memory)
                self.outcome = self._connection.reader.chunk(view[:0], [view])
        except Lost as lost:
            self.outcome = lost.reason
        self.took_s = time.monotonic() - began

    def ended(self):
        self.join(LIMIT_S)
        assert not self.is_alive()
        return self.outcome


def test_a_value_arrives_in_the_callers_memory(pair):
    asking = Asking(pair.connection, 5)
    assert pair.far.recv(1000) == PING
    pair.far.sendall(b"$5\r\nhello\r\n")
    assert (asking.ended(), bytes(asking.memory)) == (Filled.WHOLE, b"hello")
    assert pair.connection.is_usable()
    asking = Asking(pair.connection, 3)
    pair.far.sendall(b"$-1\r\n")
    assert asking.ended() is None


def test_megabytes_go_out_and_come_back(pair):
    sent, value = bytearray(), b"v" * (3 << 20)

    def serve():
        while len(sent) < len(value):
            sent.extend(pair.far.recv(1 << 16))
        pair.far.sendall(b"$%d\r\n%b\r\n" % (len(value), value))

    serving = threading.Thread(target=serve)
    serving.start()
    memory = bytearray(len(value))
    pair.connection.send(value[:10], memoryview(value)[10:], b"")
    view = memoryview(memory)
    assert pair.connection.reader.chunk(view[:256], [view[256:]]) is Filled.WHOLE
    serving.join()
    assert (sent, memory) == (value, value)


def test_the_timeout_ends_a_silent_connection(pair):
    asking = Asking(pair.connection)
    assert asking.ended() == "timeout"
    assert TIMEOUT_S <= asking.took_s < LIMIT_S


def test_an_idle_connection_stays_and_its_idle_time_counts_against_no_command(pair):
    time.sleep(TIMEOUT_S + 0.2)
    assert pair.connection.is_usable()
    asking = Asking(pair.connection)
    time.sleep(0.3)
    pair.far.sendall(b"+PONG\r\n")
    assert asking.ended() == b"PONG"


def test_bytes_above_the_floor_keep_a_long_reply_and_silence_after_them_ends_it(pair):
    asking = Asking(pair.connection, 200_000)
    pair.far.sendall(b"$200000\r\n")
    for _ in range(8):  # 1,000 bytes in each TIMEOUT_S would do
        pair.far.sendall(bytes(5000))
        time.sleep(0.15)
    assert asking.is_alive()
    assert asking.ended() == "timeout"


def test_bytes_below_the_floor_do_not_stop_the_timeout(pair):
    asking = Asking(pair.connection, 10_000)
    pair.far.sendall(b"$10000\r\n")
    for _ in range(8):
        with contextlib.suppress(OSError):
            pair.far.sendall(bytes(20))
        time.sleep(0.15)
    assert asking.ended() == "timeout"
    assert asking.took_s < 2 * TIMEOUT_S + 1


def test_a_server_that_reads_nothing_ends_a_store_by_the_timeout(pair):
    began = time.monotonic()
    with pytest.raises(Lost, match="no reply in time"):
        pair.connection.send(bytes(64 << 20))
    assert time.monotonic() - began < LIMIT_S / 2


def test_a_closed_connection_fails_the_command_in_flight_and_later_ones(pair):
    asking = Asking(pair.connection)
    assert pair.far.recv(1000) == PING
    pair.far.close()
    assert asking.ended() == "closed"
    assert Asking(pair.connection).ended() == "closed"


@pytest.mark.parametrize("nbytes", [None, 100_000])
def test_another_thread_ends_a_command_at_once(contexts, nbytes):
    for tls in (None, contexts):
        pair = Pair(tls, timeout_s=LIMIT_S)
        asking = Asking(pair.connection, nbytes)
        assert pair.far.recv(1000) == PING
        pair.far.sendall(b"$100000\r\nbegun" if nbytes else b"+begun")
        time.sleep(0.2)
        assert asking.is_alive()
        pair.connection.abort("cancelled")
        assert asking.ended() == "cancelled"
        assert asking.took_s < LIMIT_S / 2
        asking.memory.clear()  # BufferError if anything still has a hold on it
        pair.close()


def test_another_thread_ends_a_send_at_once(contexts):
    for tls in (None, contexts):
        pair = Pair(tls, timeout_s=LIMIT_S)
        threading.Timer(0.2, pair.connection.abort, ["shutdown"]).start()
        with pytest.raises(Lost) as caught:
            pair.connection.send(bytes(64 << 20))
        assert caught.value.reason == "shutdown"
        pair.close()


@pytest.mark.parametrize("data", [b"+PONG\r\n", b""])
def test_bytes_without_a_command_and_an_end_make_an_idle_connection_unusable(pair, data):
    assert pair.connection.is_usable()
    pair.far.sendall(data)
    if not data:
        pair.far.close()
    deadline = time.monotonic() + LIMIT_S
    while pair.connection.is_usable():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert pair.connection.lost == ("protocol" if data else "closed")


def test_the_deadline_of_a_handshake_holds_for_its_commands_too():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        connection = Connection(LIMIT_S)
        address = Address("127.0.0.1", mute.getsockname()[1])
        began = time.monotonic()
        connection.open(address, None, began + 0.5)
        with pytest.raises(Lost, match="no reply in time"):
            connection.ask(b"PING")
        assert 0.5 <= time.monotonic() - began < LIMIT_S / 2
        connection.close()


def test_a_mute_server_ends_a_handshake_of_tls_by_the_deadline(contexts):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        connection = Connection(LIMIT_S)
        address = Address("127.0.0.1", mute.getsockname()[1])
        began = time.monotonic()
        with pytest.raises(OSError, match="timed out"):
            connection.open(address, contexts[1], began + 0.5)
        assert time.monotonic() - began < LIMIT_S / 2
