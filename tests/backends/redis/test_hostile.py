"""Hostile servers: their replies name no counter, forge no log line, obtain no password, fill no
memory and end no task.
"""

import asyncio
import itertools
import logging
import time

import pytest
from redis_fakes import FakeRedis, bulk, masters_of, polite, table

from kvoffload.backends.redis.discovery import NUM_SLOTS, REFRESH_EVERY_S
from kvoffload.backends.redis.resp import MAX_TABLE_BYTES, ProtocolError, ReplyReader
from tests.support.redis_engine import PATIENT, RedisEngine, until

# ---- words of a server -------------------------------------------------------------------------


async def test_error_words_of_a_server_name_no_counter():
    """Each new word was a counter of its own, and a label of the engine's metrics."""
    fresh = itertools.count()

    def answer(words):
        if words[0] in (b"PING", b"INFO"):
            return polite(words)
        return b"-WORD%d%b no\r\n" % (next(fresh), b"x" * 1000)

    async with FakeRedis(answer) as server:
        async with RedisEngine(f"redis://{server.address}", **PATIENT) as engine:
            for _ in range(3):
                await engine.load()
                await engine.store()
            counters = engine.backend.counters()
    assert counters["refused_other"] > 0
    assert not [name for name in counters if "word" in name]


async def test_an_error_of_a_server_forges_no_log_line(caplog):
    forged = b"-NOPERM \x1b[2J\rCRITICAL forged" + b"x" * 3000 + b"\r\n"

    def answer(words):
        return forged if words[0] in (b"EXISTS", b"PSETEX") else polite(words)

    async with FakeRedis(answer) as server:
        async with RedisEngine(f"redis://{server.address}", **PATIENT) as engine:
            await engine.backend.contains(engine.keys)
            await engine.store()
    said = [record.getMessage() for record in caplog.records if "NOPERM" in record.getMessage()]
    assert len(said) == 2
    for line in said:
        assert line.isprintable()
        assert r"\x1b[2J\x0dCRITICAL" in line
        assert len(line) < 600


async def test_numbers_of_a_server_do_not_raise_into_the_engine():
    digits = b"9" * 5000
    info = b"run_id:a\r\nused_memory:%b\r\nmaxmemory:%b\r\ndb0:keys=%b\r\n" % ((digits,) * 3)

    def answer(words):
        return bulk(info) if words[0] == b"INFO" else polite(words)

    async with FakeRedis(answer) as server:
        async with RedisEngine(f"redis://{server.address}", **PATIENT) as engine:
            await engine.load()
            assert engine.count("connections") > 0
            assert engine.backend.usage().resident_bytes == 0


# ---- slot tables ---------------------------------------------------------------------------------

HOSTILE_TABLES = {
    "a slot number without end": lambda port: table((0, 2**60, "127.0.0.1", port)),
    "one slot too many": lambda port: table((0, NUM_SLOTS, "127.0.0.1", port)),
    "a negative slot": lambda port: table((-5, 3, "127.0.0.1", port)),
    "backwards": lambda port: table((9, 3, "127.0.0.1", port)),
    "a port too large": lambda port: table((0, NUM_SLOTS - 1, "127.0.0.1", 2**31)),
    "a host with control characters": lambda port: table((0, NUM_SLOTS - 1, "a\x1bb\0", port)),
    "a node for each slot": lambda port: table(
        *((slot, slot, "127.0.0.1", slot + 1) for slot in range(NUM_SLOTS))
    ),
    "twice the same slots": lambda port: table(*((0, 5, "127.0.0.1", port),) * 9),
    "rows announced without end": lambda port: b"*4000000000\r\n",
    "nested without end": lambda port: b"*1\r\n" * 3000,
    "no table": lambda port: b"+OK\r\n",
    "no numbers": lambda port: b"*1\r\n*3\r\n+a\r\n+b\r\n*2\r\n+c\r\n+d\r\n",
    "an error": lambda port: b"-ERR no\r\n",
}


