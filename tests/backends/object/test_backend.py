"""The conformance suite of the object store, on a real S3 server."""

import pytest

from kvoffload import open_backend
from kvoffload.backends.object.naming import chunk_name, namespace_tag
from kvoffload.testing.backends import PersistentBackendSuite


class TestObject(PersistentBackendSuite):
    @pytest.fixture(autouse=True)
    def _bucket(self, options):
        self.options = options

    def open(self, namespace):
        return open_backend("object", self.options, namespace)

    def damage(self, backend, key):
        name = chunk_name(namespace_tag("suite"), key)
        content = bytearray(backend._bucket.fetch(name, 1 << 20))
        content[-1] ^= 1
        backend._bucket.put(name, [bytes(content)], replace=True)


@pytest.mark.chaos  # tests/backends/test_encryption.py has what is not the base class's
class TestEncryptedObjects(TestObject):
    @pytest.fixture(autouse=True)
    def _bucket(self, options, encryption):
        self.options = options | {"encryption": encryption}
