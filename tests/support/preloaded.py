"""A Python that has imported what takes long: programs are forks of it.

An import of torch takes a second of a core, and one of vLLM eight.
``[*server.command, "-c", TEXT]`` runs like ``[sys.executable, "-c", TEXT]``; so do ``-m`` and a
file. The command is a small program, which hands its arguments, environment, folder, and standard
streams to the server. It ends with the fork's status. ``quick`` is such a command, whose program
frees no object at its end: to free those of torch costs a quarter of a second. Where a process is
wanted, and no command, there is :class:`Fork`.

Each fork leads a session of its own. It is killed when its command is, or the asking process. The
workers of a run of pytest share a server, which ends with the run. It is begun by
``python -m tests.support.preloaded FOLDER PID MODULE...``, which ends when it is ready.
"""

import atexit
import contextlib
import fcntl
import gc
import hashlib
import importlib
import marshal
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
QUICK = "--quick-end"
SET_BY_IMPORTS: dict[str, str] = {}
"""Variables that the modules have set in the server: a fork has them as well."""
ASK = """
import array, marshal, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
order = marshal.dumps((os.getcwd(), sys.argv[2:], dict(os.environ)))
server.sendmsg([len(order).to_bytes(4, "big")],
    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
server.sendall(order)
_, status = server.makefile().read().split()
sys.exit(int(status) if int(status) >= 0 else 128 - int(status))
"""


class Preloaded:
    """The server: that of this run of pytest, or started for it.

    Args:
        modules: imported by it.
        environment: of the server, beside that of this process.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex
        owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
        name = hashlib.sha256(repr((run, modules, environment)).encode()).hexdigest()[:16]
        folder = Path(tempfile.gettempdir(), f"preloaded-{name}")
        folder.mkdir(mode=0o700, exist_ok=True)
        self.path = f"{folder}/socket"
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the other workers wait for the first one
            if not os.path.exists(self.path):
                words = [sys.executable, "-W", "ignore", "-m", "tests.support.preloaded"]
                subprocess.run(
                    [*words, str(folder), str(owner), *modules],
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    cwd=ROOT,
                    env={**os.environ, **environment},
                    check=True,
                )
        self.command = (sys.executable, "-I", "-S", "-c", ASK, self.path)
        self.quick = (*self.command, QUICK)


class Fork:
    """A process like ``subprocess.Popen([sys.executable, *words])``.

    Args:
        server: it is a fork of.
        words: the arguments of Python; :data:`QUICK` may be before them.
        streams: its standard input, output and error, and further ones: files or descriptors.
            None is that of this process. Of the first two, PIPE is one of text.
        cwd: its folder, if not that of this process.
        env: its whole environment, if not that of this process.
    """

    def __init__(
        self,
        server: Preloaded,
        words: Sequence[str],
        streams: Sequence[Any] = (None, None, None),
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        given_env = os.environ if env is None else env
        variables = {name: str(value) for name, value in given_env.items()}
        order = marshal.dumps((str(cwd or os.getcwd()), [*map(os.fspath, words)], variables))
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(server.path)
        given, theirs = [*streams], []
        self.stdin: Any = None
        self.stdout: Any = None
        # Their users close the pipes.
        if streams[0] == subprocess.PIPE:
            given[0], ours = os.pipe()
            self.stdin = open(ours, "w")  # noqa: SIM115
            theirs.append(given[0])
        if streams[1] == subprocess.PIPE:
            ours, given[1] = os.pipe()
            self.stdout = open(ours)  # noqa: SIM115
            theirs.append(given[1])
        own = [number if one is None else one for number, one in enumerate(given)]
        numbers = [one if isinstance(one, int) else one.fileno() for one in own]
        socket.send_fds(self._connection, [len(order).to_bytes(4, "big")], numbers)
        for end in theirs:
            os.close(end)
        self._connection.sendall(order)
        self._told = self._connection.makefile()
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork", timeout or 0)
            self.returncode = int(self._told.readline() or -signal.SIGKILL)
            self._told.close()
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def communicate(self) -> tuple[str, None]:
        if self.stdin:
            with contextlib.suppress(BrokenPipeError):
                self.stdin.close()
        said = ""
        if self.stdout and not self.stdout.closed:
            with self.stdout:
                said = self.stdout.read()
        self.wait()
        return said, None


def order_of(connection: socket.socket) -> tuple[Any, list[int]]:
    """Return what is asked: folder, words, environment; and the descriptors."""
    head, streams, _, _ = socket.recv_fds(connection, 4, 4)
    left, text = int.from_bytes(head, "big"), b""
    while len(text) < left:
        text += connection.recv(left - len(text))
    return marshal.loads(text), streams


def serve(folder: str, owner: int) -> list[str]:
    """Fork for each order until a process ends; in a fork, return its words."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/socket")
        listener.listen()
        if os.fork():
            os._exit(0)  # who has started this process need not wait any more
        end = os.pidfd_open(owner)
        while end not in select.select([listener, end], [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    (cwd, words, environment), streams = order_of(connection)
                    if (pid := os.fork()) == 0:
                        break
                    watch(pid, connection)
                    os._exit(0)
        else:
            shutil.rmtree(folder)
            os._exit(0)  # to free all that was imported takes a second
    os.close(end)
    os.setsid()
    become(cwd, environment, streams)
    return list(words)


def watch(pid: int, connection: socket.socket) -> None:
    """Tell of a fork and of its end; kill its session if the other side is gone."""
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(b"%d\n" % pid)
    if connection in select.select([os.pidfd_open(pid), connection], [], [])[0]:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(b"%d\n" % status)


def become(folder: str, environment: dict[str, str], streams: list[int]) -> None:
    """Give this process what it would have had from its start."""
    spare = [os.dup(stream) for stream in streams]  # none of them is in the place of another
    for number, stream in enumerate(spare):
        os.dup2(stream, number)
    for stream in {*spare, *streams} - {*range(len(streams))}:
        os.close(stream)
    # Not those of the server, which remember what its descriptors were.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
    how: dict[str, Any] = {"buffering": 1, "encoding": environment.get("PYTHONIOENCODING")}
    sys.stdout = open(1, "w", **how, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", **how, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(SET_BY_IMPORTS | environment)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]


def run(words: list[str]) -> None:
    """Do what Python does with these words."""
    if words[0] == QUICK:
        end_at_once(words[1:])
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(words[1], main.__dict__)
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(words[0]))
        runpy.run_path(words[0], run_name="__main__")


def end_at_once(words: list[str]) -> None:
    """Run a program and what it has registered for its end, and end without the rest."""
    status: Any = 0
    try:
        run(words)
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


if __name__ == "__main__":
    before = dict(os.environ)
    for module in sys.argv[3:]:
        importlib.import_module(module)
    SET_BY_IMPORTS = {name: os.environ[name] for name in os.environ if name not in before}
    gc.freeze()  # what the collector never looks at need not be copied for a fork
    run(serve(sys.argv[1], int(sys.argv[2])))
