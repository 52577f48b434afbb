"""A real server of Azure's protocol in a process of its own: Azurite, which checks signatures.

``npm install -g azurite@3.35.0`` installs it.
"""

import base64
import contextlib
import datetime
import hashlib
import hmac
import http.client
import os
import shutil
import socket
import subprocess
import time
import uuid
from pathlib import Path

from tests.support.moto import PATIENT_S
from tests.support.redis_server import free_port

BINARY = shutil.which("azurite-blob")
MISSING = "needs Azurite: npm install -g azurite@3.35.0"
ACCOUNT = "kvoffload"
ACCOUNT_KEY = base64.b64encode(b"not a secret: " + bytes(50)).decode()
_KEY_ENV, _START_S = "KV_AZURE_KEY", 60.0


class Azurite:
    """The server, with one account; ends with :meth:`stop`."""

    def __init__(self, folder: Path) -> None:
        if BINARY is None:
            raise RuntimeError(MISSING)
        self.port = free_port()
        words = [BINARY, "--blobPort", str(self.port), "--silent"]
        words += ["--skipApiVersionCheck", "--inMemoryPersistence"]
        accounts = {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{ACCOUNT_KEY}"}
        self._process = subprocess.Popen(
            words, cwd=folder, stdout=subprocess.DEVNULL, env=os.environ | accounts
        )
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            time.sleep(0.05)
        raise RuntimeError("Azurite did not start in time")

    def options(self, **more: object) -> dict[str, object]:
        """Make a container; return the settings of a tier in it."""
        os.environ[_KEY_ENV] = ACCOUNT_KEY
        return {
            "url": f"az://{ACCOUNT}/{self._make_container()}/kv",
            "endpoint": f"http://127.0.0.1:{self.port}/{ACCOUNT}",
            "secret_key_env": _KEY_ENV,
            "timeout_s": PATIENT_S,
            **more,
        }

    def stop(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.wait()

    def _make_container(self) -> str:
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
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("PUT", f"/{ACCOUNT}/{name}?restype=container", headers=headers)
        answer = connection.getresponse()
        if answer.status != 201:
            raise RuntimeError(f"no container: {answer.read()!r}")
        connection.close()
        return name
