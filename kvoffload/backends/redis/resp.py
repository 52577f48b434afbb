"""The Redis wire format (RESP 2) without I/O: encode commands, parse replies.

The reader supports simple strings, errors, integers, bulk strings and nested arrays. Each request
declares the shape of its reply: :class:`Line`, :class:`Integers`, :class:`Fill` or
:class:`NestedArray`. Any other reply is a :class:`ProtocolError`; the connection must close then.
This rule keeps the bytes of one reply out of another key's memory.

The socket writes a value straight into the caller's memory. :meth:`ReplyReader.get_buffer` returns
the buffer for the next bytes, and :meth:`ReplyReader.received` parses them.
"""

from collections import deque
from collections.abc import Generator, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeVar

SCRATCH_BYTES = 64 << 10
"""Size of the buffer for everything but chunks. A short reply is never larger."""
MAX_LINE_BYTES = 4 << 10
MAX_TEXT = 300
"""Characters kept of a server's error text: enough for a MOVED with the longest host name."""
MAX_TABLE_BYTES = 8 << 20
MAX_TABLE_ELEMENTS = 1 << 17
_MAX_TABLE_DEPTH = 6
_PEEK_BYTES = 512
"""Bytes read at once where a chunk may follow; bytes behind the length line need a copy."""
_CRLF = b"\r\n"

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""A parser that yields where it needs more bytes."""


class ProtocolError(Exception):
    """The received bytes do not answer the request; the connection is out of step."""


class WrongSize(ProtocolError):
    """A value far longer than the expected chunk.

    The value is damaged, the server is healthy. The connection is out of step, because the reader
    does not receive so many bytes only to drop them.
    """


KNOWN_CODES = frozenset({
    "ASK", "BUSY", "BUSYKEY", "CLUSTERDOWN", "CROSSSLOT", "DENIED", "ERR", "EXECABORT", "INPROG",
    "IOERR", "LOADING", "MASTERDOWN", "MISCONF", "MOVED", "NOADDR", "NOAUTH", "NOGOODSLAVE",
    "NOMASTERLINK", "NOPERM", "NOPROTO", "NOQUORUM", "NOREPLICAS", "OOM", "READONLY", "REDIRECT",
    "TRYAGAIN", "UNBLOCKED", "WRONGPASS", "WRONGTYPE",
})  # fmt: skip
"""Error codes of Redis and Valkey. Counter names contain these words and no other."""
OTHER = "OTHER"


def printable(text: str, limit: int = MAX_TEXT) -> str:
    """Return a server's text as one bounded line for logs, with control characters escaped."""
    short = text if len(text) <= limit else f"{text[:limit]}…"
    if short.isprintable():
        return short
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in short)


class ServerError(NamedTuple):
    """An error reply. It is a value, not an exception, because the connection is still in step."""

    code: str
    """The first word if :data:`KNOWN_CODES` has it, else :data:`OTHER`."""
    text: str
    """The server's text, made :func:`printable`."""

    @classmethod
    def parse(cls, text: bytes) -> "ServerError":
        line = text.decode("utf-8", "replace")
        code = line.partition(" ")[0]
        return cls(code if code in KNOWN_CODES else OTHER, printable(line))


class FillResult(Enum):
    """The reply to a :class:`Fill` whose value arrived."""

    FILLED = "filled"
    MISFIT = "misfit"
    """The value has another size. The reader kept what the header takes, and dropped the rest."""


FILLED, MISFIT = FillResult.FILLED, FillResult.MISFIT


_NO_HEADER = memoryview(b"")


class Line:
    """Expect one reply of any kind that fits the scratch buffer."""


class Integers:
    """Expect ``count`` integer or error replies, returned as one list."""

    def __init__(self, count: int) -> None:
        self.count = count


class Fill:
    """Expect null, an error, or a bulk string of exactly the size of ``views``.

    The views belong to the caller. The reader drops them when it closes. A value of another size
    fills no more than the beginning of ``header``, if there is one: it tells whose value it is.
    """

    def __init__(self, views: Sequence[memoryview], header: memoryview = _NO_HEADER) -> None:
        self.views = views
        self.header = header
        self.nbytes = sum(view.nbytes for view in views)


