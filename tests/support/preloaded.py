"""A Python that has imported torch: programs are forks of it, which saves each of them that time.

``[*Preloaded().command, "-c", TEXT]`` runs like ``[sys.executable, "-c", TEXT]``; so do ``-m`` and
a file. The command is a small program, which hands its arguments, environment, folder, and standard
streams to the server, ``python -m tests.support.preloaded SOCKET``. It ends with the fork's status;
if the command is killed, so is the fork.
"""

import contextlib
import gc
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from pathlib import Path

ROOT = Path(__file__).parents[2]
ASK = """
import array, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
environment = [name + b"=" + value for name, value in os.environb.items()]
words = [os.fsencode(word) for word in sys.argv[2:]]
order = b"\\0\\0\\0".join([os.getcwdb(), b"\\0".join(words), b"\\0".join(environment)])
server.sendmsg([len(order).to_bytes(4, "big")],
    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
server.sendall(order)
sys.exit(int(server.recv(4)))
"""


class Preloaded:
    """The server, started; it ends with :meth:`close`, or with this process."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="preloaded")
        path = f"{self._folder.name}/socket"
        words = [sys.executable, "-W", "ignore", "-m", "tests.support.preloaded", path]
        environment = {
            **os.environ,
            "PYTHONPATH": ".:examples:tests/helpers",
            "OMP_NUM_THREADS": "1",
        }
        self._server = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"ready\n"
        self.command = (sys.executable, "-I", "-S", "-c", ASK, path)

    def close(self) -> None:
        """End the server."""
        self._server.kill()
        self._server.communicate()
        self._folder.cleanup()


def order_of(connection: socket.socket) -> tuple[list[bytes], list[int]]:
    """Return what a command asks: folder, words, environment; and its standard streams."""
    head, streams, _, _ = socket.recv_fds(connection, 4, 3)
    left, text = int.from_bytes(head, "big"), b""
    while len(text) < left:
        text += connection.recv(left - len(text))
    return text.split(b"\0\0\0"), streams


def serve(path: str) -> list[str]:
    """Fork for each command until the starting process ends; in a fork, return its words."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    (folder, words, environment), streams = order_of(connection)
                    if (pid := os.fork()) == 0:
                        break
                    status = ended(pid, connection)
                    with contextlib.suppress(BrokenPipeError):
                        connection.sendall(b"%d" % status)
                    os._exit(0)
        else:
            sys.exit()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environb.clear()
    os.environb.update(one.split(b"=", 1) for one in environment.split(b"\0"))
    return [os.fsdecode(word) for word in words.split(b"\0")]


def ended(pid: int, connection: socket.socket) -> int:
    """Wait for a fork, and kill it if its command is gone; returns the status to end with."""
    if connection in select.select([os.pidfd_open(pid), connection], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status if status >= 0 else 128 - status


def run(words: list[str]) -> None:
    """Do what Python does with these words."""
    # Not those of the server, which remember what its descriptors were.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(words[1], main.__dict__)
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    import torch  # noqa: F401

    import kvoffload.connectors.local  # noqa: F401

    gc.freeze()  # what the collector never looks at need not be copied for a fork
    run(serve(sys.argv[1]))
