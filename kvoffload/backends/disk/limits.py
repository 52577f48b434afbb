"""The limits of a root: agreed by the processes that have it open, and recorded in the root.

The only process of a root sets its limits. A process that opens a root in use takes the recorded
limits, and a warning names each setting that differs.
"""

import logging

import msgspec

from kvoffload.backends.disk.paths import BOUNDS
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.config import ByteSize, human_bytes
from kvoffload.errors import ConfigError

log = logging.getLogger(__name__)

VERSION = 1
_MAX_FILE_BYTES = 1 << 16
_SHORTEST_TTL_S, _LONGEST_TTL_S = 1.0, 315_360_000.0
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
        if self.version != VERSION:
            raise ConfigError("version", self.version, f"this one is {VERSION}")
        if ByteSize.parse(self.capacity_bytes, "capacity") == 0:
            raise ConfigError("capacity", self.capacity_bytes, "must be more than 0 bytes")
        ByteSize.parse(self.min_free_bytes, "min_free")
        if not 0 < self.high_watermark <= 1:
            remedy = "is a share of the capacity: must be more than 0 and at most 1"
            raise ConfigError("high_watermark", self.high_watermark, remedy)
        if not 0 < self.low_watermark <= self.high_watermark:
            remedy = f"must be more than 0 and at most high_watermark, {self.high_watermark}"
            raise ConfigError("low_watermark", self.low_watermark, remedy)
        if self.quarantine_files < 0:
            raise ConfigError("quarantine", self.quarantine_files, "must not be negative")
        if self.ttl_s is not None and not _SHORTEST_TTL_S <= self.ttl_s <= _LONGEST_TTL_S:
            raise ConfigError("ttl_s", self.ttl_s, "must be 1 second to ten years, or absent")

    @property
    def high_bytes(self) -> int:
        """The background evicts above this."""
        return int(self.capacity_bytes * self.high_watermark)

    @property
    def low_bytes(self) -> int:
        """The background stops evicting at this."""
        return int(self.capacity_bytes * self.low_watermark)

    def evicted_bytes(self, resident_bytes: int) -> int:
        """Return how many bytes an engine with these limits evicts at once."""
        return resident_bytes - self.low_bytes if resident_bytes > self.high_bytes else 0


SETTINGS = (
    ("capacity", "capacity_bytes", human_bytes),
    ("min_free", "min_free_bytes", human_bytes),
    ("high_watermark", "high_watermark", str),
    ("low_watermark", "low_watermark", str),
    ("quarantine", "quarantine_files", str),
    ("ttl_s", "ttl_s", str),
)
"""Setting, field of the record, and how its value is printed."""


def read(vfs: Vfs, root: str) -> Limits | None:
    """Return the limits recorded in a root, if any; ValueError: the record cannot be used."""
    try:
        return msgspec.json.decode(vfs.read_file(f"{root}/{BOUNDS}", _MAX_FILE_BYTES), type=Limits)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(error.strerror) from error
    except (msgspec.MsgspecError, ConfigError, RecursionError) as error:
        raise ValueError(str(error)) from error


def save(vfs: Vfs, root: str, temporary: str, limits: Limits) -> None:
    """Record the limits, as a whole or not at all; raises OSError."""
    vfs.replace_file(f"{root}/{BOUNDS}", temporary, msgspec.json.encode(limits) + b"\n")


def _differences(text: str, first: Limits, second: Limits) -> list[str]:
    """Write a text for each setting that differs, with its name and both values."""
    return [
        text.format(setting, shown(getattr(first, field)), shown(getattr(second, field)))
        for setting, field, shown in SETTINGS
        if getattr(first, field) != getattr(second, field)
    ]


def warn_of_difference(root: str, wanted: Limits, agreed: Limits) -> None:
    """Warn that settings have no effect, because running engines agreed on different ones."""
    text = "{} = {} is not used, the engines that have this folder open use {}"
    differing = _differences(text, wanted, agreed)
    if differing:
        remedy = "give all engines the same; to change it, stop all of them and start one"
        log.warning("disk %s: %s; %s", root, "; ".join(differing), remedy)


def log_change(root: str, recorded: Limits | None, wanted: Limits, resident_bytes: int) -> None:
    """Log which limits of a root change with the settings of its only engine, and the eviction."""
    changes = _differences("{} changes from {} to {}", recorded or wanted, wanted)
    leaving = wanted.evicted_bytes(resident_bytes)
    if leaving:
        stored = f"{human_bytes(resident_bytes)} are stored"
        changes.append(f"{stored}, this engine evicts {human_bytes(leaving)} of it")
    if changes:
        level = logging.WARNING if leaving else logging.INFO
        log.log(level, "disk %s: %s", root, "; ".join(changes))
