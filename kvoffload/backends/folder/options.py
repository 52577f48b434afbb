"""Settings of the folder backend."""

import msgspec

from kvoffload.backends.disk.options import refuse_invalid_name
from kvoffload.config import ByteSize, check_share, check_threads
from kvoffload.errors import ConfigError, check_setting
from kvoffload.extras import check_extra


class FolderOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the folder backend; ``docs/guides/folder.md`` says how to choose."""

    root: str
    """Folder for all namespaces and hosts, on a mount that all hosts have."""
    capacity: ByteSize = ByteSize(100 << 30)
    """Bytes of files under the root at most, those of all hosts and namespaces together."""
    threads: int = 16
    """Chunks moved at once. Whatever the mount does, no more threads wait for it than these and
    five."""
    timeout_s: float = 5.0
    """Seconds after which a call of the mount is given up."""
    secret_file: str = ""
    """A file with 32 random bytes or more, the same on all hosts: chunks are authenticated. The
    setting ``encryption`` does that too, and takes its place."""
    tenant_share: float = 1.0
    """The part of the capacity that chunks of one tenant may have while there must be room for
    more. A tenant above it evicts its own chunks first. Needs `tenants` of the engine."""
    trust_parent_folders: bool = False
    """Use a root below folders that other users may write, as in a pod without other programs."""

    def __post_init__(self) -> None:
        check_extra("folder", self.root)
        refuse_invalid_name(self.root)
        if ByteSize.parse(self.capacity, "capacity") == 0:
            raise ConfigError("capacity", int(self.capacity), "must be more than 0 bytes")
        check_threads("threads", self.threads)
        check_setting(self, "timeout_s", self.timeout_s > 0, "must be a positive number of seconds")
        check_share(self.tenant_share)
        if self.secret_file:
            check_extra("secret_file", self.secret_file)
