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