class NestedArray:
    """Expect nested arrays of short values, or any reply that fits :class:`Line`.

    The bounds count received bytes, not announced ones. The reader allocates nothing in advance.
    """

    def __init__(self) -> None:
        self._nbytes = self._elements = 0

    def add_bytes(self, nbytes: int) -> None:
        """Count bytes of the reply; raise :class:`ProtocolError` beyond the bound."""
        self._nbytes += nbytes
        if self._nbytes > MAX_TABLE_BYTES:
            raise ProtocolError("an endless table")

    def add_array(self, count: int, depth: int) -> None:
        """Count an array; raise :class:`ProtocolError` beyond the bounds."""
        self._elements += max(1, count)
        if count < -1 or self._elements > MAX_TABLE_ELEMENTS or depth == _MAX_TABLE_DEPTH:
            raise ProtocolError(f"an array of {count} elements in a table")


Expect = Line | Integers | Fill | NestedArray
Reply = bytes | int | None | ServerError | FillResult | list[Any]

_SINK = bytearray(SCRATCH_BYTES)


def sink(nbytes: int) -> list[memoryview]:
    """Return views of ``nbytes`` in total over one small buffer, for bytes to discard."""
    whole, rest = divmod(nbytes, SCRATCH_BYTES)
    view = memoryview(_SINK)
    return [view] * whole + [view[:rest]]


