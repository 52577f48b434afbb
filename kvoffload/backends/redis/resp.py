"""The Redis wire format (RESP 2): encode commands, read replies within bounds.

The reader pulls bytes from a connection and knows which reply it waits for. The bytes of a
chunk thus go straight into the caller's memory. Any other reply is a :class:`ProtocolError`, and
the connection must close then. This rule keeps the bytes of one reply out of another key's memory.
"""

import mmap
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from kvoffload.facts import escaped

if TYPE_CHECKING:
    from kvoffload.backends.redis.connection import Connection

SCRATCH_BYTES = 64 << 10
"""Size of the buffer for everything but chunks. A short reply is never larger."""
MAX_LINE_BYTES = 4 << 10
MAX_TEXT = 300
"""Characters kept of a server's error text: enough for a MOVED with the longest host name."""
MAX_TABLE_BYTES = 8 << 20
MAX_TABLE_ELEMENTS = 1 << 17
MAX_VALUE_BYTES = 512 << 20
"""The limit of a Redis string."""
_MAX_TABLE_DEPTH = 6
_CRLF = b"\r\n"
_BITS = {b":0": 0, b":1": 1}
"""Most of the numbers that lookups bring."""


class ProtocolError(Exception):
    """The received bytes do not answer the command; the connection is out of step."""


KNOWN_CODES = frozenset({
    "ASK", "BUSY", "BUSYKEY", "CLUSTERDOWN", "CROSSSLOT", "DENIED", "ERR", "EXECABORT", "INPROG",
    "IOERR", "LOADING", "MASTERDOWN", "MISCONF", "MOVED", "NOADDR", "NOAUTH", "NOGOODSLAVE",
    "NOMASTERLINK", "NOPERM", "NOPROTO", "NOQUORUM", "NOREPLICAS", "OOM", "READONLY", "REDIRECT",
    "TRYAGAIN", "UNBLOCKED", "WRONGPASS", "WRONGTYPE",
})  # fmt: skip
"""Error codes of Redis and Valkey. Counter names contain these words and no other."""
OTHER = "OTHER"


class ServerError(NamedTuple):
    """An error reply. It is a value, not an exception, because the connection is still in step."""

    code: str
    """The first word if :data:`KNOWN_CODES` has it, else :data:`OTHER`."""
    text: str
    """The server's text, made :func:`~kvoffload.facts.escaped`."""

    @classmethod
    def parse(cls, text: bytes) -> "ServerError":
        line = text.decode("utf-8", "replace")
        code = line.partition(" ")[0]
        return cls(code if code in KNOWN_CODES else OTHER, escaped(line, MAX_TEXT))


class Filled(Enum):
    """A value arrived where a chunk was due."""

    WHOLE = "whole"
    MISFIT = "misfit"
    """The value has another size. The reader kept what the header takes, and dropped the rest."""
    OVERSIZE = "oversize"
    """As ``MISFIT``, but the reader stopped before the end, and the connection must close."""


Reply = bytes | int | None | ServerError | list[Any]


