"""One connection over a pair of sockets: requests in flight, lost requests and timeouts."""

import asyncio
import contextlib
import socket

import pytest

from kvoffload.backends.redis.connection import Connection, Lost, RedisRequest
from kvoffload.backends.redis.resp import Fill, Line, encode
from tests.support.redis_engine import until


class Pair:
    """A connection over a pair of sockets; the far end is the test's."""

    def __init__(self, timeout_s=1.5, floor_bytes=1000):
        self.near, self.far = socket.socketpair()
        for end in (self.near, self.far):
            end.setblocking(False)
        self.lost = []
        self.connection = Connection(
            self.near,
            timeout_s,
            floor_bytes,
            lambda: None,
            lambda connection, reason, silent_s, first: self.lost.append((reason, silent_s, first)),
        )

    def ask(self, nbytes=0):
        """Send a request; return it and the list that receives its outcome."""
        outcomes = []
        kind = "load" if nbytes else "lookup"
        expect = Fill([memoryview(bytearray(nbytes))]) if nbytes else Line()
        request = RedisRequest(kind, lambda: [encode(b"PING")], expect, nbytes, outcomes.append)
        self.connection.submit(request)
        return request, outcomes

    def close(self):
        self.connection.abort("shutdown")
        self.far.close()


@pytest.fixture
async def pair():
    pair = Pair()
    yield pair
    pair.close()


async def test_replies_come_in_the_order_of_their_requests_and_free_the_bytes_in_flight(pair):
    (one, first), (two, second) = pair.ask(5), pair.ask(3)
    assert (pair.connection.num_in_flight, pair.connection.inflight_bytes) == (2, 8)
    assert pair.far.recv(1000) == encode(b"PING") * 2
    pair.far.send(b"$5\r\nhello\r\n")
    await asyncio.sleep(0.05)
    assert (bytes(one.expect.views[0]), len(first), second) == (b"hello", 1, [])
    assert (pair.connection.num_in_flight, pair.connection.inflight_bytes) == (1, 3)
    pair.far.send(b"$-1\r\n")
    await asyncio.sleep(0.05)
    assert (second, bytes(two.expect.views[0])) == ([None], bytes(3))
    assert (pair.connection.num_in_flight, pair.connection.inflight_bytes) == (0, 0)
    assert pair.lost == []


async def closed(pair):
    async def is_closed():
        return pair.connection.closed

    await until(is_closed)


async def test_the_timeout_ends_a_silent_connection_and_reports_the_silence(pair):
    request, outcomes = pair.ask()
    await asyncio.sleep(0.1)
    assert not pair.connection.closed
    await closed(pair)
    assert outcomes == [Lost("timeout")]
    ((reason, silent_s, first),) = pair.lost
    assert (reason, first) == ("timeout", request)
    assert 1.5 <= silent_s < 60


async def test_an_idle_connection_stays_and_its_idle_time_counts_against_no_request(pair):
    await asyncio.sleep(1.7)
    _, outcomes = pair.ask()
    await asyncio.sleep(0.1)
    assert outcomes == []
    pair.far.send(b"+PONG\r\n")
    await asyncio.sleep(1.7)
    assert (outcomes, pair.lost) == ([b"PONG"], [])


async def test_replies_in_time_keep_a_connection_with_more_requests_in_flight(pair):
    outcomes = [pair.ask()[1] for _ in range(5)]
    for _ in outcomes:
        await asyncio.sleep(0.4)
        pair.far.send(b"+PONG\r\n")
    await asyncio.sleep(0.05)
    assert outcomes == [[b"PONG"]] * 5
    assert pair.lost == []


async def test_bytes_above_the_floor_keep_a_long_reply_and_silence_after_them_ends_it(pair):
    _, outcomes = pair.ask(200_000)
    pair.far.send(b"$200000\r\n")
    for _ in range(15):  # 1,000 bytes in each 1.5 s would do
        pair.far.send(bytes(5000))
        await asyncio.sleep(0.15)
    assert (outcomes, pair.lost) == ([], [])
    await closed(pair)
    assert outcomes == [Lost("timeout")]


async def test_bytes_below_the_floor_do_not_stop_the_timeout(pair):
    _, outcomes = pair.ask(10_000)
    pair.far.send(b"$10000\r\n")
    for _ in range(12):
        with contextlib.suppress(BrokenPipeError):
            pair.far.send(bytes(20))
        await asyncio.sleep(0.2)
    assert outcomes == [Lost("timeout")]


async def test_a_closed_connection_fails_requests_in_flight_and_later_ones_once(pair):
    (first, one), (_, two) = pair.ask(), pair.ask(7)
    pair.far.close()
    await asyncio.sleep(0.05)
    assert (one, two) == ([Lost("closed")], [Lost("closed")])
    ((reason, _, in_flight),) = pair.lost
    assert (reason, in_flight) == ("closed", first)
    _, three = pair.ask()
    assert three == [Lost("closed")]
    pair.connection.abort("again")
    assert len(pair.lost) == 1


async def test_a_reply_without_a_request_ends_a_connection(pair):
    pair.far.send(b"+PONG\r\n")
    await asyncio.sleep(0.05)
    ((reason, _, in_flight),) = pair.lost
    assert reason.startswith("protocol: ")
    assert in_flight is None


async def test_a_cancelled_load_ends_its_connection_and_a_cancelled_lookup_does_not(pair):
    lookup, answered = pair.ask()
    lookup.cancel()
    pair.far.send(b"+PONG\r\n")
    await asyncio.sleep(0.05)
    assert (answered, pair.lost) == ([], [])
    load, loaded = pair.ask(5)
    load.cancel()
    assert loaded == []
    assert pair.lost[0][0] == "cancelled"


async def test_asking_goes_out_before_a_request_for_a_moving_slot(pair):
    outcomes = []
    pair.connection.submit(
        RedisRequest("lookup", lambda: [encode(b"PING")], Line(), 0, outcomes.append, asking=True)
    )
    assert pair.far.recv(1000) == encode(b"ASKING") + encode(b"PING")
    pair.far.send(b"+OK\r\n+PONG\r\n")
    await asyncio.sleep(0.05)
    assert outcomes == [b"PONG"]
