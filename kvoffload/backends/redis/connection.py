"""One connection to one server: requests out in order, replies in, and no way to mix them up.

A connection is given up at the first thing that does not fit: a reply nobody asked for, a value
far too long, a server that says it is not ready, or one from which too little came for too long.
Giving up is immediate: the socket is closed, no reference to a caller's memory remains, and every
request outstanding is told that it is lost. Nothing is ever sent twice.

Everything here runs on the I/O loop's thread.
"""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvoffload.backends.redis.channel import Channel
from kvoffload.backends.redis.resp import (
    MISFIT,
    Expect,
    Fill,
    Line,
    ProtocolError,
    Reply,
    ReplyReader,
    WrongSize,
    encode,
)

_GATHER = 16
"""Buffers handed to the kernel in one call."""
_TURN_BYTES = 8 << 20
"""What one connection may move before others get their turn on the loop."""


class Lost(NamedTuple):
    """The outcome of a request that got no reply."""

    reason: str
    """``timeout``, ``closed``, ``protocol``, ``unreachable``, ``cancelled``, ``shutdown``..."""


Outcome = Reply | Lost
Frames = Sequence[bytes | memoryview]


class Request:
    """A command on its way: what to send, what to expect, whom to tell.

    Args:
        frames: makes the bytes to send; called when the request's turn has come, so that a batch
            does not compute all its checksums before the first byte leaves.
        expect: what the reply must look like.
        nbytes: bytes of chunk this moves, either way; counts towards the bytes in flight.
        done: called exactly once with the outcome, unless the request is withdrawn.
        asking: say ASKING first: a cluster is moving the key's slot here.
        again: the command, where it may be tried again to see whether the server is back.
    """

    __slots__ = (
        "again", "asking", "begun", "connection", "done", "ended", "expect", "frames", "nbytes",
        "sent",
    )  # fmt: skip

    def __init__(
        self,
        frames: Callable[[], Frames],
        expect: Expect,
        nbytes: int,
        done: Callable[[Outcome], None],
        asking: bool = False,
        again: bytes = b"",
    ) -> None:
        self.again = again
        self.asking = asking
        self.frames = frames
        self.expect = expect
        self.nbytes = nbytes
        self.done = done
        self.connection: Connection | None = None
        self.begun = 0.0  # when it was handed to a connection, by the loop's clock
        self.sent = False
        self.ended = False

    def end(self, outcome: Outcome) -> None:
        """Tell the outcome, once."""
        if not self.ended:
            self.ended = True
            self.done(outcome)

    def withdraw(self) -> None:
        """Nobody waits any more; on return nothing touches or refers to the caller's memory."""
        if self.ended:
            return
        self.ended = True
        uses_memory = isinstance(self.expect, Fill) or (self.nbytes > 0 and not self.sent)
        if self.connection is None:
            self.expect = Line()  # it stays in a queue until its turn would have come
        elif uses_memory:
            self.connection.abort("cancelled")
        self.frames, self.done = tuple, _ignore


