"""Calls of the Redis tier to fake servers, and the parsers of servers' replies."""

import asyncio
import logging
import time

import pytest
from redis.crc import key_slot as slot_of_name
from redis_fakes import FakeRedis, masters_of, polite

from kvoffload import open_backend
from kvoffload.backends.redis import discovery, namespace_info
from kvoffload.backends.redis.admin import count_of, usage_of
from kvoffload.backends.redis.circuit_breaker import CircuitBreaker
from kvoffload.backends.redis.connection import Address
from kvoffload.backends.redis.discovery import (
    NUM_SLOTS,
    find_master,
    key_slot,
    parse_address,
    parse_masters,
    parse_redirect,
    parse_slots,
)
from kvoffload.backends.redis.options import Access, RedisOptions
from kvoffload.backends.redis.resp import ServerError
from kvoffload.testing.backends import filled, keys_of, slots
from tests.support.redis_engine import PATIENT, RedisEngine, until
from tests.support.redis_server import free_port


async def test_a_wrong_number_of_buffers_is_an_error_before_any_connect():
    backend = open_backend("redis", {"url": f"redis://127.0.0.1:{free_port()}"}, "n")
    with pytest.raises(ValueError, match="2 keys, but 1 buffers"):
        await backend.read(keys_of(2), slots(1))
    with pytest.raises(ValueError, match="1 keys, but 2 buffers"):
        await backend.write(keys_of(1), slots(2))
    assert backend.counters() == {}
    await backend.close()


async def test_stores_and_misses_are_counted_once_each():
    def answer(words):
        return b":1\r\n" if words[0] == b"PEXPIRE" and words[1].endswith(there) else polite(words)

    keys = keys_of(5)
    there = b"{%b}" % keys[0].hex().encode()
    async with FakeRedis(answer) as server:
        backend = open_backend("redis", {"url": f"redis://{server.address}", **PATIENT}, "n")
        assert await backend.write(keys, filled(keys)) == [True] * 5
        assert await backend.read(keys, slots(5)) == [False] * 5
        counts = backend.counters()
        shown = {name: counts.get(name) for name in ("write_present", "write_ok", "read_missing")}
        assert shown == {"write_present": 1, "write_ok": 4, "read_missing": 5}
        assert server.sent(b"PSETEX") == 4
        await backend.close()


async def test_only_probes_connect_while_a_breaker_is_open(monkeypatch):
    monkeypatch.setattr(CircuitBreaker, "probe_in", lambda self: 60.0)
    async with RedisEngine(f"redis://127.0.0.1:{free_port()}", connections=1) as engine:
        while not engine.open:
            assert await engine.load() == [False] * 8
        tried, lost = engine.count("connect_failed"), engine.count("read_lost_breaker_open")
        for _ in range(3):
            assert await engine.load() == [False] * 8
            assert await engine.store() == [False] * 8
            await asyncio.sleep(0.05)
        assert engine.count("connect_failed") == tried
        assert engine.count("read_lost_breaker_open") == lost + 24
        assert engine.count("write_lost_breaker_open") == 24


async def test_a_redirect_without_a_cluster_url_is_logged_once(caplog):
    def answer(words):
        return b"-MOVED 7 127.0.0.1:1\r\n" if words[0] == b"GETEX" else polite(words)

    async with FakeRedis(answer) as server:
        async with RedisEngine(f"redis://{server.address}", **PATIENT) as engine:
            for _ in range(2):
                assert await engine.load() == [False] * 8
    (record,) = [r for r in caplog.records if "redis+cluster://" in r.getMessage()]
    assert record.levelno == logging.ERROR
    assert "MOVED" in record.getMessage()


# ---- the description of a namespace --------------------------------------------------------------


async def test_uses_write_the_description_at_a_limited_rate(monkeypatch):
    monkeypatch.setattr(namespace_info, "_EVERY_S", 0.3)
    async with FakeRedis(polite) as server:
        async with RedisEngine(f"redis://{server.address}", **PATIENT) as engine:
            await engine.load()
            await asyncio.sleep(0.1)
            assert server.sent(b"PSETEX") == 0  # no description is set yet
            await engine.backend.describe({"model": "m", "dtype": "bf16"})
            await until(lambda: server.sent(b"PSETEX") == 1)
            begun_s = time.monotonic()

            async def goes_on():
                await engine.load()
                return time.monotonic() > begun_s + 1.0 and server.sent(b"PSETEX") > 1

            await until(goes_on)
            assert server.sent(b"PSETEX") <= 2 + (time.monotonic() - begun_s) / 0.3
            (command, *_) = [words for words in server.commands if words[0] == b"PSETEX"]
            assert command[1].endswith(b":facts")
            assert command[2:] == [b"86400000", b'{"dtype": "bf16", "model": "m"}']
            await asyncio.sleep(0.4)
            before = server.sent(b"PSETEX")
            await asyncio.sleep(0.5)
            assert server.sent(b"PSETEX") == before  # no chunk was used


