"""Plain Redis servers: one for a module of tests, or one for a test to mistreat."""

import pytest

from tests.support.redis_server import RedisServer


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
