"""Real engines of one server of the host: what dies, who goes on, and what is hit afterwards."""

import re
import time

import pytest

from kvoffload.cli.top import fetch
from tests.support.host_server import HostServer
from tests.support.redis_server import free_port

pytestmark = pytest.mark.timeout(1800)

LENGTH, CACHED, CHUNKS = 1000, 992, 31  # whole blocks of 32 tokens in a prompt


@pytest.fixture
def engine(start, tmp_path):
    """Start an engine of the server in this folder, without a cache of its own."""
    settings = {"serve": str(tmp_path / "s"), "cpu_bytes": 0, "staging_bytes": "16MiB"}
    # Until the server has listed what it has, however long that takes.
    return lambda lookup_timeout_s=30.0: start(settings | {"lookup_timeout_s": lookup_timeout_s})


@pytest.fixture
def server(tmp_path):
    """Start the server in this folder; it ends with the test."""
    made = []

    def begin():
        made.append(HostServer(tmp_path, memory="64MiB", metrics_port=free_port()))
        return made[-1]

    yield begin
    for each in made:
        each.kill()


def hit_in_the_end(engine, prompt, told):
    """Ask until a prompt comes from the server; what it is answered is right all the while."""
    until_s = time.monotonic() + 300
    while True:
        assert engine.ask("reset")
        answer = engine.generate([prompt])
        assert answer["tokens"] == told
        if answer["cached"] == [CACHED]:
            return
        assert time.monotonic() < until_s, (answer, engine.log[-3000:])
        engine.ask("quiet")


def num_lent(port):
    """Return how many chunks the server has lent: engines load these out of its memory."""
    counts = re.findall(r'reason="lent",tier="memory"} (\d+)', fetch(f"http://127.0.0.1:{port}"))
    return sum(map(int, counts))


def test_engines_share_a_cache_that_outlives_them_and_go_on_without_it(
    engine, server, prompts, until
):
    first = engine(1.0)  # its first request finds no server
    wanted, other = prompts(2, LENGTH)
    told = first.generate([wanted])["tokens"]
    host = server()
    hit_in_the_end(first, wanted, told)

    second = engine()
    lent = num_lent(host.port)
    answer = second.generate([wanted])
    assert [answer["tokens"], answer["cached"]] == [told, [CACHED]]
    until(lambda: num_lent(host.port) >= lent + CHUNKS)

    first.kill()
    again = engine()
    answer = again.generate([wanted])
    assert [answer["tokens"], answer["cached"]] == [told, [CACHED]]
    again.kill()

    host.kill()
    assert second.ask("reset")
    answer = second.generate([wanted, other])
    assert [answer["tokens"][:1], answer["cached"]] == [told, [0, 0]]
    host.start()
    hit_in_the_end(second, other, answer["tokens"][1:])
    second.kill()