class Connection:
    """A connected channel with its reader, its queue and its watch.

    Args:
        sock: connected, non-blocking; closed by the connection.
        channel: moves bytes over it.
        timeout_s: while replies are owed, so long may pass with neither a reply nor
            ``floor_bytes`` moved.
        floor_bytes: see ``timeout_s``.
        progressed: called when replies came in: there is room for more requests.
        lost: called once with the reason, how long the connection had been silent, and the first
            request without a reply, if there is one.
    """

    def __init__(
        self,
        sock: socket.socket,
        channel: Channel,
        timeout_s: float,
        floor_bytes: int,
        progressed: Callable[["Connection"], None],
        lost: Callable[["Connection", str, float, Request | None], None],
    ) -> None:
        self.inflight_bytes = 0
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._channel = channel
        self._timeout_s = timeout_s
        self._floor_bytes = floor_bytes
        self._progressed = progressed
        self._lost = lost
        self._reader = ReplyReader()
        self._owed: deque[Request] = deque()
        # What is still to be sent, each buffer with the request that it completes, if it does.
        self._out: deque[tuple[memoryview, Request | None]] = deque()
        self._writing = False
        self._mark = 0.0  # when the connection last did what it should
        self._moved = 0  # bytes since then
        self._watch: asyncio.TimerHandle | None = None
        self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def owed(self) -> int:
        """Requests without a reply."""
        return len(self._owed)

    def submit(self, request: Request) -> None:
        """Send a request behind those before it."""
        if request.ended:
            return
        if self.closed:
            request.end(Lost("closed"))
            return
        if request.asking:
            self.submit(Request(lambda: [encode(b"ASKING")], Line(), 0, _ignore))
        frames = request.frames()
        request.frames = tuple  # it is not needed again, and refers to the caller's memory
        request.connection = self
        request.begun = self._loop.time()
        self._owed.append(request)
        self._reader.expect(request.expect)
        self.inflight_bytes += request.nbytes
        for i, frame in enumerate(frames, 1):
            self._out.append((memoryview(frame), request if i == len(frames) else None))
        if len(self._owed) == 1:
            self._progress()
        if self._watch is None:
            self._watch = self._loop.call_later(self._timeout_s, self._look)
        if not self._writing:
            self._writable()

    async def ask(self, command: bytes, expect: Expect) -> Reply:
        """Send one command and wait for its reply: for greetings and probes.

        Raises:
            ConnectionError: the connection was lost first.
        """
        answer: asyncio.Future[Outcome] = self._loop.create_future()

        def done(outcome: Outcome) -> None:
            if not answer.done():
                answer.set_result(outcome)

        self.submit(Request(lambda: [command], expect, 0, done))
        outcome = await answer
        if isinstance(outcome, Lost):
            raise ConnectionError(outcome.reason)
        return outcome

    def abort(self, reason: str, silent_s: float = 0.0) -> None:
        """Give the connection up, now. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self._watch is not None:
            self._watch.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        with contextlib.suppress(OSError):
            self._sock.close()
        self._reader.close()
        self._out.clear()
        owed, self._owed = self._owed, deque()
        for request in owed:
            request.end(Lost(reason))
        self._lost(self, reason, silent_s, owed[0] if owed else None)

    def _readable(self) -> None:
        if self.closed:
            return
        taken = 0
        try:
            while taken < _TURN_BYTES:
                buffer = self._reader.get_buffer()
                count = self._channel.receive(buffer)
                if not count:
                    self.abort("closed")
                    return
                taken += count
                self._moved += count
                if not self._deliver(self._reader.received(count)):
                    return
        except (BlockingIOError, InterruptedError):
            return
        except WrongSize:
            self._owed.popleft().end(MISFIT)
            self.abort("oversize")
        except ProtocolError as error:
            self.abort(f"protocol: {error}")
        except OSError:
            self.abort("closed")
        else:
            # Bytes may wait inside the channel, where the loop's selector does not see them.
            self._loop.call_soon(self._readable)

    def _deliver(self, replies: list[Reply]) -> bool:
        """Hand replies to their requests; False if the connection was given up over one."""
        if replies:
            self._progress()
        for reply in replies:
            request = self._owed.popleft()
            self.inflight_bytes -= request.nbytes
            if not request.sent:
                request.end(Lost("protocol"))
                self.abort("protocol: a reply to a request not yet sent")
                return False
            request.end(reply)
            if self.closed:
                return False
        if replies:
            self._progressed(self)
        return not self.closed

    def _writable(self) -> None:
        taken = 0
        try:
            while self._out and taken < _TURN_BYTES:
                views = [self._out[i][0] for i in range(min(_GATHER, len(self._out)))]
                count = self._channel.send(views)
                taken += count
                self._sent(count)
            if not self._out:
                self._channel.flush()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            # Not from here: submit() may be on the stack of someone who walks the connections.
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

    def _sent(self, count: int) -> None:
        self._moved += count
        while self._out and count >= self._out[0][0].nbytes:
            view, request = self._out.popleft()
            count -= view.nbytes
            if request is not None:
                request.sent = True
        if count:
            view, request = self._out[0]
            self._out[0] = (view[count:], request)

    def _progress(self) -> None:
        self._mark = self._loop.time()
        self._moved = 0

    def _look(self) -> None:
        """Judge the time since the last reply: did enough move?"""
        self._watch = None
        if not self._owed:
            return
        silent_s = self._loop.time() - self._mark
        if silent_s >= self._timeout_s:
            if self._moved < self._floor_bytes:
                self.abort("timeout", silent_s)
                return
            self._progress()
            silent_s = 0.0
        self._watch = self._loop.call_later(self._timeout_s - silent_s, self._look)


def _ignore(outcome: Outcome) -> None:
    """Nobody wants to know."""
