"""A non-blocking socket, in the clear or under TLS: two small classes with the same two verbs."""

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from kvoffload.backends.blocking_pool import run_once

_TLS_READ_BYTES = 256 << 10
_TLS_WRITE_BYTES = 64 << 10


class Address(NamedTuple):
    """Where a server listens: a host and a port, or the path of a Unix socket."""

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Channel(Protocol):
    """Bytes both ways without waiting; BlockingIOError means: not now."""

    def receive(self, into: memoryview) -> int:
        """Receive some bytes; 0 at the end of the stream."""
        ...

    def send(self, views: Sequence[memoryview]) -> int:
        """Take some bytes off the front of these views; keeps no reference to them."""
        ...

    def flush(self) -> None:
        """Send what the channel itself holds back."""
        ...


class PlainChannel:
    """A socket in the clear: the kernel copies between it and the caller's memory."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def receive(self, into: memoryview) -> int:
        """See :class:`Channel`."""
        return self._sock.recv_into(into)

    def send(self, views: Sequence[memoryview]) -> int:
        """See :class:`Channel`."""
        return self._sock.sendmsg(views)

    def flush(self) -> None:
        """Nothing is held back."""


class TLSChannel:
    """The same under TLS; at most one slice of encrypted bytes is held back."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_name: str) -> None:
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_name)
        self._held = memoryview(b"")

    async def handshake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Agree on keys and check the server's certificate and name."""
        while True:
            try:
                self._tls.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                done = False
            if outgoing := self._outgoing.read():
                await loop.sock_sendall(self._sock, outgoing)
            if done:
                return
            incoming = await loop.sock_recv(self._sock, _TLS_READ_BYTES)
            if not incoming:
                raise ConnectionResetError("closed during the TLS handshake")
            self._incoming.write(incoming)

    def receive(self, into: memoryview) -> int:
        """See :class:`Channel`."""
        while True:
            try:
                count: int = self._tls.read(into.nbytes, into)  # type: ignore[assignment]
                return count
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLZeroReturnError:
                return 0
            incoming = self._sock.recv(_TLS_READ_BYTES)
            if not incoming:
                return 0
            self._incoming.write(incoming)

    def send(self, views: Sequence[memoryview]) -> int:
        """See :class:`Channel`."""
        self.flush()
        count = self._tls.write(views[0][:_TLS_WRITE_BYTES])
        self._held = memoryview(self._outgoing.read())
        with contextlib.suppress(BlockingIOError):  # taken all the same: the next call sends it
            self.flush()
        return count

    def flush(self) -> None:
        """See :class:`Channel`."""
        while self._held:
            self._held = self._held[self._sock.send(self._held) :]


async def open_channel(
    address: Address, context: ssl.SSLContext | None
) -> tuple[socket.socket, Channel]:
    """Connect to a server, under TLS if a context is given. The caller sets the deadline.

    Raises:
        OSError: unreachable, refused, or (as ssl.SSLError) a certificate that does not hold.
    """
    loop = asyncio.get_running_loop()
    failure: OSError = OSError(f"no address for {address}")
    for family, target in await _targets(address):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, target)
            if context is None:
                return sock, PlainChannel(sock)
            channel = TLSChannel(sock, context, address.host)
            await channel.handshake(loop)
            return sock, channel
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure


async def _targets(address: Address) -> list[tuple[int, Any]]:
    """What to connect to: (address family, socket address). Numbers need no thread to look up."""
    if address.path:
        return [(socket.AF_UNIX, address.path)]
    try:
        version = ipaddress.ip_address(address.host).version
    except ValueError:
        # On a thread of its own: names may hang for long, and neither another server's checksums
        # nor the end of the process must wait behind them.
        found = await run_once(
            partial(socket.getaddrinfo, address.host, address.port, type=socket.SOCK_STREAM)
        )
        return [(family, target) for family, _, _, _, target in found]
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    return [(family, (address.host, address.port))]
