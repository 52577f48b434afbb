"""What an engine that sends too much costs: bounded memory, and turns of other engines."""

import asyncio
import socket

import pytest
from disk_parts import until

from kvoffload.io import server
from kvoffload.io.open_stores import OpenStore
from kvoffload.io.protocol import (
    Answered,
    Ask,
    Await,
    Cancel,
    Forget,
    Forgotten,
    Load,
    MessageReader,
    Opened,
    Present,
    Remove,
    frame,
)
from kvoffload.io.server import CLOGGED_BYTES, KEYS_PER_TASK, MESSAGES_PER_TURN, Session
from tests.support.io_rig import opening

OPEN = opening([("store", "store", {})])
KEY = b"k" * 36


class HangingStore:
    """A store whose calls wait until they may end."""

    def __init__(self):
        self.may_end, self.calls = asyncio.Event(), []

    async def _call(self, name, keys):
        self.calls.append(name)
        await self.may_end.wait()
        return [True] * len(keys)

    async def contains(self, keys):
        return await self._call("contains", keys) if keys else []

    async def read(self, keys, into):
        return await self._call("read", keys)

    async def remove(self, keys):
        await self._call("remove", keys)

    async def close(self):
        self.may_end.set()


class Engine:
    """An engine's end of a session over a store."""

    def __init__(self, store, most_keys):
        async def open_store(wanted, i, places):
            return OpenStore("store", store)

        self.sock, theirs = socket.socketpair()
        self.sock.setblocking(False)
        self.session = Session(memoryview(bytearray(4096)), open_store, most_keys=most_keys)
        self.serving = asyncio.create_task(self.session.serve(theirs))
        self._reader, self._heard = MessageReader(to_server=False), []

    async def send(self, *messages):
        data = b"".join(map(frame, messages))
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def hear(self, kind, count=1):
        """Return the next messages of a kind."""
        while True:
            found = [each for each in self._heard if isinstance(each, kind)][:count]
            if len(found) == count:
                self._heard = [each for each in self._heard if each not in found]
                return found
            data = await asyncio.get_running_loop().sock_recv(self.sock, 1 << 16)
            assert data, "the session has ended"
            self._heard += self._reader.feed(data)

    async def leave(self):
        self.sock.close()
        await self.serving


@pytest.fixture
async def engines():
    """Make engines; the bound of their sessions is in tasks of one key."""
    made = []

    async def make(store=None, most=1000):
        engine = Engine(store or HangingStore(), most * (KEYS_PER_TASK + 1))
        made.append(engine)
        await engine.send(OPEN)
        await engine.hear(Opened, 2)
        return engine

    yield make
    for engine in made:
        await engine.leave()


def loads(numbers):
    return [Load(number, "store", [KEY], [0], 16) for number in numbers]


async def test_orders_beyond_the_bound_are_misses_at_once_and_a_cancel_is_read(engines):
    store = HangingStore()
    engine = await engines(store, most=10)
    await engine.send(*loads(range(30)))
    refused = await engine.hear(Answered, 20)
    assert {(each.ok, each.reason) for each in refused} == {(b"\0", "busy")}
    assert {each.job for each in refused} == set(range(10, 30))
    await engine.send(Cancel(3))
    (cancelled,) = await engine.hear(Answered)
    assert (cancelled.job, cancelled.reason) == (3, "cancelled")
    store.may_end.set()
    assert {each.job for each in await engine.hear(Answered, 9)} == set(range(10)) - {3}
    await engine.send(*loads([30]))
    assert (await engine.hear(Answered))[0].ok == b"\1", "there is room again"


async def test_one_order_of_too_many_keys_is_a_miss_at_once(engines):
    engine = await engines(most=10)
    keys = [KEY] * 10 * KEYS_PER_TASK
    await engine.send(Load(1, "store", keys, [0] * len(keys), 16))
    (answer,) = await engine.hear(Answered)
    assert (answer.ok, answer.reason) == (bytes(len(keys)), "busy")


async def test_questions_and_removals_beyond_the_bound_reach_no_store(engines):
    store = HangingStore()
    engine = await engines(store, most=10)
    await engine.send(*[Ask("store", [KEY]), Remove("store", [KEY])] * 20, *loads([1]))
    assert (await engine.hear(Answered))[0].reason == "busy"
    assert sorted(store.calls) == ["contains"] * 5 + ["remove"] * 5
    store.may_end.set()
    assert [each.answers for each in await engine.hear(Present, 5)] == [[True]] * 5


async def test_the_queue_of_an_engine_is_kept_up_to_the_bound(engines):
    engine = await engines(most=10)
    kept = engine.session.queue.needs
    most = 10 * (KEYS_PER_TASK + 1) // 2
    await engine.send(*(Await(number, [KEY]) for number in range(1000)), *loads([1]))
    await engine.send(Cancel(1))
    await engine.hear(Answered)
    assert len(kept) == most
    await engine.send(*(Await(number, []) for number in range(1000)))
    await engine.send(*[Await(number, [KEY] * 9) for number in range(10)] * 9, *loads([2]))
    await engine.send(Cancel(2))
    await engine.hear(Answered)
    assert len(kept) == 10, "a request that is told again takes its own place"


async def test_an_engine_that_reads_no_answers_is_read_no_further(engines):
    engine = await engines()
    questions = [Forget("store", [KEY] * 1000)] * 400
    sending = asyncio.create_task(engine.send(*questions))
    transport = engine.session._writer.transport
    assert await until(lambda: transport.get_write_buffer_size() > CLOGGED_BYTES)
    done, _ = await asyncio.wait([sending], timeout=0.5)
    assert not done, "the server keeps all answers"
    buffered = transport.get_write_buffer_size()
    assert CLOGGED_BYTES < buffered < 3 * CLOGGED_BYTES
    assert len(await engine.hear(Forgotten, len(questions))) == len(questions)
    await sending


async def test_a_message_that_takes_long_ends_the_turn_of_its_engine(engines, monkeypatch):
    """As one that forgets 200,000 chunks: 16 of these held the server for seconds."""
    monkeypatch.setattr(server, "TURN_S", -1.0)
    engine, taken, most = await engines(), [], 0
    (opened,) = engine.session._stores.values()
    opened.forget = taken.append
    many = MESSAGES_PER_TURN
    engine.sock.send(frame(Forget("store", [KEY])) * many)
    while len(taken) < many:
        before = len(taken)
        await asyncio.sleep(0)
        most = max(most, len(taken) - before)
    assert most == 1
    assert len(await engine.hear(Forgotten, many)) == many


async def test_other_engines_have_turns_while_one_sends_much(engines):
    told = []

    class Store(HangingStore):
        def __init__(self, name):
            super().__init__()
            self.name = name

    one, two = await engines(Store("one")), await engines(Store("two"))
    for engine, name in ((one, "one"), (two, "two")):
        (opened,) = engine.session._stores.values()
        opened.forget = lambda keys, name=name: told.append(name)
    many = 100 * MESSAGES_PER_TURN
    one.sock.send(frame(Forget("store", [KEY])) * many)
    two.sock.send(frame(Forget("store", [KEY])))
    await asyncio.gather(one.hear(Forgotten, many), two.hear(Forgotten))
    assert told.index("two") <= 10 * MESSAGES_PER_TURN, "all of the flood came first"
