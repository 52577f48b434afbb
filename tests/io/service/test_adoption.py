"""The memory of a server that has ended, whenever that was, is that of the next one."""

import fcntl
import mmap
import os
import random
import re
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest

from kvoffload.backends.header import MAGIC
from kvoffload.io.service import memory_file
from kvoffload.io.service.host_memory import BLOCK, HostMemory
from kvoffload.io.service.host_store import HostStore
from kvoffload.policies.lru import LRUPolicy
from kvoffload.testing.backends import filled, keys_of, slots
from tests.support.host_server import ClientProcess, check_stopped_borrower
from tests.support.service_manager import ServiceManager

BLOCKS = 8
RECORD = memory_file._RECORD_BYTES


def new_memory(blocks=BLOCKS, **settings):
    return HostMemory(blocks * BLOCK, LRUPolicy, keeps=True, **settings)


def next_to(memory, **settings):
    """Return the memory of the next server; the one of this memory counts as dead."""
    fcntl.flock(memory.file._own_fd, fcntl.LOCK_UN)
    return new_memory(fd=os.dup(memory.file.fd), **settings)


async def contents(memory, keys, size=BLOCK, namespace="n"):
    """Read chunks from a memory; return those that come, and check that they are right."""
    store, rows = HostStore(memory, namespace), slots(len(keys), size)
    found = await store.read(keys, rows)
    for key, answer, row, chunk in zip(keys, found, rows, filled(keys, size), strict=True):
        assert not answer or bytes(row) == bytes(chunk), key
    await store.close()
    return [key for key, answer in zip(keys, found, strict=True) if answer]


async def write(memory, keys, size=BLOCK, namespace="n"):
    store = HostStore(memory, namespace)
    await store.write(keys, filled(keys, size))
    await store.close()


def blocks_in_use(memory):
    return memory.resident_bytes // BLOCK


async def test_the_next_server_has_the_chunks_and_the_order_in_which_they_leave():
    memory, keys = new_memory(), keys_of(BLOCKS)
    for key in keys:
        await write(memory, [key])
    assert await contents(memory, keys[:2]) == keys[:2]
    for _ in range(3):
        memory = next_to(memory)
    assert blocks_in_use(memory) == BLOCKS
    await write(memory, new := keys_of(2, "new"))
    assert await contents(memory, keys + new) == keys[:2] + keys[4:] + new


async def test_chunks_of_all_lengths_namespaces_and_pieces_are_adopted():
    memory, small = new_memory(12), keys_of(12)
    await write(memory, small, 100)
    store = HostStore(memory, "n")
    await store.remove(small[::2])
    await store.close()
    await write(memory, large := keys_of(1, "large"), 3 * BLOCK + 1, namespace="other")
    assert len(memory._find(memory.number_of("other") + large[0]).runs) == 4
    after = next_to(memory, blocks=12)
    assert await contents(after, small, 100) == small[1::2]
    assert await contents(after, large, 3 * BLOCK + 1, "other") == large
    assert await contents(after, large, 3 * BLOCK + 1, "n") == []
    assert after._free.num_blocks == memory._free.num_blocks == 2


async def test_a_record_that_is_written_or_cleared_in_part_is_none():
    memory, (key, other) = new_memory(1), keys_of(2)
    record = slice(memory.file._at(0), memory.file._at(1))
    await write(memory, [other])
    old = memory.file.map[record]
    memory.file.clear(0)
    cleared = memory.file.map[record]
    await write(memory, [key])
    new = memory.file.map[record]
    cuts = [cleared[:i] + old[i:] for i in range(1, 8)]  # cleared in part
    cuts += [cleared[:256] + new[256:i] + cleared[i:] for i in range(256, 512)]
    cuts += [new[:i] + cleared[i:256] + new[256:] for i in range(256)]  # the header comes last
    for cut in cuts:
        memory.file.map[record] = cut
        memory = next_to(memory, blocks=1)
        assert await contents(memory, [key, other]) == [], cut
    memory.file.map[record] = new
    assert await contents(next_to(memory, blocks=1), [key, other]) == [key]


