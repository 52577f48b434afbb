"""Chunks that engines copy out of the server's memory: right bytes, and no block is lost."""

import contextlib
import gc
import mmap
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from cuda_stand_in import install

from kvoffload.connectors import builder
from kvoffload.io import greeting
from kvoffload.io.chunk_jobs import ChunkJobs
from kvoffload.io.lent_memory import LentMemory, portions
from kvoffload.io.protocol import (
    VERSION,
    Answered,
    Borrow,
    Cancel,
    Lent,
    Load,
    Open,
    Passed,
    Refused,
    Release,
    Store,
    TierSettings,
)
from kvoffload.io.service.host_memory import BLOCK, HostMemory
from kvoffload.io.service.host_store import HostStore
from kvoffload.io.service.shared_stores import SharedStores
from kvoffload.policies.lru import LRUPolicy
from kvoffload.testing.backends import filled, keys_of
from kvoffload.transfer.cuda.stream_copier import StreamCopier
from kvoffload.transfer.cuda.torch_device import CudaDevice
from kvoffload.transfer.shared_memory import create_shared_memory
from tests.io.service.test_bad_input import KEYS, OPEN, SLOT, Talk
from tests.support.host_server import CLIENT_POINTS, ClientProcess, check_stopped_borrower
from tests.support.small_engine import SLOT as CHUNK


@pytest.fixture
def server(new_server):
    # The default policy lets new chunks leave before those that were used.
    return new_server(memory="1MiB", policy="lru")


@pytest.fixture
async def memory():
    return HostMemory(8 * BLOCK, LRUPolicy, lends=True)


@pytest.fixture
async def store(memory):
    store = HostStore(memory, "n")
    yield store
    await store.close()


async def lent(store, keys, size=BLOCK):
    await store.verify(keys, [size] * len(keys))
    return store.lend(keys, [size] * len(keys))


async def test_blocks_on_loan_are_not_used_again_before_its_end(memory, store):
    keys, other = keys_of(2), keys_of(8, "other")
    await store.write(keys, filled(keys, BLOCK))
    starts, end = await lent(store, keys)
    await store.remove(keys[:1])
    await store.write(other, filled(other, BLOCK))
    for start, chunk in zip(starts, filled(keys, BLOCK), strict=True):
        assert memory._map[start : start + BLOCK] == chunk
    assert memory.lent_bytes == 2 * BLOCK
    assert sum(map(store.holds, other)) == 6
    end()
    end()
    assert memory.lent_bytes == 0
    await store.remove(keys[1:])
    await store.write(other, filled(other, BLOCK))
    assert sum(map(store.holds, other)) == 8


async def test_nothing_is_entered_into_a_table_that_no_server_reads(memory, store):
    keys = keys_of(2)
    await store.write(keys, filled(keys, BLOCK))
    _, end = await lent(store, keys)
    await store.remove(keys[:1])
    end()
    assert list(memory.file.records()) == []
    blocks_end = memory.capacity_bytes
    assert [start for start, _ in portions(memory.file.fd, blocks_end + mmap.PAGESIZE)] == []


async def test_half_of_the_memory_is_lent_at_most(store):
    keys = keys_of(8)
    await store.write(keys, filled(keys, BLOCK))
    starts, end = await lent(store, keys)
    assert [start >= 0 for start in starts] == [True] * 4 + [False] * 4
    assert (await lent(store, keys[:1]))[0] == [-1]
    end()
    starts, end = await lent(store, keys[4:])
    assert min(starts) >= 0
    end()


async def test_an_eviction_passes_chunks_on_loan_and_they_leave_as_others_after_its_end(
    memory, store
):
    keys, rest, new = keys_of(2), keys_of(6, "rest"), keys_of(6, "new")
    await store.write(keys, filled(keys, BLOCK))
    _, end = await lent(store, keys)
    await store.write(rest, filled(rest, BLOCK))
    await store.write(new, filled(new, BLOCK))
    assert all(map(store.holds, keys + new)), "they are the first to leave, and on loan"
    assert not any(map(store.holds, rest))
    assert store.counters()["evicted"] == 6
    store.spare(keys)  # what is out of the order for a while may change in each other way
    memory.used([store._number + keys[0]])
    memory.reorder([store._number + key for key in keys + new[:1]])
    store.spare([])
    end()
    last = keys_of(8, "last")
    await store.write(last, filled(last, BLOCK))
    assert (len(memory), sum(map(store.holds, last))) == (8, 8)


