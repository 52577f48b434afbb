"""A bucket that refuses, lies, hangs or crawls: misses with a reason, by their deadline."""

import asyncio
import itertools
import logging
import subprocess
import sys
import time

import pytest

from kvoffload import open_backend
from kvoffload.backends.base import ReadResult
from kvoffload.backends.header import namespace_digest, pack_header
from kvoffload.backends.object import doctor
from kvoffload.testing.backends import filled, keys_of, slots
from kvoffload.testing.harness import payload_of, wrong_bytes
from tests.support.proxy import Bandwidth, CutAfter, FaultProxy, HangAfter
from tests.support.redis_engine import until
from tests.support.s3_stand_in import MISSING, STORED, Answer, S3StandIn, error, whole

pytest.importorskip("obstore", reason="obstore is not installed: the extra object has it")
KEY = keys_of(1)[0]
SIZE = 64 * 1024
DEADLINE_S = 0.3
MARGIN_S = 3.0
"""A busy machine wakes threads late."""


def said(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


async def opened(server, **more):
    return open_backend("object", server.options(**more), "n")


@pytest.mark.parametrize(
    ("answer", "reason", "remedy"),
    [
        (error(403, "AccessDenied"), "refused_forbidden", "s3:ListBucket"),
        (error(403, "RequestTimeTooSkewed"), "refused_clock_skew", "clock"),
        (error(403, "SignatureDoesNotMatch"), "refused_credentials", "secret_key"),
        (error(403, "InvalidAccessKeyId"), "refused_credentials", "access_key"),
        (error(400, "ExpiredToken"), "refused_expired_token", "token"),
        (error(400, "AuthorizationHeaderMalformed"), "refused_wrong_region", "region"),
        (Answer(301), "refused_wrong_region", "region"),
        (error(404, "NoSuchBucket"), "refused_missing_bucket", "create it"),
        (Answer(401), "refused_credentials", "credentials"),
        (error(400, "Other"), "refused_other", "server's log"),
    ],
)
async def test_what_an_operator_must_mend_is_said_once_with_the_remedy(
    answer, reason, remedy, caplog
):
    with S3StandIn(lambda method, path: answer) as server:
        backend = await opened(server)
        await backend.contains([])
        for _ in range(3):
            assert await backend.contains(keys_of(4)) == [False] * 4
            assert not any(await backend.read([KEY], slots(1)))
        await backend.close()
    assert backend.counters()[reason] >= 1
    lookups = [line for line in said(caplog) if line.startswith("object: lookups pause")]
    assert len(lookups) == 1
    assert remedy in lookups[0]
    assert len(server.asked) < 8, "the breaker was not open"


async def test_a_server_without_the_path_refuses_stores(caplog):
    with S3StandIn(lambda method, path: Answer(404)) as server:
        backend = await opened(server)
        assert await backend.write([KEY], filled([KEY])) == [False]
        await backend.close()
    assert backend.counters() == {"refused_missing_bucket": 1}
    assert "there is no such bucket" in caplog.text


@pytest.mark.parametrize("body", [b"<html>Sign in</html>", b""])
async def test_what_answers_each_request_with_a_page_is_no_bucket(body, caplog):
    page = Answer(200, body, {"Content-Type": "text/html"})
    with S3StandIn(lambda method, path: page) as server:
        backend = await opened(server)
        for _ in range(3):
            assert await backend.contains(keys_of(4)) == [False] * 4
            assert not any(await backend.read([KEY], slots(1)))
            assert await backend.write([KEY], filled([KEY])) == [False]
        assert backend.usage().gauges["up"] == 0
        await backend.close()
    assert backend.counters()["refused_other"] >= 3
    assert "expired" not in backend.counters()
    assert len(server.asked) < 12, "the breaker was not open"
    lines = said(caplog)
    assert len(lines) == 3
    assert all("no bucket" in line and "endpoint" in line for line in lines)


async def test_a_reader_loads_and_its_stores_pause(caplog):
    header = pack_header(KEY, namespace_digest("n"), payload_of(KEY, SIZE))
    content = header + payload_of(KEY, SIZE)
    reader = {"GET": whole(content), "HEAD": whole(content), "PUT": error(403, "AccessDenied")}
    with S3StandIn(lambda method, path: reader[method]) as server:
        backend = await opened(server, ttl_s=10**8)
        for _ in range(3):
            assert await backend.write(keys_of(5, "w"), filled(keys_of(5, "w"))) == [False] * 5
            into = slots(1)
            assert await backend.read([KEY], into) == [True]
            assert wrong_bytes([KEY], into) == []
        assert backend.usage().gauges["up"] == 1
        assert backend.usage().gauges["breakers_open"] == 1
        await backend.close()
    assert len([line for line in said(caplog) if "writes pause" in line]) == 1


async def test_a_server_without_create_only_stores_is_said_once_and_replaces(caplog):
    def answer(method, path):
        if method != "PUT":
            return whole(server.bodies[path]) if path in server.bodies else MISSING
        is_conditional = "if-none-match" in {name.lower() for name in server.sent[-1]}
        return error(501, "NotImplemented") if is_conditional else STORED

    with S3StandIn(answer) as server:
        backend, keys = await opened(server, threads=1, ttl_s=10**8), keys_of(3)
        for _ in range(2):
            assert await backend.write(keys, filled(keys)) == [True] * 3
        assert await backend.read(keys, into := slots(3)) == [True] * 3
        assert wrong_bytes(keys, into) == []
        assert doctor._check_create_only(backend._bucket, "name").verdict == "warning"
        await backend.close()
    assert backend.counters()["write_ok"] == 6
    assert sum("If-None-Match" in line for line in said(caplog)) == 1


async def test_the_breaker_opens_by_share_and_closes_when_the_bucket_answers(caplog):
    turns = itertools.count()
    busy, one_of = error(503, "SlowDown"), 5

    def answer(method, path):
        return busy if next(turns) % one_of == 0 else MISSING

    with S3StandIn(answer) as server:
        backend = await opened(server)
        await backend.contains(keys_of(40, "a"))
        assert backend.counters()["refused_slow_down"] >= 8
        assert backend.usage().gauges["up"] == 1, "a fifth of refusals opened it"
        one_of = 1
        await backend.contains(keys_of(40, "b"))
        assert backend.usage().gauges == {"up": 0, "breakers_open": 1, "inflight_bytes": 0}
        asked = len(server.asked)
        assert await backend.contains(keys_of(100, "c")) == [False] * 100
        assert len(server.asked) - asked <= 1
        assert backend.counters()["lookup_lost_breaker_open"] >= 99
        one_of = 10**9
        await until(lambda: backend.usage().gauges["up"] == 1)  # the engine is idle
        await backend.close()
    assert "slow down (503)" in "".join(said(caplog))
    assert "answers again" in "".join(said(caplog))


WRONG = {
    "nothing": b"",
    "less than a header": b"x" * 100,
    "a foreign object": b"x" * (256 + SIZE),
    "a huge object": b"x" * (20 << 20),
    "a cut chunk": (pack_header(KEY, namespace_digest("n"), payload_of(KEY, SIZE)) + b"abc"),
    "another key's chunk": pack_header(b"other", namespace_digest("n"), bytes(SIZE)) + bytes(SIZE),
    "another namespace's": pack_header(KEY, namespace_digest("m"), bytes(SIZE)) + bytes(SIZE),
    "a turned byte": pack_header(KEY, namespace_digest("n"), payload_of(KEY, SIZE))
    + b"\xff" * SIZE,
}


@pytest.mark.parametrize("kind", WRONG)
async def test_an_object_that_is_no_chunk_is_a_miss_and_is_replaced(kind):
    stored = {}

    def answer(method, path):
        return STORED if method == "PUT" else whole(stored["content"])

    stored["content"] = WRONG[kind]
    with S3StandIn(answer) as server:
        backend = await opened(server, ttl_s=10**8)
        assert await backend.contains([KEY]) == [True]
        assert await backend.read([KEY], slots(1)) == [ReadResult.CORRUPT]
        assert await backend.contains([KEY]) == [False]
        assert await backend.write([KEY], filled([KEY])) == [True]
        put = next(sent for (verb, _), sent in zip(server.asked, server.sent, strict=True)
                   if verb == "PUT")  # fmt: skip
        assert "If-None-Match" not in {name.title() for name in put}
        counters = backend.counters()
        assert counters["write_replaced"] == 1
        assert sum(n for name, n in counters.items() if name.startswith("corrupt_")) == 1
        assert await backend.contains([KEY]) == [True]
        await backend.close()


async def test_an_object_older_than_ttl_s_is_a_miss_and_is_replaced():
    content = pack_header(KEY, namespace_digest("n"), payload_of(KEY, SIZE))
    content += payload_of(KEY, SIZE)
    with S3StandIn(lambda verb, path: STORED if verb == "PUT" else whole(content)) as server:
        backend = await opened(server, ttl_s=3600)
        assert await backend.contains([KEY]) == [False]
        assert await backend.read([KEY], slots(1)) == [False]
        assert await backend.write([KEY], filled([KEY])) == [True]
        assert backend.counters()["expired"] == 1
        assert backend.counters()["write_replaced"] == 1
        await backend.close()


async def test_words_of_a_server_reach_neither_log_nor_counters(caplog):
    forged = "\r\nCRITICAL forged\x1b[2J" + "x" * 10_000
    answers = itertools.cycle([error(403, "AccessDenied", forged), error(500, f"C{forged}")])
    with S3StandIn(lambda method, path: next(answers)) as server:
        backend = await opened(server)
        await backend.contains(keys_of(9))
        await backend.write([KEY], filled([KEY]))
        await backend.close()
    assert "forged" not in "".join([*said(caplog), *backend.counters()])


FAULTS = {
    "hangs": HangAfter(0),
    "hangs within a chunk": HangAfter(30_000),
    "crawls": Bandwidth(1000),
    "resets": CutAfter(0),
    "resets within a chunk": CutAfter(30_000),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_each_call_ends_by_its_deadline_and_leaves_the_memory(server, fault):
    options = server.options()
    patient, keys = open_backend("object", options, "n"), keys_of(4)
    assert await patient.write(keys, filled(keys)) == [True] * 4
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        options["endpoint"] = options["endpoint"].replace(str(server.port), str(proxy.port))
        backend = open_backend("object", options | {"timeout_s": DEADLINE_S}, "n")
        proxy.to_client = [FAULTS[fault]]
        proxy.to_server = [FAULTS[fault]]
        into, memory, other = slots(4), filled(keys), keys_of(4, "other")
        for call in (
            lambda: backend.read(keys, into),
            lambda: backend.write(other, memory),
            lambda: backend.contains(other),
        ):
            began = time.monotonic()
            answers = await call()
            assert time.monotonic() - began < DEADLINE_S + MARGIN_S
            assert not all(answers)
        for slot in (*into, *memory):
            slot[:] = b"\xaa" * SIZE
        await asyncio.sleep(0.05)
        assert all(bytes(slot) == b"\xaa" * SIZE for slot in into)
        began = time.monotonic()
        await backend.close()
        assert time.monotonic() - began < MARGIN_S
    found = slots(4)
    assert await patient.read(keys, found) == [True] * 4
    stored = await patient.read(other, found)
    assert wrong_bytes(other, found, stored) == []
    await patient.close()


async def test_a_cancelled_call_does_not_wait_for_room(s3):
    """One chunk is in flight, the others wait; the cancellation ends them by its deadline."""
    options = s3.options(timeout_s=1.0, max_inflight_bytes=1 << 20, threads=8)
    async with FaultProxy("127.0.0.1", s3.port) as proxy:
        options["endpoint"] = f"http://127.0.0.1:{proxy.port}"
        backend, keys = open_backend("object", options, "n"), keys_of(8)
        proxy.to_server = [HangAfter(0)]
        task = asyncio.ensure_future(backend.write(keys, filled(keys, 1 << 20)))
        await asyncio.sleep(0.3)
        assert backend.usage().gauges["inflight_bytes"] == 1 << 20
        task.cancel()
        began = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - began < 1.0 + MARGIN_S
        assert backend.counters()["write_lost_cancelled"] >= 1
        await backend.close()


PROGRAM = """
import asyncio, sys
from kvoffload import open_backend
from kvoffload.testing.backends import filled, keys_of, slots
async def main():
    options = {"url": "s3://bucket/kv", "endpoint": sys.argv[1], "timeout_s": 0.3,
               "access_key_env": "KV_TEST_ACCESS_KEY", "secret_key_env": "KV_TEST_SECRET_KEY"}
    backend, keys = open_backend("object", options, "n"), keys_of(32)
    calls = [backend.read(keys, slots(32)), backend.write(keys, filled(keys)),
             backend.contains(keys)]
    tasks = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(float(sys.argv[2]))
    await backend.close()
    print(sum(map(bool, sum(await asyncio.gather(*tasks), []))))
asyncio.run(main())
"""


@pytest.mark.parametrize("times", [1, pytest.param(100, marks=pytest.mark.chaos)])
def test_a_process_that_closes_with_calls_in_flight_ends_cleanly(times):
    def answer(method, path):
        time.sleep(5)
        return MISSING

    with S3StandIn(answer) as server:
        words = [sys.executable, "-c", PROGRAM, str(server.options()["endpoint"])]
        for turn in range(times):
            done = subprocess.run(
                [*words, str(0.02 * (turn % 16))], capture_output=True, text=True, timeout=60
            )
            assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
            assert not [line for line in done.stderr.splitlines() if "pause, until" not in line]