async def comes_back_after_a_hostile_table(name):
    tables = []

    def answer(words):
        return tables[-1] if words[0].upper() == b"CLUSTER" else polite(words)

    async with FakeRedis(answer) as server:
        tables.append(HOSTILE_TABLES[name](server.port))
        async with RedisEngine(f"redis+cluster://{server.address}") as engine:
            assert await engine.load() == [False] * 8, name
            assert not server.sent(b"GETEX"), name
            tables.append(table((0, NUM_SLOTS - 1, "127.0.0.1", server.port)))

            async def served():
                await engine.load()
                return server.sent(b"GETEX") > 0

            await until(served)


async def test_after_a_hostile_slot_table_the_store_comes_back():
    """As soon as the table is right: nothing of it has ended for good."""
    async with asyncio.TaskGroup() as group:  # they mostly wait: side by side
        for name in HOSTILE_TABLES:
            group.create_task(comes_back_after_a_hostile_table(name), name=name)


@pytest.mark.parametrize("refuses", [True, False])
async def test_however_badly_a_cluster_answers_it_is_asked_for_its_table_at_a_pace(refuses):
    """Neither servers that refuse it nor redirects without end make a storm of questions."""

    def answer(words):
        if words[0].upper() == b"CLUSTER":
            row = (0, NUM_SLOTS - 1, "127.0.0.1", server.port)
            return b"-ERR no\r\n" if refuses else table(row)
        if words[0] == b"GETEX":
            return b"-MOVED 7 %b\r\n" % server.address.encode()
        return polite(words)

    async with FakeRedis(answer) as server:
        begun_s = time.monotonic()
        async with RedisEngine(f"redis+cluster://{server.address}", **PATIENT) as engine:
            while time.monotonic() < begun_s + 0.5:
                await engine.load()
                await asyncio.sleep(0.005)
        asked = server.sent(b"CLUSTER")
        assert 1 <= asked <= 2 + (time.monotonic() - begun_s) / REFRESH_EVERY_S


async def test_a_cluster_without_a_table_is_logged_once_and_so_is_its_return(caplog):
    """A cluster URL for a single server stored nothing, and no log line gave the reason."""
    tables = [b"-ERR This instance has cluster support disabled\r\n"]

    def answer(words):
        return tables[-1] if words[0].upper() == b"CLUSTER" else polite(words)

    def lines():
        return [r.getMessage() for r in caplog.records if r.getMessage().startswith("redis: ")]

    async with FakeRedis(answer) as server:
        async with RedisEngine(f"redis+cluster://{server.address}", **PATIENT) as engine:
            assert await engine.store() == [False] * 8
            await until(lambda: server.sent(b"CLUSTER") > 1)
            (line,) = lines()
            assert f"{server.address}: CLUSTER refused: ERR This instance has cluster" in line
            tables.append(table((0, NUM_SLOTS - 1, "127.0.0.1", server.port)))
            await until(lambda: len(lines()) == 2)
            assert "known again" in lines()[1]


@pytest.mark.parametrize("kind", ["cluster", "sentinel"])
async def test_servers_that_never_answer_are_said_to(kind, caplog):
    async with FakeRedis(lambda words: b"") as server:
        # Port 1 refuses, and so the second Sentinel leaves time to tell of the first.
        rest = ",127.0.0.1:1/mymaster" if kind == "sentinel" else ""
        url = f"redis+{kind}://{server.address}{rest}"
        async with RedisEngine(url, connect_timeout_s=0.1) as engine:
            await engine.store()
            await until(lambda: f"{server.address}: no reply in time" in caplog.text)