def encode(*words: bytes) -> bytes:
    """Encode a command."""
    parts = [b"*%d\r\n" % len(words)]
    parts += [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    return b"".join(parts)


class ReplyReader:
    """Reads one reply at a time; holds no memory of callers between two calls."""

    def __init__(self, source: "Connection") -> None:
        self._source = source
        self._buffer = bytearray(SCRATCH_BYTES)
        self._scratch = memoryview(self._buffer)
        self._start = self._end = 0
        self._table_bytes = self._table_elements = 0

    @property
    def left(self) -> int:
        """Bytes received that no reply has taken."""
        return self._end - self._start

    def finish(self) -> None:
        """Raise :class:`ProtocolError` if more came than the replies that were asked for."""
        if self.left:
            raise ProtocolError("a reply to no command")

    def reply(self) -> Reply:
        """Read one reply that is no array, of at most :data:`SCRATCH_BYTES`."""
        return self._value(self._line())

    def table(self) -> Reply:
        """Read nested arrays of short values, or a reply as :meth:`reply` does.

        The bounds count received bytes, not announced ones.
        """
        self._table_bytes = self._table_elements = 0
        return self._nested(0)

    def numbers(self, count: int) -> list[int | ServerError]:
        """Read so many integers or errors."""
        values: list[int | ServerError] = []
        while len(values) < count:
            lines = self._lines(count - len(values))
            try:
                values += [_BITS[line] for line in lines]
            except KeyError:
                values += map(self._integer, lines)
        return values

    def chunk(self, header: memoryview, rest: Sequence[memoryview]) -> Filled | ServerError | None:
        """Read null, an error, or a value of exactly the size of the header and the rest.

        A value of another size fills the beginning of ``header``: it tells whose value it is. The
        content of the rest is undefined unless the answer is ``WHOLE``.
        """
        wanted = header.nbytes + sum([view.nbytes for view in rest])
        line = b"$%d\r\n" % wanted
        # What precedes the rest if all is well, so that no byte of the rest is copied.
        before = len(line) + header.nbytes
        ending = memoryview(bytearray(2))
        count = 0
        if not self.left and before <= SCRATCH_BYTES:
            views = [self._scratch[:before], *rest, ending]
            count = self._source.some(views)
            if count >= before and self._scratch[: len(line)] == line:
                header[:] = self._scratch[len(line) : before]
                if views := after(views, count):
                    self._source.fill(views)
                _check_ending(ending)
                return Filled.WHOLE
            self._unread(views, count)
        size = self._value_size(before)
        if size is None or isinstance(size, ServerError):
            return size
        head = header[:size]
        is_endless = size > 2 * wanted + SCRATCH_BYTES
        if not is_endless:
            self._take([head])
        if is_endless or count > SCRATCH_BYTES:  # more than the buffer keeps has come
            self._start = self._end = 0
            return Filled.OVERSIZE
        if size == wanted:
            self._take([*rest, ending])
        else:
            self._drop(size - head.nbytes)
            self._take([ending])
        _check_ending(ending)
        return Filled.WHOLE if size == wanted else Filled.MISFIT

    def value(self, limit: int = MAX_VALUE_BYTES) -> memoryview | ServerError | None:
        """Read a value of any size up to ``limit``."""
        size = self._value_size(SCRATCH_BYTES)
        return self._bulk(size, limit) if isinstance(size, int) else size

    # ---- parts of replies ----------------------------------------------------------------------

    def _line(self, at_once: int = SCRATCH_BYTES) -> bytes:
        """Return the next line; receive no more than ``at_once`` bytes at a time for it."""
        while (stop := self._buffer.find(b"\n", self._start, self._end)) < 0:
            if self.left > MAX_LINE_BYTES:
                raise ProtocolError("an endless reply line")
            self._receive(at_once)
        line = bytes(self._scratch[self._start : stop + 1])
        self._start = stop + 1
        if len(line) > MAX_LINE_BYTES or not line.endswith(_CRLF):
            raise ProtocolError("a malformed reply line")
        return line[:-2]

    def _lines(self, most: int) -> list[bytes]:
        """Return at least one line, and as many of those received as are wanted."""
        first = self._line()
        stop = self._buffer.rfind(_CRLF, self._start, self._end)
        if most == 1 or stop < 0:
            return [first]
        more = bytes(self._scratch[self._start : stop]).split(_CRLF)[: most - 1]
        self._start += sum(map(len, more)) + 2 * len(more)
        return [first, *more]

    def _receive(self, most: int) -> None:
        """Receive behind what there is, which moves to the front if there is no room."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end + most > SCRATCH_BYTES:
            left = self.left
            self._scratch[:left] = bytes(self._scratch[self._start : self._end])
            self._start, self._end = 0, left
        self._end += self._source.some([self._scratch[self._end : self._end + most]])

    def _unread(self, views: list[memoryview], count: int) -> None:
        """Put received bytes into the buffer, of which the first view is a part; as far as fits."""
        self._start, self._end = 0, min(count, SCRATCH_BYTES)
        at = views[0].nbytes
        for view in views[1:]:
            if at < self._end:
                self._scratch[at : self._end][: view.nbytes] = view[: self._end - at]
            at += view.nbytes

    def _value_size(self, at_once: int) -> int | ServerError | None:
        line = self._line(at_once)
        if line[:1] == b"-":
            return ServerError.parse(line[1:])
        if line[:1] != b"$":
            raise ProtocolError("no value where one was due")
        return _size(line)

    def _value(self, line: bytes) -> bytes | int | ServerError | None:
        if line[:1] != b"$":
            return self._simple(line)
        size = _size(line)
        return None if size is None else bytes(self._bulk(size, SCRATCH_BYTES - 2))

    def _bulk(self, size: int, limit: int) -> memoryview:
        """Receive a value; pages that it does not fill take no memory."""
        if size > limit:
            raise ProtocolError(f"a value of {size} bytes")
        large = size > SCRATCH_BYTES
        value = memoryview(mmap.mmap(-1, size + 2) if large else bytearray(size + 2))
        self._take([value])
        _check_ending(value[size:])
        return value[:size]

    def _nested(self, depth: int) -> Reply:
        line = self._line()
        self._table_bytes += len(line)
        if line[:1] != b"*":
            value = self._value(line)
            self._table_bytes += len(value) if isinstance(value, bytes) else 0
            if self._table_bytes > MAX_TABLE_BYTES:
                raise ProtocolError("an endless table")
            return value
        count = _number(line)
        self._table_elements += max(1, count)
        endless = self._table_elements > MAX_TABLE_ELEMENTS or self._table_bytes > MAX_TABLE_BYTES
        if count < -1 or endless or depth == _MAX_TABLE_DEPTH:
            raise ProtocolError(f"an array of {count} elements in a table")
        return [self._nested(depth + 1) for _ in range(count)]

    def _integer(self, line: bytes) -> int | ServerError:
        if isinstance(value := self._simple(line), int | ServerError):
            return value
        raise ProtocolError("a text instead of a number")

    @staticmethod
    def _simple(line: bytes) -> bytes | int | ServerError:
        kind = line[:1]
        if kind == b"+":
            return line[1:]
        if kind == b":":
            return _number(line)
        if kind == b"-":
            return ServerError.parse(line[1:])
        raise ProtocolError(f"a reply of an unknown kind ({kind!r})")

    def _take(self, views: Sequence[memoryview]) -> None:
        """Fill the views from what was received, then from the source."""
        rest: list[memoryview] = []
        for view in views:
            count = min(view.nbytes, self.left)
            if count:
                view[:count] = self._scratch[self._start : self._start + count]
                self._start += count
            if count < view.nbytes:
                rest.append(view[count:])
        if rest:
            self._source.fill(rest)

    def _drop(self, size: int) -> None:
        while size:
            if not self.left:
                self._receive(min(size, SCRATCH_BYTES))
            count = min(size, self.left)
            self._start += count
            size -= count


def after(views: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of views behind so many bytes."""
    for i, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *views[i + 1 :]]
        count -= view.nbytes
    return []


def _check_ending(ending: memoryview) -> None:
    if ending != _CRLF:
        raise ProtocolError("a value that does not end where it should")


def _size(line: bytes) -> int | None:
    """Parse the length of a value; None for no value."""
    size = _number(line)
    if size < -1:
        raise ProtocolError("a value of negative size")
    return None if size == -1 else size


def _number(line: bytes) -> int:
    digits = line[1:]
    if len(digits) > 20 or not digits.removeprefix(b"-").isdigit():
        raise ProtocolError("a malformed number")
    return int(digits)
