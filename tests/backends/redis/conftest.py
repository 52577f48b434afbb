"""Redis servers: one for a module of tests, one for a test to mistreat; a cluster for all."""

import pytest

from kvoffload import open_backend
from kvoffload.testing.backends import filled, keys_of
from tests.support.redis_engine import PATIENT
from tests.support.redis_server import RedisServer, redis_cluster


@pytest.fixture(scope="module")
def plain_server(tmp_path_factory):
    """One plain server, also on a Unix socket."""
    folder = tmp_path_factory.mktemp("redis")
    server = RedisServer(folder, "--unixsocket", str(folder / "sock"))
    yield server
    server.stop()


@pytest.fixture
def server(tmp_path):
    """A plain server of the test's own."""
    server = RedisServer(tmp_path / "redis")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def session_cluster(tmp_path_factory):
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


@pytest.fixture
def cluster(session_cluster):
    """Three masters that share all slots, empty; tests may move slots."""
    for server in session_cluster:
        server.cli("flushall")
    return session_cluster


@pytest.fixture
async def opened():
    """Opens patient tiers on a server, or at a URL, and closes them after the test."""
    backends = []

    def opened(server, namespace="n", **options):
        options = {"url": getattr(server, "url", server), **PATIENT, **options}
        backends.append(open_backend("redis", options, namespace))
        return backends[-1]

    yield opened
    for backend in backends:
        await backend.close()


@pytest.fixture
async def moving(cluster, opened):
    """A tier with one chunk, whose slot is on its way to another server; what ends the way."""
    backend, keys = opened(f"redis+cluster://127.0.0.1:{cluster[0].port}", "moving"), keys_of(1)
    await backend.write(keys, filled(keys))
    name = f"kvoffload:moving:xxh3:{{{keys[0].hex()}}}"
    slot = cluster[0].cli("cluster", "keyslot", name)
    source = next(s for s in cluster if int(s.cli("cluster", "countkeysinslot", slot)) == 1)
    target = next(s for s in cluster if s is not source)
    source_id, target_id = source.cli("cluster", "myid"), target.cli("cluster", "myid")

    def end():
        for server in (target, source):
            server.cli("cluster", "setslot", slot, "node", target_id)

    target.cli("cluster", "setslot", slot, "importing", source_id)
    source.cli("cluster", "setslot", slot, "migrating", target_id)
    source.cli("migrate", "127.0.0.1", str(target.port), name, "0", "5000")
    yield backend, keys, end
    end()


@pytest.fixture
def login(monkeypatch):
    """Returns the options that name a user, whose password is in the environment."""

    def options(username, password):
        monkeypatch.setenv("KV_LOGIN", password)
        return {"username": username, "password_env": "KV_LOGIN"}

    return options


@pytest.fixture
def empty(plain_server):
    """The plain server, empty."""
    plain_server.cli("flushall")
    return plain_server
