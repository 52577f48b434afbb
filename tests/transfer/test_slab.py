"""The slab is the memory asked for, is not copied by forks, and can be of several processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from kvoffload.errors import ConfigError
from kvoffload.transfer import shared_memory
from kvoffload.transfer import slab as slab_module
from kvoffload.transfer.cpu.copier import POPULATED_BYTES, CpuCopier
from kvoffload.transfer.cuda.pinning import Pinning
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.shared_memory import create_shared_memory
from kvoffload.transfer.slab import Slab
from tests.support.fence_ends import ends
from tests.support.moves import move, moves_of

SLOT = 8192


def mapped_bytes(address):
    """Size of the mapping that begins at or contains an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < last:
            return last - first
    return 0


def resident_bytes(address):
    """The resident bytes of the mapping, and its flags."""
    inside, resident, flags = False, 0, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            first, last = (int(number, 16) for number in line.split()[0].split("-"))
            inside = first <= address < last
        elif inside and line.startswith("Rss:"):
            resident += int(line.split()[1]) * 1024
        elif inside and line.startswith("VmFlags:"):
            flags = line
    return resident, flags


def test_a_slab_maps_what_was_asked_for_and_takes_it_as_it_is_used():
    slab = Slab(4096, SLOT)
    assert slab.num_bytes == 4096 * SLOT
    # The kernel may join it with a neighbour, never give less.
    assert mapped_bytes(slab.address) >= slab.num_bytes
    assert resident_bytes(slab.address)[0] < slab.num_bytes
    slab.slot(7, 3)[:] = b"abc"
    slab.populate(0, slab.num_bytes)
    assert bytes(slab.slot(7, 4)) == b"abc\0"
    assert slab.rows[7, :3].tolist() == [97, 98, 99]


