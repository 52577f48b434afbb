"""Real engines of one server of the host: what dies, who goes on, and what is hit afterwards."""

import time

import pytest

from tests.support.host_server import HostServer

pytestmark = pytest.mark.timeout(1800)

LENGTH, CACHED = 1000, 992  # whole blocks of 32 tokens in a prompt


@pytest.fixture
def engine(start, tmp_path):
    """Start an engine of the server in this folder, without a cache of its own."""
    # Until the server has listed what it has, however long that takes.
    settings = {"serve": str(tmp_path / "s"), "cpu_bytes": 0, "lookup_timeout_s": 30.0}
    return lambda: start(settings | {"staging_bytes": "16MiB"})


@pytest.fixture
def server(tmp_path):
    """Start the server in this folder; it ends with the test."""
    made = []

    def begin():
        made.append(HostServer(tmp_path, memory="64MiB"))
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


def test_engines_share_a_cache_that_outlives_them_and_go_on_without_it(engine, server, prompts):
    first = engine()
    wanted, other = prompts(2, LENGTH)
    told = first.generate([wanted])["tokens"]  # no server is there
    host = server()
    hit_in_the_end(first, wanted, told)

    second = engine()
    answer = second.generate([wanted])
    assert [answer["tokens"], answer["cached"]] == [told, [CACHED]]

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
