"""Records a manager's events, or the requests of an engine, as a trace for ``kvoffload replay``.

One JSON object a line::

    {"keys": ["6f1c…", …], "medium": "CPU", "removed": false, "reason": "stored",
     "tokens_per_chunk": 16}

The fields are those of :class:`~kvoffload.offload.base.OffloadingEvent`, keys in hexadecimal, head
of the prompt first. ``kvoffload size`` reads the tokens of a chunk. Each line has them, because a
file may be cut, and several engines may append to it.

A line with reason ``used`` names all blocks a request asked for, hits and misses; where a file has
such lines, they are its requests. Without them only the stored blocks, that is the misses, are
known: then a replay sees no hits that the recorded cache had.
"""

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from kvoffload.errors import ConfigError
from kvoffload.offload.base import ChunksRemoved, OffloadingEvent, OffloadKey

log = logging.getLogger(__name__)


def _for_owner_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class Recorder:
    """Appends events to a file, which it owns until :meth:`close`.

    Args:
        path: the file.
        tokens_per_chunk: tokens that each key stands for.
    """

    def __init__(self, path: Path, tokens_per_chunk: int) -> None:
        self._tokens_per_chunk = tokens_per_chunk
        # One write a line: a killed process leaves whole lines, and several processes may append.
        # Block hashes confirm a guessed prompt, so the file is for its owner alone.
        self._file = open(path, "ab", buffering=0, opener=_for_owner_alone)  # noqa: SIM115 - owned until close()

    def events(self, events: Iterable[OffloadingEvent]) -> None:
        """Write what ``manager.take_events()`` returned."""
        for event in events:
            self._write(
                event.keys, event.medium, isinstance(event, ChunksRemoved), event.reason.value
            )

    def used(self, keys: Iterable[OffloadKey]) -> None:
        """Write that a request asked for these chunks: call it with ``manager.touch(keys)``."""
        self._write(keys, "", False, "used")

    def _write(self, keys: Iterable[OffloadKey], medium: str, removed: bool, reason: str) -> None:
        line = {
            "keys": [key.hex() for key in keys],
            "medium": medium,
            "removed": removed,
            "reason": reason,
            "tokens_per_chunk": self._tokens_per_chunk,
        }
        self._file.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


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
        self._path = Path(path) if path else None
        self._tokens_per_chunk = tokens_per_chunk
        if self._path is not None:
            try:
                Recorder(self._path, self._tokens_per_chunk).close()
            except OSError as error:
                why = error.strerror or type(error).__name__
                raise ConfigError("record", path, f"must be a file to append to: {why}") from None

    def asked_for(self, keys: Sequence[OffloadKey]) -> None:
        """Write that a request asked for these chunks, head first; nothing if it has none."""
        if self._path is None or not keys:
            return
        try:
            with Recorder(self._path, self._tokens_per_chunk) as recorder:
                recorder.used(keys)
        except OSError as error:
            log.warning("requests are no longer recorded: %s", error)
            self._path = None
