"""The removal of whole namespaces."""

import contextlib
from collections.abc import Callable, Sequence

from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.disk.walker import remove_namespace, walk


def purge(
    vfs: Vfs, root: str, folders: Sequence[str], own: str, is_stopping: Callable[[], bool]
) -> int:
    """Remove all chunks of namespace folders, and the folders but for the own one.

    Returns:
        How many were removed. The evictor finds the bytes free at its next scan.
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
