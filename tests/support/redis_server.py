"""Real Redis servers for tests and benchmarks: on free loopback ports, in folders of their own.

Everything started is ended by :meth:`RedisServer.stop`, also when it was paused. Which program is
run may be said by the environment variable ``KVOFFLOAD_REDIS_SERVER``, to test another version, or
Valkey; by default it is the ``redis-server`` or ``valkey-server`` that is installed.
"""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_CHOSEN = os.environ.get("KVOFFLOAD_REDIS_SERVER")
_NAMES = [_CHOSEN] if _CHOSEN else ["redis-server", "valkey-server"]
BINARY = next((path for path in map(shutil.which, _NAMES) if path), None)
MISSING = "needs " + " or ".join(_NAMES)
_START_S = 60.0


def free_port() -> int:
    """A TCP port nobody listens on now, and the one 10,000 above it (a cluster's second port).

    Below the range the kernel takes ports for outgoing connections from, so that none of those
    takes it before the server does.
    """
    while True:
        port = random.SystemRandom().randrange(10_240, 21_760)
        with socket.socket() as one, socket.socket() as two, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            two.bind(("127.0.0.1", port + 10_000))
            return port


class RedisServer:
    """A server process; remembers its settings, so that it can be started again.

    Args:
        folder: its working directory, made if need be.
        arguments: settings as on the command line: ``("--maxmemory", "64mb")``.
        port: where it listens; a free one by default.
        sentinel: start as a Sentinel; the settings go into its file.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        port: int | None = None,
        sentinel: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.port = port or free_port()
        self._arguments = arguments
        self._sentinel = tuple(sentinel)
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    @property
    def url(self) -> str:
        """A URL that reaches it."""
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Its process."""
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    def start(self, wait: bool = True) -> None:
        """Start it, empty unless its folder holds a snapshot."""
        if BINARY is None:
            raise RuntimeError(MISSING)
        command = [BINARY]
        if self._sentinel:
            config = self.folder / "sentinel.conf"
            config.write_text("\n".join([f"port {self.port}", *self._sentinel]) + "\n")
            command += [str(config), "--sentinel"]
        else:
            command += ["--port", str(self.port), "--save", "", "--appendonly", "no"]
        command += ["--dir", str(self.folder), "--bind", "127.0.0.1", *self._arguments]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until its port takes connections."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError((self.folder / "log").read_text()[-2000:])
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            time.sleep(0.01)
        raise RuntimeError("redis-server did not start in time")

    def cli(self, *words: str, tls: Sequence[str] = ()) -> str:
        """Run one command through redis-cli and return what it printed."""
        name = "redis-cli" if shutil.which("redis-cli") else "valkey-cli"
        done = subprocess.run(
            [name, "-h", "127.0.0.1", "-p", str(self.port), *tls, *words],
            capture_output=True,
            text=True,
            timeout=_START_S,
            check=True,
        )
        return done.stdout.strip()

    def pause(self) -> None:
        """Stop its process in its tracks: connections stay open, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, as a crash does. It holds nothing when started again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    stop = kill


@contextlib.contextmanager
def redis_cluster(folder: Path, masters: int = 3) -> Iterator[list[RedisServer]]:
    """A cluster of masters without replicas, all slots served."""
    servers = [
        RedisServer(
            folder / f"node{i}", "--cluster-enabled", "yes", "--cluster-node-timeout", "2000"
        )
        for i in range(masters)
    ]
    try:
        bounds = [round(i * 16384 / masters) for i in range(masters + 1)]
        for server, start, stop in zip(servers, bounds, bounds[1:], strict=False):
            server.cli("cluster", "addslotsrange", str(start), str(stop - 1))
            server.cli("cluster", "meet", "127.0.0.1", str(servers[0].port))
        deadline = time.monotonic() + _START_S
        while not all(_settled(server, masters) for server in servers):
            if time.monotonic() > deadline:
                raise RuntimeError("the cluster did not settle in time")
            time.sleep(0.05)
        yield servers
    finally:
        for server in servers:
            server.stop()


def _settled(server: RedisServer, masters: int) -> bool:
    info = server.cli("cluster", "info")
    return "cluster_state:ok" in info and f"cluster_known_nodes:{masters}" in info


def make_certificates(folder: Path) -> dict[str, str]:
    """A certificate authority and a server's certificate for ``localhost``, made by openssl.

    Returns:
        paths by name: ``ca``, ``cert``, ``key``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ca, ca_key, cert, key, request = (
        str(folder / name) for name in ("ca.pem", "ca.key", "cert.pem", "cert.key", "request.pem")
    )
    # What a strict verifier (Python 3.13's default) wants to see beside the name.
    extension = folder / "san"
    extension.write_text("subjectAltName=DNS:localhost\nauthorityKeyIdentifier=keyid\n")
    itself = ["-x509", "-days", "2", "-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    sign = ["-CA", ca, "-CAkey", ca_key, "-CAcreateserial"]
    for words in (
        ["req", *itself, *curve, "-keyout", ca_key, "-out", ca, "-subj", "/CN=test"],
        ["req", *curve, "-keyout", key, "-out", request, "-subj", "/CN=localhost"],
        ["x509", "-req", "-in", request, "-out", cert, "-extfile", str(extension), *sign],
    ):
        subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=240)
    return {"ca": ca, "cert": cert, "key": key}
