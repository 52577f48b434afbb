"""A thread that an I/O server runs on, and the end of its event loop."""

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvoffload.backends.blocking_pool import start_once
from kvoffload.io.open_stores import closings
from kvoffload.io.server import Session


def run_server(sock: socket.socket, memory: memoryview, attach: Callable[[Session], None]) -> None:
    """Serve an engine on this thread until the engine's end of the socket is closed.

    The thread goes on until no call of a store uses the slab any more. Stores whose end hangs are
    closed on another one.

    Args:
        sock: this end; closed afterwards.
        memory: the slab.
        attach: called with the session before it begins.
    """

    async def serve() -> None:
        session = Session(memory)
        attach(session)
        try:
            await session.serve(sock)
        finally:
            # The engine reads the end before. It takes the slots back when this thread has ended.
            await session.settled()

    loop = asyncio.new_event_loop()
    # For plug-ins' calls of run_in_executor. An executor of our own ends with the loop.
    executor = ThreadPoolExecutor(2, "kvoffload-io-file")
    loop.set_default_executor(executor)
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(serve())
    finally:
        sock.close()
        if closings(loop):  # they hang, and the next thread waits for this one
            start_once(partial(_end_loop, loop, executor))
        else:
            _end_loop(loop, executor)


def _end_loop(loop: asyncio.AbstractEventLoop, executor: ThreadPoolExecutor) -> None:
    """End a loop once its stores are closed, or they would hold descriptors and locks for good."""
    while left := closings(loop):
        loop.run_until_complete(asyncio.wait(left))
    executor.shutdown(wait=False, cancel_futures=True)
    loop.close()
