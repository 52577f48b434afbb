"""The end of a session whose engine is killed, or has its slots back."""

import asyncio
import socket

from kvoffload.io import server
from kvoffload.io.protocol import Opened, Remove
from kvoffload.io.server import Session
from tests.io.test_floods import KEY, OPEN, Engine, HangingStore


async def test_a_connection_that_is_reset_is_no_error_in_the_log():
    """An engine that is killed with unread bytes resets it."""
    engine, ours = socket.socketpair()
    session = Session(memoryview(bytearray(1)))
    serving = asyncio.create_task(session.serve(ours))
    await asyncio.get_running_loop().run_in_executor(None, engine.recv, 1)
    engine.close()
    await serving
    ended = session._writer._protocol._closed
    assert not ended._log_traceback, "it is logged when it is collected"


async def test_a_session_that_ends_before_it_has_its_connection_ends():
    """A server that ends, or has other backends from now on, would serve this engine on."""
    engine, ours = socket.socketpair()
    session = Session(memoryview(bytearray(1)))
    serving = asyncio.create_task(session.serve(ours))
    await asyncio.sleep(0)
    assert session._writer is None
    session.end()
    with engine:
        await asyncio.wait_for(serving, 20)


async def test_an_engine_that_reads_late_what_a_session_sent_last_ends_it_without_an_error():
    """It reads while the session waits for that, and asyncio has closed the transport then."""
    engine, ours = socket.socketpair()
    session = Session(memoryview(bytearray(1)))
    _, session._writer = await asyncio.open_connection(sock=ours)
    session._writer.write(bytes(8 << 20))
    ending = asyncio.create_task(session._end())
    while not session._writer.is_closing():  # noqa: ASYNC110
        await asyncio.sleep(0)

    def read_all():
        with engine:
            while engine.recv(1 << 20):
                pass

    await asyncio.to_thread(read_all)
    await ending


async def test_a_call_that_uses_no_slot_and_hangs_keeps_no_engine_from_its_slots(monkeypatch):
    monkeypatch.setattr(server, "END_S", 0.05)
    monkeypatch.setattr(server, "CLOSE_S", 0.05)
    store = HangingStore()
    store.close = store.may_end.wait
    engine = Engine(store, 1 << 20)
    await engine.send(OPEN)
    await engine.hear(Opened, 2)
    await engine.send(Remove("store", [KEY]))
    while not store.calls:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    engine.sock.close()
    await engine.serving
    settling = asyncio.create_task(engine.session.settled())
    done, _ = await asyncio.wait([settling], timeout=20)
    store.may_end.set()
    assert done