async def test_a_chunk_on_loan_that_was_passed_by_an_eviction_can_be_removed(memory, store):
    keys, more = keys_of(4), keys_of(8, "more")
    await store.write(keys, filled(keys, BLOCK))
    _, end = await lent(store, keys)
    await store.write(more, filled(more, BLOCK))
    assert sum(map(store.holds, keys)) == sum(map(store.holds, more)) == 4
    await store.remove(keys[:2])
    await store.write(keys[:1], filled(keys[:1], BLOCK))  # stored again, elsewhere
    end()
    await store.write(more, filled(more, BLOCK))
    assert (len(memory), memory.lent_bytes, memory.resident_bytes) == (8, 0, 8 * BLOCK)


async def test_a_memory_of_which_nothing_can_leave_refuses_chunks_and_lends_no_more(memory, store):
    keys, more = keys_of(8), keys_of(1, "more")
    await store.write(keys, filled(keys, BLOCK))
    _, end = await lent(store, keys[:4])
    rest = [memory._find(store._number + key) for key in keys[4:]]
    for chunk in rest:  # the other half is read at this moment
        chunk.num_readers += 1
    assert await store.write(more, filled(more, BLOCK)) == [False]
    assert all(map(store.holds, keys)), "nothing has left in vain"
    assert (await lent(store, keys[4:]))[0] == [-1] * 4
    memory._end_reading(rest)
    assert all(await store.write(more, filled(more, BLOCK)))
    end()


async def test_a_loan_is_one_use_of_its_chunks_counted_at_its_end():
    """So the engine has its chunks before, and ends that are told twice count once."""
    used = []

    class Counting(LRUPolicy):
        def touch(self, keys):
            used.extend(keys)
            super().touch(keys)

    memory = HostMemory(8 * BLOCK, Counting, lends=True)
    store, keys = HostStore(memory, "n"), keys_of(2)
    await store.write(keys, filled(keys, BLOCK))
    _, end = await lent(store, keys)
    assert used == []
    end()
    end()
    assert used == [store._number + key for key in reversed(keys)]
    await store.close()


async def test_a_loan_of_verified_chunks_is_answered_in_the_turn_that_reads_its_order(memory):
    sent, stores = [], SharedStores(memory, [])
    opened = await stores.open(
        Open(VERSION, [TierSettings("s", "s", {}, "")], "n", {}, 1, 1, 1), 0, {}
    )
    keys = keys_of(2)
    await opened.backend.write(keys, filled(keys, BLOCK))
    await opened.backend.verify(keys, [BLOCK] * 2)
    jobs = ChunkJobs(memoryview(bytearray(4 * BLOCK)), sent.append, lambda *_: None)
    jobs.loans.may_begin = True
    twice = [*keys, keys[0]]
    assert jobs.begin(Load(1, "s", twice, [0] * 3, BLOCK, may_lend=True), opened) is None
    assert [type(message) for message in sent] == [Lent, Answered]
    assert (sent[0].numbers, sent[1].ok) == ([0, 1, 2], b"\1\1\1")
    assert memory.lent_bytes == 3 * BLOCK
    jobs.loans.release_all()
    await opened.backend.remove(keys)
    assert (memory.lent_bytes, memory.resident_bytes) == (0, 0)
    wrong = jobs.begin(Load(2, "s", keys, [0] * 2, [BLOCK], may_lend=True), opened)
    await wrong
    assert (sent[-1].ok, sent[-1].reason) == (b"\0\0", "error")
    await opened.backend.close()
    await stores.close()


async def test_a_damaged_chunk_is_not_lent_and_is_removed(memory, store):
    keys = keys_of(2)
    await store.write(keys, filled(keys, BLOCK))
    memory._map[memory._find(store._number + keys[0]).start + 100] ^= 1
    starts, end = await lent(store, keys)
    assert (starts[0], starts[1] >= 0) == (-1, True)
    assert [store.holds(key) for key in keys] == [False, True]
    assert store.counters()["corrupt_payload"] == 1
    end()


