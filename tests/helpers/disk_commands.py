"""The command line as a process of its own, and folders for it to work on."""

import json
import subprocess
import sys

from kvoffload import open_backend

SIZE = 28 * 1024
ON_DISK = 32 * 1024


def kvoffload(*words):
    return subprocess.run(
        [sys.executable, "-c", "from kvoffload.cli.main import main; main()", *words],
        capture_output=True,
        text=True,
        timeout=60,
    )


def answered(*words, code=0):
    result = kvoffload(*words, "--json")
    assert result.returncode == code, result.stderr
    return json.loads(result.stdout)


def open_disk(root, namespace):
    backend = open_backend("disk", {"root": str(root), "capacity": "64MiB"}, namespace)
    assert backend.wait_ready(10)
    return backend
