"""Records the requests of an engine as a trace for ``kvoffload replay``.

One JSON object a line::

    {"keys": ["6f1c…", …], "timestamp": 1764115200123, "medium": "", "removed": false,
     "reason": "used", "tokens_per_chunk": 16}

``timestamp`` is in milliseconds. A line names all chunks that a request asked for, hits and misses,
head of the prompt first, with keys in hexadecimal. ``kvoffload size`` reads the tokens of a chunk.
Each line has them, because a file may be cut, and several engines may append to it.
"""

import errno
import logging
import os
import stat
import time
from collections.abc import Sequence

import msgspec

from kvoffload.errors import ConfigError
from kvoffload.offload.base import OffloadKey

log = logging.getLogger(__name__)


class RequestLog:
    """Appends each request to a file for ``kvoffload replay``; stops with a warning on an error.

    The file is opened for each line, so it may be moved away at any time.

    Args:
        path: the file, which other engines may append to as well; empty: nothing is written.
        tokens_per_chunk: of the chunks that requests ask for.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: str, tokens_per_chunk: int) -> None:
        self._path = path
        self._tokens_per_chunk = tokens_per_chunk
        if path:
            try:
                _append(path, b"")
            except OSError as error:
                why = error.strerror or type(error).__name__
                raise ConfigError("record", path, f"must be a file to append to: {why}") from None

    def asked_for(self, keys: Sequence[OffloadKey]) -> None:
        """Write that a request asked for these chunks, head first; nothing if it has none."""
        if not self._path or not keys:
            return
        line = {
            "keys": [key.hex() for key in keys],
            "timestamp": round(time.time() * 1000),
            "medium": "",
            "removed": False,
            "reason": "used",
            "tokens_per_chunk": self._tokens_per_chunk,
        }
        try:
            _append(self._path, msgspec.json.encode(line) + b"\n")
        except OSError as error:
            log.warning("requests are no longer recorded: %s", error)
            self._path = ""


def _append(path: str, line: bytes) -> None:
    # Block hashes confirm a guessed prompt, so the file is for its owner alone. In a folder that
    # everyone may write, another user may have made it before, or a link to another file.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(path, flags, 0o600)
    try:
        facts = os.fstat(file)
        if stat.S_ISREG(facts.st_mode):
            if facts.st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, f"belongs to user {facts.st_uid}", path)
            if facts.st_mode & 0o077:
                os.fchmod(file, 0o600)
        if line:
            # One write a line: a killed process leaves whole lines, and several may append.
            os.write(file, line)
    finally:
        os.close(file)
