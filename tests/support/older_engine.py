"""An engine of 0.1 that has a root open: so others store small chunks as files."""

import contextlib
import fcntl
import os
from pathlib import Path

from kvoffload.backends.disk.paths import WRITERS


@contextlib.contextmanager
def older_engine(root):
    """Have a writer's lock of 0.1 under a root, which is made if missing."""
    folder = Path(root, WRITERS, "0" * 16)
    for each in (Path(root), folder.parent, folder):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(folder / "lock", "w", opener=private) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def private(path, flags):
    """Open a file that only its owner reads and writes."""
    return os.open(path, flags, 0o600)
