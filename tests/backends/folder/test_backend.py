"""The folder backend: conformance, plain, encrypted, and with a secret."""

from typing import ClassVar

import pytest

from kvoffload import open_backend
from kvoffload.testing import PersistentBackendSuite
from tests.support.file_faults import flip


class FolderSuite(PersistentBackendSuite):
    settings: ClassVar[dict[str, object]] = {}

    def open(self, namespace):
        return self._opened_at("kv", namespace, "64MiB")

    def open_small(self, namespace):
        return self._opened_at("small", namespace, "2MiB")

    def _opened_at(self, name, namespace, capacity):
        options = {"root": str(self.folder / name), "capacity": capacity, **self.settings}
        return open_backend("folder", options, namespace)

    def damage(self, backend, key):
        (path,) = (self.folder / "kv").glob(f"*/??/{key.hex()}")
        flip(path, -1)


class TestFolder(FolderSuite):
    pass


@pytest.mark.chaos  # test_tenants.py has the rest
class TestShares(FolderSuite):
    settings: ClassVar = {"tenant_share": 0.5}


@pytest.mark.chaos
class TestOneThread(FolderSuite):
    settings: ClassVar = {"threads": 1}


@pytest.mark.chaos  # its seal has the place of that of encryption; test_sharing.py has the rest
class TestSecret(FolderSuite):
    @property
    def settings(self):
        secret = self.folder / "secret"
        secret.write_bytes(bytes(range(32)))
        return {"secret_file": str(secret)}


class TestEncrypted(FolderSuite):
    @pytest.fixture(autouse=True)
    def _keys(self, encryption):
        self.settings = {"encryption": encryption}
