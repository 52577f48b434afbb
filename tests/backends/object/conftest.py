"""A bucket for each test, on each server that is installed; ``make chaos`` runs all but moto."""

from importlib.util import find_spec

import pytest

from tests.support import azurite as azure
from tests.support import swift as openstack
from tests.support.moto import PATIENT_S


@pytest.fixture(scope="session")
def swift(tmp_path_factory):
    yield from _started(openstack.Swift, openstack.MISSING, openstack.PROXY, tmp_path_factory)


@pytest.fixture(scope="session")
def azurite(tmp_path_factory):
    yield from _started(azure.Azurite, azure.MISSING, azure.BINARY, tmp_path_factory)


def _started(kind, missing, binary, tmp_path_factory):
    if binary is None:
        pytest.skip(missing)
    pytest.importorskip("obstore", reason="obstore is not installed: the extra object has it")
    server = kind(tmp_path_factory.mktemp("server"))
    yield server
    server.stop()


@pytest.fixture(
    params=["s3", *(pytest.param(name, marks=pytest.mark.chaos) for name in ("swift", "azurite"))]
)
def server(request):
    """A real server of a provider's protocol."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def options(server):
    """Settings of a tier in an empty bucket."""
    return server.options()


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """On a busy machine a lookup may take longer than an engine would wait for it."""
    if find_spec("obstore"):
        monkeypatch.setattr("kvoffload.backends.object.backend.LOOKUP_S", PATIENT_S)
