"""Engines attached to the server of a host: they load out of its memory; outputs stay the same."""

import re

import pytest

from kvoffload.cli.top import fetch
from tests.support.host_server import HostServer
from tests.support.redis_server import free_port

pytestmark = pytest.mark.timeout(1800)


def test_an_engine_loads_what_another_one_stored_out_of_the_servers_memory(
    start, prompts, tmp_path, until
):
    port = free_port()
    server = HostServer(tmp_path, memory="256MiB", metrics_port=port)
    settings = {
        "cpu_bytes": 0,
        "staging_bytes": "64MiB",
        "serve": server.path,
        "lookup_timeout_s": 30.0,
    }
    try:
        first = start(settings)
        stored = first.generate(prompts(4, 1000))
        assert stored["cached"] == [0] * 4
        first.ask("quiet")
        second = start(settings)
        first.kill()
        loaded = second.generate(prompts(4, 1000))
        assert loaded["cached"] == [992] * 4
        assert loaded["tokens"] == stored["tokens"]
        until(lambda: num_lent(port) >= 4 * 31)
        server.kill()
        assert second.generate(prompts(4, 1000))["tokens"] == stored["tokens"]
    finally:
        server.kill()


def num_lent(port):
    """Return how many chunks the server has lent."""
    counts = re.findall(r'reason="lent",tier="memory"} (\d+)', fetch(f"http://127.0.0.1:{port}"))
    return sum(map(int, counts))
