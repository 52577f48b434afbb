"""The disk backend: conformance, bounds, restart."""

from typing import ClassVar

import pytest
from disk_parts import flip_chunk, in_form

from kvoffload import open_backend
from kvoffload.backends.disk.admin import DiskAdmin
from kvoffload.testing import PersistentBackendSuite
from kvoffload.testing.backends import filled, keys_of, slots
from tests.support.file_faults import flip


class DiskSuite(PersistentBackendSuite):
    form = "files"
    settings: ClassVar[dict[str, object]] = {}

    def open(self, namespace):
        options = {"root": str(self.folder / "kv"), "capacity": "64MiB", **self.settings}
        return in_form(open_backend("disk", options, namespace), self.form)

    def open_small(self, namespace):
        options = {"root": str(self.folder / "small"), "capacity": "1MiB", **self.settings}
        return in_form(open_backend("disk", options, namespace), self.form)

    def damage(self, backend, key):
        (path,) = (self.folder / "kv").glob(f"*/??/{key.hex()}")
        flip(path, -1)

    async def ready(self, backend):
        assert backend.wait_ready(60)


class TestAuto(DiskSuite):
    settings: ClassVar = {"io": "auto"}


class TestDirect(DiskSuite):
    settings: ClassVar = {"io": "direct"}


class TestBuffered(DiskSuite):
    settings: ClassVar = {"io": "buffered"}


class TestEncrypted(DiskSuite):
    @pytest.fixture(autouse=True)
    def _key(self, encryption):
        self.settings = {"encryption": encryption}


class TestDurable(DiskSuite):
    settings: ClassVar = {"durability": "fsync"}


class SegmentSuite(DiskSuite):
    form = "segments"

    def damage(self, backend, key):
        flip_chunk(self.folder / "kv", key, -1)


class TestSegments(SegmentSuite):
    pass


class TestEncryptedSegments(SegmentSuite):
    @pytest.fixture(autouse=True)
    def _key(self, encryption):
        self.settings = {"io": "auto", "encryption": encryption}


async def test_keys_that_cannot_have_been_stored_are_absent_and_harm_nothing(tmp_path):
    backend = open_backend("disk", {"root": str(tmp_path / "kv")}, "ns")
    keys = keys_of(40)
    await backend.write(keys, filled(keys, 4096))
    strange = [b"", bytes(121), bytes(5000)]
    assert await backend.contains(strange) == [False] * 3
    assert await backend.read(strange, slots(3, 4096)) == [False] * 3
    await backend.remove(strange)
    for key in strange:
        with pytest.raises(ValueError, match="a key has"):
            await backend.write([key], slots(1, 4096))
    assert await backend.read(keys, slots(40, 4096)) == [True] * 40
    await backend.close()


async def test_an_examination_names_medium_io_space_sharing_and_speed(tmp_path):
    options = {"root": str(tmp_path / "kv"), "capacity": "1TiB"}
    backend = open_backend("disk", options, "ns")
    findings = {finding.check: finding for finding in await DiskAdmin(options).diagnose()}
    told = ["file system", "rights", "limits", "ledger", "space", "sharing", "io", "small chunks"]
    assert list(findings) == [*told, "throughput"]
    assert findings["space"].verdict in ("ok", "warning")
    assert "capacity 1.0 TiB" in findings["space"].detail
    assert findings["throughput"].verdict != "failed"
    assert backend.usage().chunks == 0
    await backend.close()
