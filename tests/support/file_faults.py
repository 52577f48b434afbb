"""Faults of a store's files, one table for every level: backend, connector, engine.

A file that is gone is left alone: the store may be at work.
"""

import contextlib
import os
from itertools import count


def flip(path, at=None, bit=0):
    """Change one bit of a byte: of the middle one, or of that at a place, negative from the end."""
    with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        place = size // 2 if at is None else at % size
        file.seek(place)
        if byte := file.read(1):  # none of a file that was cut to nothing
            file.seek(place)
            file.write(bytes([byte[0] ^ 1 << bit]))


def overwrite(path, at, data):
    """Write at a place."""
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def cut(path):
    """Cut the second half off."""
    with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
        file.truncate(os.fstat(file.fileno()).st_size // 2)


def swap(files):
    """Exchange the files of each pair of neighbours."""
    for one, other in zip(files[::2], files[1::2], strict=False):
        with contextlib.suppress(FileNotFoundError):
            spare = one.with_name("spare")
            one.rename(spare)
            other.rename(one)
            spare.rename(other)


def fill(folder, what):
    """Take all that is left of a file system: of its ``files``, or of its ``bytes``."""
    with contextlib.suppress(OSError):
        if what == "files":  # which free bytes do not show: only writing shows it
            for i in count(len(os.listdir(folder))):
                (folder / str(i)).touch()
        else:
            with open(folder / "large", "ab", buffering=0) as large:
                while large.write(bytes(1 << 20)):
                    pass
