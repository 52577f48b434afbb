"""Asks the I/O server where chunks are that the engine reads itself, and tells it what was read."""

import itertools
import time
from queue import Empty, SimpleQueue
from typing import Any

from kvoffload.io.link import Link
from kvoffload.io.protocol import Locate, Located, Used, frame
from kvoffload.io.remote_tier import RemoteTier
from kvoffload.timed_queue import next_within

LATE_S = 0.1
"""A server whose answer takes longer is late: it gets an order for the chunks, which can wait."""


class ReadsInPlace:
    """The questions of threads that read chunks in place. Any thread may call.

    Args:
        link: to the server.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._numbers = itertools.count(1)
        self._asked: dict[int, SimpleQueue[list[Any]]] = {}
        """Question → where its answer comes; threads add them under the link's lock."""

    def places(self, tier: RemoteTier, keys: list[bytes], until_s: float) -> list[Any]:
        """Ask a store where chunks are; nothing: it knows none, is late, or there is no server."""
        number, link, answers = next(self._numbers), self._link, SimpleQueue[list[Any]]()
        question = frame(Locate(tier.name, keys, number))
        with link.lock:  # a server that dies answers this question, or is known to be dead
            if not link.is_up or link.is_clogged:
                return []
            self._asked[number] = answers
            link.push(question)
        try:
            return next_within(answers, max(0.0, min(LATE_S, until_s - time.monotonic())))
        except Empty:
            return []
        finally:
            del self._asked[number]

    def has_read(
        self, tier: RemoteTier, listing: int, keys: list[bytes], num_bytes: int, seconds: float
    ) -> bool:
        """Count chunks that the engine has read in place, and tell the store of their use.

        Returns:
            False if the tier has been opened again since that listing: it may not have them now.
        """
        data, link = frame(Used(tier.name, keys)), self._link
        with link.lock:  # a renewal comes before it or after it
            if tier.listing != listing:
                return False
            if not link.is_clogged:  # uses are a hint
                link.push(data)
        tier.has_read(len(keys), num_bytes, seconds)
        return True

    # ---- on the client's thread ----

    def answered(self, message: Located) -> None:
        """Take in an answer, unless its question is given up."""
        if (answers := self._asked.get(message.number)) is not None:
            answers.put(message.places)

    def lose(self) -> None:
        """Answer all questions: the server is gone."""
        with self._link.lock:
            asked = list(self._asked.values())
        for answers in asked:
            answers.put([])
