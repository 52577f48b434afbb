"""An engine's control socket: where it is, and what an operator and an engine say there.

Each engine has one socket, in a private folder of its user. A connection carries one question and
one answer. Each is a JSON object, whose sender then ends its side.
"""

import contextlib
import errno
import fcntl
import os
import re
import socket
import stat
import struct
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from itertools import count
from typing import Annotated

import msgspec

from kvoffload.errors import ConfigError

MOST_BYTES = 16 << 20
"""Of a question or an answer: more than two million token ids."""
HELLO_S = 5.0
"""How long an engine may take to say what it is, and either end to send what it has to say."""
ORDER_S = 60.0
"""How long an engine may take to carry out an order."""
HOST = "cpu"
"""The name of host memory among the tiers."""
_NAME = re.compile(r"(\d+)(-\d+)?\.sock")
_CREDENTIALS = struct.Struct("3i")
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Describe(msgspec.Struct, tag="describe", forbid_unknown_fields=True):
    """Ask what an engine is."""


class Lookup(msgspec.Struct, tag="lookup", forbid_unknown_fields=True):
    """Ask how much of a prompt is where."""

    token_ids: list[TokenId]
    salt: str = ""


class Clear(msgspec.Struct, tag="clear", forbid_unknown_fields=True):
    """Order to remove what the engine has on a tier, or on all."""

    tier: str = ""


Question = Describe | Lookup | Clear


class EngineFacts(msgspec.Struct, frozen=True):
    """What an engine is."""

    pid: int
    model: str
    tokenizer: str
    tiers: list[str]
    """Nearest first; ``cpu`` is host memory."""


class Held(msgspec.Struct):
    """What one tier has of a prompt, in one KV cache group."""

    leading: int = 0
    """Chunks from the first on."""
    chunks: int = 0
    """Chunks in all."""


class GroupFound(msgspec.Struct):
    """What is found of a prompt in one KV cache group."""

    chunk_tokens: int
    chunks: int
    """Full chunks of the prompt."""
    reads_all: bool
    """Whether a prefix needs all of its chunks, or those of a window at its end."""
    tiers: dict[str, Held] = {}
    any: Held = msgspec.field(default_factory=Held)
    """What all tiers together have."""
    missing: str = ""
    """Why the first missing chunk is in no tier."""


class Found(msgspec.Struct):
    """What is found of a prompt."""

    tokens: int
    groups: list[GroupFound]


class Answer(msgspec.Struct):
    """What an engine answers."""

    error: str = ""
    engine: EngineFacts | None = None
    found: Found | None = None


_question, _answer = msgspec.json.Decoder(Question), msgspec.json.Decoder(Answer)


def decode_question(data: bytes) -> Question:
    """Read a question; raises msgspec.DecodeError."""
    question: Question = _question.decode(data)
    return question


# ---- the folder ----


def is_supported() -> bool:
    """Return whether this system tells who is at the other end of a socket."""
    return sys.platform == "linux" and hasattr(socket, "SO_PEERCRED")


def folders() -> list[str]:
    """Return where sockets of this user may be; an engine takes the first that can be had.

    A service may lack a login's variable ``XDG_RUNTIME_DIR``. Ours names the only place.
    """
    if chosen := os.environ.get("KVOFFLOAD_RUNTIME_DIR"):
        return [os.path.join(chosen, "kvoffload")]
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    found = [os.path.join(runtime, "kvoffload")] if os.path.isabs(runtime) else []
    return [*found, f"/tmp/kvoffload-{os.geteuid()}"]  # its owner is checked


