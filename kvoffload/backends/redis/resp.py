"""Redis' wire format, without any I/O: commands as bytes, replies from bytes.

Only what kvoffload needs of RESP 2: simple strings, errors, integers, bulk strings, and arrays
where a server is asked who serves what. Each request says beforehand what its reply must look like
(:class:`Line`, :class:`Integers`, :class:`Fill`, :class:`Table`); anything else is a
:class:`ProtocolError`, after which the reader, and with it the connection, must not be used again.
That is what keeps the bytes of one reply out of another's key.

A value goes straight from the socket into the caller's memory: the reader hands out the buffer to
receive into (:meth:`ReplyReader.get_buffer`) and is told how much came (:meth:`received`).
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

SCRATCH_BYTES = 64 << 10
"""Received bytes that are not a chunk: reply lines, small values. No reply of these is larger."""
MAX_LINE_BYTES = 4 << 10
MAX_TEXT = 300
"""Characters kept of a server's error: enough for a MOVED with the longest host name."""
MAX_TABLE_BYTES = 8 << 20
MAX_TABLE_ELEMENTS = 1 << 17
_MAX_TABLE_DEPTH = 6
_PEEK_BYTES = 512
"""How far to read ahead where a chunk may follow: what lies beyond its length line is copied."""
_CRLF = b"\r\n"
_ARRAY = ord("*")


class ProtocolError(Exception):
    """What came is not a reply to what was asked; the connection is out of step."""


class WrongSize(ProtocolError):
    """A value much longer than the chunk asked for: the value's fault, not the server's.

    The connection is out of step all the same: so much is not received to be thrown away.
    """


KNOWN_CODES = frozenset({
    "ASK", "BUSY", "BUSYKEY", "CLUSTERDOWN", "CROSSSLOT", "DENIED", "ERR", "EXECABORT", "INPROG",
    "IOERR", "LOADING", "MASTERDOWN", "MISCONF", "MOVED", "NOADDR", "NOAUTH", "NOGOODSLAVE",
    "NOMASTERLINK", "NOPERM", "NOPROTO", "NOQUORUM", "NOREPLICAS", "OOM", "READONLY", "REDIRECT",
    "TRYAGAIN", "UNBLOCKED", "WRONGPASS", "WRONGTYPE",
})  # fmt: skip
"""Error codes of Redis and Valkey. Counters are named after these, and after no other word."""
OTHER = "OTHER"


def printable(text: str, limit: int = MAX_TEXT) -> str:
    """A server's text as one bounded line for logs: control characters are escaped."""
    short = text if len(text) <= limit else f"{text[:limit]}…"
    if short.isprintable():
        return short
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in short)


class ServerError(NamedTuple):
    """An error reply: a value, because the connection is still in step."""

    code: str
    """The first word if it is one of :data:`KNOWN_CODES`, else :data:`OTHER`."""
    text: str
    """What the server said, as :func:`printable` makes it."""

    @classmethod
    def of(cls, text: bytes) -> "ServerError":
        """Read an error reply, given without its ``-``."""
        said = text.decode("utf-8", "replace")
        code = said.partition(" ")[0]
        return cls(code if code in KNOWN_CODES else OTHER, printable(said))


class Filled:
    """The reply to a :class:`Fill` that arrived; there is one, :data:`FILLED`."""

    def __repr__(self) -> str:
        return "FILLED"


FILLED = Filled()


class Misfit:
    """The reply to a :class:`Fill` whose value has another size; there is one, :data:`MISFIT`.

    The value was received and thrown away: the views are untouched, the connection is in step.
    """

    def __repr__(self) -> str:
        return "MISFIT"


MISFIT = Misfit()


class Line:
    """Expect one reply of any kind that fits the scratch buffer."""


class Integers:
    """Expect ``count`` integer (or error) replies; they are given as one list."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.values: list[int | ServerError] = []


class Fill:
    """Expect a bulk string of exactly these views' size, received into them; or null, or an error.

    The views belong to the caller. Nothing touches them once the reader is closed.
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.views = views
        self.nbytes = sum(view.nbytes for view in views)


