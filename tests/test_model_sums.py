"""What the random model adds up, while stores write and before they have started all threads."""

import contextlib
import random
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from disk_parts import open_disk
from disk_parts import write as store_on_disk
from folder_parts import open_folder, store

from kvoffload.backends.disk.paths import SHARDS
from kvoffload.testing.backends import keys_of
from tests.support.disk_chunks import stored_in
from tests.support.random_model import sums
from tests.support.random_model.faults import Faults
from tests.support.vfs import HookedVfs


class SeenVfs(HookedVfs):
    """Looks at the chunks of a root before the file of one is renamed."""

    def __init__(self, root):
        super().__init__()
        self._root = root
        self.seen = []

    def around(self, call, path, perform):
        if call == "rename" and Path(path).parent.name in SHARDS:
            self.seen.append([chunk.key for chunk in stored_in(self._root)])
        return perform()


async def test_a_file_that_is_written_is_no_chunk_yet(tmp_path):
    vfs, keys = SeenVfs(tmp_path), keys_of(2)
    backend = open_folder(tmp_path, vfs=vfs, threads=1)
    assert await store(backend, keys[:1]) == [True]
    assert await store(backend, keys[1:]) == [True]
    assert vfs.seen == [[], keys[:1]]
    assert [chunk.key for chunk in stored_in(tmp_path)] == sorted(keys)
    await backend.close()


async def test_an_entry_that_is_written_in_part_is_no_chunk_yet(tmp_path):
    backend, keys = open_disk(tmp_path, form="slots"), keys_of(1)
    assert await store_on_disk(backend, keys) == [True]
    await backend.close()
    (table,) = tmp_path.rglob("*.table")
    table.write_bytes(table.read_bytes() + b"\1" * 10)
    assert [chunk.key for chunk in stored_in(tmp_path)] == keys


@contextlib.contextmanager
def running(name):
    """Run a thread of a name."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name=name)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


async def test_a_folder_tier_may_start_its_threads_after_the_first_rest(tmp_path, monkeypatch):
    backend = open_folder(tmp_path, threads=sums.FOLDER_THREADS)
    await backend.contains(keys_of(1))
    with running("kvoffload-io"):
        held = sums.Held()
        held.check()
        for number in range(4):  # each call starts one thread, up to the most
            await backend.contains(keys_of(1, f"k{number}"))
        held.check()
        monkeypatch.setattr(sums, "REST_S", 0.0)
        assert "kvoffload-folder-lookup-1" in sums._late_threads()
        for left in ("kvoffload-folder-lookup-1", "kvoffload-folder-2", "other"):
            with running(left), pytest.raises(AssertionError, match=left):
                held.check()
    await backend.close()


def test_chunks_are_exchanged_within_their_store_alone(tmp_path):
    """Else a plain chunk of another store would lie in one that encrypts."""
    roots = [tmp_path / "plain", tmp_path / "encrypted"]
    for root in roots:
        (root / "n").mkdir(parents=True)
        for i in range(20):
            (root / "n" / f"{i:064x}").write_bytes(bytes(100))
    before = [{path.stat().st_ino for path in root.glob("n/*")} for root in roots]
    engine = SimpleNamespace(forget_kept=lambda: None)  # it has no host memory
    faults = Faults(random.Random(0), [engine], None, roots, None)
    for _ in range(50):
        faults.damage()
    assert [{path.stat().st_ino for path in root.glob("n/*")} for root in roots] == before
