"""A real S3 server in a process of its own: moto's, which keeps all objects in memory."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator

from tests.support.redis_server import free_port

_START_S = 60.0
PATIENT_S = 30.0
"""No request may be late where a test does not ask for it, although the machine is busy."""
KEYS = {"KV_TEST_ACCESS_KEY": "test-access-key", "KV_TEST_SECRET_KEY": "test-secret-key"}
"""Credentials in the environment; the server takes any."""


class MotoServer:
    """The server; ends with :meth:`stop`."""

    def __init__(self) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.endpoint}/moto-api/", timeout=5).close()
                return
            if self._process.poll() is not None:
                raise RuntimeError("moto_server ended at once")
            time.sleep(0.02)
        raise RuntimeError("moto_server did not start in time")

    @property
    def endpoint(self) -> str:
        """The URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    def options(self, **more: object) -> dict[str, object]:
        """Make a bucket; return the settings of a tier in it."""
        self.make_bucket(bucket := f"test-{uuid.uuid4().hex[:12]}")
        place = {"url": f"s3://{bucket}/kv", "endpoint": self.endpoint}
        return {**place, **login(), "timeout_s": PATIENT_S, **more}

    def make_bucket(self, name: str) -> None:
        """Make a bucket of this name."""
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        urllib.request.urlopen(request, timeout=30).close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The server keeps its connections and objects, and answers nothing."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.wait()


def login() -> dict[str, object]:
    """Put credentials into the environment; return the settings that name them."""
    os.environ.update(KEYS)
    access, secret = KEYS
    return {"access_key_env": access, "secret_key_env": secret, "region": "us-east-1"}


@contextlib.contextmanager
def moto_server() -> Iterator[MotoServer]:
    """Run a server."""
    server = MotoServer()
    try:
        yield server
    finally:
        server.stop()