class Endless:
    """A source that sends the beginning of a table, and then one element over and over."""

    def __init__(self, element):
        self.element, self.rest, self.sent = element, b"*100000\r\n", 0

    def some(self, views):
        self.fill(views)
        return sum(view.nbytes for view in views)

    def fill(self, views):
        for view in views:
            self.rest += self.element * (view.nbytes // len(self.element) + 1)
            view[:], self.rest = self.rest[: view.nbytes], self.rest[view.nbytes :]
            self.sent += view.nbytes


@pytest.mark.parametrize("element", [bulk(b"x" * 50_000), b"*1\r\n:1\r\n"])
def test_a_table_without_end_is_given_up_at_its_bound(element):
    """The bound counts received bytes, not the announced length."""
    source = Endless(element)
    with pytest.raises(ProtocolError, match="table"):
        ReplyReader(source).table()
    assert source.sent <= 2 * MAX_TABLE_BYTES


# ---- redirects -----------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["MOVED", "ASK"])
async def test_a_redirect_to_a_stranger_brings_it_no_password(word, key_file):
    async with FakeRedis(polite) as thief:

        def answer(words):
            if words[0].upper() == b"CLUSTER":
                return table((0, NUM_SLOTS - 1, "127.0.0.1", server.port))
            if words[0] in (b"GETEX", b"PSETEX", b"EXISTS", b"PEXPIRE"):
                return b"-%b 7 %b\r\n" % (word.encode(), thief.address.encode())
            return polite(words)

        async with FakeRedis(answer) as server:
            url = f"redis+cluster://{server.address}"
            async with RedisEngine(url, password_file=key_file(), **PATIENT) as engine:
                for _ in range(3):
                    assert await engine.load() == [False] * 8
                    assert await engine.store() == [False] * 8
                    await engine.backend.contains(engine.keys)
                await asyncio.sleep(0.05)
                assert thief.accepted == 0
                assert engine.count(f"refused_{word.lower()}") > 0
                asked = min(server.sent(b"CLUSTER"), 1)
                await until(lambda: server.sent(b"CLUSTER") > asked)


NOWHERE = ["127.0.0.1:99999", f"127.0.0.1:{'9' * 200}", "a\0b:1", ":7000", f"{'x' * 300}:1", "?:1"]


async def stays_in_use_after_a_redirect_to(target):
    def answer(words):
        if words[0].upper() == b"CLUSTER":
            return table((0, NUM_SLOTS - 1, "127.0.0.1", server.port))
        if words[0] == b"GETEX" and lies:
            return b"-MOVED 7 %b\r\n" % target.encode()
        return polite(words)

    lies = True
    async with FakeRedis(answer) as server:
        async with RedisEngine(f"redis+cluster://{server.address}", **PATIENT) as engine:
            for _ in range(4):
                assert await engine.load() == [False] * 8, target
            lies = False

            async def misses():
                before = engine.count("read_missing")
                await engine.load()
                return engine.count("read_missing") == before + 8

            await until(misses)
            assert engine.count("connections") <= 3, target


async def test_redirects_to_nowhere_leave_the_server_in_use():
    async with asyncio.TaskGroup() as group:
        for target in NOWHERE:
            group.create_task(stays_in_use_after_a_redirect_to(target), name=target)


# ---- Sentinels -----------------------------------------------------------------------------------

HOSTILE_SENTINELS = {
    "a port too large": masters_of("m", "127.0.0.1", "99999"),
    "a port that is none": masters_of("m", "127.0.0.1", "x"),
    "a host that is none": masters_of("m", "a\x1b\0b", "6379"),
    "no rows": b"*1\r\n*1\r\n+x\r\n",
    "a number": b":5\r\n",
    "nested without end": b"*1\r\n" * 3000,
    "announced without end": b"*4000000000\r\n",
    "an error": b"-ERR \x1b[2J\r\n",
}


async def comes_back_after_a_hostile_sentinel(name):
    def answer(words):
        return said if words[0].upper() == b"SENTINEL" else polite(words)

    said = HOSTILE_SENTINELS[name]
    async with FakeRedis(polite) as master, FakeRedis(answer) as sentinel:
        async with RedisEngine(f"redis+sentinel://{sentinel.address}/m") as engine:
            for _ in range(3):
                assert await engine.load() == [False] * 8, name
            said = masters_of("m", "127.0.0.1", str(master.port))

            async def served():
                await engine.load()
                return engine.count("read_missing") >= 8

            await until(served)


async def test_after_a_hostile_sentinel_the_store_comes_back(caplog):
    caplog.set_level(logging.DEBUG, logger="kvoffload")
    async with asyncio.TaskGroup() as group:
        for name in HOSTILE_SENTINELS:
            group.create_task(comes_back_after_a_hostile_sentinel(name), name=name)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("kvoffload")]
    assert any("no Sentinel names a master" in line for line in said)
    assert [line for line in said if not line.isprintable()] == []
