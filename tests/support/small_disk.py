"""File systems of their own: a small one for stores that run out of room, and other kinds."""

import contextlib
import os
import shutil
import subprocess

import pytest


def run_as_root(*command):
    is_there = not os.geteuid() and shutil.which(command[0])  # without /sbin in the path it is not
    if not is_there or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip(f"needs root and a kernel that lets it: {' '.join(command)}")


@contextlib.contextmanager
def disk_in_a_file(folder, kind, size):
    """Make a file system in a file of the folder, and mount it."""
    image, where = folder / "image", folder / kind
    where.mkdir()
    image.touch()
    os.truncate(image, size)
    run_as_root(f"mkfs.{kind}", "-q", str(image))
    run_as_root("mount", "-o", "loop", str(image), str(where))
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


@contextlib.contextmanager
def small_disk(where, limits):
    """Mount a tmpfs on a folder, with these mount options; True if that can be had here."""
    command = ["mount", "-t", "tmpfs", "-o", limits, "none", str(where)]
    mounted = not os.geteuid() and not subprocess.run(command, capture_output=True).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(where)], check=True)
