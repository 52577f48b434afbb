"""The disk backend: conformance, bounds, restart."""

from typing import ClassVar

from kvoffload import open_backend
from kvoffload.testing import PersistentBackendSuite


class DiskSuite(PersistentBackendSuite):
    settings: ClassVar[dict[str, object]] = {}

    def open(self, namespace):
        options = {"root": str(self.folder / "kv"), "capacity": "64MiB", **self.settings}
        return open_backend("disk", options, namespace)

    async def ready(self, backend):
        assert backend.wait_ready(10)


class TestDirect(DiskSuite):
    settings: ClassVar = {"io": "auto"}


class TestBuffered(DiskSuite):
    settings: ClassVar = {"io": "buffered"}


class TestDurable(DiskSuite):
    settings: ClassVar = {"durability": "fsync"}
