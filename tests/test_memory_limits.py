"""Memory is told by files of the kernel, which these tests write as Linux 6.1 and 6.18 do."""

from pathlib import Path

import pytest

from kvoffload import memory_limits
from kvoffload.memory_limits import Memory, available_host_bytes, memories, pressure
from tests.support.kernel_files import waiting

MEMINFO = """\
MemTotal:       16000000 kB
MemFree:         1000000 kB
MemAvailable:   12000000 kB
HugePages_Total:       0
"""
MACHINE = Memory("the machine", 16_000_000 * 1024, 12_000_000 * 1024)
V1 = "12:blkio:/\n4:cpu,memory:/pod/ours\n0::/\n"
V2 = "0::/pod/ours\n"


@pytest.fixture
def kernel(kernel_files):
    kernel_files.remove("proc/meminfo")
    return kernel_files.write


def test_a_kernel_that_tells_nothing_of_memory(kernel):
    assert (memories(), available_host_bytes(), pressure()) == ([], None, None)
    kernel("proc/meminfo", "MemTotal:  x kB\nMemAvailable:")
    kernel("proc/self/cgroup", V2)
    kernel("sys/fs/cgroup/pod/ours/memory.max", "max")
    kernel("sys/fs/cgroup/pod/ours/memory.pressure", "")
    kernel("proc/pressure/memory", "some of another form")
    assert (memories(), available_host_bytes(), pressure()) == ([], None, None)


def test_this_kernel_tells_of_the_memory_of_this_machine():
    assert Path("/") == memory_limits.ROOT
    memory = memories()[0]
    assert 0 < memory.available_bytes <= memory.total_bytes
    assert 0 < available_host_bytes() <= memory.total_bytes


@pytest.mark.parametrize("limited", ["pod/ours", "pod", ""])
@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_of_the_own_cgroup_or_of_any_above_counts(kernel, version, limited):
    base, limit, used = "sys/fs/cgroup", "memory.max", "memory.current"
    if version == 1:
        base, limit, used = f"{base}/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
    kernel("proc/meminfo", MEMINFO)
    kernel("proc/self/cgroup", V1 if version == 1 else V2)
    kernel(f"{base}/pod/ours/{limit}", "max" if version == 2 else 2**63 - 4096)
    kernel(f"{base}/pod/ours/{used}", 1)
    kernel(f"{base}/{limited}/{limit}", 1_000_000)
    kernel(f"{base}/{limited}/{used}", 900_000)
    assert memories() == [MACHINE, Memory(f"the cgroup /{limited}", 1_000_000, 100_000)]
    assert available_host_bytes() == 100_000


@pytest.mark.parametrize(
    ("group", "base", "limit", "used", "stat"),
    [
        (V2, "sys/fs/cgroup/pod", "memory.max", "memory.current", "inactive_file 700000"),
        (
            V1,
            "sys/fs/cgroup/memory/pod",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "inactive_file 1\ntotal_inactive_file 700000",
        ),
    ],
)
def test_old_files_in_a_page_cache_count_as_memory_that_is_left(
    kernel, group, base, limit, used, stat
):
    kernel("proc/self/cgroup", group)
    kernel(f"{base}/{limit}", 1_000_000)
    kernel(f"{base}/{used}", 900_000)
    kernel(f"{base}/memory.stat", f"anon 100000\nactive_file 1000\n{stat}")
    assert available_host_bytes() == 800_000
    kernel(f"{base}/{used}", 1_900_000)  # the limit was lowered
    assert available_host_bytes() == 0


def test_a_limit_above_which_the_kernel_throttles_counts(kernel):
    kernel("proc/self/cgroup", V2)
    kernel("sys/fs/cgroup/pod/memory.high", 950_000)
    kernel("sys/fs/cgroup/pod/memory.max", 1_000_000)
    kernel("sys/fs/cgroup/pod/memory.current", 900_000)
    assert memories() == [Memory("the cgroup /pod", 950_000, 50_000)]


def test_the_place_where_programs_wait_most_for_memory(kernel):
    kernel("proc/self/cgroup", V2)
    kernel("proc/pressure/memory", waiting(1.25))
    assert pressure() == ("the machine", 1.25)
    kernel("sys/fs/cgroup/pod/memory.pressure", waiting(12.5))
    kernel("sys/fs/cgroup/pod/ours/memory.pressure", waiting(0))
    assert pressure() == ("the cgroup /pod", 12.5)
