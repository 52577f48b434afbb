"""The descriptors that one store keeps of segments: a bounded number, however many there are."""

import contextlib
import os
import resource
import shutil

import pytest
from disk_parts import ON_DISK, chunk_bytes, load, open_disk, stored, until, write

from kvoffload.backends.disk.descriptors import MOST_KEPT, Descriptors
from kvoffload.backends.disk.index import name_of
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.config import ByteSize
from kvoffload.testing.backends import keys_of

NAMESPACES = 500
MOST = MOST_KEPT + 4
"""With the lock of the own segment, and what housekeeping uses at the moment."""


@pytest.fixture
def few_descriptors():
    """The usual limit is 1,024 for all of an engine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def in_segments():
    """Return how many descriptors of this process lead to segments."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(link.endswith((".table", ".slots")) for link in links)


@pytest.mark.usefixtures("few_descriptors")
async def test_five_hundred_namespaces_and_few_descriptors(tmp_path):
    keys = keys_of(2)
    await stored(tmp_path, keys, "old", form="segments")
    (folder,) = (path for path in tmp_path.iterdir() if len(path.name) == 64)
    for i in range(1, NAMESPACES):
        shutil.copytree(folder, tmp_path / f"{i:064x}")
    room = {"capacity": ByteSize((2 * NAMESPACES + 20) * ON_DISK), "high_watermark": 1.0}
    backend = open_disk(tmp_path, "old", form="segments", low_watermark=1.0, **room)
    try:
        store, new = backend._store, keys_of(120, "new")
        assert len(store.index) == 2 * NAMESPACES
        for i in range(1, NAMESPACES + 1):
            assert store.used_ns(name_of(i % NAMESPACES, keys[0]))
            assert in_segments() <= MOST
        for key in new:  # most of them evict chunks of other namespaces
            assert await write(backend, [key]) == [True]
            assert in_segments() <= MOST
        assert await load(backend, new) == [True] * 120
        assert backend.counters()["evicted"] >= 100
        assert set(backend.counters()) <= {"evicted", "overwritten"}
        assert backend._housekeeper._scanner.scan(full=True)
        assert backend.usage().resident_bytes == chunk_bytes(tmp_path) == room["capacity"]
        assert in_segments() <= MOST
    finally:  # or its descriptors would fail the tests after it
        await backend.close()
    assert await until(lambda: in_segments() == 0)


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.fixture
def paths(tmp_path):
    paths = [str(tmp_path / f"{i}.table") for i in range(2 * MOST_KEPT)]
    for path in paths:
        with open(path, "w") as file:
            file.write(path)
    return paths


def test_the_least_recently_used_descriptors_close_first_and_none_in_use(paths):
    files = Descriptors(Vfs())
    used = files.get(paths[0], os.O_RDONLY)
    for path in paths[1:]:
        other = files.get(path, os.O_RDONLY)
        assert os.read(other.fd, 4096) == path.encode()
    assert in_segments() == MOST_KEPT + 1
    assert os.read(used.fd, 4096) == paths[0].encode()
    del used
    assert in_segments() == MOST_KEPT
    assert files.get(paths[-1], os.O_RDONLY) is other
    del other
    files.close()
    assert in_segments() == 0


@pytest.mark.parametrize(
    "end", [lambda files, path: files.drop(path), lambda files, _: files.close()]
)
def test_a_descriptor_in_use_closes_after_its_last_use(paths, end):
    files, path = Descriptors(Vfs()), paths[0]
    one, two = files.get(path, os.O_RDONLY), files.get(path, os.O_RDONLY)
    assert one is two
    fd = one.fd
    end(files, path)
    del one
    assert is_open(fd)
    del two
    assert not is_open(fd)


def test_a_thread_that_comes_after_the_end_leaves_nothing_open(paths):
    files = Descriptors(Vfs())
    files.close()
    file = files.get(paths[0], os.O_RDONLY)
    assert os.read(file.fd, 4096) == paths[0].encode()
    del file
    assert in_segments() == 0


def test_threads_that_open_one_file_at_once_share_a_descriptor(paths, monkeypatch):
    """The slower one's own closes at once."""
    files, vfs = Descriptors(Vfs()), Vfs()

    def slow_open(path, flags):
        monkeypatch.setattr(files.vfs, "open", vfs.open)
        first.append(files.get(path, flags))  # the other thread
        return vfs.open(path, flags)

    first = []
    monkeypatch.setattr(files.vfs, "open", slow_open)
    assert files.get(paths[0], os.O_RDONLY) is first[0]
    assert in_segments() == 1
    files.close()
