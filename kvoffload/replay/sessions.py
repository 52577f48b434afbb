"""Which requests of a trace belong to one session: a later prompt continues an earlier one.

A trace has no names of sessions. The last known block of a prompt was first used by some session. A
request continues it, if it has more than a half of that session's latest prompt. The rest may
differ: the last block was partial, or a turn was taken back.
"""

from array import array
from collections.abc import Sequence
from itertools import pairwise, takewhile
from operator import eq

from kvoffload.replay.requests import Requests


def sessions_of(requests: Requests) -> list[list[int]]:
    """Return the sessions, each as the numbers of its requests in order."""
    sessions: list[list[int]] = []
    latest: list[Sequence[int]] = []
    introduced = array("q", [-1]) * len(requests.keys)
    for number, blocks in enumerate(requests.blocks()):
        session = _continued(blocks, introduced, latest)
        if session < 0:
            session = len(sessions)
            sessions.append([])
            latest.append(())
        sessions[session].append(number)
        latest[session] = blocks
        for block in blocks:
            if introduced[block] < 0:
                introduced[block] = session
    return sessions


def _continued(
    blocks: Sequence[int], introduced: "array[int]", latest: Sequence[Sequence[int]]
) -> int:
    """Return the session that a prompt continues; -1 if it begins one."""
    known = next((block for block in reversed(blocks) if introduced[block] >= 0), None)
    if known is None:
        return -1
    session = introduced[known]
    before = latest[session]
    shared = sum(takewhile(bool, map(eq, before, blocks)))
    return session if 2 * shared > len(before) else -1


def gaps_of(requests: Requests, sessions: Sequence[Sequence[int]]) -> "array[float]":
    """Return for each request in how many seconds its session's next one comes; infinite: never."""
    gaps = array("d", [float("inf")]) * len(requests)
    for session in sessions:
        for number, following in pairwise(session):
            gaps[number] = requests.times[following] - requests.times[number]
    return gaps
