"""The conformance suite on a real server of Azure's protocol: Azurite, where it is installed.

``npm install -g azurite@3.35.0`` installs it, and ``make chaos`` runs these.
"""

import base64
import contextlib
import datetime
import hashlib
import hmac
import http.client
import shutil
import socket
import subprocess
import time
import uuid

import pytest

from kvoffload import open_backend
from kvoffload.testing.backends import filled, keys_of
from tests.backends.object.test_backend import TestObject as ObjectSuite
from tests.support.redis_server import free_port

AZURITE = shutil.which("azurite-blob")
ACCOUNT = "kvoffload"
ACCOUNT_KEY = base64.b64encode(b"not a secret: " + bytes(50)).decode()

pytestmark = pytest.mark.chaos
if AZURITE is None:
    pytest.skip("needs Azurite: npm install -g azurite@3.35.0", allow_module_level=True)


@pytest.fixture(scope="module")
def azurite(tmp_path_factory):
    """The port of a server with one account."""
    pytest.importorskip("obstore", reason="obstore is not installed: the extra object has it")
    port, folder = free_port(), tmp_path_factory.mktemp("azurite")
    words = [AZURITE, "--blobPort", str(port), "--silent"]
    words += ["--skipApiVersionCheck", "--inMemoryPersistence"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AZURITE_ACCOUNTS", f"{ACCOUNT}:{ACCOUNT_KEY}")
        process = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        time.sleep(0.05)
    yield port
    process.kill()
    process.wait()


def make_container(port):
    """Make a container by a signed request, as the client library makes none."""
    name, version = f"test-{uuid.uuid4().hex[:12]}", "2021-08-06"
    now = datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    resource = f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    signed = f"PUT{chr(10) * 12}x-ms-date:{now}\nx-ms-version:{version}\n{resource}"
    key = base64.b64decode(ACCOUNT_KEY)
    signature = base64.b64encode(hmac.digest(key, signed.encode(), hashlib.sha256)).decode()
    headers = {
        "x-ms-date": now,
        "x-ms-version": version,
        "Content-Length": "0",
        "Authorization": f"SharedKey {ACCOUNT}:{signature}",
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("PUT", f"/{ACCOUNT}/{name}?restype=container", headers=headers)
    answer = connection.getresponse()
    assert answer.status == 201, answer.read()
    connection.close()
    return name


@pytest.fixture
def options(azurite, monkeypatch):
    monkeypatch.setenv("KV_AZURE_KEY", ACCOUNT_KEY)
    return {
        "url": f"az://{ACCOUNT}/{make_container(azurite)}/kv",
        "endpoint": f"http://127.0.0.1:{azurite}/{ACCOUNT}",
        "secret_key_env": "KV_AZURE_KEY",
    }


class TestAzure(ObjectSuite):
    pass


del ObjectSuite


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


async def test_operators_work_on_it(options):
    backend = open_backend("object", options, "n")
    await backend.write(keys_of(3), filled(keys_of(3)))
    findings = await backend.diagnose()
    assert {each.verdict for each in findings if each.check == "rights"} == {"ok"}, findings
    assert "failed" not in {each.verdict for each in findings}, findings
    assert await backend.purge(["n"]) == 3
    assert (await backend.survey()).held == []
    await backend.close()
