"""The transfer engine: one answer a chunk, by the deadline, for any behaviour of the store."""

import asyncio
import hashlib
import re
import threading
import time
from contextlib import closing

import numpy as np
import pytest
import torch

from kvoffload import open_backend
from kvoffload.backends.blocking_pool import undisturbed
from kvoffload.config import parse_config
from kvoffload.connectors.builder import TieredOffloadingSpec
from kvoffload.io import deadlines
from kvoffload.messages import (
    BackendLoadStoreSpec,
    CPULoadStoreSpec,
    Fetch,
    GPULoadStoreSpec,
    make_offload_key,
)
from kvoffload.testing import FaultyBackend, Plan
from kvoffload.transfer.cpu.copier import CpuCopier
from kvoffload.transfer.engine import ROUTES, TransferEngine
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.slab import Slab
from tests.support.io_rig import call, client_over

KEYS = [make_offload_key(hashlib.sha256(bytes([i])).digest(), 0) for i in range(20)]


class StubbornBackend:
    """Ignores cancellation as a hung disk does: its thread still writes to the caller's memory."""

    def __init__(self):
        self.let_go = threading.Event()

    async def read(self, keys, into):
        def hang():
            self.let_go.wait(20)
            into[0][:] = b"\xee" * len(into[0])

        thread = asyncio.get_running_loop().run_in_executor(None, hang)
        await undisturbed(thread)
        return [False] * len(keys)

    async def write(self, keys, chunks):
        return await self.read(keys, [memoryview(bytearray(1))])

    async def close(self):
        self.let_go.set()


class Half:
    """A worker half over a memory store that can be made to misbehave."""

    def __init__(self, kv_caches, root=None):
        self.caches = kv_caches
        self.layout = ChunkLayout(kv_caches, 2)
        self.slab = Slab(20, self.layout.slot_bytes)
        self.copier = CpuCopier(kv_caches, self.slab, self.layout)
        self.store = FaultyBackend(open_backend("memory", {"capacity": "1MiB"}, "0" * 64))
        self.stubborn = StubbornBackend()
        stores = {"store": self.store, "stubborn": self.stubborn}
        if root is not None:
            options = {"root": str(root), "capacity": "1MiB", "min_free": 0}
            self.disk = stores["disk"] = open_backend("disk", options, "0" * 64)
        self.io = client_over(stores, self.slab)
        self.worker = TransferEngine(self.io, self.slab, self.layout, self.copier)

    def wait_at_most(self, timeout_s):
        """Let loads and stores take so long from now on."""
        self.io._load_timeout_s = self.io._store_timeout_s = timeout_s

    def close(self):
        self.stubborn.let_go.set()
        self.io.close()
        self.copier.close()


@pytest.fixture
def half(new_kv_caches, tmp_path, closing):
    return closing(Half(new_kv_caches(num_blocks=64), root=tmp_path))


@pytest.fixture
def settling(monkeypatch):
    """Give a cancelled call as long as it takes to release the memory."""
    monkeypatch.setattr(deadlines, "CANCEL_GRACE_S", 60.0)


def store_all(half, until, tier="store"):
    """Chunks 0..19 (blocks 2i, 2i+1) into host slots, and from there into a store."""
    blocks = list(range(40))
    half.worker.submit(0, (GPULoadStoreSpec(blocks), CPULoadStoreSpec(range(20))), 20)
    (stored,) = until(half.worker.get_finished)
    half.worker.submit(1, (CPULoadStoreSpec(range(20)), BackendLoadStoreSpec(tier, KEYS)), 20)
    (persisted,) = until(half.worker.get_finished)
    assert (stored.success, persisted.success) == (True, True)
    originals = [t.tensor[:40].clone() for t in half.caches.tensors]
    for t in half.caches.tensors:
        t.tensor.zero_()
    half.slab.rows[:] = 0
    return originals


def staged(slots, fetched, tier="store"):
    return CPULoadStoreSpec(slots, [Fetch(tier, tuple(fetched), tuple(KEYS[i] for i in fetched))])


TO_OR_FROM_A_TIER = {
    "read": (staged(range(20), range(20)), GPULoadStoreSpec(range(40))),
    "write": (CPULoadStoreSpec(range(20)), BackendLoadStoreSpec("store", KEYS)),
}


def test_a_load_fetches_what_is_missing_and_copies_what_is_here(half, until):
    originals = store_all(half, until)
    # Chunks 0 and 1 are in slots already, the other 18 come from the store.
    half.worker.submit(2, (CPULoadStoreSpec([]), GPULoadStoreSpec([])), 0)
    views = [half.slab.slot(i, half.layout.payload_bytes[0]) for i in (0, 1)]
    assert call(half.io, half.store.read(KEYS[:2], views)) == [True, True]
    target = GPULoadStoreSpec(range(40))
    half.worker.submit(3, (staged(range(20), range(2, 20)), target), 20)
    results = until(lambda: [r for r in half.worker.get_finished() if r.job_id == 3])
    assert results[0].success
    for original, t in zip(originals, half.caches.tensors, strict=True):
        assert torch.equal(t.tensor[:40], original)


