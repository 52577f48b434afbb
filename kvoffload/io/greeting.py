"""The first bytes between an engine and the server of its host, before any message.

An engine says its version and its name, and passes two descriptors: its slab's memory file, and
one end of a pair of sockets. The server passes its own memory file over the pair, and shuts its end
down when nothing touches the slab any more. That tells the engine that all its slots are free, also
if the server was killed. The engine shuts its end down when it reads the server's memory no more.
"""

import array
import asyncio
import contextlib
import fcntl
import os
import re
import socket
import stat
import struct

from kvoffload.io.protocol import VERSION

MAGIC = b"kvoffload serve\n"
_GREETING = struct.Struct(f"<{len(MAGIC)}sI")
"""The same in all versions, or one could not tell another what it needs; the rest follows it."""
_NAME_BYTES = 80
"""A host name has at most 64."""
_NAME = re.compile(rb"[A-Za-z0-9._-]+")
"""It becomes a label of metrics and a part of log lines."""
_DESCRIPTORS = 2


def greet(sock: socket.socket, slab_fd: int, pair_fd: int) -> None:
    """Send the greeting of an engine; raises OSError."""
    data = _GREETING.pack(MAGIC, VERSION) + own_name().encode().ljust(_NAME_BYTES, b"\0")
    socket.send_fds(sock, [data], [slab_fd, pair_fd])


def own_name() -> str:
    """Return the name of this process for a server in another container: the host's, and its id."""
    host = re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())
    return f"{host}-{os.getpid()}"[-_NAME_BYTES:]


class Greeting:
    """What an engine has sent first. Its maker closes it.

    Raises:
        OSError: it is no greeting.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.version, self.name = 0, ""
        room = socket.CMSG_SPACE(_DESCRIPTORS * array.array("i").itemsize)
        how = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        data, ancillary, flags, _ = sock.recvmsg(_GREETING.size, room, how)
        self._fds = array.array("i")
        for level, kind, found in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds.frombytes(found[: len(found) - len(found) % self._fds.itemsize])
        try:
            self._read(sock, data, is_cut=bool(flags & socket.MSG_CTRUNC))
        except BaseException:
            self.close()
            raise

    def _read(self, sock: socket.socket, data: bytes, *, is_cut: bool) -> None:
        if len(data) != _GREETING.size or not data.startswith(MAGIC):
            raise OSError("it does not speak as an engine")
        self.version = _GREETING.unpack(data)[1]
        if self.version == VERSION:
            self.name = _read_name(sock)
        if len(self._fds) != _DESCRIPTORS or is_cut:
            raise OSError(f"it has passed {len(self._fds)} descriptors, not {_DESCRIPTORS}")
        _check_slab(self._fds[0])
        if self.version == VERSION:
            self.pair = socket.socket(fileno=self._fds[1])
            self._fds.pop()
            self.pair.setblocking(False)

    @property
    def slab_fd(self) -> int:
        """The engine's memory file."""
        return self._fds[0]

    def pass_memory(self, fd: int) -> None:
        """Pass the server's memory file, and close it; raises OSError."""
        try:
            socket.send_fds(self.pair, [b"\0"], [fd])
        finally:
            os.close(fd)

    def tell_free(self) -> None:
        """Tell the engine that its slots are free."""
        with contextlib.suppress(OSError):  # it has ended
            self.pair.shutdown(socket.SHUT_WR)

    async def reads_no_more(self) -> None:
        """Wait until the engine reads the server's memory no more: it says so, or has ended.

        The kernel closes the pair of a killed process when none of its threads can run any more.
        """
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while await loop.sock_recv(self.pair, 1 << 10):
                pass

    def close(self) -> None:
        """Close the descriptors: the engine's slots are free."""
        if hasattr(self, "pair"):
            self.pair.close()
        while self._fds:
            os.close(self._fds.pop())


def _read_name(sock: socket.socket) -> str:
    """Read the name of an engine of this version, which came in the same piece; raises OSError."""
    data = sock.recv(_NAME_BYTES, socket.MSG_DONTWAIT)
    name = data.rstrip(b"\0")
    if len(data) != _NAME_BYTES or not _NAME.fullmatch(name):
        raise OSError("what it calls itself is no name")
    return name.decode()


def _check_slab(fd: int) -> None:
    """Refuse memory that its engine could take away while the server uses it: that ends a process.

    Raises:
        OSError: it is no memory file, or may shrink.
    """
    facts = os.fstat(fd)
    try:
        is_kept = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:
        is_kept = 0
    if not is_kept or not stat.S_ISREG(facts.st_mode) or not facts.st_size:
        raise OSError("what it has passed is no memory file that keeps its size")
