"""Two hosts on real network file systems, whose servers are stopped, continued and killed.

``make chaos`` runs these; other tests have two mounts of one file system in memory.
"""

import asyncio
import signal
import threading
import time

import pytest
from disk_parts import SIZE, load, until
from folder_parts import open_folder, store

from kvoffload.backends.folder import doctor
from kvoffload.backends.folder.admin import FolderAdmin
from kvoffload.testing.backends import keys_of, slots
from tests.backends.folder.test_backend import FolderSuite
from tests.support import gluster_mounts
from tests.support.network_mounts import KINDS

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module", params=KINDS)
def served(request, tmp_path_factory):
    mounts, missing = KINDS[request.param]
    with mounts(tmp_path_factory.mktemp(request.param)) as made:
        if made is None:
            pytest.skip(missing)
        yield *made, request.param


@pytest.fixture
def roots(served, request):
    """The same empty root by both mounts, and the server."""
    one, two, server, _ = served
    name = request.node.name.partition("[")[0]
    yield one / name, two / name, server
    server.signal(signal.SIGCONT)


async def test_a_chunk_of_one_host_is_found_and_read_by_the_other(roots):
    one, two = (open_folder(root) for root in roots[:2])
    keys = keys_of(8)
    assert await two.contains(keys) == [False] * 8
    assert await store(one, keys) == [True] * 8
    assert await two.contains(keys) == [True] * 8
    assert await load(two, keys) == [True] * 8
    await one.close()
    await two.close()


async def test_a_stopped_server_is_misses_by_the_deadline_and_serves_again(roots):
    root, _, server = roots
    patient = open_folder(root, timeout_s=60.0)
    keys, into = keys_of(12), slots(12, SIZE)
    assert await store(patient, keys) == [True] * 12
    backend = open_folder(root, threads=4, timeout_s=0.5)
    before = threading.active_count()
    server.signal(signal.SIGSTOP)
    begun_s = time.monotonic()
    assert await backend.read(keys, into) == [False] * 12
    assert await store(backend, keys_of(4, "new")) == [False] * 4
    assert await backend.contains(keys) == [False] * 12
    assert time.monotonic() - begun_s < 10
    assert threading.active_count() <= before + 4 + 4
    for slot in into:
        slot[:] = b"\xaa" * SIZE
    server.signal(signal.SIGCONT)
    assert await until(lambda: backend.usage().gauges["up"])
    assert await until(lambda: not backend._mount._threads.all_busy_for(0))
    await asyncio.sleep(0.2)
    assert all(bytes(slot) == b"\xaa" * SIZE for slot in into)
    assert await load(patient, keys) == [True] * 12
    await backend.close()
    await patient.close()


async def test_doctor_measures_both_mounts(roots, served, monkeypatch):
    monkeypatch.setattr(doctor, "_DEPTHS", (2,))
    await open_folder(roots[0]).close()
    options = {"root": str(roots[0]), "other_mount": str(roots[1]), "trust_parent_folders": True}
    found = {each.check: each for each in await FolderAdmin(options).diagnose()}
    assert found["file system"].detail.startswith(f"fuse.{served[3]}")
    assert {found[name].verdict for name in ("file system", "rights", "other host", "times")} == {
        "ok"
    }
    assert found["depth 2"].verdict != "failed"


class TestMounted(FolderSuite):
    @pytest.fixture(autouse=True)
    def _own_folder(self, served, request):
        self.folder = served[0] / request.node.name
        self.folder.mkdir()
        self._opened = []

    settings = {"trust_parent_folders": True}  # noqa: RUF012


def test_no_file_of_glusterfs_changes_its_brick_as_it_gets_its_name(tmp_path):
    with gluster_mounts.gluster_mounts(tmp_path) as made:
        if made is None:
            pytest.skip(gluster_mounts.MISSING)
        asyncio.run(_stored(made[0] / "kv", keys := keys_of(60)))
        names = {key.hex() for key in keys}
        # Else a brick keeps an empty file of the name, which tells where the chunk is.
        files = [path for path in tmp_path.glob("brick-*/kv/*/*/*") if path.name in names]
        assert len(files) == 60
        assert len({path.parents[3] for path in files}) == 3


async def _stored(root, keys):
    backend = open_folder(root)
    assert await store(backend, keys) == [True] * len(keys)
    await backend.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_server_is_misses_with_a_reason(tmp_path, kind):
    mounts, missing = KINDS[kind]
    with mounts(tmp_path) as made:
        if made is None:
            pytest.skip(missing)
        asyncio.run(_killed(*made))


async def _killed(one, two, server):
    backend, keys = open_folder(one / "kv", timeout_s=2.0), keys_of(4)
    await store(backend, keys)
    server.signal(signal.SIGKILL)
    assert await store(backend, keys_of(2, "new")) == [False] * 2
    for _ in range(100):  # the kernel remembers files of the mount for a second
        if not any([*await load(backend, keys), *await backend.contains(keys)]):
            break
        await asyncio.sleep(0.1)
    assert await load(backend, keys) == [False] * 4
    assert await backend.contains(keys) == [False] * 4
    told = backend.counters()
    assert any(name.startswith("read_") for name in told), told
    assert any(name.startswith(("write_", "refused_")) for name in told), told
    await backend.close()
    if not one.is_mount():  # sshfs unmounts itself
        assert list(one.iterdir()) == []  # nothing was written in the place of the mount