@pytest.mark.parametrize(
    ("error", "again"), [(b"OOM full", False), (b"NOPERM no", False), (b"MISCONF disk", True)]
)
async def test_a_refused_description_waits_a_minute_and_a_failed_one_less(
    monkeypatch, error, again
):
    monkeypatch.setattr(namespace_info, "_EVERY_S", 0.05)

    def answer(words):
        return b"-%b\r\n" % error if words[0] == b"PSETEX" else polite(words)

    async with FakeRedis(answer) as server:
        async with RedisEngine(f"redis://{server.address}", **PATIENT) as engine:
            await engine.backend.describe({"model": "m"})
            await until(lambda: server.sent(b"PSETEX") > 0)
            for _ in range(20):
                await engine.load()
                await asyncio.sleep(0.02)
            assert (server.sent(b"PSETEX") > 1) is again


# ---- Sentinels -----------------------------------------------------------------------------------


async def test_the_next_sentinel_replaces_one_that_is_down():
    def answer(words):
        return masters_of("m", "127.0.0.1", "7") if words[0] == b"SENTINEL" else polite(words)

    async with FakeRedis(answer) as sentinel:
        url = f"redis+sentinel://127.0.0.1:{free_port()},{sentinel.address}/m"
        options = RedisOptions(url=url, connect_timeout_s=10.0)
        found = await asyncio.to_thread(find_master, Access(options))
        assert found == parse_address("127.0.0.1", "7")


async def test_the_error_shows_each_sentinels_answer_and_the_first_failure_is_its_cause():
    def answer(words):
        return masters_of("n", "127.0.0.1", "7") if words[0] == b"SENTINEL" else polite(words)

    down = free_port()
    async with FakeRedis(answer) as sentinel, FakeRedis(lambda words: b"-ERR odd\r\n") as other:
        url = f"redis+sentinel://127.0.0.1:{down},{sentinel.address},{other.address}/m"
        options = RedisOptions(url=url, connect_timeout_s=10.0)
        with pytest.raises(ConnectionError, match="no Sentinel names a master 'm'") as caught:
            await asyncio.to_thread(find_master, Access(options))
    text = str(caught.value)
    assert f"{sentinel.address}: knows only ['n']" in text
    assert f"127.0.0.1:{down}: " in text
    assert f"{other.address}: SENTINEL refused: ERR odd" in text
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


async def test_a_tier_is_down_while_no_sentinel_names_its_master_and_the_master_then_serves(caplog):
    """The reason is logged once, and the Sentinels are asked at a pace."""
    masters, begun_s = [], time.monotonic()

    def answer(words):
        if words[0] == b"SENTINEL":
            return masters[0] if masters else b"-ERR no\r\n"
        return polite(words)

    async with FakeRedis(polite) as master, FakeRedis(answer) as sentinel:
        async with RedisEngine(f"redis+sentinel://{sentinel.address}/m", **PATIENT) as engine:
            assert await engine.load() == [False] * 8
            await until(lambda: sentinel.sent(b"SENTINEL") > 1)
            assert engine.backend.usage().gauges["up"] == 0
            assert engine.count("read_no_server") == 8
            (line,) = (each for each in caplog.messages if "no Sentinel names" in each)
            assert f"{sentinel.address}: SENTINEL refused: ERR no" in line
            masters.append(masters_of("m", "127.0.0.1", str(master.port)))

            async def served():
                await engine.load()
                return master.sent(b"GETEX") > 0

            await until(served)
            assert engine.backend.usage().gauges["up"] == 1
            most = 2 + (time.monotonic() - begun_s) / discovery.REFRESH_EVERY_S
            assert sentinel.sent(b"SENTINEL") <= most


@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
async def test_no_request_waits_on_once_no_server_says_who_the_servers_are(kind):
    async with FakeRedis(lambda words: b"-ERR no\r\n") as server:
        path = "/m" if kind == "sentinel" else ""
        url, asked = f"redis+{kind}://{server.address}{path}", {"connect_timeout_s": 3600.0}
        async with RedisEngine(url, **asked) as engine:
            assert await engine.load() == [False] * 8
            assert engine.count("read_no_server") == 8


