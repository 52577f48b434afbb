"""The chunks in a root of the disk tier or in a shared folder, whichever form they have."""

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from kvoffload.backends.disk.paths import SHARDS, key_of

_HEAD = _ENTRY = 64


class Stored(NamedTuple):
    """A chunk in a file of its own, or in a slot."""

    key: bytes
    path: Path
    offset: int
    allocated_bytes: int

    @property
    def namespace(self):
        """The folder of its namespace."""
        return self.path.parent.parent.name

    @property
    def _is_slot(self):
        return self.path.suffix == ".slots"

    @property
    def payload_bytes(self):
        """The length that its header tells."""
        return int.from_bytes(self._read(16, 8), "little")

    def flip(self, at):
        """Change a byte: of the header, or from the end of the chunk if negative."""
        place = at if at >= 0 else len(self.content()) + at
        (byte,) = self._read(place, 1)
        self.overwrite(place, bytes([byte ^ 1]))

    def overwrite(self, at, data):
        """Write into it."""
        with open(self.path, "r+b") as file:
            file.seek(self.offset + at)
            file.write(data)

    def content(self):
        """Return header and chunk."""
        return self._read(0, 4096 + self.payload_bytes if self._is_slot else -1)

    def cut(self, length):
        """Keep so many bytes: of a file, or of what a slot holds."""
        if self._is_slot:
            self.overwrite(length, bytes(max(0, self.allocated_bytes - length)))
        else:
            os.truncate(self.path, length)

    def wipe(self):
        """Lose it: remove its file, or have a slot read as zeros."""
        if self._is_slot:
            with contextlib.suppress(FileNotFoundError):
                self.cut(0)
        else:
            self.path.unlink(missing_ok=True)

    def _read(self, at, length):
        with open(self.path, "rb") as file:
            file.seek(self.offset + at)
            return file.read(length)


def stored_in(root):
    """Return the chunks in a root, in the order of their keys.

    Stores may write meanwhile: a file under a temporary name is none, nor is a part of an entry.
    """
    found = []
    for folder, _, names in os.walk(root):
        for path in (Path(folder, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                if Path(folder).name in SHARDS and (key := key_of(path.name)):
                    found.append(Stored(key, path, 0, path.lstat().st_blocks * 512))
                elif path.suffix == ".table":
                    found += _in_slots(path)
    return sorted(found)


def _in_slots(table):
    content, slots = table.read_bytes(), table.with_suffix(".slots")
    size = int.from_bytes(content[12:20], "little")
    if size > slots.stat().st_size:  # of a damaged table
        return
    for slot, at in enumerate(range(_HEAD, len(content) - _ENTRY + 1, _ENTRY)):
        length = content[at + 16]
        if 0 < length < 48:
            yield Stored(content[at + 17 : at + 17 + length], slots, slot * size, size)
