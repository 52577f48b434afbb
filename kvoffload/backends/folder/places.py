"""Names of everything under the root of the folder backend.

::

    root/
      .store.json                  marks a root, and names the store
      .lease.json                  who evicts, and how much each host may store until it says more
      .hosts/<token>.json          what one engine has stored, and that it lives
      <namespace digest, hex>/     as the disk tier has it: see :mod:`kvoffload.backends.disk.paths`
        manifest.json
        <2 hex digits>/<key, hex>  the chunks
        <2 hex digits>/.<key, hex>.<token>-N   a chunk that is being written

Names of chunks are lower case only, so a mount that ignores case keeps them apart.
"""

from kvoffload.backends.disk.paths import OTHER_STORE

STORE = OTHER_STORE
LEASE = ".lease.json"
HOSTS = ".hosts"
"""Folder of the engines' own records."""
NEW = ".new-"
"""Prefix of a record that is being written."""
LEFTOVERS = (NEW, ".fuse_hidden", ".nfs")
"""Prefixes of files that a process may leave which was killed, and a mount: FUSE and NFS rename a
file that is removed while it is open. On a full mount sshfs leaves one after each failed store."""


_LONG = 200
"""Names of files have 255 characters at most."""


def record_of(token: str) -> str:
    """Return the name of an engine's record, below the root."""
    return f"{HOSTS}/{token}.json"


def temporary_of(name: str, token: str, number: int) -> str:
    """Return the name of a chunk's file while it is written.

    GlusterFS chooses a file's brick by its name, and takes this form for ``name``. Else two files
    of three would change their brick as they are renamed, and need a second question ever after.
    """
    return f".{name}.{token}-{number}" if len(name) <= _LONG else f".{token}-{number}"


def is_temporary(name: str) -> bool:
    """Return whether a file in a shard is a chunk that was being written."""
    return name.startswith(".")


def is_temporary_of(name: str, token: str) -> bool:
    """Return whether it is one of this process."""
    return is_temporary(name) and f".{token}-" in name