async def test_damaged_chunks_are_absent_once_they_are_read_and_their_blocks_are_free():
    memory, keys = new_memory(), keys_of(3)
    await write(memory, keys)
    for key in keys[:2]:
        memory._map[memory._find(memory.number_of("n") + key).start + 100] ^= 1
    after = next_to(memory)
    store = HostStore(after, "n")
    await store.verify(keys[1:2], [BLOCK])
    assert store.lend(keys[1:2], [BLOCK])[0] == [-1]
    await store.close()
    assert await contents(after, keys) == keys[2:]
    assert (len(after), blocks_in_use(after)) == (1, 1)


async def test_of_chunks_that_have_a_block_in_common_one_is_adopted():
    memory, keys = new_memory(), keys_of(3)
    await write(memory, keys, 2 * BLOCK)
    chunks = [memory._find(memory.number_of("n") + key) for key in keys]
    header = chunks[1].header
    for runs in (
        [(chunks[1].first, 1), (chunks[0].first, 1)],
        [(chunks[1].first, 1)] * 2,
        [(chunks[1].first, 3)],
        [(chunks[1].first, 2), (3, 0)],
        [(chunks[1].first, 2**32 - 1)],
    ):
        memory.file.clear(chunks[1].first)
        memory.file.note(header, runs)
        later = next_to(memory)
        found = await contents(later, keys, 2 * BLOCK)
        assert blocks_in_use(later) == 2 * len(found)
        assert set(found) <= {keys[0], keys[2]}
        memory = later


@pytest.mark.parametrize("what", ["smaller", "version", "unsealed", "in use", "no file", "short"])
async def test_a_memory_that_does_not_fit_is_not_adopted(what, caplog):
    memory, keys = new_memory(), keys_of(2)
    await write(memory, keys)
    fd, blocks = os.dup(memory.file.fd), BLOCKS
    if what != "in use":
        fcntl.flock(memory.file._own_fd, fcntl.LOCK_UN)
    if what == "smaller":
        blocks -= 1
    elif what == "version":
        memory.file.map[memory.file._label] ^= 1
    elif what == "unsealed":
        os.close(fd)
        fd = os.memfd_create("other")
        os.truncate(fd, os.fstat(memory.file.fd).st_size)
    elif what == "no file":
        os.close(fd)
        fd, other = os.pipe()
        os.close(other)
    elif what == "short":
        os.close(fd)
        fd = os.memfd_create("other")
    inode = os.fstat(fd).st_ino
    after = new_memory(blocks, fd=fd)
    assert "cannot be adopted" in caplog.text
    caplog.clear()  # it has the error, and that what it was about
    assert (len(after), after.file.is_adopted) == (0, False)
    assert not is_open(fd) or os.fstat(fd).st_ino != inode


def is_open(fd):
    return os.path.exists(f"/proc/self/fd/{fd}")


async def test_what_an_earlier_server_has_lent_stays_until_its_engine_maps_it_no_more():
    memory, keys = new_memory(lends=True), keys_of(8)
    await write(memory, keys)
    engine = memory.file.opened_for_engine()
    mapped = mmap.mmap(engine, 0, prot=mmap.PROT_READ)
    os.close(engine)
    store = HostStore(memory, "n")
    await store.verify(keys, [BLOCK] * 8)
    (_, end), (starts, _), (gone, _) = (store.lend(keys[i : i + 1], [BLOCK]) for i in range(3))
    end()
    await store.remove(keys[2:3])
    lent = {starts[0]: keys[1], gone[0]: keys[2]}
    for name in ("second", "third"):
        memory = next_to(memory, lends=True)
        later = memory.file.opened_for_engine()  # of an engine that is attached to this server
        memory.end_old_loans()
        assert memory.lent_bytes == 2 * BLOCK
        assert await contents(memory, keys[2:3]) == []
        await write(memory, new := keys_of(8, name))
        assert len(await contents(memory, new)) == BLOCKS - 2
        for start, key in lent.items():
            assert mapped[start : start + BLOCK] == bytes(filled([key], BLOCK)[0])
        os.close(later)
    mapped.close()
    memory.end_old_loans()
    assert memory.lent_bytes == 0
    await write(memory, last := keys_of(8, "last"))
    assert await contents(memory, last) == last


def test_what_an_engine_gets_cannot_be_written():
    memory = new_memory(lends=True)
    fd = memory.file.opened_for_engine()
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 0)
    for write in (lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 0)):
        with pytest.raises(OSError, match=r"Bad file descriptor|Invalid argument"):
            write()
    assert os.fstat(fd).st_mode & 0o777 == 0o400
    os.close(fd)


