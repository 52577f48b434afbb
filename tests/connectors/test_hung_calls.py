"""Calls of a plug-in that hang and cannot be cancelled: how much host memory they may keep."""

import asyncio
import threading

import pytest

from kvoffload.backends.blocking_pool import undisturbed
from kvoffload.backends.memory import MemoryBackend, MemoryOptions
from tests.support.manager_check import check
from tests.support.random_model.sums import tables

BLOCK, CHUNKS, SLOTS = 4, 8, 64


class Hung(MemoryBackend):
    """Its verbs of one kind never return before :attr:`released`, not even if cancelled."""

    Options = MemoryOptions
    hung_verb = ""
    released = threading.Event()

    async def _hang(self):
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def wait():
            self.released.wait()
            loop.call_soon_threadsafe(future.set_result, None)

        threading.Thread(target=wait, daemon=True).start()
        await undisturbed(future)

    async def read(self, keys, into):
        if self.hung_verb == "read":
            await self._hang()
        return await super().read(keys, into)

    async def write(self, keys, chunks):
        if self.hung_verb == "write":
            await self._hang()
        return await super().write(keys, chunks)


@pytest.fixture
def hung(monkeypatch, plug_in):
    plug_in("hung", Hung)
    monkeypatch.setattr(Hung, "released", threading.Event())
    monkeypatch.setattr(Hung, "hung_verb", "")
    yield Hung
    Hung.released.set()


@pytest.fixture
def connector(connect, hung, new_kv_caches, request):
    """A connector; its parameter is how long a load may take."""
    settings = {"cpu_bytes": SLOTS * 4096, "blocks_per_chunk": 1, "policy": "lru"}
    settings |= {"load_timeout_s": getattr(request, "param", 0.2), "store_timeout_s": 60.0}
    caches = new_kv_caches(num_blocks=64, page_bytes=(4096,))
    return connect({"type": "hung"}, {"type": "memory"}, caches=caches, **settings)


def store(connector, request):
    connector.after_forward(request, [range(1, 1 + CHUNKS)], BLOCK * CHUNKS)
    connector.request_finished(request)


def store_all(connector, new_request):
    """Store twenty prompts; return their names."""
    names = [f"p{i}" for i in range(20)]
    for name in names:
        store(connector, new_request(name, BLOCK * CHUNKS + 1))
        assert connector.flush()
    return names


def busy(connector):
    return connector.stats()["host_chunks_busy"]


def test_a_tier_whose_writes_hang_keeps_its_share_and_the_other_tier_stores(
    connector, new_request, hung, until
):
    hung.hung_verb = "write"
    client = connector._spec.io
    client._store_timeout_s = 0.5  # of each tier: the other one may be slow on a busy machine
    for i in range(40):
        store(connector, new_request(f"p{i}", BLOCK * CHUNKS + 1))
        connector.flush(0.15)
        if client._jobs.late:
            client._store_timeout_s = 60.0
    until(connector.flush)
    assert busy(connector) <= SLOTS // 4
    assert connector.stats()["store_chunks"]["memory"] == 40 * CHUNKS
    assert connector.stats()["stores_dropped"]["cpu"]["no_room"] == 0
    hung.released.set()
    until(lambda: connector.flush() and not busy(connector))
    check(connector)


def test_a_tier_whose_reads_hang_keeps_half_of_host_memory_until_they_return(
    connector, new_request, hung, until
):
    store_all(connector, new_request)
    hung.hung_verb = "read"
    for i in range(10):
        request = new_request(f"p{i}", BLOCK * CHUNKS + 1, request_id=f"load {i}")
        tokens = connector.get_num_new_matched_tokens(request, 0)
        connector.update_state_after_alloc(request, [range(20, 29)], tokens)
        until(lambda tokens=tokens: not tokens or connector.poll())
        connector.request_finished(request)
    assert SLOTS // 4 <= busy(connector) <= SLOTS // 2
    store(connector, new_request("new", BLOCK * CHUNKS + 1))
    connector.flush()
    assert connector.stats()["stores_dropped"]["cpu"]["no_room"] == 0
    hung.released.set()
    until(lambda: connector.flush() and not busy(connector))
    check(connector)


