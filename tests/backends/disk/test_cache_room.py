"""Stores may fill the page cache while memory is free, and no program waits for it."""

import threading

import pytest

from kvoffload.backends.disk import cache_room
from kvoffload.backends.disk.cache_room import CacheRoom
from tests.support.kernel_files import GIB, waiting

GROUP = "sys/fs/cgroup/pod"


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when the test says so."""
    now = [1000.0]
    monkeypatch.setattr(cache_room.time, "monotonic", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    return wait


def limit_pod(kernel_files, *, limit, used, old_files=0):
    kernel_files.write("proc/self/cgroup", "0::/pod")
    kernel_files.write(f"{GROUP}/memory.max", limit)
    kernel_files.write(f"{GROUP}/memory.current", used)
    kernel_files.write(f"{GROUP}/memory.stat", f"anon 5\ninactive_file {old_files}")


@pytest.mark.parametrize(
    ("total", "available", "is_free"),
    [(16, 2.1, True), (16, 1.9, False), (64, 8.1, True), (64, 7.9, False), (1, 1, False)],
)
def test_an_eighth_of_the_memory_and_2_gib_are_left_to_programs(
    kernel_files, total, available, is_free
):
    figures = total * GIB, int(available * GIB)
    lines = "MemTotal: {} kB\nMemAvailable: {} kB".format(*(each >> 10 for each in figures))
    kernel_files.write("proc/meminfo", lines)
    assert CacheRoom("root").is_free is is_free


@pytest.mark.parametrize(("old_files", "is_free"), [(0, False), (3 * GIB, True)])
def test_a_pod_has_the_room_that_old_files_leave_it(kernel_files, old_files, is_free):
    limit_pod(kernel_files, limit=16 * GIB, used=15 * GIB, old_files=old_files)
    room = CacheRoom("root")
    assert room.is_free is is_free
    assert "the cgroup /pod has " in str(room)


def test_programs_that_wait_for_memory_get_it(kernel_files):
    for percent, is_free in ((0, True), (10, True), (10.1, False)):
        kernel_files.pressure(percent)
        assert CacheRoom("root").is_free is is_free
    kernel_files.pressure(0)
    limit_pod(kernel_files, limit="max", used=1)
    kernel_files.write(f"{GROUP}/memory.pressure", waiting(40))
    why = "programs of the cgroup /pod waited for memory in 40 % of the last 10 s"
    assert str(CacheRoom("root")) == f"stores go directly: {why}"


def test_stores_go_directly_where_the_kernel_tells_nothing(kernel_files):
    kernel_files.remove("proc/meminfo")
    room = CacheRoom("root")
    assert not room.look()
    assert str(room).endswith(": the kernel does not tell how much memory is available")


def test_the_kernel_is_asked_once_a_second_and_only_by_stores(kernel_files, clock):
    room = CacheRoom("root")
    kernel_files.available(GIB)
    clock(0.9)
    assert room.look() is room.is_free is True
    clock(0.2)
    assert room.is_free  # the loop's: it asks nothing
    assert room.look() is room.is_free is False


def test_the_page_cache_is_filled_again_after_ten_seconds_without_a_reason(
    kernel_files, clock, caplog
):
    caplog.set_level("INFO")
    room = CacheRoom("/kv")
    kernel_files.pressure(80)
    clock(1)
    assert not room.look()
    kernel_files.pressure(0)
    for _ in range(9):
        clock(1)
        assert not room.look()
    assert "80 % of the last 10 s" in str(room)
    clock(1)
    assert room.look()
    left = "the machine has 10.0 GiB of 16.0 GiB available"
    assert [record.getMessage() for record in caplog.records] == [
        "disk /kv: stores go directly: programs of the machine waited for memory in 80 % of the "
        "last 10 s",
        f"disk /kv: stores go through the page cache: {left}",
    ]


def test_a_thread_that_asks_the_kernel_keeps_no_other_waiting(kernel_files, clock, monkeypatch):
    room, asked, go_on = CacheRoom("root"), threading.Event(), threading.Event()

    def slow():
        asked.set()
        assert go_on.wait(30)
        return False, "slow"

    monkeypatch.setattr(cache_room, "_judged", slow)
    clock(1)
    thread = threading.Thread(target=room.look)
    thread.start()
    assert asked.wait(30)
    assert room.look()
    go_on.set()
    thread.join()
    assert not room.look()