def test_each_chunk_of_a_half_failed_load_has_its_own_answer(half, until):
    originals = store_all(half, until)
    call(half.io, half.store.remove([KEYS[5], KEYS[17]]))
    half.worker.submit(3, (staged(range(20), range(20)), GPULoadStoreSpec(range(40))), 20)
    (result,) = until(half.worker.get_finished)
    assert [i for i, ok in enumerate(result.ok) if not ok] == [5, 17]
    assert (result.reason, result.settled) == ("missing", True)
    assert half.worker.failures["missing"] == 2
    for original, t in zip(originals, half.caches.tensors, strict=True):
        assert not t.tensor[10:12].any()
        assert torch.equal(t.tensor[12:34], original[12:34])


def test_what_has_been_read_is_copied_while_the_rest_is_still_being_read(half, until):
    """A pipeline: were it stage after stage, no chunk could arrive before the last is read."""
    originals = store_all(half, until)
    read, order = half.store.read, []
    first_page = half.caches.tensors[0].tensor[0]

    async def last_ones_after_the_first_have_arrived(keys, into):
        if KEYS[19] in keys:
            while not torch.equal(first_page, originals[0][0]):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            order.append("first chunk copied")
        answers = await read(keys, into)
        order.append("last read" if KEYS[19] in keys else "read")
        return answers

    half.store.read = last_ones_after_the_first_have_arrived
    half.worker.submit(3, (staged(range(20), range(20)), GPULoadStoreSpec(range(40))), 20)
    (result,) = until(half.worker.get_finished)
    assert result.success
    assert order == ["read", "read", "first chunk copied", "last read"]


def test_chunks_are_copied_as_they_arrive_while_later_ones_are_still_being_read(half, until):
    """From a disk the last slots are not read before all other chunks are back in their blocks."""
    disk = half.disk
    originals = store_all(half, until, "disk")
    read, order = disk._store.load_run, []

    def read_the_last_ones_last(names, keys, targets):
        if KEYS[19] in keys:
            rest = slice(0, 2 * (20 - len(keys)))  # blocks
            pairs = list(zip(half.caches.tensors, originals, strict=True))
            until(lambda: all(torch.equal(t.tensor[rest], was[rest]) for t, was in pairs))
            order.append("copied")
        good = read(names, keys, targets)
        order.extend(["read"] * len(keys))
        return good

    disk._store.load_run = read_the_last_ones_last
    half.worker.submit(3, (staged(range(20), range(20), "disk"), GPULoadStoreSpec(range(40))), 20)
    (result,) = until(half.worker.get_finished)
    assert result.success
    last = len(order) - 1 - order.index("copied")
    assert 0 < last < 20
    assert order == ["read"] * (20 - last) + ["copied"] + ["read"] * last


def test_chunks_that_were_copied_as_they_arrived_are_not_launched_again(half, until, tmp_path):
    """The whole call's answer names them once more; an empty copy costs a fence and an event."""
    store_all(half, until, "disk")
    launch, launched = half.copier.launch, []

    def noted(moves, to_host, after, lent=None):
        launched.append([move.host_slot for move in moves])
        return launch(moves, to_host, after, lent)

    half.copier.launch = noted
    half.worker.submit(3, (staged(range(20), range(20), "disk"), GPULoadStoreSpec(range(40))), 20)
    (result,) = until(half.worker.get_finished)
    assert result.success
    assert all(launched)
    assert sorted(slot for slots in launched for slot in slots) == list(range(20))


@pytest.mark.parametrize("tier", ["store", "disk"])
@pytest.mark.parametrize("num_slots", [1, 2, 3, 7])
def test_chunks_that_take_turns_in_slots_wait_until_those_before_them_were_copied(
    half, until, tier, num_slots
):
    """Read too early, the next chunk's bytes would reach the blocks of the one before."""
    originals = store_all(half, until, tier)
    copy = half.copier._copy
    half.copier._copy = lambda *copies: (time.sleep(0.005), copy(*copies))
    slots = [i % num_slots for i in range(20)]
    half.worker.submit(3, (staged(slots, range(20), tier), GPULoadStoreSpec(range(40))), 20)
    (result,) = until(half.worker.get_finished)
    assert result.success
    for original, t in zip(originals, half.caches.tensors, strict=True):
        assert torch.equal(t.tensor[:40], original)
    assert not half.slab.rows[num_slots:].any()