class Folder:
    """A private folder, open; a context manager.

    Paths go through its descriptor. So they are short enough for a socket, and no link that is
    put there later leads elsewhere.

    Args:
        path: of the folder.
        create: whether to make it.

    Raises:
        OSError: there is none.
        ConfigError: it is a link, or another user may put something there.
    """

    def __init__(self, path: str, *, create: bool = False) -> None:
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        remedy = "must be your folder with mode 0700: remove it, or set KVOFFLOAD_RUNTIME_DIR"
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (NotADirectoryError, PermissionError) as error:
            raise ConfigError("control folder", path, remedy) from error
        found = os.fstat(self.fd)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            os.close(self.fd)
            raise ConfigError("control folder", path, remedy)

    def close(self) -> None:
        """Close its descriptor."""
        os.close(self.fd)

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self) -> list[str]:
        """Return the names of the sockets."""
        return sorted(name for name in os.listdir(self.fd) if _NAME.fullmatch(name))

    def connect(self, name: str, timeout_s: float) -> socket.socket:
        """Connect to a socket; raises OSError, ConnectionRefusedError if its engine has ended."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(self._path(name))
        except BaseException:
            sock.close()
            raise
        return sock

    def has(self, name: str) -> bool:
        """Return whether an engine listens on a socket."""
        return is_listening(self._path(name))

    def listen(self) -> tuple[socket.socket, str]:
        """Listen on a new socket named by this process; return its name too.

        Sockets of engines that have ended are removed.

        Raises:
            OSError: it cannot be had, or another engine holds the folder too long.
        """
        self._lock()
        try:
            for name in self.names():
                if not self.has(name):
                    self.remove(name)  # or its engine has meanwhile
            # A process may have several engines, and another container the same number.
            taken = {name.removesuffix(".sock") for name in self.names()}
            name = f"{free_name(str(os.getpid()), taken)}.sock"
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.bind(self._path(name))
                sock.listen(8)
            except BaseException:
                sock.close()
                raise
            return sock, name
        finally:
            fcntl.flock(self.fd, fcntl.LOCK_UN)

    def remove(self, name: str) -> None:
        """Remove a socket's name."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def _path(self, name: str) -> str:
        return f"/proc/self/fd/{self.fd}/{name}"

    def _lock(self) -> None:
        until_s = time.monotonic() + HELLO_S
        while True:
            try:
                return fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    raise
                time.sleep(0.01)


def free_name(wanted: str, taken: Collection[str]) -> str:
    """Return a name, with a number if it is taken."""
    names = (f"{wanted}-{number}" if number else wanted for number in count())
    return next(name for name in names if name not in taken)


def is_listening(path: str) -> bool:
    """Return whether something listens on a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.setblocking(False)
            sock.connect(path)
        except OSError as error:  # one that is busy answers EAGAIN
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return True


def peer(sock: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end of a connection."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid


def check_user(sock: socket.socket, *allowed: int) -> int:
    """Return the process at the other end of a connection; of a listening systemd, its own.

    Raises:
        PermissionError: it belongs to a user who is not allowed.
    """
    pid, user = peer(sock)
    if user not in allowed:
        raise PermissionError(f"process {pid} belongs to user {user}, not to {os.geteuid()}")
    return pid


# ---- a connection ----


def send(sock: socket.socket, message: Question | Answer, timeout_s: float) -> None:
    """Send a message and end this side; raises OSError."""
    sock.settimeout(timeout_s)
    sock.sendall(msgspec.json.encode(message))
    sock.shutdown(socket.SHUT_WR)


def receive(sock: socket.socket, timeout_s: float) -> bytes:
    """Return all that the other end sends.

    Raises:
        OSError: it sends too much, or not all of it in time.
    """
    until_s, data = time.monotonic() + timeout_s, bytearray()
    while True:
        sock.settimeout(max(0.001, until_s - time.monotonic()))
        part = sock.recv(1 << 16)
        if not part:
            return bytes(data)
        data += part
        if len(data) > MOST_BYTES:
            raise OSError(errno.EMSGSIZE, "the message is too long")
        if time.monotonic() >= until_s:
            raise TimeoutError(errno.ETIMEDOUT, "the message takes too long")


# ---- the operator's end ----


@dataclass(frozen=True)
class EngineSocket:
    """The socket of an engine that lives."""

    folder: str
    name: str

    @property
    def engine(self) -> str:
        """What operators name the engine by: its process, and a number if it has several."""
        return self.name.partition(".")[0]

    def ask(self, question: Question, timeout_s: float = HELLO_S) -> Answer:
        """Ask the engine, and wait for its answer.

        Raises:
            OSError: it has ended, or does not answer in time.
        """
        with Folder(self.folder) as folder, folder.connect(self.name, HELLO_S) as sock:
            check_user(sock, os.geteuid(), 0)
            send(sock, question, HELLO_S)
            data = receive(sock, timeout_s)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "the engine has ended the connection")
        return _answer.decode(data)


def engine_sockets() -> list[EngineSocket]:
    """Return the sockets of this user's engines that live.

    Raises:
        ConfigError: there is none, and another user may put something into a folder.
    """
    found: list[EngineSocket] = []
    refusal: ConfigError | None = None
    for path in folders():
        try:
            with Folder(path) as folder:
                found += (EngineSocket(path, name) for name in folder.names() if folder.has(name))
        except ConfigError as error:
            refusal = error
        except FileNotFoundError:
            continue
    if refusal is not None and not found:
        raise refusal
    return found
