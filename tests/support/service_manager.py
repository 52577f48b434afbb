"""What systemd does for a service that lets it keep descriptors, by the same protocol."""

import fcntl
import os
import socket
import subprocess

STORE_MAX = 1


class ServiceManager:
    """Starts servers, and passes on to each what the one before has let it keep.

    Args:
        folder: gets its socket.
    """

    def __init__(self, folder):
        self._path = str(folder / "notify")
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(self._path)
        self._sock.setblocking(False)
        self.kept = []
        """Names and descriptors."""
        self.told = []

    def start(self, words, **options):
        self.take_messages()
        fds = [fd for _, fd in self.kept]
        moved = " ".join(f"{3 + i}<&{fd} {fd}<&-" for i, fd in enumerate(fds))
        environment = {
            **os.environ,
            "NOTIFY_SOCKET": self._path,
            "FDSTORE": str(STORE_MAX),
            "LISTEN_FDS": str(len(fds)),
            "LISTEN_FDNAMES": ":".join(name for name, _ in self.kept),
        }
        script = ["bash", "-c", f'export LISTEN_PID=$$; exec "$@" {moved}', "bash", *words]
        return subprocess.Popen(script, pass_fds=fds, env=environment, **options)

    def take_messages(self):
        """Take in what the last server has said; it may be dead."""
        while True:
            try:
                data, fds, *_ = socket.recv_fds(self._sock, 4096, 8)
            except BlockingIOError:
                return
            said = dict(line.split("=", 1) for line in data.decode().splitlines())
            self.told.append(said)
            if "FDSTOREREMOVE" in said:
                self._forget(said["FDNAME"])
            for fd in fds:
                if "FDSTORE" in said and len(self.kept) < STORE_MAX:
                    self.kept.append((said["FDNAME"], fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)))
                os.close(fd)

    def _forget(self, wanted):
        for name, fd in self.kept:
            if name == wanted:
                os.close(fd)
        self.kept = [each for each in self.kept if each[0] != wanted]

    def close(self):
        self.take_messages()
        for name in {name for name, _ in self.kept}:
            self._forget(name)
        self._sock.close()