async def test_chunks_of_another_length_or_in_pieces_are_copied(memory, store):
    small, (large,) = keys_of(8), keys_of(1, "large")
    await store.write(small, filled(small, BLOCK))
    assert (await lent(store, small[:1], BLOCK // 2))[0] == [-1]
    await store.remove(small[::3])
    await store.write([large], filled([large], 3 * BLOCK))
    assert len(memory._find(store._number + large).runs) == 3
    assert (await lent(store, [large], 3 * BLOCK))[0] == [-1]


async def test_blocks_that_are_neighbours_are_one_piece_again(memory, store):
    small, (large,) = keys_of(8), keys_of(1, "large")
    for order in (small, small[::-1], small[::2] + small[1::2]):
        await store.write(small, filled(small, BLOCK))
        for key in order:
            await store.remove([key])
        await store.write([large], filled([large], 4 * BLOCK))
        starts, end = await lent(store, [large], 4 * BLOCK)
        assert memory._map[starts[0] : starts[0] + 4 * BLOCK] == filled([large], 4 * BLOCK)[0]
        end()
        await store.remove([large])
        assert memory._free.runs == {0: 8}


def test_the_memory_is_written_by_the_server_alone(tmp_path, memory):
    with pytest.raises(PermissionError):
        mmap.mmap(memory.file.fd, memory.capacity_bytes)
    with pytest.raises(PermissionError):
        os.pwrite(memory.file.fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.file.fd, 0)
    with mmap.mmap(memory.file.fd, 0, prot=mmap.PROT_READ) as reading:
        memory._map[:5] = b"chunk"
        assert reading[:5] == b"chunk"


# ---- engines ----


@pytest.fixture(params=["cpu", "gpu"])
def device(request, monkeypatch):
    """Where the KV caches are; the stand-in for torch.cuda if they are on a GPU."""
    if request.param == "cpu":
        return None
    cuda = install(monkeypatch.setattr, 3 * 4096)

    def new_copier(caches, slab, layout, batches):
        return StreamCopier(caches, slab, layout, CudaDevice(caches, slab, batches=batches))

    monkeypatch.setattr(builder, "make_copier", new_copier)
    return cuda


def test_chunks_go_from_the_servers_memory_to_the_kv_cache_and_to_no_slot(device, server, attach):
    first, second = attach(server.path), attach(server.path)
    first.store("p")
    second.truth = first.truth
    second.await_hits("p")
    assert not second.connector._spec._slab.rows.any()


def test_the_memory_of_a_server_that_has_ended_is_unmapped(device, server, attach, until):
    before = mappings()
    engine = attach(server.path)
    engine.store("p")
    engine.await_hits("p")
    mine = mappings() - before
    assert len(mine) == 1
    server.kill()
    until(lambda: engine.died)
    assert engine.load("p") == 0
    until(lambda: not mine & mappings())


def mappings():
    """Return the memories of servers that this process has mapped, by their inodes."""
    with open("/proc/self/maps") as maps:
        return {line.split()[4] for line in maps if "memfd:kvoffload-serve" in line}


@pytest.mark.parametrize("device", ["gpu"], indirect=True)
def test_chunks_are_copied_by_the_server_once_its_memory_cannot_be_pinned(
    device, server, attach, until, caplog
):
    """Copies out of unpinned memory are slow, and all other copies wait for them."""
    engine = attach(server.path)
    engine.store("p")
    until(lambda: engine.connector.stats()["copies"]["pinned_bytes"])
    device.refuse_after = 0
    engine.await_hits("p")
    until(lambda: "the server's memory: only 0 B" in caplog.text)
    slots = engine.connector._spec._slab.rows
    slots[:] = 0
    assert engine.load("p") == 10
    assert slots.any()


def test_an_engine_with_a_cache_of_its_own_keeps_what_it_loads_and_maps_nothing(
    server, attach, until
):
    before = mappings()
    second = attach(server.path, cpu_bytes=12 * CHUNK, staging_bytes=0)
    writer = attach(server.path, cpu_bytes=12 * CHUNK, staging_bytes=0)
    writer.store("p")
    second.truth = writer.truth
    second.await_hits("p")
    assert second.client.tiers["serve"].counters.get("lent", 0) == 0
    assert (mappings() - before, second.client._memory) == (set(), None)
    assert "kvoffload-map" not in [thread.name for thread in threading.enumerate()]
    server.kill()
    until(lambda: second.died)
    assert second.load("p") == 10


def test_an_engine_that_asks_for_no_memory_gets_none_and_borrows_nothing(server):
    engine = Borrower(server.path).greet()
    engine.send(OPEN, Store(1, "serve", KEYS, [0, 1, 2, 3], SLOT))
    assert engine.hear(Answered).ok == b"\1\1\1\1"
    engine.send(Load(2, "serve", KEYS, [4, 5, 6, 7], SLOT, may_lend=True))
    assert engine.hear(Answered).ok == b"\1\1\1\1"
    assert engine.hear_all((Lent, Passed)) == []
    half = 4 * SLOT
    with mmap.mmap(engine.fd, 0) as slab:
        assert slab[:half] == slab[half:]
    engine.sock.shutdown(socket.SHUT_RDWR)
    assert engine.passed() == []
    engine.close()


def test_memory_is_passed_once_however_often_an_engine_asks(server):
    engine = Borrower(server.path).greet()
    engine.send(*[Borrow()] * 1000, OPEN)
    assert engine.hear(Passed)
    engine.send(Store(1, "serve", KEYS, [0, 1, 2, 3], SLOT))
    assert engine.hear(Answered).ok == b"\1\1\1\1"
    assert engine.hear_all(Passed) == []
    engine.sock.shutdown(socket.SHUT_RDWR)
    assert len(engine.passed()) == 1
    engine.close()


def test_memory_that_an_engine_has_left_leaves_no_object_behind(until):
    """An engine may lose its server many times between two looks of the garbage collector."""

    def lose():
        mine, theirs = socket.socketpair()
        memory = LentMemory(create_shared_memory(BLOCK), mine)
        memory.leave()
        theirs.close()
        until(lambda: "kvoffload-map" not in {thread.name for thread in threading.enumerate()})

    lose()
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for _ in range(20):
            lose()
        assert len(gc.get_objects()) < before + 20
    finally:
        gc.enable()


FORKING = """
import mmap, os, socket, threading
from kvoffload.io.lent_memory import LentMemory

size, fd = 64 << 20, os.memfd_create("lent")
os.ftruncate(fd, size)
lent = LentMemory(fd, socket.socketpair()[0])
while threading.active_count() > 1:
    pass
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
else:
    own = mmap.mmap(-1, size)  # where the lent memory would be
    del lent
    own[:] = b"1" * size
    os._exit(0)
"""


def test_a_forked_child_that_drops_the_memory_keeps_its_own():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKING], check=True, timeout=60)


