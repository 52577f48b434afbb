"""One connection to one server: requests go out in order, replies come back in order.

A connection aborts at the first anomaly. That is an unexpected reply, an oversized value, a
not-ready error, or too little progress within the timeout. An abort closes the socket, drops every
reference to callers' memory and fails every request in flight. A connection never sends a request
twice. All code here runs on the I/O loop's thread.
"""

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvoffload.backends.redis.resp import (
    MISFIT,
    Expect,
    Line,
    ProtocolError,
    Reply,
    ReplyReader,
    WrongSize,
    encode,
)

_GATHER = 16
"""Buffers in one system call."""
_TLS_BYTES = 64 << 10
"""Bytes that TLS encrypts at once."""
_NOT_READY = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_TURN_BYTES = 8 << 20
"""Bytes one connection moves before the loop serves the next one."""


class Lost(NamedTuple):
    """The outcome of a request without a reply."""

    reason: str
    """``timeout``, ``closed``, ``protocol``, ``unreachable``, ``cancelled``, ``shutdown``..."""


Outcome = Reply | Lost
Frames = Sequence[bytes | memoryview]
Kind = Literal["lookup", "load", "store"]


def _ignore(outcome: Outcome) -> None:
    """Drop the outcome of a request without a listener."""


@dataclass(slots=True, eq=False)
class RedisRequest:
    """A command, its expected reply, and the callback for its outcome."""

    kind: Kind
    """Selects the queue and the failure count of the circuit breaker."""
    frames: Callable[[], Frames]
    """Returns the bytes to send. The connection calls it when it sends the request, so that a batch
    does not compute all its checksums before the first byte leaves."""
    expect: Expect
    nbytes: int = 0
    """Bytes of chunk in either direction; counts towards the bytes in flight."""
    done: Callable[[Outcome], None] = _ignore
    """Receives the outcome exactly once, unless the request is cancelled."""
    asking: bool = False
    """Send ASKING first, because a cluster is moving the key's slot to this server."""
    probe: bytes = b""
    """The command that a health probe may repeat after this request failed."""
    connection: "Connection | None" = None
    submitted_at: float = 0.0
    """When a connection sent it, on the loop's clock."""
    sent: bool = False
    ended: bool = False

    def end(self, outcome: Outcome) -> None:
        if not self.ended:
            self.ended = True
            self.done(outcome)

    def cancel(self) -> None:
        """Drop the request. On return no code uses or references the caller's memory."""
        if self.ended:
            return
        self.ended = True
        uses_memory = self.kind == "load" or (self.nbytes > 0 and not self.sent)
        if self.connection is None:
            self.expect = Line()  # the request stays in its queue, without the memory
        elif uses_memory:
            self.connection.abort("cancelled")
        self.frames, self.done = tuple, _ignore


