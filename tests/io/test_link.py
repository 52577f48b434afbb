"""The engine's end of the socket, when the other end reads late or the sending is over."""

import socket
import time

import pytest

from kvoffload.io.link import Link

NUM_BYTES = 1 << 20


@pytest.fixture
def ends():
    """A link whose socket takes little, and the other end."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    theirs.setblocking(False)
    link = Link()
    with link.lock:
        link.attach(ours)
    yield link, theirs
    link.close()
    theirs.close()


def test_what_the_socket_has_not_taken_is_sent_before_the_end(ends):
    link, theirs = ends
    link.send(b"x" * NUM_BYTES)
    read, until_s = [b"x"], time.monotonic() + 10
    link.end_sending()
    while read[-1] and time.monotonic() < until_s:
        link.receive(0.02)
        link.end_sending()
        try:
            read.append(theirs.recv(1 << 16))
        except BlockingIOError:
            continue
    assert sum(map(len, read)) == NUM_BYTES + 1


def test_what_is_sent_after_the_end_keeps_no_thread_busy(ends):
    link, _ = ends
    link.end_sending()
    link.send(b"late")
    turns, until_s = 0, time.monotonic() + 0.2
    while time.monotonic() < until_s:
        link.receive(0.05)
        turns += 1
    assert turns < 10
