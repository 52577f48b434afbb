"""``kvoffload serve`` in a process of its own, for the demo's engines."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from kvoffload.demo.engine_process import DemoError

STARTED_S = 60.0
LOOK_S = 0.1
"""Time between two looks whether the server has ended."""


class SharedServer:
    """A server with a memory and nothing below it; use it in a ``with`` statement.

    Args:
        memory: bytes of it.
        log: gets what it logs.

    Raises:
        DemoError: it does not start.
    """

    def __init__(self, memory: int, log: IO[str]) -> None:
        # A folder of its own: a socket's path must be short.
        self._folder = tempfile.TemporaryDirectory(prefix="kvoffload-demo-")
        self.path = f"{self._folder.name}/s"
        """Of the socket where engines attach."""
        settings = Path(self._folder.name, "serve.json")
        settings.write_text(json.dumps({"socket": self.path, "memory": memory}))
        words = [sys.executable, "-m", "kvoffload", "serve", "--config", str(settings)]
        ready = f"{self._folder.name}/ready"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "NOTIFY_SOCKET": ready,
        }
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
            told.bind(ready)
            told.settimeout(LOOK_S)
            self._child = subprocess.Popen(words, stdout=log, stderr=log, env=environment)
            until_s = time.monotonic() + STARTED_S
            while not self._is_ready(told):
                if self._child.poll() is not None or time.monotonic() > until_s:
                    self.__exit__()
                    raise DemoError(f"the server does not start (see {log.name})")

    def _is_ready(self, told: socket.socket) -> bool:
        try:
            return told.recv(64) == b"READY=1"
        except TimeoutError:
            return False

    def __enter__(self) -> "SharedServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._child.send_signal(signal.SIGTERM)
        self._child.wait()
        self._folder.cleanup()
