"""Settings of the disk backend."""

import os

import msgspec

from kvoffload.backends.disk.limits import Limits
from kvoffload.config import ByteSize, check_share, check_threads
from kvoffload.errors import ConfigError, check_setting

IO_MODES = ("auto", "direct", "buffered")
DURABILITY = ("none", "fsync")


class DiskOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the disk backend; ``docs/guides/disk.md`` says how to choose."""

    root: str
    """Folder for all namespaces; made if missing, its parents too."""
    capacity: ByteSize = ByteSize(10 << 30)
    """Bytes allocated under the root at most, all namespaces together."""
    min_free: ByteSize = ByteSize(1 << 30)
    """Bytes of the file system to keep free."""
    io: str = "auto"
    """``auto``: loads take what the page cache has, and read the rest directly; stores go through
    it while memory is free. ``direct`` bypasses the page cache, ``buffered`` uses it."""
    durability: str = "none"
    """``fsync``: a stored chunk survives a power loss. ``none``: it may be missing."""
    policy: str = "handicap"
    """Which chunks leave first; a name of the ``kvoffload.policies`` entry-point group."""
    high_watermark: float = 0.95
    """The background begins to evict above this part of the capacity."""
    low_watermark: float = 0.90
    """The background stops evicting at this part of the capacity."""
    read_threads: int | None = None
    """Chunks read at once; by default 8, out of the page cache no more than there are cores."""
    write_threads: int | None = None
    """Chunks written at once; by default 4, of which 2 may have more than 1 MiB: loads go first."""
    stall_s: float = 5.0
    """A device counts as dead when every thread waits longer than this: misses at once."""
    quarantine: int = 16
    """Damaged files kept for inspection at most."""
    tenant_share: float = 1.0
    """The part of the chunks that one tenant may have while there must be room for more. A tenant
    above it evicts its own chunks first. Needs ``tenants`` of the engine."""
    ttl_s: float | None = None
    """Seconds from its last use until a chunk expires; by default none expires."""
    trust_parent_folders: bool = False
    """Use a root below folders that other users may write, as in a pod without other programs."""

    def __post_init__(self) -> None:
        refuse_invalid_name(self.root)
        self.limits()  # refuses its own
        for field, choices in (("io", IO_MODES), ("durability", DURABILITY)):
            check_setting(self, field, getattr(self, field) in choices, f"must be one of {choices}")
        for field in ("read_threads", "write_threads"):
            check_threads(field, getattr(self, field))
        check_share(self.tenant_share)
        check_setting(self, "stall_s", self.stall_s > 0, "must be a positive number of seconds")

    def limits(self) -> Limits:
        """Return the limits that these settings ask for."""
        return Limits(
            capacity_bytes=int(self.capacity),
            min_free_bytes=int(self.min_free),
            high_watermark=self.high_watermark,
            low_watermark=self.low_watermark,
            quarantine_files=self.quarantine,
            ttl_s=self.ttl_s,
        )


def refuse_invalid_name(root: str) -> None:
    """Refuse a name that no file system can have: each system call would fail differently."""
    if not root:
        raise ConfigError("root", root, "must name a folder")
    try:
        name = os.fsencode(root)
    except UnicodeEncodeError as error:
        raise ConfigError("root", root, f"cannot be the name of a folder ({error})") from error
    if b"\0" in name:
        raise ConfigError("root", root, "must not contain a NUL character")
