"""The conformance suite of a store in Redis, whose values the suite damages."""

from collections.abc import Sequence

from kvoffload.testing.backends import PersistentBackendSuite
from tests.support.redis_server import RedisServer

TURN_THE_LAST_BYTE = """
local value = redis.call("get", KEYS[1])
redis.call("set", KEYS[1], value:sub(1, -2) .. string.char((value:byte(-1) + 1) % 256))
"""


class RedisSuite(PersistentBackendSuite):
    servers: Sequence[RedisServer]
    tls: Sequence[str] = ()

    def damage(self, backend, key):
        found = 0
        for server in self.servers:
            if name := server.cli("keys", f"*{key.hex()}*", tls=self.tls):
                server.cli("eval", TURN_THE_LAST_BYTE, "1", name, tls=self.tls)
                found += 1
        assert found == 1
