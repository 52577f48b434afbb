"""What arrived before a load was cut off counts as loaded."""

import asyncio

from kvoffload.backends.base import ReadsEach
from kvoffload.io.chunk_jobs import ChunkJobs
from kvoffload.io.open_stores import OpenStore
from kvoffload.io.protocol import Answered, Load


class Endless(ReadsEach):
    """A store whose last chunk never arrives."""

    def __init__(self):
        self.has_told = asyncio.Event()

    async def read_each(self, keys, into, arrived):
        arrived(0)
        await asyncio.sleep(0)  # the loop looks for the next arrivals a little later
        await asyncio.sleep(0)
        for i in range(1, len(keys) - 1):
            arrived(i)
        self.has_told.set()
        await asyncio.Event().wait()


async def test_arrivals_of_a_load_that_is_cut_off_are_answered():
    sent, store = [], Endless()
    jobs = ChunkJobs(memoryview(bytearray(4096)), sent.append, lambda *of_answer: None)
    jobs.slot_bytes = 1024
    load = Load(7, "endless", [b"a", b"b", b"c", b"d"], [0, 1, 2, 3], 1024)
    answer = asyncio.ensure_future(jobs.begin(load, OpenStore("endless", store)))
    await store.has_told.wait()
    jobs.cancel(7)
    await answer
    (answered,) = (message for message in sent if isinstance(message, Answered))
    assert (answered.ok, answered.reason) == (b"\1\1\1\0", "cancelled")
    await asyncio.sleep(0.02)
    assert sent[-1] is answered  # nothing arrives after it


class AtOnce(ReadsEach):
    """A store that tells of all chunks before the loop has looked."""

    async def read_each(self, keys, into, arrived):
        for i in range(len(keys)):
            arrived(i)
        return [True] * len(keys)


async def test_a_chunk_that_its_store_has_told_of_is_noted_once(monkeypatch):
    noted, sent, note = [], [], ChunkJobs._note_arrival
    monkeypatch.setattr(
        ChunkJobs, "_note_arrival", lambda jobs, *of: (noted.append(of[-1]), note(jobs, *of))
    )
    jobs = ChunkJobs(memoryview(bytearray(4096)), sent.append, lambda *of_answer: None)
    jobs.slot_bytes = 1024
    load = Load(7, "quick", [b"a", b"b", b"c", b"d"], [0, 1, 2, 3], 1024)
    await jobs.begin(load, OpenStore("quick", AtOnce()))
    assert sent[-1].ok == b"\1\1\1\1"
    assert noted == [0, 1, 2, 3]