def test_a_tier_that_hangs_while_it_reads_for_the_queue_keeps_a_part_and_goes_on_later(
    connector, new_request, hung, until
):
    names = store_all(connector, new_request)
    hung.hung_verb = "read"
    queued = [new_request(name, BLOCK * CHUNKS + 1, request_id=f"q {name}") for name in names[:6]]
    for request in queued:
        connector.request_queued(request)
    until(lambda: connector.poll() or busy(connector))
    connector.flush()  # their deadline is over
    aborted, waits = queued[::2], queued[1::2]
    for request in aborted:
        connector.request_finished(request)
    for _ in range(20):
        connector.poll()
    assert connector.flush()  # what the next tier reads meanwhile
    assert 0 < busy(connector) <= SLOTS // 8
    store(connector, new_request("new", BLOCK * CHUNKS + 1))
    connector.flush()
    assert connector.stats()["stores_dropped"]["cpu"]["no_room"] == 0
    hung.released.set()

    def are_here():
        assert connector.poll() == []
        return all(set(connector.explain(each)[0]) == {"CPU"} for each in waits)

    until(are_here)
    for request in waits:
        connector.request_finished(request)
    assert connector.stats()["queue_kept_bytes"] == 0
    until(lambda: connector.flush() and not busy(connector))
    check(connector)


def begin_all(connector, new_request, names):
    """Look up prompts and begin their loads in one step, as an engine's waiting queue does."""
    requests = [new_request(name, BLOCK * CHUNKS + 1, request_id=f"load {name}") for name in names]
    begun = []
    for request in requests:
        tokens = connector.get_num_new_matched_tokens(request, 0)
        assert tokens != 0, "declined for good"
        if tokens:
            first = 1 + len(begun) * CHUNKS % 48
            connector.update_state_after_alloc(request, [range(first, first + CHUNKS)], tokens)
            begun.append(request)
    return requests, begun


def test_a_load_has_one_record_and_a_table_only_where_something_waits_for_it(
    connector, new_request, hung
):
    store(connector, new_request("p", BLOCK * CHUNKS + 1))
    assert connector.flush()
    connector._manager.reset_cache()
    hung.hung_verb = "read"
    connector._manager.tiers = connector._manager.tiers[:1]
    connector._spec.io._load_timeout_s = 60.0
    _, (request,) = begin_all(connector, new_request, ["p"])
    (job,) = connector._manager._jobs.values()
    assert list(connector._transfers.jobs.values()) == [job]
    assert connector._requests.find(request).loads == {job}
    assert (job.waiter.state.context.req_id, set(job.media())) == (request.request_id, {"HUNG"})
    left = {name for name, table in tables(connector).items() if len(table)}
    by_job = {"manager's jobs", "jobs", "engine jobs", "I/O jobs"}
    by_chunk_and_block = {"fetching", "jobs of blocks"}
    of_request = {"requests", "counted uses"}
    of_tier = {"loads in flight from hung", "bytes in flight from hung"}
    assert left == by_job | by_chunk_and_block | of_request | of_tier


@pytest.mark.parametrize("connector", [60.0], indirect=True)
def test_a_burst_of_loads_from_a_tier_that_answers_is_loaded_whole(connector, new_request, until):
    names = store_all(connector, new_request)
    connector._manager.reset_cache()
    connector._manager.tiers = connector._manager.tiers[:1]
    waiting, loaded = names, []
    while waiting:
        requests, begun = begin_all(connector, new_request, waiting)
        assert begun or loaded, "none begins"
        outcomes = []
        until(lambda: outcomes.extend(connector.poll()) or len(outcomes) == len(begun))  # noqa: B023
        loaded += [each.num_loaded_tokens for each in outcomes]
        waiting = [
            name for name, request in zip(waiting, requests, strict=True) if request not in begun
        ]
        for request in requests:
            connector.request_finished(request)
    assert loaded == [BLOCK * CHUNKS] * len(names)