def test_the_copier_lets_the_kernel_allocate_it_before_its_first_use(kv_caches, until):
    layout = ChunkLayout(kv_caches, [2])
    slab = Slab(6 * POPULATED_BYTES // layout.slot_bytes, layout.slot_bytes)
    with closing(CpuCopier(kv_caches, slab, layout)):
        until(lambda: resident_bytes(slab.address)[0] >= slab.num_bytes)


def test_a_copy_and_the_end_wait_for_one_part_of_that_alone(kv_caches, monkeypatch, until):
    layout = ChunkLayout(kv_caches, [2])
    slab = Slab(6 * POPULATED_BYTES // layout.slot_bytes, layout.slot_bytes)
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def populate(start, length):
        begun.release()
        return go_on.acquire(timeout=60)

    monkeypatch.setattr(slab, "populate", populate)
    copier = CpuCopier(kv_caches, slab, layout)
    assert begun.acquire(timeout=60)
    fence = copier.launch(moves_of(move(0, [1, 2])), True, copier.record_fence())
    assert not fence.done()
    go_on.release()  # one of six
    assert ends(fence)
    assert begun.acquire(timeout=60)
    closing = threading.Thread(target=copier.close)
    closing.start()
    until(lambda: not copier._queue.empty())
    go_on.release()  # the second
    closing.join()
    assert not begun.acquire(blocking=False)


def test_a_kernel_that_cannot_allocate_ahead_is_asked_once(kv_caches, monkeypatch):
    layout = ChunkLayout(kv_caches, [2])
    slab, asked = Slab(6 * POPULATED_BYTES // layout.slot_bytes, layout.slot_bytes), []
    monkeypatch.setattr(slab, "populate", lambda *part: asked.append(part))
    copier = CpuCopier(kv_caches, slab, layout)
    assert ends(copier.launch(moves_of(move(0, [1, 2])), True, copier.record_fence()))
    copier.close()
    assert len(asked) <= 1


def test_a_core_file_has_no_cache_of_clients_in_it():
    slab = Slab(4, 1 << 20)
    slab.rows[:] = 1
    _, flags = resident_bytes(slab.address)
    assert "dd" in flags.split()


def test_copies_do_not_wait_for_memory_whose_pages_cannot_be_taken(monkeypatch, until):
    slab = Slab(4, SLOT)

    def refuse(start, length):
        raise ValueError("madvise start out of bounds")

    monkeypatch.setattr(slab, "populate", refuse)
    pinning = Pinning(slab, lambda address, length: None, lambda address: None)
    until(lambda: pinning.is_settled(SLOT))
    assert pinning.pinned_bytes == 0
    assert "out of bounds" in str(pinning.error)
    pinning.close()


def test_memory_is_taken_without_the_gil():
    """A portion takes tens of milliseconds, in which no other Python thread would run."""
    slab = Slab(1, 16 << 20)
    steps = []

    def populate_until_the_other_has_moved():
        # In time of this thread: a busy machine may run the other one late.
        while len(steps) < 5 and time.thread_time() < 20.0:
            slab.populate(0, slab.num_bytes)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # no thread is asked for the GIL: the call must release it
    try:
        thread = threading.Thread(target=populate_until_the_other_has_moved)
        thread.start()
        while thread.is_alive():
            steps.append(1)
            time.sleep(0)
    finally:
        sys.setswitchinterval(interval)
    assert len(steps) >= 5
    assert resident_bytes(slab.address)[0] >= slab.num_bytes


def test_a_copy_waits_until_its_portion_is_pinned_and_not_for_later_ones(until):
    slab, pinned, goes_on = Slab(4, SLOT), [], [threading.Event() for _ in range(4)]

    def register(address, length):
        assert goes_on[len(pinned)].wait(10)
        pinned.append((address - slab.address, length))

    pinning = Pinning(slab, register, lambda address: None, portion_bytes=SLOT)
    assert not pinning.is_settled(1)
    goes_on[0].set()
    until(lambda: pinning.is_settled(SLOT))
    assert (pinned, pinning.pinned_bytes) == ([(0, SLOT)], SLOT)
    assert not pinning.is_settled(SLOT + 1)
    pinning.stop()
    assert pinning.is_settled(4 * SLOT)
    assert pinning.pinned_bytes == SLOT
    goes_on[1].set()
    pinning.close()
    assert len(pinned) <= 2


def test_a_child_process_does_not_share_pages_that_a_gpu_writes():
    slab = Slab(4, SLOT)
    slab.rows[:] = 1
    assert " dc" not in resident_bytes(slab.address)[1]
    slab.keep_from_forks()
    assert " dc" in resident_bytes(slab.address)[1]  # "do not copy area on fork"


def test_more_memory_than_the_container_has_left_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(shared_memory, "available_host_bytes", lambda: 10 * SLOT)
    Slab(10, SLOT)
    with pytest.raises(ConfigError, match=r"cpu_bytes.*only 80\.0 KiB of host memory"):
        Slab(11, SLOT)
    with pytest.raises(ConfigError, match="cpu_bytes"):
        create_shared_memory(11 * SLOT)


def test_memory_the_system_refuses_is_refused_by_name():
    code = (
        "import resource\n"
        "from kvoffload.errors import ConfigError\n"
        "from kvoffload.transfer.slab import Slab\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "try: Slab(5, 1 << 30)\n"
        "except ConfigError as error: print(error.field)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert said.stdout == "cpu_bytes\n", said.stderr


CHILD = """
import sys, time
from kvoffload.transfer.shared_memory import create_shared_memory
from kvoffload.transfer.slab import Slab
fd, num_slots, slot_bytes = map(int, sys.argv[1:])
if fd < 0:
    fd = create_shared_memory(num_slots * slot_bytes)
    print(fd, flush=True)
slab = Slab(num_slots, slot_bytes, fd)
slab.slot(2, 5)[:] = b"child"
print("written", flush=True)
time.sleep(60)
"""


def start(fd, num_slots, pass_fds=()):
    command = [sys.executable, "-c", CHILD, str(fd), str(num_slots), str(SLOT)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=pass_fds)


def test_a_slab_in_a_memory_file_is_one_for_several_processes():
    fd = create_shared_memory(4 * SLOT)
    try:
        ours = Slab(4, SLOT, fd)
        child = start(fd, 4, pass_fds=(fd,))
        with child:
            assert child.stdout.readline() == "written\n"
            assert bytes(ours.slot(2, 5)) == b"child"
            child.kill()
        assert bytes(ours.slot(2, 5)) == b"child"  # the child only mapped it
        with pytest.raises(PermissionError):
            os.ftruncate(fd, SLOT)
        with pytest.raises(ValueError, match=r"32768 bytes, 5 slots of 8192 bytes take 40960"):
            Slab(5, SLOT, fd)
    finally:
        os.close(fd)


def test_nothing_of_a_shared_slab_is_left_when_all_its_processes_were_killed():
    maker = start(-1, 1000)
    with maker:
        fd = int(maker.stdout.readline())
        assert maker.stdout.readline() == "written\n"
        borrowed = os.open(f"/proc/{maker.pid}/fd/{fd}", os.O_RDWR)
        slab = Slab(1000, SLOT, borrowed)
        assert bytes(slab.slot(2, 5)) == b"child"
        maker.send_signal(signal.SIGKILL)
    assert bytes(slab.slot(2, 5)) == b"child"  # it lives as long as one process maps it
    # It never had a name in /dev/shm or elsewhere.
    assert os.fstat(borrowed).st_nlink == 0
    assert os.readlink(f"/proc/self/fd/{borrowed}") == "/memfd:kvoffload-slab (deleted)"
    os.close(borrowed)


@pytest.mark.parametrize("node", [0, 5, 70])
def test_the_kernel_is_asked_for_the_node_of_the_device(node, monkeypatch):
    asked = []

    class Libc:
        def syscall(self, number, address, length, mode, mask, max_node, flags):
            bits = "".join(f"{word:064b}"[::-1] for word in mask)
            asked.append([i for i, bit in enumerate(bits) if bit == "1"])
            assert max_node.value > node
            return 0

    slab = Slab(1, SLOT)
    monkeypatch.setattr(slab_module, "_MBIND", 237)
    monkeypatch.setattr(slab_module.ctypes, "CDLL", lambda *_, **__: Libc())
    slab.prefer_node(node)
    assert asked == [[node]]


@pytest.mark.parametrize(
    ("allowed", "is_told"),
    [
        ("always within_size advise [never] deny force", True),
        ("always within_size [advise] never deny force", False),
        (None, False),
    ],
)
def test_shared_memory_without_huge_pages_is_made_and_told_of(
    monkeypatch, tmp_path, caplog, allowed, is_told
):
    file = tmp_path / "shmem_enabled"
    if allowed:
        file.write_text(allowed)
    monkeypatch.setattr(shared_memory, "_SHARED_HUGE_PAGES", file)
    with caplog.at_level("INFO", "kvoffload"):
        os.close(create_shared_memory(SLOT))
    assert (f"echo advise > {file}" in caplog.text) is is_told