def test_an_engine_of_another_version_gets_no_memory(server):
    engine = Borrower(server.path)
    other = struct.pack("<16sI", greeting.MAGIC, VERSION - 1)
    socket.send_fds(engine.sock, [other], [engine.fd, engine._theirs])
    os.close(engine._theirs)
    with contextlib.suppress(BrokenPipeError):  # the server may have refused it by now
        engine.send(Borrow(), OPEN)
    assert engine.hear(Refused)
    assert engine.passed() == []
    engine.close()


def test_the_server_copies_for_an_engine_that_has_no_room_to_map_its_memory(
    new_server, attach, caplog
):
    server, limits = new_server(memory="4GiB"), resource.getrlimit(resource.RLIMIT_AS)
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), limits[1]))
        engine = attach(server.path)
        engine.store("p")
        engine.await_hits("p")
        assert engine.client.tiers["serve"].counters.get("lent", 0) == 0
        assert "cannot be mapped" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_server_without_memory_that_it_alone_can_write_copies_from_private_memory(caplog):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK, limits[1]))
    try:
        memory = HostMemory(8 * BLOCK, LRUPolicy, lends=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (memory.file, memory.lends) == (None, False)
    assert "chunks are copied to all engines" in caplog.text


def test_a_load_takes_from_memory_and_disk_at_once(tmp_path, new_server, attach):
    disk = {"type": "disk", "root": str(tmp_path / "kv"), "capacity": "64MiB", "min_free": 0}
    server = new_server(memory=str(6 * BLOCK), backends=[disk])
    engine = attach(server.path)
    for name in "pqrp":
        engine.store(name)
        assert engine.load(name) == 10


class Borrower(Talk):
    """An engine's end that borrows all chunks of a load."""

    def borrow(self, job):
        self.send(Load(job, "serve", KEYS, [4, 5, 6, 7], SLOT, may_lend=True))
        answer = self.hear(Lent)
        assert (answer.job, answer.numbers) == (job, [0, 1, 2, 3])
        assert self.hear(Answered).ok == b"\1\1\1\1"
        return answer

    def hear_all(self, kind):
        return [each for each in self._heard if isinstance(each, kind)]

    def passed(self):
        """Return the descriptors that were passed to it, up to the end of the session; closed."""
        found = []
        with socket.socket(fileno=os.dup(self.ended)) as pair:
            pair.settimeout(20)
            data = b"more"
            while data:
                data, fds, *_ = socket.recv_fds(pair, 1, 1)
                found += fds
        for fd in found:
            os.close(fd)
        return found

    def map(self):
        """Map the server's memory."""
        with socket.socket(fileno=os.dup(self.ended)) as pair:
            _, fds, *_ = socket.recv_fds(pair, 1, 1)
        mapped = mmap.mmap(fds[0], 0, prot=mmap.PROT_READ)
        os.close(fds[0])
        return mapped


@pytest.fixture
def borrower(server):
    engine = Borrower(server.path).greet()
    engine.send(OPEN, Borrow(), Store(1, "serve", KEYS, [0, 1, 2, 3], SLOT))
    assert engine.hear(Passed)
    assert engine.hear(Answered).ok == b"\1\1\1\1"
    yield engine
    engine.close()


def lent_bytes(engine):
    usage = engine.client.tiers["serve"].usage
    return usage.gauges["memory_lent_bytes"] if usage else -1


def test_a_loan_lasts_until_it_is_released_or_the_engine_reads_no_more(
    server, attach, borrower, until
):
    engine = attach(server.path)
    loans = [borrower.borrow(job) for job in (2, 3)]
    until(lambda: lent_bytes(engine) == 8 * BLOCK)
    borrower.send(Release(loans[0].loan), Release(loans[0].loan), Release(999), Cancel(2))
    until(lambda: lent_bytes(engine) == 4 * BLOCK)
    mapped, starts = borrower.map(), loans[1].starts
    before = [mapped[start : start + SLOT] for start in starts]
    borrower.sock.close()
    for i in range(8):  # more than the memory has room for
        engine.store(f"new {i}")
        assert engine.load(f"new {i}") == 10
    until(lambda: lent_bytes(engine) == 4 * BLOCK)  # it has left, and may still read
    assert [mapped[start : start + SLOT] for start in starts] == before
    with socket.socket(fileno=os.dup(borrower.ended)) as pair:
        pair.shutdown(socket.SHUT_WR)
    until(lambda: lent_bytes(engine) == 0)


def test_a_stopped_engine_has_right_bytes_of_a_server_that_died(server, attach, until):
    client = ClientProcess(server.path, 1, "held")
    client.await_loan()
    os.kill(client.process.pid, signal.SIGSTOP)
    server.kill()
    server.start()
    engine = attach(server.path)
    for i in range(8):
        engine.store(f"new {i}")
        assert engine.load(f"new {i}") == 10
    client.go_on()
    until(lambda: lent_bytes(engine) > 0)  # the next loan is one of the new server
    assert client.kill() == "", "wrong bytes"
    until(lambda: lent_bytes(engine) == 0)


def test_an_engine_that_is_stopped_with_loans_delays_no_other(server, attach, until):
    client = ClientProcess(server.path, 1, "held")
    client.await_loan()
    os.kill(client.process.pid, signal.SIGSTOP)
    check_stopped_borrower(client, attach(server.path), until)


def test_an_engine_that_is_killed_has_left_though_a_child_of_it_lives(server, attach, until):
    client, engine = ClientProcess(server.path, 1, "forked"), attach(server.path)
    client.await_loan()
    until(lambda: (server.slabs, lent_bytes(engine) > 0) == (2, True))
    (child,) = psutil.Process(client.process.pid).children()
    client.process.kill()
    try:
        until(lambda: (server.slabs, lent_bytes(engine)) == (1, 0))
    finally:
        child.kill()
        client.kill()


@pytest.mark.parametrize("kills", [6, pytest.param(300, marks=pytest.mark.chaos)])
def test_engines_killed_with_loans_leave_right_bytes_and_no_lost_block(
    server, attach, until, kills
):
    """Each kills itself at a named point of a loan, while another one is at the next point."""
    engine, clients = attach(server.path), list[ClientProcess]()
    for i in range(kills):
        clients.append(ClientProcess(server.path, i, CLIENT_POINTS[i % len(CLIENT_POINTS)]))
        if i:
            assert clients.pop(0).end() == "", "wrong bytes"
        engine.store(f"p{i % 3}")
        engine.load(f"p{i % 2}")  # their chunks may have made room for those of the others
    assert clients.pop().end() == "", "wrong bytes"
    engine.store("last")
    assert engine.load("last") == 10
    until(lambda: are_all_blocks_accounted(engine))
    assert "Traceback" not in server.log


def are_all_blocks_accounted(engine):
    """Whether the chunks that are there have all blocks that are in use; each takes one."""
    used = engine.client.tiers["serve"].usage
    return (used.resident_bytes, lent_bytes(engine)) == (used.chunks * BLOCK, 0)


def test_a_descriptor_that_is_no_socket_is_refused(server):
    talk = Talk(server.path)
    reading, writing = os.pipe()
    greeting.greet(talk.sock, talk.fd, writing)
    assert talk.sock.recv(1) == b""
    for fd in (reading, writing, talk._theirs):
        os.close(fd)
    talk.close()
