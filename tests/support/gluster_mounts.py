"""A folder by two GlusterFS mounts of three bricks, whose files move between bricks as they get
their names.

The processes are those of a volume of type *distribute*, started without the management daemon.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time

from tests.support.redis_server import free_port

SERVER, CLIENT = shutil.which("glusterfsd"), shutil.which("glusterfs")
MISSING = "needs GlusterFS (Debian: glusterfs-server), /dev/fuse and root"
_BRICKS, _START_S = 3, 30.0
_BRICK = """
volume posix
  type storage/posix
  option directory {folder}
end-volume
volume locks
  type features/locks
  subvolumes posix
end-volume
volume brick
  type performance/io-threads
  subvolumes locks
end-volume
volume server
  type protocol/server
  option transport-type tcp
  option transport.socket.bind-address 127.0.0.1
  option transport.socket.listen-port {port}
  option auth.addr.brick.allow 127.0.0.1
  subvolumes brick
end-volume
"""
_OF_BRICK = """
volume client-{number}
  type protocol/client
  option transport-type tcp
  option remote-host 127.0.0.1
  option remote-port {port}
  option remote-subvolume brick
end-volume
"""
_ABOVE = ("performance/write-behind", "performance/open-behind", "performance/quick-read",
          "performance/md-cache", "performance/io-threads")  # fmt: skip
"""What the management daemon puts above the bricks, on the client's side."""


def is_possible():
    return bool(SERVER and CLIENT and os.path.exists("/dev/fuse")) and not os.geteuid()


class Bricks:
    """The processes that keep the files."""

    def __init__(self, where):
        self._where, self._processes, self.ports = where, [], []
        for number in range(_BRICKS):
            folder, port = where / f"brick-{number}", free_port()
            folder.mkdir()
            text = _BRICK.format(folder=folder, port=port)
            self._processes.append(started(SERVER, where, f"brick-{number}", text))
            self.ports.append(port)
        for port in self.ports:
            until(lambda port=port: is_open(port), where)

    def signal(self, number):
        """Stop, continue or kill what serves the mounts."""
        for process in self._processes:
            process.send_signal(number)

    def close(self):
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


def started(program, where, name, volume, *more):
    """Start a process of these translators, with its log in a folder."""
    file = where / f"{name}.vol"
    file.write_text(volume)
    command = [program, "-N", "-f", str(file), "-l", str(where / f"{name}.log")]
    command += ["-p", str(where / f"{name}.pid"), *map(str, more)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def is_open(port):
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    return False


def until(condition, where):
    end = time.monotonic() + _START_S
    while not condition():
        if time.monotonic() > end:
            logs = [path.read_text()[-500:] for path in where.glob("*.log")]
            raise RuntimeError(f"GlusterFS did not start in time: {logs}")
        time.sleep(0.05)


def volume_of(ports):
    """Return the translators of a mount."""
    names = [f"client-{number}" for number in range(len(ports))]
    parts = [_OF_BRICK.format(number=i, port=port) for i, port in enumerate(ports)]
    for kind in ("cluster/distribute", *_ABOVE):
        name = kind.partition("/")[2]
        # Else files go to another brick where the machine's disk is nearly full.
        option = "  option min-free-disk 0%\n" if name == "distribute" else ""
        parts.append(
            f"\nvolume {name}\n  type {kind}\n{option}  subvolumes {' '.join(names)}\nend-volume\n"
        )
        names = [name]
    return "".join(parts)


@contextlib.contextmanager
def gluster_mounts(where):
    """Mount a volume twice; the two paths and the bricks, or None if that cannot be had here."""
    if not is_possible():
        yield None
        return
    bricks, clients, paths = Bricks(where), [], []
    try:
        for name in ("one", "two"):
            path = where / name
            path.mkdir()
            clients.append(started(CLIENT, where, name, volume_of(bricks.ports), path))
            paths.append(path)
            until(path.is_mount, where)
        yield (*paths, bricks)
    finally:
        bricks.close()
        for path in paths:
            subprocess.run(["umount", "-l", str(path)], capture_output=True)
        for client in clients:
            client.kill()
            client.wait()