# ---- replies of servers --------------------------------------------------------------------------


ASKED = Address("asked", 1, "")


def test_rows_of_a_slot_table_reach_from_one_slot_to_the_last_one():
    rows = [[5, 5, [b"a", 1]], [NUM_SLOTS - 1, NUM_SLOTS - 1, [None, 2]], [0, 4, [b"", 3, b"id"]]]
    assert parse_slots(rows, ASKED) == [
        (0, 4, parse_address("asked", "3")),
        (5, 5, parse_address("a", "1")),
        (NUM_SLOTS - 1, NUM_SLOTS - 1, parse_address("asked", "2")),
    ]
    for unknown in ([b"?", 1], [b"", 0]):
        assert parse_slots([[0, 1, unknown], [2, 3, [b"a", 1]]], ASKED) == [
            (2, 3, parse_address("a", "1"))
        ]
    for row in ([5, 4, [b"a", 1]], [-1, 4, [b"a", 1]], [0, NUM_SLOTS, [b"a", 1]], [0, 1], 7):
        with pytest.raises(ValueError, match=r"row of a slot table|instead of an array"):
            parse_slots([row], ASKED)
    with pytest.raises(ValueError, match="in two rows"):
        parse_slots([[0, 5, [b"a", 1]], [5, 6, [b"b", 1]]], ASKED)


def test_a_slot_table_has_at_most_as_many_nodes_as_a_cluster():
    rows = [[slot, slot, [b"a", slot + 1]] for slot in range(1025)]
    assert len(parse_slots(rows[:1024], ASKED)) == 1024
    with pytest.raises(ValueError, match="more than 1024 nodes"):
        parse_slots(rows, ASKED)


def test_the_slot_of_a_key_is_that_of_its_tag():
    assert key_slot(b"123456789") == 0x31C3  # of the specification
    for tag in (b"", b"00", b"ff" * 60, b"kvoffload:n:facts"):
        assert key_slot(tag) == slot_of_name(tag)
        assert not tag or key_slot(tag) == slot_of_name(b"kvoffload:n:xxh3:{%b}" % tag)


@pytest.mark.parametrize("port", ["1", "65535"])
def test_an_address_has_a_host_and_a_port(port):
    address = parse_address("host-1.x", port)
    assert (address.host, address.port, address.path) == ("host-1.x", int(port), "")


@pytest.mark.parametrize("port", ["0", "65536", "", "-1", "1.0", "٣", "000001"])
def test_a_wrong_port_is_refused(port):
    with pytest.raises(ValueError, match="not a port"):
        parse_address("host", port)


def test_a_redirect_names_a_slot_and_a_server():
    def of(text):
        return parse_redirect(ServerError.parse(text))

    assert of(b"MOVED 16383 [::1]:7000") == (16383, parse_address("::1", "7000"))
    assert of(b"ASK 0 h:1") == (0, parse_address("h", "1"))
    for text in (b"MOVED", b"MOVED 1", b"MOVED x h:1", b"MOVED 1 h:1 x", b"MOVED 100000 h:1"):
        with pytest.raises(ValueError, match="not a redirect"):
            of(text)
    with pytest.raises(ValueError, match="a redirect of slot 16384"):
        of(b"MOVED 16384 h:1")


def test_a_master_that_is_down_has_no_address():
    def row(flags):
        return [b"name", b"m", b"ip", b"h", b"port", b"1", b"flags", flags]

    assert parse_masters([row(b"master")]) == {"m": parse_address("h", "1")}
    for flags in (b"master,s_down", b"master,o_down", b"slave", b""):
        assert parse_masters([row(flags)]) == {"m": None}
    with pytest.raises(ValueError, match="not a description of a master"):
        parse_masters([[b"name", 7]])


def test_usage_is_the_sum_of_the_servers_and_unlimited_if_one_has_no_limit():
    one = {"used_memory": "10", "maxmemory": "100", "db0": "keys=3,expires=3", "db1": "keys=9"}
    two = {"used_memory": "5", "maxmemory": "50"}
    assert usage_of([one, two], 0)[:3] == (15, 150, 3)
    assert usage_of([one], 1)[:3] == (10, 100, 9)
    assert usage_of([one, two | {"maxmemory": "0"}], 0)[:3] == (15, None, 3)
    assert usage_of([], 0)[:3] == (0, None, 0)
    assert [count_of(text) for text in ("", "x", "-5", "9" * 18, "9" * 19)] == [
        0, 0, 0, 10**18 - 1, 0,
    ]  # fmt: skip