# ---- servers ----


@pytest.fixture
def manager(tmp_path, closing):
    return closing(ServiceManager(tmp_path))


@pytest.fixture
def new_client(tmp_path):
    """Start clients of the server in this folder, which end with the test."""
    made = []

    def make(seed, point=""):
        made.append(ClientProcess(str(tmp_path / "s"), seed, point))
        return made[-1]

    yield make
    for client in made:
        client.process.kill()
        client.process.wait()
        client.process.stdout.close()


@pytest.mark.parametrize("lend", [False, True])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_prompt_is_a_hit_on_the_next_server(manager, new_server, attach, lend, how):
    server = new_server(manager, lend=lend)
    engine = attach(server.path)
    engine.store("p")
    getattr(server, how)()
    server.start()
    engine.await_hits("p")
    late = attach(server.path)
    late.truth = engine.truth
    late.await_hits("p")
    assert "10 chunks of the server before are adopted" in server.log


def test_another_size_begins_empty_and_the_manager_keeps_the_new_memory(
    manager, new_server, attach, until
):
    server = new_server(manager, memory="16MiB")
    engine = attach(server.path)
    engine.store("p")
    server.kill()
    server.configure(memory="8MiB")
    server.start()  # the manager's socket takes calls before the server has its memory
    until(lambda: "cannot be adopted" in server.log)
    until(lambda: engine.client._link.is_up and not engine.client._is_opening)
    engine.store("p")
    engine.await_hits("p")
    server.kill()
    server.start()
    engine.await_hits("p")
    assert len(manager.kept) == 1


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_stopped_engine_keeps_what_it_has_on_loan_from_the_server_before(
    manager, new_server, attach, new_client, until, how
):
    server = new_server(manager, memory="1MiB", policy="lru")
    client = new_client(1, "held")
    client.await_loan()
    os.kill(client.process.pid, signal.SIGSTOP)
    getattr(server, how)()
    server.start()
    engine = attach(server.path)
    check_stopped_borrower(client, engine, until)


def num_descriptors(server):
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def engine_count(server):
    """Engines that are attached to a server since its start."""
    return server.log.rpartition("engines may attach")[2].count("is attached")


def num_kept(manager, memory_bytes):
    """Return how many chunks the table of the memory has that the manager keeps."""
    manager.take_messages()
    fd = manager.kept[0][1]
    at = range(memory_bytes + memory_file._LABEL_BYTES, os.fstat(fd).st_size, RECORD)
    return sum(os.pread(fd, len(MAGIC), start) == MAGIC for start in at)


@pytest.mark.parametrize(
    ("kills", "lend"),
    [(3, True), *(pytest.param(300, lend, marks=pytest.mark.chaos) for lend in (False, True))],
)
def test_servers_killed_at_any_time_leave_a_warm_memory(
    manager, new_server, attach, new_client, until, kills, lend
):
    """Clients store and load all the time, in a memory that has no room for all they store."""
    rng = random.Random(kills)
    server = new_server(manager, memory="2MiB", lend=lend)
    before = num_descriptors(server)
    clients = [new_client(seed) for seed in range(2)]
    for i in range(kills):
        if i % 3 == 2:  # else it is killed while it starts, or engines attach
            until(lambda: engine_count(server) == 2)
            until(lambda: num_kept(manager, 2 << 20) > 100)
        time.sleep(rng.uniform(0, 0.3))
        server.kill()
        server.start()
    engine = attach(server.path)
    # On a busy machine the clients' chunks may take the place of these before they are read.
    until(lambda: engine.store("p") or engine.load("p") == 10)
    for client in clients:
        assert client.process.poll() is None
        assert client.kill() == "", "wrong bytes"
    adopted = list(map(int, re.findall(r"(\d+) chunks of the server before", server.log)))
    assert len(adopted) >= kills // 2  # the rest was killed before it said so
    assert "cannot be adopted" not in server.log
    assert adopted[-1] > 64
    # Two stores of 16 chunks, which have made room, may be lost.
    assert all(now >= last - 32 for last, now in pairwise(adopted))
    until(lambda: num_descriptors(server) <= before + 12)  # of the one engine that is left
    assert len(manager.kept) == 1
    assert "Traceback" not in server.log