def encode(*words: bytes) -> bytes:
    """Encode a command."""
    parts = [b"*%d\r\n" % len(words)]
    parts += [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    return b"".join(parts)


class ReplyReader:
    """Parses received bytes into the expected replies, in order.

    The parser is a generator, which yields where it needs more bytes.
    """

    def __init__(self) -> None:
        self._scratch = bytearray(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._start = self._end = 0
        self._expected: deque[Expect] = deque()
        self._replies: list[Reply] = []
        # State of an incoming chunk: views to fill, bytes in the first view, bytes missing.
        self._filling: deque[memoryview] = deque()
        self._filled = 0
        self._missing = 0
        self._parser = self._parse()
        self._failure: ProtocolError | None = None

    def expect(self, expect: Expect) -> None:
        self._expected.append(expect)

    def get_buffer(self) -> memoryview:
        """Return the non-empty buffer for the next bytes; valid until :meth:`received`."""
        if self._failure is not None:
            raise self._failure
        if self._missing:
            return self._filling[0][self._filled :]
        if self._start:
            left = self._end - self._start
            self._scratch[:left] = self._scratch[self._start : self._end]
            self._start, self._end = 0, left
        if self._end == SCRATCH_BYTES:
            raise ProtocolError("a reply larger than any expected one")
        if self._expected and isinstance(self._expected[0], Fill):
            return self._view[self._end : self._end + _PEEK_BYTES]
        return self._view[self._end :]

    def received(self, nbytes: int) -> list[Reply]:
        """Parse ``nbytes`` received; return the replies completed; ProtocolError: they fit none."""
        if self._missing:
            self._advance(nbytes)
            if self._missing:
                return []
        else:
            self._end += nbytes
        try:
            next(self._parser)
        except ProtocolError as error:
            if not self._replies:
                raise
            self._failure = error  # return the good replies first; get_buffer() raises it
        replies, self._replies = self._replies, []
        return replies

    def close(self) -> None:
        """Drop every reference to callers' memory."""
        self._expected.clear()
        self._filling.clear()
        self._parser.close()
        self._missing = 0

    def _parse(self) -> Steps[None]:
        while True:
            while self._start == self._end:
                yield
            if not self._expected:
                raise ProtocolError("a reply without a request")
            expect = self._expected[0]
            reply: Reply
            if isinstance(expect, Fill):
                reply = yield from self._fill(expect)
            elif isinstance(expect, Integers):
                reply = yield from self._integers(expect.count)
            else:
                nested = expect if isinstance(expect, NestedArray) else None
                reply = yield from self._value(nested)
            self._expected.popleft()
            self._replies.append(reply)

    def _line(self) -> Steps[bytes]:
        while True:
            limit = min(self._end, self._start + MAX_LINE_BYTES)
            stop = self._scratch.find(_CRLF, self._start, limit)
            if stop >= 0:
                break
            if self._end - self._start >= MAX_LINE_BYTES:
                raise ProtocolError("an endless reply line")
            yield
        line = bytes(self._view[self._start : stop])
        self._start = stop + 2
        return line

    def _take_crlf(self) -> None:
        if self._scratch[self._start : self._start + 2] != _CRLF:
            raise ProtocolError("a value longer than its announced size")
        self._start += 2

    def _value(self, nested: NestedArray | None, depth: int = 0) -> Steps[Any]:
        """Take any short reply; arrays only with ``nested``, which has their bounds."""
        line = yield from self._line()
        if nested is not None:
            nested.add_bytes(len(line) + 2)
            if line[:1] == b"*":
                count = _number(line)
                nested.add_array(count, depth)
                array = []
                for _ in range(count):
                    array.append((yield from self._value(nested, depth + 1)))
                return array if count >= 0 else None
        if line[:1] != b"$":
            return _simple(line)
        size = _number(line)
        if size == -1:
            return None
        if not 0 <= size <= SCRATCH_BYTES - MAX_LINE_BYTES:
            raise ProtocolError(f"a value of {size} bytes instead of a short one")
        if nested is not None:
            nested.add_bytes(size + 2)
        while self._end - self._start < size + 2:
            yield
        value = bytes(self._view[self._start : self._start + size])
        self._start += size
        self._take_crlf()
        return value

    def _integers(self, count: int) -> Steps[list[int | ServerError]]:
        """Take all complete lines at once: one batch of lookups has a thousand of them."""
        values: list[int | ServerError] = []
        while True:
            *lines, rest = bytes(self._view[self._start : self._end]).split(_CRLF)
            if len(rest) > MAX_LINE_BYTES:
                raise ProtocolError("an endless reply line")
            for line in lines[: count - len(values)]:
                self._start += len(line) + 2
                if line == b":1":
                    values.append(1)
                elif line == b":0":
                    values.append(0)
                elif isinstance(reply := _simple(line), int | ServerError):
                    values.append(reply)
                else:
                    raise ProtocolError("a text instead of a number")
            if len(values) == count:
                return values
            yield

    def _fill(self, expect: Fill) -> Steps[ServerError | FillResult | None]:
        line = yield from self._line()
        if line[:1] == b"-":
            return ServerError.parse(line[1:])
        if line[:1] != b"$":
            raise ProtocolError("no value where one was due")
        size = _number(line)
        if size == -1:
            return None
        if size < 0:
            raise ProtocolError("a value of negative size")
        if size > 2 * expect.nbytes + SCRATCH_BYTES:
            raise WrongSize(f"a value of {size} bytes instead of {expect.nbytes}")
        fits = size == expect.nbytes
        header = expect.header[:size]
        views = expect.views if fits else [header, *sink(size - header.nbytes)]
        self._filling.extend(view for view in views if view.nbytes)
        self._filled, self._missing = 0, size
        while self._missing and self._start < self._end:  # bytes that arrived with the line
            target = self._filling[0][self._filled :]
            count = min(target.nbytes, self._end - self._start)
            target[:count] = self._view[self._start : self._start + count]
            self._start += count
            self._advance(count)
        while self._missing or self._end - self._start < 2:
            yield
        self._take_crlf()
        return FILLED if fits else MISFIT

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
        return ServerError.parse(line[1:])
    raise ProtocolError(f"a reply of an unknown kind ({kind!r})")


def _number(line: bytes) -> int:
    digits = line[1:]
    if len(digits) > 20 or not digits.removeprefix(b"-").isdigit():
        raise ProtocolError("a malformed number")
    return int(digits)