class Connection:
    """A connected socket with its reply reader, its send queue and its watchdog.

    Args:
        sock: Connected and non-blocking, plain or under TLS; the connection closes it.
        timeout_s: Longest time without a reply while requests are in flight, unless
            ``floor_bytes`` moved in that time.
        floor_bytes: See ``timeout_s``.
        on_progress: Runs after replies arrived, when the connection has room for requests.
        on_lost: Runs once, with the reason, the seconds without a reply, and the first request
            in flight if there is one.
    """

    def __init__(
        self,
        sock: socket.socket,
        timeout_s: float,
        floor_bytes: int,
        on_progress: Callable[[], None],
        on_lost: Callable[["Connection", str, float, RedisRequest | None], None],
    ) -> None:
        self.inflight_bytes = 0
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._timeout_s = timeout_s
        self._floor_bytes = floor_bytes
        self._on_progress = on_progress
        self._on_lost = on_lost
        self._reader = ReplyReader()
        self._in_flight: deque[RedisRequest] = deque()
        # Buffers to send. The last buffer of a request carries the request.
        self._out: deque[tuple[memoryview, RedisRequest | None]] = deque()
        self._writing = False
        self._progress_at = 0.0
        self._moved = 0  # bytes since _progress_at
        self._watchdog: asyncio.TimerHandle | None = None
        self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def submit(self, request: RedisRequest) -> None:
        """Send a request behind the earlier ones."""
        if request.ended:
            return
        if self.closed:
            request.end(Lost("closed"))
            return
        if request.asking:
            self.submit(RedisRequest("lookup", lambda: [encode(b"ASKING")], Line()))
        frames = request.frames()
        request.frames = tuple  # drops the reference to the caller's memory
        request.connection = self
        request.submitted_at = self._loop.time()
        self._in_flight.append(request)
        self._reader.expect(request.expect)
        self.inflight_bytes += request.nbytes
        for i, frame in enumerate(frames, 1):
            self._out.append((memoryview(frame), request if i == len(frames) else None))
        if len(self._in_flight) == 1:
            self._note_progress()
        if self._watchdog is None:
            self._watchdog = self._loop.call_later(self._timeout_s, self._check_progress)
        if not self._writing:
            self._writable()

    async def ask(self, command: bytes, expect: Expect) -> Reply:
        """Send one command and return its reply; ConnectionError: the connection was lost first."""
        answer: asyncio.Future[Outcome] = self._loop.create_future()

        def done(outcome: Outcome) -> None:
            if not answer.done():
                answer.set_result(outcome)

        self.submit(RedisRequest("lookup", lambda: [command], expect, done=done))
        outcome = await answer
        if isinstance(outcome, Lost):
            raise ConnectionError(outcome.reason)
        return outcome

    def abort(self, reason: str, silent_s: float = 0.0) -> None:
        """Close the connection at once and fail its requests. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        with contextlib.suppress(OSError):
            self._sock.close()
        self._reader.close()
        self._out.clear()
        failed, self._in_flight = self._in_flight, deque()
        for request in failed:
            request.end(Lost(reason))
        self._on_lost(self, reason, silent_s, failed[0] if failed else None)

    def _readable(self) -> None:
        if self.closed:
            return
        taken = 0
        try:
            while taken < _TURN_BYTES:
                buffer = self._reader.get_buffer()
                count = self._sock.recv_into(buffer)
                if not count:
                    self.abort("closed")
                    return
                taken += count
                self._moved += count
                if not self._deliver(self._reader.received(count)):
                    return
        except _NOT_READY:
            return
        except WrongSize:
            self._in_flight.popleft().end(MISFIT)
            self.abort("oversize")
        except ProtocolError as error:
            self.abort(f"protocol: {error}")
        except OSError:
            self.abort("closed")
        else:
            # A TLS socket may hold decrypted bytes, which the loop's selector does not see.
            self._loop.call_soon(self._readable)

    def _deliver(self, replies: list[Reply]) -> bool:
        """Pass replies to their requests. Return False if the connection closed on the way."""
        if not replies:
            return True
        self._note_progress()
        for reply in replies:
            request = self._in_flight.popleft()
            self.inflight_bytes -= request.nbytes
            if not request.sent:
                request.end(Lost("protocol"))
                self.abort("protocol: a reply to a request not yet sent")
                return False
            request.end(reply)
            if self.closed:
                return False
        self._on_progress()
        return not self.closed

    def _writable(self) -> None:
        taken = 0
        try:
            while self._out and taken < _TURN_BYTES:
                count = self._send()
                taken += count
                self._note_sent(count)
        except _NOT_READY:
            pass
        except OSError:
            # Deferred: the caller of submit() may be iterating over the connections.
            self._loop.call_soon(self.abort, "closed")
            return
        else:
            if not self._out:
                if self._writing:
                    self._loop.remove_writer(self._sock.fileno())
                    self._writing = False
                return
        if not self._writing:
            self._loop.add_writer(self._sock.fileno(), self._writable)
            self._writing = True

    def _send(self) -> int:
        if isinstance(self._sock, ssl.SSLSocket):
            return self._sock.send(self._out[0][0][:_TLS_BYTES])
        views = [self._out[i][0] for i in range(min(_GATHER, len(self._out)))]
        return self._sock.sendmsg(views)

    def _note_sent(self, count: int) -> None:
        self._moved += count
        while self._out and count >= self._out[0][0].nbytes:
            view, request = self._out.popleft()
            count -= view.nbytes
            if request is not None:
                request.sent = True
        if count:
            view, request = self._out[0]
            self._out[0] = (view[count:], request)

    def _note_progress(self) -> None:
        self._progress_at = self._loop.time()
        self._moved = 0

    def _check_progress(self) -> None:
        self._watchdog = None
        if not self._in_flight:
            return
        silent_s = self._loop.time() - self._progress_at
        if silent_s >= self._timeout_s:
            if self._moved < self._floor_bytes:
                self.abort("timeout", silent_s)
                return
            self._note_progress()
            silent_s = 0.0
        self._watchdog = self._loop.call_later(self._timeout_s - silent_s, self._check_progress)
