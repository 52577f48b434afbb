"""OpenStack Swift in a folder: four processes that speak S3's protocol and check each signature.

``pip install swift==2.38.3`` into an environment of its own installs it; its ``bin`` belongs on the
PATH. The file system needs extended attributes.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from pathlib import Path

from tests.support.moto import PATIENT_S
from tests.support.redis_server import free_port

PROXY = shutil.which("swift-proxy-server")
MISSING = "needs Swift: pip install swift==2.38.3 into an environment whose bin is on the PATH"
USER, SECRET = "kv:engine", "a-secret-of-swift"
_PARTS = ("account", "container", "object")
_START_S = 60.0
_RESTS = """
[DEFAULT]
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
log_level = ERROR
[pipeline:main]
pipeline = {part}-server
[app:{part}-server]
use = egg:swift#{part}
"""
_FRONT = """
[DEFAULT]
swift_dir = {folder}
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
log_level = ERROR
[pipeline:main]
pipeline = catch_errors proxy-logging s3api tempauth copy slo proxy-server
[app:proxy-server]
use = egg:swift#proxy
allow_account_management = true
account_autocreate = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:proxy-logging]
use = egg:swift#proxy_logging
[filter:s3api]
use = egg:swift#s3api
s3_acl = false
location = us-east-1
[filter:tempauth]
use = egg:swift#tempauth
user_kv_engine = {secret} .admin
[filter:copy]
use = egg:swift#copy
[filter:slo]
use = egg:swift#slo
"""


class Swift:
    """The processes; all end with :meth:`stop`."""

    def __init__(self, folder: Path) -> None:
        if PROXY is None:
            raise RuntimeError(MISSING)
        self._folder, self._bin = folder, Path(PROXY).parent
        (folder / "devices" / "d").mkdir(parents=True)
        conf = "[swift-hash]\nswift_hash_path_suffix = test\n"
        (folder / "swift.conf").write_text(conf + "[storage-policy:0]\nname = one\ndefault = yes\n")
        self._ports = {part: free_port() for part in _PARTS}
        for part, port in self._ports.items():
            text = _RESTS.format(folder=folder, port=port, part=part)
            (folder / f"{part}-server.conf").write_text(text)
            builder = str(folder / f"{part}.builder")
            place = f"r1z1-127.0.0.1:{port}/d"
            for words in (["create", "4", "1", "1"], ["add", place, "1"], ["rebalance"]):
                command = [str(self._bin / "swift-ring-builder"), builder, *words]
                subprocess.run(command, check=True, capture_output=True, timeout=_START_S)
        self.port = free_port()
        text = _FRONT.format(folder=folder, port=self.port, secret=SECRET)
        (folder / "proxy-server.conf").write_text(text)
        self._processes = {part: self._start(part) for part in (*_PARTS, "proxy")}
        for port in (*self._ports.values(), self.port):
            self._wait(port)

    @property
    def endpoint(self) -> str:
        """The URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    def options(self, **more: object) -> dict[str, object]:
        """Make a bucket; return the settings of a tier in it."""
        import boto3  # the extra dev has it, and the package does not need it

        client = boto3.client(
            "s3", endpoint_url=self.endpoint, region_name="us-east-1",
            aws_access_key_id=USER, aws_secret_access_key=SECRET,
        )  # fmt: skip
        client.create_bucket(Bucket=(bucket := f"test-{uuid.uuid4().hex[:12]}"))
        client.close()
        os.environ.update(KV_USER=USER, KV_SECRET=SECRET)
        secrets = {"access_key_env": "KV_USER", "secret_key_env": "KV_SECRET"}
        place = {"url": f"s3://{bucket}/kv", "endpoint": self.endpoint}
        return {**place, **secrets, "timeout_s": PATIENT_S, **more}

    def signal(self, part: str, number: int) -> None:
        """Send a signal to one process: ``proxy``, ``object``..."""
        self._processes[part].send_signal(number)

    def restart(self, part: str) -> None:
        """Kill one process, and start it again."""
        self._processes[part].kill()
        self._processes[part].wait()
        self._processes[part] = self._start(part)
        self._wait({**self._ports, "proxy": self.port}[part])

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()

    def _start(self, part: str) -> "subprocess.Popen[bytes]":
        command = [str(self._bin / f"swift-{part}-server")]
        with (self._folder / f"{part}.log").open("ab") as log:
            return subprocess.Popen(
                [*command, str(self._folder / f"{part}-server.conf")],
                stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": ""},
            )  # fmt: skip

    def _wait(self, port: int) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            time.sleep(0.05)
        logs = [path.read_text()[-500:] for path in self._folder.glob("*.log")]
        raise RuntimeError(f"Swift did not start in time: {logs}")
