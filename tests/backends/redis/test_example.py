"""The examples with Redis: two engines that share one, and the server with its users."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload import open_backend
from tests.support.redis_engine import until
from tests.support.redis_server import BINARY, MISSING, free_port

START = Path(__file__).parents[3] / "examples" / "redis" / "start.sh"
EXAMPLE = Path(__file__).parents[3] / "examples" / "redis" / "two_engines.py"


@pytest.mark.chaos
@pytest.mark.skipif(BINARY is None, reason=MISSING)
def test_the_second_engine_loads_what_the_first_computed():
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "'REDIS': 512" in done.stdout  # whole chunks of 256 tokens
    assert "same answer: True" in done.stdout


@pytest.fixture
def secrets(tmp_path):
    """Passwords and a secret, as the Compose files have them."""
    for name in ("password", "operator_password", "secret"):
        path = tmp_path / name
        path.write_text(os.urandom(32).hex() + "\n")
        path.chmod(0o600)
    return tmp_path


@contextlib.contextmanager
def started(secrets, port):
    """The server as in the container, with the host's program."""
    options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(secrets), "--save", ""]
    options += ["--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"]
    environment = {**os.environ, "SECRETS": str(secrets), "TMPDIR": str(secrets)}
    process = subprocess.Popen(
        ["sh", str(START), BINARY, *options],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(BINARY is None, reason=MISSING)
async def test_the_server_of_the_compose_files_lets_each_user_do_its_own(secrets):
    port = free_port()
    engine = {
        "url": f"redis://127.0.0.1:{port}",
        "username": "kvoffload",
        "password_file": f"{secrets}/password",
        "secret_file": f"{secrets}/secret",
    }
    operator = engine | {"username": "operator", "password_file": f"{secrets}/operator_password"}
    with started(secrets, port):
        backend, looking = (open_backend("redis", each, "n") for each in (engine, operator))

        async def up():
            return (await backend.diagnose())[0].check != "reachable"

        await until(up)
        findings = await backend.diagnose()
        found = {finding.check: finding.verdict for finding in findings}
        # How fast a busy machine is says nothing of the server's settings.
        speed = {found.pop("latency"), found.pop("throughput")}
        assert set(found.values()) == {"ok"}, findings
        assert "failed" not in speed
        assert (await looking.survey()).held == []
        with pytest.raises(OSError, match="scan"):
            await backend.survey()
        await backend.close()
        await looking.close()


@pytest.mark.skipif(BINARY is None, reason=MISSING)
@pytest.mark.parametrize("name", ["password", "operator_password"])
def test_the_server_does_not_start_with_a_short_password(secrets, name):
    (secrets / name).write_text("hunter2\n")
    with started(secrets, free_port()) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"{name} is shorter than 16 characters" in said
    assert "hunter2" not in said
