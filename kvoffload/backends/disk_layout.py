"""Where things lie under the root of the disk backend, and whether that root may be trusted.

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
import errno
import os
import stat

import xxhash

from kvoffload.backends.vfs import Vfs
from kvoffload.errors import ConfigError

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


def prepare_root(vfs: Vfs, root: str, *, durable: bool) -> None:
    """Make the root and its inner folders; refuse one that others could tamper with.

    Raises:
        ConfigError: the root cannot be made or written, is a symbolic link, belongs to someone
            else, or is writable by everyone.
    """
    try:
        os.makedirs(os.path.dirname(root), exist_ok=True)
        make_folder(vfs, root, durable=durable)
        facts = vfs.lstat(root)
        refuse_unsafe(root, facts)
        for inner in (WRITERS, QUARANTINE):
            make_folder(vfs, f"{root}/{inner}")
            refuse_unsafe(f"{root}/{inner}", vfs.lstat(f"{root}/{inner}"))
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "error")
        raise ConfigError(
            "root", root, f"must be a folder this process can write ({name}: {error.strerror})"
        ) from error


def refuse_unsafe(path: str, facts: os.stat_result) -> None:
    """Raise ConfigError for a folder that others could tamper with, or that leads elsewhere."""
    if stat.S_ISLNK(facts.st_mode):
        raise ConfigError("root", path, "is a symbolic link; give the folder itself")
    if not stat.S_ISDIR(facts.st_mode):
        raise ConfigError("root", path, "is not a folder")
    if facts.st_uid != os.geteuid():
        raise ConfigError(
            "root",
            path,
            f"belongs to user {facts.st_uid}, not to {os.geteuid()}; "
            "run as that user, or use a folder of your own",
        )
    if facts.st_mode & stat.S_IWOTH:
        remedy = f"is writable by everyone; chmod o-w, or give a sub-folder such as {path}/kv"
        raise ConfigError("root", path, remedy)


def _is_hex(name: str) -> bool:
    return not name.strip("0123456789abcdef")
