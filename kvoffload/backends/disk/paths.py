"""Where things lie under the root of the disk backend.

::

    root/
      <namespace digest, hex>/       one folder a namespace
        manifest.json                the facts behind the digest, for people
        snapshot                     the index as it was: a hint that makes a restart faster
        <2 hex digits>/<key, hex>    the chunks
      .bounds.json                   capacity and other limits, agreed by all processes
      .ledger                        bytes allocated under the root, shared by all processes
      .owner                         locked by the process that evicts
      .writers/<token>/              temporary files of one writer, locked while it lives
      .quarantine/                   chunks that failed verification, a bounded number
"""

import contextlib
import os
import stat

import xxhash

from kvoffload.backends.disk.permissions import refuse_exposed, refuse_unsafe
from kvoffload.backends.disk.vfs import Vfs

MANIFEST = "manifest.json"
SNAPSHOT = "snapshot"
BOUNDS = ".bounds.json"
LEDGER = ".ledger"
OWNER = ".owner"
WRITERS = ".writers"
QUARANTINE = ".quarantine"
SCRATCH = ".doctor-"
"""Beginning of the name of a folder in which ``kvoffload doctor`` measures."""
SHARDS = tuple(f"{i:02x}" for i in range(256))


def is_namespace(name: str) -> bool:
    """Whether a name under the root is that of a namespace folder."""
    return len(name) == 64 and _is_hex(name)


def key_of(name: str) -> bytes | None:
    """The key a chunk's file name spells, or None for a name that is none of ours."""
    try:
        key = bytes.fromhex(name)
    except ValueError:
        return None
    return key if key and key.hex() == name else None  # fromhex() takes spaces and capitals too


def shard_of(key: bytes) -> str:
    """The shard folder of a key: spread evenly whatever the keys look like."""
    return SHARDS[xxhash.xxh32_intdigest(key) & 0xFF]


def chunk_path(folder: str, key: bytes) -> str:
    """Where a chunk of a namespace folder lies."""
    return f"{folder}/{shard_of(key)}/{key.hex()}"


def make_folder(vfs: Vfs, path: str, *, durable: bool = False) -> None:
    """Make a folder unless it is there; ``durable``: so that it outlasts a power loss."""
    try:
        vfs.mkdir(path)
    except FileExistsError:
        return
    if durable:
        try:
            vfs.sync_folder(os.path.dirname(path))
        except OSError:
            # Whoever finds the folder relies on it: it must not stay half made.
            with contextlib.suppress(OSError):
                vfs.rmdir(path)
            raise


def remove_namespace(vfs: Vfs, folder: str) -> bool:
    """Remove a namespace's folder if it holds no chunk; say whether it is gone."""
    try:
        if not stat.S_ISDIR(vfs.lstat(folder).st_mode):
            return False
        for shard in SHARDS:
            with contextlib.suppress(FileNotFoundError):
                vfs.rmdir(f"{folder}/{shard}")
        if not set(vfs.listdir(folder)) <= {MANIFEST, SNAPSHOT}:
            return False  # it has to stay, and so does what says whose it is
        for name in (MANIFEST, SNAPSHOT):
            with contextlib.suppress(FileNotFoundError):
                vfs.unlink(f"{folder}/{name}")
        vfs.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def prepare_root(vfs: Vfs, root: str, *, durable: bool, trust_parents: bool) -> None:
    """Make the root and its inner folders, and enter it; refuse one that others could replace.

    Raises:
        ConfigError: the root is a symbolic link, belongs to someone else, or others may write it or
            (without ``trust_parents``) a folder above it.
        OSError: the root cannot be made or written.
    """
    if not trust_parents:
        refuse_exposed(vfs, root)
    _make_parents(os.path.dirname(root))
    make_folder(vfs, root, durable=durable)
    refuse_unsafe(root, vfs.lstat(root))
    fd = vfs.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Once more: another user may have been faster in a folder such as /tmp.
        refuse_unsafe(root, vfs.fstat(fd))
        if not trust_parents:
            refuse_exposed(vfs, root)
    except BaseException:
        vfs.close_quietly(fd)
        raise
    vfs.enter(root, fd)
    for inner in (WRITERS, QUARANTINE):
        make_folder(vfs, f"{root}/{inner}")
        refuse_unsafe(f"{root}/{inner}", vfs.lstat(f"{root}/{inner}"))


def _make_parents(folder: str) -> None:
    """Make missing folders above the root: for the owner to write, whatever the umask."""
    if not os.path.isdir(folder):
        _make_parents(os.path.dirname(folder))
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o755)


def _is_hex(name: str) -> bool:
    return not name.strip("0123456789abcdef")