@pytest.mark.usefixtures("settling")
def test_nothing_is_read_into_slots_that_a_hung_read_still_has(half, until):
    originals = store_all(half, until)
    half.wait_at_most(1.5)
    half.store.plans = [Plan("hang", frozenset({"read"}), keys=frozenset(KEYS[8:9]))]
    slots = [i % 4 for i in range(20)]
    half.worker.submit(3, (staged(slots, range(20)), GPULoadStoreSpec(range(40))), 20)
    (result,) = until(half.worker.get_finished)
    good = [i for i, ok in enumerate(result.ok) if ok]
    # Calls are of two chunks: slots 0 and 1 are used no more, the other two go on.
    assert good == [*range(8), 10, 11, 14, 15, 18, 19]
    assert (result.settled, result.reason) == (True, "deadline")
    for original, t in zip(originals, half.caches.tensors, strict=True):
        for i in range(20):
            expected = original[2 * i : 2 * i + 2] if i in good else torch.zeros(2, 1)
            assert (t.tensor[2 * i : 2 * i + 2] == expected).all()


def test_parts_that_bring_nothing_leave_a_load_in_turns_no_more_time(half, until):
    """Each part asks the store within its time; together they would take ten times as long."""
    store_all(half, until)
    half.wait_at_most(1.0)
    asked = []

    async def slowly_missing(keys, into):
        asked.extend(keys)
        await asyncio.sleep(0.4)
        return [False] * len(keys)

    half.store.read = slowly_missing
    slots = [i % 2 for i in range(20)]
    half.worker.submit(3, (staged(slots, range(20)), GPULoadStoreSpec(range(40))), 20)
    (result,) = until(half.worker.get_finished)
    assert (any(result.ok), result.settled, result.reason) == (False, True, "deadline")
    assert len(asked) < 20


def test_a_part_that_waits_for_copies_has_its_time_from_their_end(half, until):
    store_all(half, until)
    half.wait_at_most(1.5)
    copy = half.copier._copy
    half.copier._copy = lambda *copies: (time.sleep(1.7), copy(*copies))
    half.worker.submit(3, (staged([0, 0], range(2)), GPULoadStoreSpec(range(4))), 2)
    (result,) = until(half.worker.get_finished)
    assert (result.success, result.reason) == (True, "")


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("fault", ["raise", "hang", "miss"])
@pytest.mark.usefixtures("settling")
def test_a_misbehaving_store_is_a_failed_job_not_an_exception(half, until, verb, fault):
    store_all(half, until)
    if fault == "hang":
        half.wait_at_most(0.3)
    half.store.plans = [Plan(fault, frozenset({verb}))]
    half.worker.submit(3, TO_OR_FROM_A_TIER[verb], 20)
    (result,) = until(half.worker.get_finished)
    assert not any(result.ok)
    expected = {"raise": "error", "hang": "deadline", "miss": "missing"}[fault]
    assert result.reason == ("refused" if (verb, fault) == ("write", "miss") else expected)
    assert result.settled  # a cancelled coroutine has released the memory
    assert not half.worker.get_finished()


def test_a_hung_read_is_answered_at_the_deadline_and_its_slot_named_when_it_ends(half, until):
    half.wait_at_most(0.3)
    started = time.monotonic()
    half.worker.submit(3, (staged([4], [0], "stubborn"), GPULoadStoreSpec([0, 1])), 1)
    (result,) = until(half.worker.get_finished)
    assert (result.ok, result.settled, result.reason) == ((False,), False, "deadline")
    assert time.monotonic() - started < 60
    before = [t.tensor.clone() for t in half.caches.tensors]
    assert half.worker.get_settled() == []
    half.stubborn.let_go.set()  # the late read writes to the slot now
    assert until(half.worker.get_settled) == [3]
    assert half.slab.rows[4].any()
    # Nothing of it reached the GPU, and no second answer comes.
    assert all(torch.equal(a, t.tensor) for a, t in zip(before, half.caches.tensors, strict=True))
    assert not half.worker.get_finished()


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_store_that_answers_the_wrong_number_of_verdicts_is_a_failed_job(half, until, verb):
    store_all(half, until)

    async def confused(*_):
        return [True]

    setattr(half.store, verb, confused)
    half.worker.submit(3, TO_OR_FROM_A_TIER[verb], 20)
    (result,) = until(half.worker.get_finished)
    assert (result.ok, result.reason) == ((False,) * 20, "error")