class Table:
    """Expect nested arrays of short values, given as lists; or any reply that fits :class:`Line`.

    The bounds apply to what arrives, not to what is announced: nothing is allocated beforehand.
    """

    def __init__(self) -> None:
        self.value: Any = None
        self._nbytes = self._elements = 0
        self._open: list[tuple[list[Any], int]] = []  # arrays begun, each with its whole length

    def received(self, nbytes: int) -> None:
        """Count bytes of the reply.

        Raises:
            ProtocolError: they are more than any table needs.
        """
        self._nbytes += nbytes
        if self._nbytes > MAX_TABLE_BYTES:
            raise ProtocolError("a table without end")

    def begin(self, count: int) -> bool:
        """Begin an array; True if the reply is complete with it.

        Raises:
            ProtocolError: there are too many elements, or they are nested too deeply.
        """
        self._elements += max(1, count)
        if count < -1 or self._elements > MAX_TABLE_ELEMENTS or len(self._open) == _MAX_TABLE_DEPTH:
            raise ProtocolError(f"an array of {count} elements in a table")
        if count <= 0:
            return self.put(None if count else [])
        self._open.append(([], count))
        return False

    def put(self, value: Any) -> bool:
        """Add a value where it belongs; True if the reply is complete with it."""
        while self._open:
            array, count = self._open[-1]
            array.append(value)
            if len(array) < count:
                return False
            self._open.pop()
            value = array
        self.value = value
        return True


Expect = Line | Integers | Fill | Table
Reply = bytes | int | None | ServerError | Filled | Misfit | list[Any]

_SINK = bytearray(SCRATCH_BYTES)


def sink(nbytes: int) -> list[memoryview]:
    """Views of ``nbytes`` together, all of the same small memory: for bytes nobody wants."""
    whole, rest = divmod(nbytes, SCRATCH_BYTES)
    view = memoryview(_SINK)
    return [view] * whole + [view[:rest]]


