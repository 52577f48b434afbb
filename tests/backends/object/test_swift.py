"""OpenStack Swift, which checks signatures, and whose processes stop and die.

It takes half a minute to start: ``make chaos`` runs these, where Swift is installed.
"""

import asyncio
import signal
import time

import pytest

from kvoffload import open_backend
from kvoffload.testing.backends import filled, keys_of, slots
from kvoffload.testing.harness import wrong_bytes

pytestmark = pytest.mark.chaos


@pytest.fixture
def server(swift):
    return swift


async def test_wrong_secrets_and_missing_buckets_are_said(options, monkeypatch, caplog):
    missing = open_backend("object", options | {"url": "s3://no-such-bucket/kv"}, "n")
    await missing.contains([])
    await missing.close()
    assert missing.counters()["refused_missing_bucket"] == 1
    monkeypatch.setenv("KV_SECRET", "wrong")
    wrong = open_backend("object", options, "n")
    assert await wrong.contains(keys_of(3)) == [False] * 3
    await wrong.close()
    assert "credentials are wrong" in caplog.text
    assert "create it" in caplog.text


@pytest.mark.parametrize("part", ["proxy", "object"])
async def test_a_process_that_stops_costs_misses_by_the_deadline(server, options, part):
    backend, keys = open_backend("object", options | {"timeout_s": 1.0}, "n"), keys_of(4)
    while not all(await backend.write(keys, filled(keys))):
        pass  # a busy machine may need more than a second
    server.signal(part, signal.SIGSTOP)
    try:
        for call in (
            lambda: backend.read(keys, slots(4)),
            lambda: backend.write(keys_of(4, "b"), filled(keys_of(4, "b"))),
            lambda: backend.contains(keys_of(4, "c")),
        ):
            began = time.monotonic()
            assert not any(await call())
            assert time.monotonic() - began < 3.0
    finally:
        server.signal(part, signal.SIGCONT)
    await backend.close()


async def test_no_wrong_byte_when_a_process_is_killed_under_stores(server, options):
    backend = open_backend("object", options, "n")
    for turn in range(4):
        keys = keys_of(16, f"turn{turn}")
        part = ("object", "proxy", "container", "account")[turn]
        await asyncio.gather(
            backend.write(keys, filled(keys)), asyncio.to_thread(server.restart, part)
        )
        into = slots(16)
        good = await backend.read(keys, into)
        assert wrong_bytes(keys, into, good) == []
    end = time.monotonic() + 60
    while not all(await backend.write(keys, filled(keys))):
        assert time.monotonic() < end, "stores do not work again"
    assert await backend.read(keys, into) == [True] * 16
    assert wrong_bytes(keys, into) == []
    await backend.close()
