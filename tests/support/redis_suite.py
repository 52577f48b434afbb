"""The conformance suite of a store in Redis, whose values the suite damages."""

from collections.abc import Mapping, Sequence

from kvoffload import open_backend
from kvoffload.testing.backends import PersistentBackendSuite
from tests.support.redis_engine import PATIENT
from tests.support.redis_server import RedisServer

TURN_THE_LAST_BYTE = """
local value = redis.call("get", KEYS[1])
redis.call("set", KEYS[1], value:sub(1, -2) .. string.char((value:byte(-1) + 1) % 256))
"""


class RedisSuite(PersistentBackendSuite):
    servers: Sequence[RedisServer]
    tls: Sequence[str] = ()
    options: Mapping[str, object] = {}
    """Beside the URL of the only server, or in its place."""

    def open(self, namespace):
        options = {"url": self.servers[0].url, **PATIENT, **self.options}
        return open_backend("redis", options, namespace)

    def damage(self, backend, key):
        found = 0
        for server in self.servers:
            if name := server.cli("keys", f"*{key.hex()}*", tls=self.tls):
                server.cli("eval", TURN_THE_LAST_BYTE, "1", name, tls=self.tls)
                found += 1
        assert found == 1
