"""The conformance suites of backends, with the backend in an I/O process."""

import pytest

from kvoffload.testing import BackendSuite
from kvoffload.testing.backends import CHUNK_BYTES, PersistentBackendSuite
from tests.support.redis_server import BINARY, MISSING, RedisServer
from tests.support.redis_suite import RedisSuite
from tests.support.store_behind_io import StoreBehindIO

pytestmark = pytest.mark.chaos


class TestMemory(BackendSuite):
    def open(self, namespace):
        return StoreBehindIO("memory", {"capacity": "64MiB"}, namespace)

    def open_small(self, namespace):
        return StoreBehindIO("memory", {"capacity": 16 * CHUNK_BYTES}, namespace)

    test_a_damaged_chunk_is_a_miss_and_can_come_back = None  # no medium that could damage it


class TestDisk(PersistentBackendSuite):
    def open(self, namespace):
        options = {"root": str(self.folder / "kv"), "capacity": "64MiB", "min_free": 0}
        return StoreBehindIO("disk", options, namespace)

    def open_small(self, namespace):
        options = {"root": str(self.folder / "small"), "capacity": "2MiB", "min_free": 0}
        return StoreBehindIO("disk", options, namespace)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.mark.skipif(BINARY is None, reason=MISSING)
class TestRedis(RedisSuite):
    @pytest.fixture(autouse=True)
    def _server(self, server):
        server.cli("flushall")
        self.servers = [server]

    def open(self, namespace):
        patient = dict.fromkeys(("timeout_s", "connect_timeout_s", "lookup_timeout_s"), 5.0)
        return StoreBehindIO("redis", {"url": self.servers[0].url, **patient}, namespace)
