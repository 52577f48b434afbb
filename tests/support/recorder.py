"""Writes a manager's events, or the requests of an engine, as lines that a replay reads."""

import msgspec

from kvoffload.offload.base import ChunksRemoved


class Recorder:
    def __init__(self, path, tokens_per_chunk):
        self._tokens_per_chunk = tokens_per_chunk
        self._file = open(path, "ab")  # noqa: SIM115 - owned until the end of the block

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def events(self, events):
        """Write what ``manager.take_events()`` returned."""
        for event in events:
            removed = isinstance(event, ChunksRemoved)
            self._write(event.keys, event.medium, removed, event.reason.value)

    def used(self, keys):
        self._write(keys, "", False, "used")

    def _write(self, keys, medium, removed, reason):
        line = {
            "keys": [key.hex() for key in keys],
            "medium": medium,
            "removed": removed,
            "reason": reason,
            "tokens_per_chunk": self._tokens_per_chunk,
        }
        self._file.write(msgspec.json.encode(line) + b"\n")
