"""Servers of a host, and engines that attach to them."""

import os

import pytest

from tests.support import host_server, kill_points
from tests.support.host_server import ROOT, EngineInAProcess, HostServer
from tests.support.small_engine import SmallEngine


@pytest.fixture(autouse=True, scope="session")
def forks(preloaded):
    """Servers, engines and clients import nothing anew."""
    host_server.FORKS_OF.append(preloaded)
    yield
    host_server.FORKS_OF.clear()


@pytest.fixture
def new_server(tmp_path):
    """Start servers, which are killed after the test."""
    made = []

    def start(manager=None, **settings):
        made.append(HostServer(tmp_path, manager, **settings))
        return made[-1]

    yield start
    for server in made:
        server.kill()


@pytest.fixture
def server(new_server, request):
    """A server; tests may ask for one that lends nothing."""
    return new_server(**({"lend": request.param} if hasattr(request, "param") else {}))


@pytest.fixture
def attach(new_kv_caches, new_request):
    """Make engines in this process that are attached to the server at a path."""
    made = []

    def make(path, **settings):
        made.append(SmallEngine(new_kv_caches(seed=len(made)), new_request, serve=path, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.check()
        engine.connector.close()


@pytest.fixture
def engine_process():
    """Start engines in processes of their own."""
    made = []

    def make(path):
        made.append(EngineInAProcess(path))
        return made[-1]

    yield make
    for engine in made:
        engine.kill()


@pytest.fixture
def kill_point(tmp_path, monkeypatch):
    """Kill servers that tests start, each a program of its own, at a named point."""
    monkeypatch.setattr(host_server, "FORKS_OF", [])
    points = kill_points.installed(tmp_path, monkeypatch)
    paths = [str(tmp_path / "kill_points"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return points
