"""The limits of a root: agreed by the processes that have it open, and kept in the root.

A process that opens a root alone sets the limits: its settings are the request. A process that
opens it beside others takes the limits that are recorded, and is told of each that differs.
"""

import errno
import logging
import os

import msgspec

from kvoffload.backends.disk.paths import BOUNDS
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.config import human_bytes

log = logging.getLogger(__name__)

VERSION = 1
_MAX_FILE_BYTES = 1 << 16
_LARGEST = 2**63 - 1
SHORTEST_TTL_S, LONGEST_TTL_S = 1.0, 315_360_000.0
"""Access times tell other processes of a use about a second later; ten years are for ever."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one root, as they are recorded."""

    version: int = VERSION
    capacity_bytes: int
    min_free_bytes: int
    high_watermark: float
    low_watermark: float
    quarantine_files: int
    ttl_s: float | None = None
    """Seconds from its last use until a chunk expires."""

    def __post_init__(self) -> None:
        """Refuse what cannot be; msgspec reports it as a validation error of the file."""
        if self.version != VERSION:
            raise ValueError(f"version {self.version}, this one is {VERSION}")
        if not 0 < self.capacity_bytes <= _LARGEST or not 0 <= self.min_free_bytes <= _LARGEST:
            raise ValueError("a size that no file system has")
        if not 0 < self.low_watermark <= self.high_watermark <= 1 or self.quarantine_files < 0:
            raise ValueError("watermarks or quarantine out of range")
        if self.ttl_s is not None and not SHORTEST_TTL_S <= self.ttl_s <= LONGEST_TTL_S:
            raise ValueError("ttl_s out of range")

    @property
    def high_bytes(self) -> int:
        """Above this the background evicts..."""
        return int(self.capacity_bytes * self.high_watermark)

    @property
    def low_bytes(self) -> int:
        """...down to this."""
        return int(self.capacity_bytes * self.low_watermark)

    def evicted_bytes(self, resident_bytes: int) -> int:
        """How much leaves at once under these limits."""
        return resident_bytes - self.low_bytes if resident_bytes > self.high_bytes else 0


SETTINGS = (
    ("capacity", "capacity_bytes", human_bytes),
    ("min_free", "min_free_bytes", human_bytes),
    ("high_watermark", "high_watermark", str),
    ("low_watermark", "low_watermark", str),
    ("quarantine", "quarantine_files", str),
    ("ttl_s", "ttl_s", str),
)
"""Setting, field of the record, how its value is written for people."""


def load(vfs: Vfs, root: str) -> Limits | None:
    """The limits recorded in a root; None if there are none, or none that can be used."""
    try:
        return read(vfs, root)
    except ValueError as error:
        log.warning("disk: %s/%s is ignored: %s", root, BOUNDS, error)
        return None


def read(vfs: Vfs, root: str) -> Limits | None:
    """The limits recorded in a root; None if there are none, as an older version leaves it.

    Raises:
        ValueError: what is there cannot be used; the text says why.
    """
    try:
        return msgspec.json.decode(_content(vfs, f"{root}/{BOUNDS}"), type=Limits)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(error.strerror) from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error


def save(vfs: Vfs, root: str, temporary: str, bounds: Limits) -> None:
    """Record the limits, whole or not at all; raises OSError."""
    data = msgspec.json.encode(bounds) + b"\n"
    try:
        fd = vfs.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            if vfs.pwritev(fd, [data], 0) != len(data):
                raise OSError(errno.EIO, "short write", temporary)
        finally:
            vfs.close_quietly(fd)
        vfs.rename(temporary, f"{root}/{BOUNDS}")
    except OSError:
        vfs.unlink_quietly(temporary)
        raise


def tell_difference(root: str, wanted: Limits, agreed: Limits) -> None:
    """Warn that settings are not used, because other engines have the root open with others."""
    differing = [
        f"{setting} = {shown(getattr(wanted, field))} is not used, "
        f"the engines that have this folder open use {shown(getattr(agreed, field))}"
        for setting, field, shown in SETTINGS
        if getattr(wanted, field) != getattr(agreed, field)
    ]
    if differing:
        remedy = "give all engines the same; to change it, stop all of them and start one"
        log.warning("disk %s: %s; %s", root, "; ".join(differing), remedy)


def tell_change(root: str, recorded: Limits | None, wanted: Limits, resident_bytes: int) -> None:
    """Log which limits of a root change with the settings of its only engine, and what leaves."""
    changes = [
        f"{setting} changes from {shown(getattr(recorded, field))} "
        f"to {shown(getattr(wanted, field))}"
        for setting, field, shown in SETTINGS
        if recorded is not None and getattr(recorded, field) != getattr(wanted, field)
    ]
    leaving = wanted.evicted_bytes(resident_bytes)
    if leaving:
        stored = f"{human_bytes(resident_bytes)} are stored"
        changes.append(f"{stored}, this engine evicts {human_bytes(leaving)} of it")
    if changes:
        level = logging.WARNING if leaving else logging.INFO
        log.log(level, "disk %s: %s", root, "; ".join(changes))


def _content(vfs: Vfs, path: str) -> bytes:
    fd = vfs.open(path, os.O_RDONLY | os.O_NONBLOCK)  # it may be anything
    try:
        buffer = bytearray(_MAX_FILE_BYTES + 1)
        size = vfs.preadv(fd, [buffer], 0)
    finally:
        vfs.close_quietly(fd)
    if size > _MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
    return bytes(buffer[:size])
