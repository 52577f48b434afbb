"""A bucket for each test."""

from importlib.util import find_spec

import pytest

from tests.support.moto import PATIENT_S


@pytest.fixture
def options(s3):
    """Settings of a tier in an empty bucket."""
    return s3.options()


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """On a busy machine a lookup may take longer than an engine would wait for it."""
    if find_spec("obstore"):
        monkeypatch.setattr("kvoffload.backends.object.backend.LOOKUP_S", PATIENT_S)
