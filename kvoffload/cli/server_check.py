"""The server of a host, as ``doctor`` and ``config check --probe`` see it."""

import contextlib
import os
import stat
import time

from kvoffload.backends.admin import Finding
from kvoffload.io.attached import AttachedServer
from kvoffload.io.protocol import MessageReader, Refused
from kvoffload.io.service.listener import lock_of
from kvoffload.transfer.shared_memory import create_shared_memory

ANSWER_S = 5.0
"""How long the server may take to say its first word."""


def is_of_server(path: str) -> bool:
    """Return whether there is a socket, or the lock that a server leaves next to its own.

    A reboot removes both from ``/run``, where nothing else of ours is.
    """
    with contextlib.suppress(OSError):
        return stat.S_ISSOCK(os.stat(path).st_mode)
    with contextlib.suppress(OSError):  # a link that this user may not read
        return os.path.exists(lock_of(path)) or os.path.realpath(path).startswith("/run/")
    return False


def server_findings(path: str) -> list[Finding]:
    """Attach to a server as an engine does, and leave it again."""
    begun_s, fd = time.monotonic(), create_shared_memory(1)
    try:
        server = AttachedServer(path, fd)
        try:
            server.sock.settimeout(ANSWER_S)
            said = next(MessageReader(to_server=False).feed(server.sock.recv(1 << 16)), None)
        finally:
            server.close()
    except OSError as error:
        found, _, remedy = str(error).partition("; ")
        if not remedy:  # it has accepted, and then gone or silent
            found, remedy = f"{path}: {error.strerror or error}", "its log says why"
        return [Finding("server", "failed", found, remedy)]
    finally:
        os.close(fd)
    if said is None:
        return [Finding("server", "failed", "it has ended the connection", "its log says why")]
    if isinstance(said, Refused):
        text, _, remedy = said.remedy.partition(": ")
        return [Finding("server", "failed", text, remedy)]
    took_ms = 1e3 * (time.monotonic() - begun_s)
    told = "doctor --config FILE, with the server's settings, examines its stores"
    return [Finding("server", "ok", f"attached in {took_ms:.1f} ms; {told}", "")]
