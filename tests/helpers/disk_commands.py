"""The command line, in this process or in one of its own, and folders for it to work on."""

import contextlib
import io
import json
import os
import pty
import select
import subprocess
import sys
import threading
import time
from typing import NamedTuple
from unittest import mock

from disk_parts import in_form

from kvoffload import open_backend
from kvoffload.cli.main import main
from kvoffload.testing.backends import filled, keys_of

PYTHON = [sys.executable]
"""Runs commands; tests of the command line put one in its place that has imported them."""
PROGRAM = "import sys; sys.argv[0] = 'kvoffload'\nfrom kvoffload.cli.main import main; main()"
SIZE = 28 * 1024
ON_DISK = 32 * 1024


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def process(*words, **environment):
    """Run a command as users do."""
    done = subprocess.run(
        [*PYTHON, "-c", PROGRAM, *words],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | environment,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def kvoffload(*words, **environment):
    """Run a command in this process, which is some twenty times as fast."""
    code, out, err = [1], _text(), _text()

    def run():
        try:
            main()
        except SystemExit as ending:
            code[0] = ending.code or 0

    argv, sys.argv = sys.argv, ["kvoffload", *words]
    try:
        with (
            mock.patch.dict(os.environ, environment),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            # In a thread without a loop, because a test may have one running.
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
    finally:
        sys.argv = argv
    return Result(code[0], *(_written(stream) for stream in (out, err)))


def on_terminal(*words, answer=b"", stdout=None, **environment):
    """Run a command on a terminal and answer its question; return exit code and output.

    ``stdout`` is a file that standard output goes to.
    """
    here, there = pty.openpty()
    process = subprocess.Popen(
        [*PYTHON, "-c", PROGRAM, *words],
        stdin=there,
        stdout=stdout or there,
        stderr=there,
        env={**os.environ, "TERM": "dumb", "COLUMNS": "100", **environment},
    )
    os.close(there)
    shown, until_s = b"", time.monotonic() + 120
    while time.monotonic() < until_s:
        if select.select([here], [], [], 0.2)[0]:
            try:
                shown += os.read(here, 1 << 16)
            except OSError:  # the other end is closed
                break
        elif process.poll() is not None:
            break
        if answer and b"[y/N]" in shown:
            os.write(here, answer)
            answer = b""
    code = process.wait(60)
    os.close(here)
    return code, shown.decode()


def as_user(user, *words):
    """Run a command in this process with the rights of another user; needs root."""
    os.seteuid(user)
    try:
        return kvoffload(*words)
    finally:
        os.seteuid(0)


def answered(*words, code=0, run=kvoffload):
    result = run(*words, "--json")
    assert result.returncode == code, result.stderr
    return json.loads(result.stdout)


def open_disk(root, namespace):
    backend = open_backend("disk", {"root": str(root), "capacity": "64MiB"}, namespace)
    assert backend.wait_ready(60)
    return in_form(backend, "files")


def files_of(root):
    return sorted(root.glob("*/??/*"))


def _text():
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8")


def _written(stream):
    stream.flush()
    return stream.buffer.getvalue().decode()


async def two_namespaces(root):
    """Make a store with 6 chunks of one model and 3 of another; return its folder."""
    for namespace, count in (("llama", 6), ("qwen", 3)):
        backend = open_disk(root, namespace)
        await backend.describe({"model": namespace, "dtype": "bfloat16"})
        await backend.write(keys_of(count), filled(keys_of(count), SIZE))
        await backend.close()
    return root
