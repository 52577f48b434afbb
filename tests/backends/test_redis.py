"""The Redis backend against real servers: it conforms, wherever and however it is reached."""

import pytest

from kvoffload import open_backend
from kvoffload.testing.backends import PersistentBackendSuite
from kvoffload.testing.redis_server import BINARY, MISSING, RedisServer

pytestmark = pytest.mark.skipif(BINARY is None, reason=MISSING)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


class TestOneServer(PersistentBackendSuite):
    @pytest.fixture(autouse=True)
    def _server(self, server):
        server.cli("flushall")
        self.server = server

    def open(self, namespace):
        return open_backend("redis", {"url": self.server.url, "timeout_s": 5.0}, namespace)
