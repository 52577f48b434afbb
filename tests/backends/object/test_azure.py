"""What is wrong at Azure, as its protocol says it: on Azurite, where it is installed."""

import base64

import pytest

from kvoffload import open_backend
from kvoffload.testing.backends import filled, keys_of
from tests.support.azurite import ACCOUNT

pytestmark = pytest.mark.chaos


@pytest.fixture
def server(azurite):
    return azurite


async def test_a_wrong_key_is_said_with_its_remedy(options, monkeypatch, caplog):
    monkeypatch.setenv("KV_AZURE_KEY", base64.b64encode(b"wrong").decode())
    backend = open_backend("object", options, "n")
    await backend.contains([])
    await backend.close()
    assert backend.counters()["refused_forbidden"] == 1
    assert "the credentials are wrong" in caplog.text


async def test_a_missing_container_is_said_with_its_remedy(options, caplog):
    backend = open_backend("object", options | {"url": f"az://{ACCOUNT}/no-such-one"}, "n")
    await backend.contains([])
    assert await backend.write(keys_of(1), filled(keys_of(1))) == [False]
    await backend.close()
    assert backend.counters()["refused_missing_bucket"] == 2
    assert "there is no such bucket" in caplog.text
