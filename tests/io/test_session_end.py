"""The end of a session whose engine is killed."""

import asyncio
import socket

from kvoffload.io.server import Session


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
