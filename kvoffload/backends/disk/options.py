"""Settings of the disk backend."""

import os

import msgspec

from kvoffload.backends.disk.limits import LONGEST_TTL_S, SHORTEST_TTL_S, Limits
from kvoffload.config import ByteSize
from kvoffload.errors import ConfigError

IO_MODES = ("auto", "direct", "buffered")
DURABILITY = ("none", "fsync")
MAX_THREADS = 256
"""Far beyond what any device rewards; more is a slip of the pen that takes the host down."""


class DiskOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the disk backend; ``docs/disk.md`` says how to choose."""

    root: str
    """Folder for all namespaces; made if missing, its parents too."""
    capacity: ByteSize = ByteSize(10 << 30)
    """Bytes allocated under the root at most, all namespaces together."""
    min_free: ByteSize = ByteSize(1 << 30)
    """Bytes of the file system left free for others."""
    io: str = "auto"
    """``direct`` bypasses the page cache, ``buffered`` uses it, ``auto``: direct if possible."""
    durability: str = "none"
    """``fsync``: what was answered True survives a power loss. ``none``: it may be missing."""
    policy: str = "handicap"
    """Which chunks leave first; a name of the ``kvoffload.policies`` entry-point group."""
    high_watermark: float = 0.95
    """Above this part of the capacity the background begins to evict..."""
    low_watermark: float = 0.90
    """...down to this one."""
    read_threads: int | None = None
    """Chunks read at once; by default 4, out of the page cache no more than there are cores."""
    write_threads: int = 2
    """Chunks written at once; fewer than reads, because a load has a request waiting."""
    stall_s: float = 5.0
    """A device on which every thread waits longer than this is taken for dead: misses at once."""
    quarantine: int = 16
    """Damaged files kept for inspection, at most; older ones are removed."""
    ttl_s: float | None = None
    """Seconds from its last use until a chunk expires; by default chunks leave for room alone."""
    trust_parent_folders: bool = False
    """Use a root below folders that other users may write: for volumes of a pod of its own."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        _refuse_unspeakable(self.root)
        for field in ("capacity", "min_free"):
            ByteSize.parse(getattr(self, field), field)
        if self.capacity == 0:
            raise ConfigError("capacity", int(self.capacity), "must be more than 0 bytes")
        for field, choices in (("io", IO_MODES), ("durability", DURABILITY)):
            if getattr(self, field) not in choices:
                raise ConfigError(field, getattr(self, field), f"must be one of {choices}")
        if not 0 < self.high_watermark <= 1:
            remedy = "is a share of the capacity: must be more than 0 and at most 1"
            raise ConfigError("high_watermark", self.high_watermark, remedy)
        if not 0 < self.low_watermark <= self.high_watermark:
            remedy = f"must be more than 0 and at most high_watermark, {self.high_watermark}"
            raise ConfigError("low_watermark", self.low_watermark, remedy)
        for field in ("read_threads", "write_threads"):
            threads = getattr(self, field)
            if threads is not None and not 1 <= threads <= MAX_THREADS:
                raise ConfigError(field, threads, f"must be 1 to {MAX_THREADS}")
        if not self.stall_s > 0:
            raise ConfigError("stall_s", self.stall_s, "must be a positive number of seconds")
        if self.quarantine < 0:
            raise ConfigError("quarantine", self.quarantine, "must not be negative")
        if self.ttl_s is not None and not SHORTEST_TTL_S <= self.ttl_s <= LONGEST_TTL_S:
            raise ConfigError("ttl_s", self.ttl_s, "must be 1 second to ten years, or absent")

    def bounds(self) -> Limits:
        """The limits that these settings ask for."""
        return Limits(
            capacity_bytes=int(self.capacity),
            min_free_bytes=int(self.min_free),
            high_watermark=self.high_watermark,
            low_watermark=self.low_watermark,
            quarantine_files=self.quarantine,
            ttl_s=self.ttl_s,
        )


def _refuse_unspeakable(root: str) -> None:
    """A name that no file system can have raises something else at every turn."""
    if not root:
        raise ConfigError("root", root, "must name a folder")
    try:
        name = os.fsencode(root)
    except UnicodeEncodeError as error:
        raise ConfigError("root", root, f"cannot be the name of a folder ({error})") from error
    if b"\0" in name:
        raise ConfigError("root", root, "must not contain a NUL character")
