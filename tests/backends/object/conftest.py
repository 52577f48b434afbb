"""A real S3 server for the tests of a session, and a bucket for each test."""

from importlib.util import find_spec

import pytest

from tests.support.moto import PATIENT_S, moto_server


@pytest.fixture(scope="session")
def s3():
    pytest.importorskip("obstore", reason="obstore is not installed: the extra object has it")
    pytest.importorskip("moto", reason="moto is not installed: the extra dev has it")
    with moto_server() as server:
        yield server


@pytest.fixture
def options(s3):
    """Settings of a tier in an empty bucket."""
    return s3.options()


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """On a busy machine a lookup may take longer than an engine would wait for it."""
    if find_spec("obstore"):
        monkeypatch.setattr("kvoffload.backends.object.backend.LOOKUP_S", PATIENT_S)
