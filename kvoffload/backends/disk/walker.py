"""Walks the files of a namespace folder, for scans, inspection and purges."""

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from kvoffload.backends.disk.paths import MANIFEST, SEGMENTS, SHARDS, SNAPSHOT, key_of
from kvoffload.backends.disk.vfs import Vfs


class Shard(NamedTuple):
    """A listed folder of chunks."""

    name: str
    path: str
    chunks: list[tuple[bytes, os.stat_result]]
    """Key and facts of each file with a chunk's name."""
    strays: list[str]
    """The names of other files."""


def walk(
    vfs: Vfs,
    folder: str,
    failed: Callable[[str, OSError], None] = lambda shard, error: None,
    is_due: Callable[[str], bool] = lambda shard: True,
) -> Iterator[Shard]:
    """Yield the shards of a namespace folder.

    Args:
        vfs: lists them.
        folder: of the namespace.
        failed: called with the name of each shard that cannot be listed, and the error.
        is_due: returns whether to list the shard of this name; may raise OSError.
    """
    for name in SHARDS:
        path = f"{folder}/{name}"
        try:
            listed = [*vfs.listfacts(path)] if is_due(name) else None
        except FileNotFoundError:
            continue
        except OSError as error:
            failed(name, error)
            continue
        if listed is not None:
            yield shard_of_files(name, path, listed)


def shard_of_files(name: str, path: str, listed: Iterable[tuple[str, os.stat_result]]) -> Shard:
    """Return a shard of its files, as a listing has them."""
    strays: list[str] = []
    chunks = []
    for file, facts in listed:
        if (key := key_of(file)) is not None:
            chunks.append((key, facts))
        else:
            strays.append(file)
    return Shard(name, path, chunks, strays)


def names_in(vfs: Vfs, folder: str) -> list[str]:
    """Return the sorted names in a folder; an empty list if it cannot be listed."""
    try:
        return sorted(vfs.listdir(folder))
    except OSError:
        return []


def remove_namespace(vfs: Vfs, folder: str) -> bool:
    """Remove a namespace folder without chunks; return whether it is gone."""
    try:
        if not stat.S_ISDIR(vfs.lstat(folder).st_mode):
            return False
        for shard in SHARDS:
            with contextlib.suppress(FileNotFoundError):
                vfs.rmdir(f"{folder}/{shard}")
        with contextlib.suppress(FileNotFoundError):
            vfs.rmdir(f"{folder}/{SEGMENTS}")
        if not set(vfs.listdir(folder)) <= {MANIFEST, SNAPSHOT}:
            return False  # the folder stays, and with it the file that says whose it is
        for name in (MANIFEST, SNAPSHOT):
            with contextlib.suppress(FileNotFoundError):
                vfs.unlink(f"{folder}/{name}")
        vfs.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def purge_files(
    vfs: Vfs, root: str, folders: Sequence[str], own: str, is_stopping: Callable[[], bool]
) -> int:
    """Remove all chunks of namespace folders, and the folders but for the own one.

    Returns:
        How many were removed. A later scan finds their bytes free.
    """
    removed = 0
    for folder in folders:
        for shard in walk(vfs, f"{root}/{folder}"):
            for key, _ in shard.chunks:
                if is_stopping():
                    return removed
                with contextlib.suppress(OSError):
                    vfs.unlink(f"{shard.path}/{key.hex()}")
                    removed += 1
        if folder != own:
            remove_namespace(vfs, f"{root}/{folder}")
    return removed
