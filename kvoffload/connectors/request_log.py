"""A trace of one's own load: which chunks each request asked for."""

import logging
from collections.abc import Sequence
from pathlib import Path

from kvoffload.errors import ConfigError
from kvoffload.messages import OffloadKey
from kvoffload.replay.record import Recorder

log = logging.getLogger(__name__)


class RequestLog:
    """Appends each request to a file for ``kvoffload replay``; stops, saying so, if it cannot.

    The file is opened for each line, so it may be moved away at any time.

    Args:
        path: the file, which others may append to as well; empty: nothing is written.
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
