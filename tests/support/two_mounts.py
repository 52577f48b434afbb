"""One folder under two mount points, as two hosts have it."""

import contextlib
import os
import subprocess

MISSING = "needs the right to mount, as root"


def mount(*arguments):
    """Return whether a mount with these arguments could be made."""
    command = ["mount", *map(str, arguments)]
    return not os.geteuid() and not subprocess.run(command, capture_output=True).returncode


def unmount(path):
    subprocess.run(["umount", "-l", str(path)], check=True)


@contextlib.contextmanager
def two_mounts(where):
    """Mount a tmpfs twice below a folder; the two paths, or None if that cannot be had here."""
    one, two = where / "one", where / "two"
    one.mkdir()
    two.mkdir()
    mounted = []
    try:
        if mount("-t", "tmpfs", "-o", "size=256m,mode=700", "none", one):
            mounted.append(one)
            if mount("--bind", one, two):
                mounted.append(two)
        yield (one, two) if len(mounted) == 2 else None
    finally:
        for path in reversed(mounted):
            unmount(path)
