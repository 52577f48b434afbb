"""A TCP proxy that does to a connection what networks and broken servers do.

::

    async with FaultProxy("127.0.0.1", server.port) as proxy:
        backend = open_backend("redis", {"url": f"redis://127.0.0.1:{proxy.port}"}, "test")
        ...
        proxy.to_client = [Corrupt(at=1000)]  # from here on, counted from here, on each connection

Faults are small values; a list of them is applied in order to each piece of data on its way. They
may be replaced at any time. What is random follows from the offset, so that a failure can be
repeated. Each connection has copies of its own, so that a fault may remember what it holds back.
"""

import asyncio
import contextlib
import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

_PIECE_BYTES = 64 << 10


class Cut(Exception):
    """End both directions at once, with a reset; sends ``data`` first."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data


class HalfClosed(Exception):
    """End this direction only; sends ``data`` first."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data


class Fault(Protocol):
    """Something that happens to data on its way."""

    async def apply(self, data: bytes, offset: int) -> bytes:
        """Return what is passed on.

        Args:
            data: the next piece of the stream.
            offset: bytes of the stream that came before it since the fault was set.

        Raises:
            Cut, HalfClosed: the connection ends here.
        """
        ...


@dataclass(frozen=True)
class Latency:
    """Each piece arrives later, by ``seconds`` and up to ``jitter_s`` more."""

    seconds: float
    jitter_s: float = 0.0

    async def apply(self, data: bytes, offset: int) -> bytes:
        more = random.Random(offset).random() * self.jitter_s
        await asyncio.sleep(self.seconds + more)
        return data


@dataclass(frozen=True)
class Bandwidth:
    """No more than so many bytes a second."""

    bytes_per_s: int

    async def apply(self, data: bytes, offset: int) -> bytes:
        await asyncio.sleep(len(data) / self.bytes_per_s)
        return data


@dataclass(frozen=True)
class CutAfter:
    """The connection is reset after so many bytes."""

    nbytes: int
    _end: ClassVar[type[Cut | HalfClosed]] = Cut

    async def apply(self, data: bytes, offset: int) -> bytes:
        if offset + len(data) > self.nbytes:
            raise self._end(data[: max(0, self.nbytes - offset)])
        return data


class HalfCloseAfter(CutAfter):
    """After so many bytes nothing more comes this way, and the stream is ended properly."""

    _end = HalfClosed


@dataclass(frozen=True)
class Corrupt:
    """One byte, the ``at``-th, has its bits in ``mask`` flipped."""

    at: int
    mask: int = 0x01

    async def apply(self, data: bytes, offset: int) -> bytes:
        if not offset <= self.at < offset + len(data):
            return data
        changed = bytearray(data)
        changed[self.at - offset] ^= self.mask
        return bytes(changed)


@dataclass(frozen=True)
class HangAfter:
    """After so many bytes nothing more comes, and nothing is closed either."""

    nbytes: int

    async def apply(self, data: bytes, offset: int) -> bytes:
        if offset + len(data) <= self.nbytes:
            return data
        await asyncio.Event().wait()
        return b""


@dataclass(frozen=True)
class Garbage:
    """From the ``at``-th byte on, random bytes take the place of the true ones."""

    at: int = 0

    async def apply(self, data: bytes, offset: int) -> bytes:
        keep = max(0, self.at - offset)
        noise = random.Random(offset).randbytes(max(0, len(data) - keep))
        return data[:keep] + noise


@dataclass(frozen=True)
class Insert:
    """Bytes that nobody sent come before the ``at``-th."""

    data: bytes
    at: int = 0

    async def apply(self, data: bytes, offset: int) -> bytes:
        if not offset <= self.at < offset + len(data):
            return data
        return data[: self.at - offset] + self.data + data[self.at - offset :]


@dataclass
class Swap:
    """The first ``nbytes`` and the ``nbytes`` behind them change places: two replies, say."""

    nbytes: int
    _held: bytes = b""

    async def apply(self, data: bytes, offset: int) -> bytes:
        if offset >= 2 * self.nbytes:
            return data
        self._held += data
        if len(self._held) < 2 * self.nbytes:
            return b""
        first, second = self._held[: self.nbytes], self._held[self.nbytes : 2 * self.nbytes]
        return second + first + self._held[2 * self.nbytes :]


class FaultProxy:
    """Passes connections on to a server, through faults. Runs on the loop it is started on.

    Args:
        host: where the server listens.
        port: its port.
    """

    def __init__(self, host: str, port: int) -> None:
        self.port = 0
        self.accepted = 0
        self._target = host, port
        self.to_client: Sequence[Fault] = ()
        """Faults on the way from the server to the client."""
        self.to_server: Sequence[Fault] = ()
        """Faults on the way from the client to the server."""
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "FaultProxy":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *raised: object) -> None:
        if self._server is not None:
            self._server.close()
        for _ in range(3):  # what was accepted this very moment comes to be known here
            await asyncio.sleep(0)
        self.drop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def drop(self) -> None:
        """Reset every connection."""
        for writer in list(self._open):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            from_server, to_server = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, to_server}
        self._open |= ends
        try:
            await asyncio.gather(
                self._pump(reader, to_server, "to_server", ends),
                self._pump(from_server, writer, "to_client", ends),
            )
        except asyncio.CancelledError:
            pass  # closing the proxy; asyncio's server would only log it
        finally:
            self._open -= ends
            for end in ends:
                end.transport.abort()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        way: str,
        ends: set[asyncio.StreamWriter],
    ) -> None:
        faults: Sequence[Fault] = ()
        mine: list[Fault] = []
        offset = 0
        try:
            while data := await reader.read(_PIECE_BYTES):
                if faults is not getattr(self, way):
                    faults, offset = getattr(self, way), 0
                    mine = [copy.copy(fault) for fault in faults]
                came = len(data)
                for fault in mine:
                    data = await fault.apply(data, offset)
                offset += came
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        except HalfClosed as end:
            with contextlib.suppress(OSError):
                writer.write(end.data)
                await writer.drain()
                writer.write_eof()
        except Cut as end:
            with contextlib.suppress(OSError):
                writer.write(end.data)
                await writer.drain()
            for each in ends:
                each.transport.abort()
        except (OSError, RuntimeError):
            for each in ends:
                each.transport.abort()
