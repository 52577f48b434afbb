"""In which order the files leave that a scan found: by last use, or with shares of tenants."""

from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.folder.scan import MOST_OLDEST, OldFile, Scan
from kvoffload.backends.folder.tenants import Tag, Tags
from kvoffload.policies.lru import LRUPolicy
from kvoffload.policies.tenant_order import TenantOrder, TenantShares


class ByUse:
    """The file that was used longest ago leaves first. Used by one thread."""

    tags = None
    """For the next scan: whose the files are. None: that is not asked."""

    def __init__(self) -> None:
        self._files: list[OldFile] = []
        """The least recently used last."""

    def __len__(self) -> int:
        return len(self._files)

    def above(self) -> frozenset[Tag]:
        """Return the tenants above their share: the next scan remembers more of their files."""
        return frozenset()

    def take_in(self, scan: Scan) -> None:
        """Order the files that a complete scan found, in place of the ones before."""
        self._files = scan.oldest()

    def take(self) -> OldFile | None:
        """Take the file out of the order that leaves next."""
        return self._files.pop() if self._files else None

    def removed(self, file: OldFile) -> None:
        """Note that a file is gone which was taken."""

    def clear(self) -> None:
        """Forget all files."""
        self._files = []


class ByTenant:
    """The files of tenants above their share leave first, as the last scan counted them.

    Args:
        vfs: makes the system calls.
        share: of the capacity, for each tenant.
        capacity_bytes: of all files.
    """

    def __init__(self, vfs: Vfs, share: float, capacity_bytes: int) -> None:
        self.tags = Tags(vfs)
        self._files: dict[bytes, OldFile] = {}
        """By name: those of the order, and those that were taken and are not gone."""
        self._shares = TenantShares(share)
        self._shares.use(capacity_bytes, lambda name: self._files[name].stored_bytes)
        self._order = TenantOrder(LRUPolicy(MOST_OLDEST), self._shares)

    def __len__(self) -> int:
        return len(self._order)

    def above(self) -> frozenset[Tag]:
        return frozenset(int.from_bytes(tenant) for tenant, _ in self._shares.above())

    def take_in(self, scan: Scan) -> None:
        self.clear()
        self.tags.keep(scan.passed)
        self._files = {_name(file): file for file in reversed(scan.oldest())}
        tagged = ((name, file.tag) for name, file in self._files.items() if file.tag)
        self._shares.of.update((name, _tenant(tag)) for name, tag in tagged)
        for tag, num_bytes in scan.bytes_of.items():
            self._shares.count(_tenant(tag), num_bytes)
        self._order.add([*self._files])

    def take(self) -> OldFile | None:
        return next((self._files[name] for name in self._order.victims(1)), None)

    def removed(self, file: OldFile) -> None:
        name = _name(file)
        self._shares.forget([name])
        del self._files[name]

    def clear(self) -> None:
        self._order.clear()
        self._shares.clear()
        self._files = {}


Order = ByUse | ByTenant


def _name(file: OldFile) -> bytes:
    return bytes.fromhex(file.folder) + file.key


def _tenant(tag: Tag) -> bytes:
    return tag.to_bytes(8)
