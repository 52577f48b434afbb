"""A folder by two sshfs mounts: a real file system over a network, which can be stopped."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time

_PLACES = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server")
SERVER = next(filter(os.path.exists, _PLACES), None)
MISSING = "needs sshfs, sftp-server (Debian: sshfs, openssh-sftp-server), /dev/fuse and root"


def is_possible():
    return (
        bool(shutil.which("sshfs") and SERVER and os.path.exists("/dev/fuse")) and not os.geteuid()
    )


class Server:
    """Serves files to sshfs: one process a connection, without encryption or password."""

    def __init__(self):
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._processes = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                with connection:
                    self._processes.append(
                        subprocess.Popen([SERVER, "-e"], stdin=connection, stdout=connection,
                                         stderr=subprocess.DEVNULL)
                    )  # fmt: skip

    def signal(self, number):
        """Stop, continue or kill what serves the mounts."""
        for process in self._processes:
            process.send_signal(number)

    def close(self):
        self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread's wait for a connection
        self._thread.join()
        self._socket.close()
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


@contextlib.contextmanager
def sshfs_mounts(where):
    """Mount a folder twice; the two paths and the server, or None if that cannot be had here."""
    if not is_possible():
        yield None
        return
    served, server, paths = where / "served", Server(), []
    served.mkdir(mode=0o700)
    try:
        for name in ("one", "two"):
            path = where / name
            path.mkdir()
            options = f"directport={server.port},cache=no,auto_unmount"
            command = ["sshfs", "-o", options, f"127.0.0.1:{served}", str(path)]
            if subprocess.run(command, capture_output=True).returncode:
                break
            paths.append(path)
        yield (*paths, server) if len(paths) == 2 else None
    finally:
        server.close()
        for path in paths:
            subprocess.run(["umount", "-l", str(path)], capture_output=True)
            for _ in range(50):
                if not os.path.ismount(path):
                    break
                time.sleep(0.02)
