"""Walks the files of a namespace folder, for inspection and purges."""

import contextlib
import os
import stat
from collections.abc import Callable, Iterator

from kvoffload.backends.disk.paths import MANIFEST, SHARDS, SNAPSHOT
from kvoffload.backends.disk.vfs import Vfs


def walk(
    vfs: Vfs, folder: str, failed: Callable[[str, OSError], None] = lambda path, error: None
) -> Iterator[tuple[str, list[tuple[str, os.stat_result]]]]:
    """Yield the path of each shard of a namespace folder with its files.

    ``failed`` learns of each shard that cannot be listed.
    """
    for shard in SHARDS:
        path = f"{folder}/{shard}"
        try:
            listed = vfs.listfacts(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            failed(path, error)
            continue
        yield path, listed


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
