"""What a service manager passes to a server, keeps for the next one, and is told."""

import contextlib
import os
import socket
from typing import NamedTuple

_FIRST_PASSED = 3
"""The first descriptor that systemd passes."""
_MEMORY = "memory"
"""The name of the memory among the descriptors that it keeps."""


class Passed(NamedTuple):
    """Descriptors that were passed to this process; -1 stands for none."""

    socket: int = -1
    memory: int = -1
    """That of the server before, which the service manager has kept."""


def passed() -> Passed:
    """Return what systemd has passed; once, at the start."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return Passed()
    count = int(os.environ.get("LISTEN_FDS", "0"))
    names = os.environ.get("LISTEN_FDNAMES", "").split(":")
    found = {"socket": -1, "memory": -1}
    for i in range(count):
        fd = _FIRST_PASSED + i
        os.set_inheritable(fd, False)
        kind = "memory" if i < len(names) and names[i] == _MEMORY else "socket"
        if found[kind] >= 0:
            os.close(fd)
        else:
            found[kind] = fd
    return Passed(**found)


def keeps_memory() -> bool:
    """Whether the service manager keeps descriptors of this service."""
    return bool(os.environ.get("NOTIFY_SOCKET")) and os.environ.get("FDSTORE", "0") != "0"


def keep_memory(fd: int) -> None:
    """Let the service manager keep the memory for the next server, in place of another one."""
    tell(f"FDSTOREREMOVE=1\nFDNAME={_MEMORY}")
    tell(f"FDSTORE=1\nFDNAME={_MEMORY}", fd)


def tell(state: str, *fds: int) -> None:
    """Tell the service manager, if there is one, of a state such as ``READY=1``."""
    if place := os.environ.get("NOTIFY_SOCKET"):
        address = "\0" + place[1:] if place.startswith("@") else place
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            with contextlib.suppress(OSError):
                sock.connect(address)
                socket.send_fds(sock, [state.encode()], fds)