def encode(*words: bytes) -> bytes:
    """Write a command as RESP."""
    parts = [b"*%d\r\n" % len(words)]
    parts += [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    return b"".join(parts)


class ReplyReader:
    """Turns received bytes into the replies expected, in order. See the module's docstring."""

    def __init__(self) -> None:
        self._scratch = bytearray(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._start = self._end = 0
        self._expected: deque[Expect] = deque()
        # While a chunk comes in: the views still to fill, how far the first one is, bytes missing.
        self._filling: deque[memoryview] = deque()
        self._filled = 0
        self._missing = 0
        self._in_bulk = False
        self._fits = True
        self._failure: ProtocolError | None = None

    def expect(self, expect: Expect) -> None:
        """Say what the next request's reply must look like."""
        self._expected.append(expect)

    def get_buffer(self) -> memoryview:
        """Return where to receive the next bytes into; never empty, good until :meth:`received`."""
        if self._failure is not None:
            raise self._failure
        if self._missing:
            return self._filling[0][self._filled :]
        if self._start:
            left = self._end - self._start
            self._scratch[:left] = self._scratch[self._start : self._end]
            self._start, self._end = 0, left
        if self._end == SCRATCH_BYTES:
            raise ProtocolError("a reply larger than any that was asked for")
        if self._expected and isinstance(self._expected[0], Fill):
            return self._view[self._end : self._end + _PEEK_BYTES]
        return self._view[self._end :]

    def received(self, nbytes: int) -> list[Reply]:
        """Take note of bytes received into the buffer; return the replies they completed.

        Raises:
            ProtocolError: they fit nothing that was expected.
        """
        if self._missing:
            self._advance(nbytes)
        else:
            self._end += nbytes
        replies: list[Reply] = []
        while self._start < self._end and not self._missing:
            try:
                complete, reply = self._next()
            except ProtocolError as error:
                if not replies:
                    raise
                self._failure = error  # those before it are good; it comes up right after them
                break
            if not complete:
                break
            self._expected.popleft()
            replies.append(reply)
        return replies

    def close(self) -> None:
        """Drop every reference to the memory of callers."""
        self._expected.clear()
        self._filling.clear()
        self._missing = 0

    def _next(self) -> tuple[bool, Reply]:
        if not self._expected:
            raise ProtocolError("a reply nobody asked for")
        expect = self._expected[0]
        if isinstance(expect, Integers):
            return self._integers(expect)
        if isinstance(expect, Fill):
            return self._fill(expect)
        if isinstance(expect, Table):
            return self._table(expect)
        return self._line()

    def _take_line(self) -> bytes | None:
        """Return the next line without its end, or None if it is not whole yet."""
        stop = self._scratch.find(_CRLF, self._start, min(self._end, self._start + MAX_LINE_BYTES))
        if stop < 0:
            if self._end - self._start >= MAX_LINE_BYTES:
                raise ProtocolError("a reply line without end")
            return None
        line = bytes(self._view[self._start : stop])
        self._start = stop + 2
        return line

    def _line(self) -> tuple[bool, Reply]:
        begin = self._start
        line = self._take_line()
        if line is None:
            return False, None
        if line[:1] != b"$":
            return True, _simple(line)
        size = _number(line)
        if size == -1:
            return True, None
        if not 0 <= size <= SCRATCH_BYTES - MAX_LINE_BYTES:
            raise ProtocolError(f"a value of {size} bytes where a short one was due")
        stop = self._start + size
        if self._end < stop + 2:
            self._start = begin
            return False, None
        value = bytes(self._view[self._start : stop])
        if self._scratch[stop : stop + 2] != _CRLF:
            raise ProtocolError("a value that does not end where it said")
        self._start = stop + 2
        return True, value

    def _integers(self, expect: Integers) -> tuple[bool, Reply]:
        """Take as many lines as there are at once: one batch of lookups is a thousand of them."""
        *lines, rest = bytes(self._view[self._start : self._end]).split(_CRLF)
        if len(rest) > MAX_LINE_BYTES:
            raise ProtocolError("a reply line without end")
        for line in lines[: expect.count - len(expect.values)]:
            self._start += len(line) + 2
            if line == b":1":
                expect.values.append(1)
            elif line == b":0":
                expect.values.append(0)
            elif isinstance(reply := _simple(line), int | ServerError):
                expect.values.append(reply)
            else:
                raise ProtocolError("a text where a number was due")
        done = len(expect.values) == expect.count
        return done, expect.values if done else None

    def _table(self, expect: Table) -> tuple[bool, Reply]:
        """Take as many elements as there are at once."""
        while self._start < self._end:
            begin = self._start
            if self._scratch[begin] == _ARRAY:
                line = self._take_line()
                if line is None:
                    return False, None
                done = expect.begin(_number(line))
            else:
                complete, value = self._line()
                if not complete:
                    return False, None
                done = expect.put(value)
            expect.received(self._start - begin)
            if done:
                return True, expect.value
        return False, None

    def _fill(self, expect: Fill) -> tuple[bool, Reply]:
        if not self._in_bulk:
            line = self._take_line()
            if line is None:
                return False, None
            if line[:1] == b"-":
                return True, _simple(line)
            if line[:1] != b"$":
                raise ProtocolError("no value where one was due")
            size = _number(line)
            if size == -1:
                return True, None
            if size < 0:
                raise ProtocolError("a value of a size that is none")
            if size > 2 * expect.nbytes + SCRATCH_BYTES:
                raise WrongSize(f"a value of {size} bytes where {expect.nbytes} were due")
            self._fits = size == expect.nbytes
            views = expect.views if self._fits else sink(size)
            self._filling.extend(view for view in views if view.nbytes)
            self._filled, self._missing, self._in_bulk = 0, size, True
            self._spill()
        if self._missing or self._end - self._start < 2:
            return False, None
        if self._scratch[self._start : self._start + 2] != _CRLF:
            raise ProtocolError("a value that does not end where it said")
        self._start += 2
        self._in_bulk = False
        return True, FILLED if self._fits else MISFIT

    def _spill(self) -> None:
        """Move what was read ahead of a chunk to where it belongs."""
        while self._missing and self._start < self._end:
            target = self._filling[0][self._filled :]
            count = min(target.nbytes, self._end - self._start)
            target[:count] = self._view[self._start : self._start + count]
            self._start += count
            self._advance(count)

    def _advance(self, count: int) -> None:
        self._missing -= count
        self._filled += count
        if self._filled == self._filling[0].nbytes:
            self._filling.popleft()
            self._filled = 0


def _simple(line: bytes) -> bytes | int | ServerError:
    kind = line[:1]
    if kind == b"+":
        return line[1:]
    if kind == b":":
        return _number(line)
    if kind == b"-":
        return ServerError.of(line[1:])
    raise ProtocolError(f"a reply of an unknown kind ({kind!r})")


def _number(line: bytes) -> int:
    digits = line[1:]
    if len(digits) > 20 or not digits.removeprefix(b"-").isdigit():
        raise ProtocolError("a number that is none")
    return int(digits)
