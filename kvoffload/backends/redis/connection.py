"""A blocking connection to one server, for one thread at a time and one command in flight.

Every wait ends: at the deadline of the handshake, when too few bytes move within ``timeout_s``, or
at once when another thread calls :meth:`Connection.abort`.
"""

import contextlib
import ipaddress
import math
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from kvoffload.backends.blocking_pool import begin_once
from kvoffload.backends.redis.resp import ProtocolError, Reply, ReplyReader, after, encode

_TLS_BYTES = 64 << 10
"""Bytes that TLS encrypts at once."""
_LEAST_S = 0.001
_RECENT_S = 0.002
"""So soon after a command no server was restarted."""
T = TypeVar("T")
_NOT_READY = (BlockingIOError, TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Address(NamedTuple):
    """The address of a server: a host and a port, or the path of a Unix socket."""

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Lost(ConnectionError):
    """A command without a reply; ``reason`` is the word that counters have."""

    def __init__(self, reason: str, text: str = "") -> None:
        super().__init__(text or reason)
        self.reason = reason
        """``timeout``, ``closed``, ``protocol``, ``unreachable``, ``cancelled``, ``shutdown``..."""


class Connection:
    """A socket with the reader of its replies.

    Args:
        timeout_s: Longest time without a reply, unless ``floor_bytes`` moved in that time.
        floor_bytes: See ``timeout_s``.
    """

    def __init__(self, timeout_s: float, floor_bytes: int = 1) -> None:
        self.reader = ReplyReader(self)
        self.address = Address("", 0)
        """Where it was opened to."""
        self.lost = ""
        """Why the connection ended; empty while it is open."""
        self._timeout_s, self._floor_bytes = timeout_s, max(1, floor_bytes)
        self._sock: socket.socket | None = None
        self._closing = threading.Lock()
        self._deadline = math.inf
        """The end of the handshake, on the monotonic clock."""
        self._waits_s: float | None = None
        """The timeout that the socket has."""
        self._since, self._moved = 0.0, 0
        """When the command was sent, or enough bytes had moved; and the bytes moved since."""

    @property
    def is_open(self) -> bool:
        """Whether the handshake is done, and no end was noticed."""
        return self._deadline == math.inf and self._sock is not None and not self.lost

    # ---- open and close ------------------------------------------------------------------------

    def open(
        self,
        address: Address,
        tls: ssl.SSLContext | None,
        deadline: float,
        check_ip: Callable[[Address, str], None] = lambda address, ip: None,
    ) -> None:
        """Connect, under TLS if there is a context; raises OSError.

        Commands have the same deadline, until :meth:`opened`. ``check_ip`` raises OSError for an IP
        address to which the address must not lead.
        """
        self.address, self._deadline = address, deadline
        failure: OSError | None = None
        for family, target in _resolve(address, deadline):
            try:
                if family != socket.AF_UNIX:
                    check_ip(address, target[0])
                self._connect(family, target, address.host, tls)
                return
            except OSError as error:
                self._close()
                failure = error
        try:
            raise failure or OSError(f"no address for {address}")
        finally:
            failure = None  # it refers to this frame

    def opened(self) -> None:
        """Replace the deadline by the timeout of each command."""
        self._deadline = math.inf

    def abort(self, reason: str) -> None:
        """End the connection from any thread: a call that waits on it ends at once."""
        self.lost = self.lost or reason
        with self._closing, contextlib.suppress(OSError):
            if self._sock is not None:
                # SSLSocket.shutdown() would drop the state that another thread uses.
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self, reason: str = "closed") -> None:
        """End the connection, from the thread that uses it."""
        self.lost = self.lost or reason
        self._close()

    def is_usable(self, *, is_trusted: bool = False) -> bool:
        """Return whether an idle connection is open, and no byte waits that nothing asked for.

        A look at the socket costs as much as a small transfer, so one in use is trusted.
        """
        sock = self._sock
        if self.lost or sock is None or self.reader.left:
            return False
        if is_trusted and time.monotonic() - self._since < _RECENT_S:
            return True
        try:
            if isinstance(sock, ssl.SSLSocket):  # may have a session ticket to read, and no data
                self._set_timeout(sock, 0.0)
                data = sock.recv(1)
            else:
                data = sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except _NOT_READY:
            return True
        except OSError:
            data = b""
        self.lost = "protocol" if data else "closed"
        return False

    def check_usable(self) -> None:
        """Raise :class:`Lost` unless the connection is usable."""
        if not self.is_usable():
            raise Lost(self.lost, f"{self.lost} at once")

    def _connect(self, family: int, target: Any, host: str, tls: ssl.SSLContext | None) -> None:
        sock = self._sock = socket.socket(family, socket.SOCK_STREAM)
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(self._left_s())
        self._check_lost()
        sock.connect(target)
        if tls is None:
            sock.settimeout(None)
        else:
            sock = self._sock = tls.wrap_socket(
                sock, server_hostname=host, do_handshake_on_connect=False
            )
            sock.settimeout(self._left_s())
            self._check_lost()
            sock.do_handshake()
        self._waits_s = None

    def _close(self) -> None:
        with self._closing:
            sock, self._sock = self._sock, None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.close()

    # ---- commands ------------------------------------------------------------------------------

    def ask(self, *command: bytes) -> Reply:
        """Send a command and return its reply; raises :class:`Lost`."""
        return self.ask_all([encode(*command)], self.reader.reply)[0]

    def ask_all(self, commands: Sequence[bytes], read: Callable[[], T]) -> list[T]:
        """Send commands at once, and read the reply to each; raises :class:`Lost`."""
        try:
            self.send(b"".join(commands))
            return [read() for _ in commands]
        except ProtocolError as error:
            self.close("protocol")
            raise Lost("protocol", f"protocol: {error}") from error

    def send(self, *parts: bytes | memoryview) -> None:
        """Send a command; raises :class:`Lost`."""
        self._since, self._moved = time.monotonic(), 0
        self._move_all([memoryview(part) for part in parts], _send)

    def some(self, views: list[memoryview]) -> int:
        """Receive at least one byte, and return how many; raises :class:`Lost`."""
        return self._move(views, _receive)

    def fill(self, views: list[memoryview]) -> None:
        """Receive until all views are full; raises :class:`Lost`."""
        self._move_all(views, _receive_all)

    def _move_all(self, views: list[memoryview], move: "Move") -> None:
        while views:
            views = after(views, self._move(views, move))

    def _move(self, views: list[memoryview], move: "Move") -> int:
        """Make system calls until bytes have moved; return how many. Raises :class:`Lost`."""
        while True:
            sock = self._sock
            if self.lost or sock is None:
                raise Lost(self.lost or "closed")
            if (left_s := self._left_s()) != self._waits_s:
                self._set_timeout(sock, left_s)
            count: int | None
            try:
                count = move(sock, views)
            except _NOT_READY:
                count = None
            except OSError as error:
                raise Lost(self.lost or "closed", f"closed: {error}") from error
            if count:
                self._moved += count
                return count
            if count == 0:
                raise Lost(self.lost or "closed", "the server closed the connection")

    def _left_s(self) -> float:
        """Return how long the next system call may wait; raises :class:`Lost` without time."""
        now = time.monotonic()
        if self._deadline < math.inf:
            left_s = self._deadline - now
        else:
            left_s = self._since + self._timeout_s - now
            if left_s > 0.9 * self._timeout_s:
                return self._timeout_s  # mostly the one that the socket has
            if left_s <= 0 and self._moved >= self._floor_bytes:
                self._since, self._moved, left_s = now, 0, self._timeout_s
        if left_s <= 0:
            self._check_lost()
            raise Lost("timeout", "no reply in time")
        return max(left_s, _LEAST_S)

    def _set_timeout(self, sock: socket.socket, seconds: float) -> None:
        self._waits_s = seconds
        if isinstance(sock, ssl.SSLSocket):
            sock.settimeout(seconds)
            return
        # The kernel's timeout: one call then fills a whole chunk without the GIL.
        whole = int(seconds)
        timeval = struct.pack("ll", whole, int((seconds - whole) * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def _check_lost(self) -> None:
        if self.lost:
            raise Lost(self.lost)


Move = Callable[[socket.socket, list[memoryview]], int]


def _send(sock: socket.socket, views: list[memoryview]) -> int:
    if isinstance(sock, ssl.SSLSocket):
        return sock.send(views[0][:_TLS_BYTES])
    return sock.sendmsg(views)


def _receive(sock: socket.socket, views: list[memoryview], flags: int = 0) -> int:
    if isinstance(sock, ssl.SSLSocket):
        return sock.recv_into(views[0])
    return sock.recvmsg_into(views, 0, flags)[0]


def _receive_all(sock: socket.socket, views: list[memoryview]) -> int:
    return _receive(sock, views, socket.MSG_WAITALL)


def _resolve(address: Address, deadline: float) -> list[tuple[int, Any]]:
    """Return address families and socket addresses; raises OSError. An IP address is no lookup."""
    if address.path:
        return [(socket.AF_UNIX, address.path)]
    with contextlib.suppress(ValueError):
        version = ipaddress.ip_address(address.host).version
        family = socket.AF_INET if version == 4 else socket.AF_INET6
        return [(family, (address.host, address.port))]
    # On a thread of its own, because a name lookup may hang far beyond the deadline.
    given = address.host, address.port, socket.AF_UNSPEC, socket.SOCK_STREAM
    found = begin_once(socket.getaddrinfo, *given)
    left_s = max(_LEAST_S, deadline - time.monotonic())
    return [(family, target) for family, _, _, _, target in found.result(left_s)]
