"""Faults of a Redis server, one table for every level: backend, connector, engine.

Each is a context: the server is ill in it, and well again behind it.
"""

import contextlib
from collections.abc import Iterator

from tests.support.redis_server import RedisServer


@contextlib.contextmanager
def killed(server: RedisServer) -> Iterator[None]:
    """It is gone, with all that it had."""
    server.kill()
    try:
        yield
    finally:
        server.start()


@contextlib.contextmanager
def paused(server: RedisServer) -> Iterator[None]:
    """It keeps its connections and what it has, and answers nothing."""
    server.pause()
    try:
        yield
    finally:
        server.resume()


@contextlib.contextmanager
def restarted_empty(server: RedisServer) -> Iterator[None]:
    """It is well, but all connections and chunks are lost."""
    server.kill()
    server.start()
    yield


FAULTS = {"killed": killed, "paused": paused, "restarted empty": restarted_empty}