def test_a_transfer_nobody_serves_is_answered_as_failed(half):
    half.worker.submit(9, (GPULoadStoreSpec([1]), GPULoadStoreSpec([2])), 1)
    half.worker.submit(10, (GPULoadStoreSpec([1, 2]), CPULoadStoreSpec([77])), 1)
    half.worker.submit(11, (CPULoadStoreSpec([0]), BackendLoadStoreSpec("gone", KEYS[:1])), 1)
    half.worker.submit(12, (staged([0], [0], "gone"), GPULoadStoreSpec([1, 2])), 1)
    results = half.worker.get_finished()
    assert [(r.job_id, r.ok, r.reason) for r in results] == [
        (job, (False,), "refused_transfer") for job in (9, 10, 11, 12)
    ]
    assert not half.slab.rows.any()


@pytest.mark.parametrize(
    ("blocks", "named"),
    [([0, 1, 2, 999], r"\[999\]: out of"), ([0, 1, 5, 1], r"\[1\]: written twice")],
)
def test_a_load_is_refused_as_a_whole_before_anything_is_read_or_copied(
    half, until, caplog, blocks, named
):
    """Also for what several copies would do to one block, each of them without a fault."""
    store_all(half, until)
    half.slab.rows[:2] = 7
    before = [entry.tensor.clone() for entry in half.caches.tensors]
    spec = CPULoadStoreSpec([0, 1], [Fetch("store", (1,), (KEYS[1],))])  # chunk 0 is here
    half.worker.submit(3, (spec, GPULoadStoreSpec(blocks)), 2)
    (result,) = half.worker.get_finished()
    assert (result.ok, result.reason) == ((False,) * 2, "refused_transfer")
    assert re.search(named, caplog.text)
    assert (half.slab.rows[:2] == 7).all()
    assert all(torch.equal(a, b.tensor) for a, b in zip(before, half.caches.tensors, strict=True))


def test_copies_refused_after_a_read_are_a_failed_job_with_a_reason(half, until, monkeypatch):
    store_all(half, until)

    def refuse(*_, **__):
        raise RuntimeError("out of something")

    with monkeypatch.context() as patched:
        patched.setattr(half.copier, "launch", refuse)
        half.worker.submit(3, (staged(range(2), range(2)), GPULoadStoreSpec(range(4))), 2)
        (result,) = until(half.worker.get_finished)
    assert (result.ok, result.reason) == ((False,) * 2, "refused_transfer")
    half.worker.submit(4, (staged(range(2), range(2)), GPULoadStoreSpec(range(4))), 2)
    (result,) = until(half.worker.get_finished)
    assert result.success


def test_one_handler_serves_every_route_of_a_spec(new_kv_caches):
    caches = new_kv_caches(num_blocks=8)
    layout = ChunkLayout(caches, 2)
    config = parse_config({"cpu_bytes": 4 * layout.slot_bytes})
    with closing(TieredOffloadingSpec(config, layout.slot_bytes, {"of": "test"}, layout)) as spec:
        routes = list(spec.get_handlers(caches))
        assert tuple((source, destination) for source, destination, _ in routes) == ROUTES
        (handler,) = {handler for _, _, handler in routes}
        before = [entry.tensor[2:4].clone() for entry in caches.tensors]
        assert handler.transfer_async(1, (GPULoadStoreSpec([2, 3]), CPULoadStoreSpec([1])))
        handler.wait([1])
        assert [result.ok for result in handler.get_finished()] == [(True,)]
        assert handler.transfer_async(2, (CPULoadStoreSpec([1]), GPULoadStoreSpec([6, 7])))
        handler.wait([2])
        assert [result.ok for result in handler.get_finished()] == [(True,)]
        assert not handler.transfer_async(3, (GPULoadStoreSpec([1]), GPULoadStoreSpec([2])))
        assert handler.get_finished() == []
        for entry, pages in zip(caches.tensors, before, strict=True):
            assert torch.equal(entry.tensor[6:8], pages)


def test_wait_returns_when_the_job_is_answered(half, until):
    store_all(half, until)
    half.worker.submit(3, (staged(range(20), range(20)), GPULoadStoreSpec(range(40))), 20)
    half.worker.wait([3, 12345])
    (result,) = half.worker.get_finished()
    assert result.success


def test_shutdown_does_not_wait_for_a_hung_store(new_kv_caches):
    half = Half(new_kv_caches())
    half.store.plans = [Plan("hang", frozenset({"read"}))]
    half.worker.submit(3, (staged([4], [0]), GPULoadStoreSpec([0, 1])), 1)
    started = time.monotonic()
    half.close()
    assert time.monotonic() - started < 60
    (result,) = half.worker.get_finished()
    assert result.ok == (False,)


def test_slots_are_page_aligned_for_direct_io(half):
    address = np.frombuffer(half.slab.slot(3, 4096), np.uint8).ctypes.data
    assert address % 4096 == 0
    assert all(size % 4096 == 0 for size in half.layout.payload_bytes)
