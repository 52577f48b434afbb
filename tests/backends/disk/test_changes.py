"""A copy made of the listed changes holds what the backend holds, whatever changed it."""

from disk_parts import open_disk, until, write

from kvoffload.backends.disk import housekeeper as disk_housekeeper
from kvoffload.testing.backends import keys_of
from kvoffload.testing.indexes import followed

HOUR_S = 3600.0


class Copy(set):
    """The chunks that a backend has, by its changes alone."""

    def __init__(self, backend):
        super().__init__()
        self._backend = backend

    def has(self, keys):
        followed(self._backend, self)
        return self == set(keys)


async def test_an_index_without_a_reader_keeps_no_changes(tmp_path):
    backend = open_disk(tmp_path / "kv")
    await write(backend, keys_of(3))
    assert backend._store.index.num_changes == 0
    assert Copy(backend).has(keys_of(3))


async def test_what_another_process_stores_and_removes_is_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_housekeeper, "_TICK_S", 0.1)
    one, two, keys = open_disk(tmp_path / "kv"), open_disk(tmp_path / "kv"), keys_of(4)
    copy = Copy(two)
    assert copy.has([])
    await write(one, keys)
    assert await until(lambda: copy.has(keys))
    await one.remove(keys[:2])
    assert await until(lambda: copy.has(keys[2:]))


async def test_chunks_of_other_namespaces_are_not_listed(tmp_path):
    own, other = open_disk(tmp_path / "kv"), open_disk(tmp_path / "kv", "other")
    copy = Copy(own)
    assert copy.has([])
    await write(other, keys_of(4))
    own._housekeeper._scanner.scan(full=True)  # it evicts for both
    assert len(own._store.index) == 4
    assert own.take_changes(100) == []


async def test_a_root_that_is_refused_has_no_chunks_until_it_is_in_order(tmp_path):
    backend, keys = open_disk(tmp_path / "kv"), keys_of(3)
    await write(backend, keys)
    copy, root = Copy(backend), backend._store.root
    assert copy.has(keys)
    root._refuse("changed by another user")
    assert copy.has([])
    root._allow()
    assert copy.has(keys)
    await backend.close()
    assert copy.has([])


async def test_a_chunk_that_left_just_before_all_are_listed_again_is_gone(tmp_path):
    backend, keys = open_disk(tmp_path / "kv"), keys_of(3)
    await write(backend, keys)
    copy, root = Copy(backend), backend._store.root
    assert copy.has(keys)
    await backend.remove(keys[:1])
    root._refuse("changed by another user")
    assert copy.has([])
    root._allow()
    await backend.remove(keys[1:2])
    assert copy.has(keys[2:])


async def test_expired_chunks_leave_and_come_back_when_another_process_used_them(tmp_path, clock):
    owner = open_disk(tmp_path / "kv", ttl_s=HOUR_S)
    other, keys = open_disk(tmp_path / "kv"), keys_of(2)
    await write(owner, keys)
    copy = Copy(other)
    assert await until(lambda: copy.has(keys))
    owner._housekeeper._evict = owner._housekeeper.expire = lambda: None
    clock[0] = HOUR_S + 60
    other._housekeeper.expire()
    assert copy.has([])
    # Another process loaded one; a scan finds the access time.
    owner._store.uses.used([name for name, _ in owner._store.index.sizes()][:1])
    owner._store.record_use()
    other._housekeeper._scanner.scan(full=True)
    assert len([key for key in keys if other.holds(key)]) == 1
    assert copy.has([key for key in keys if other.holds(key)])


async def test_a_chunk_that_the_policy_refuses_is_listed_as_gone(tmp_path, monkeypatch):
    backend, keys = open_disk(tmp_path / "kv"), keys_of(2)
    await write(backend, keys)
    copy = Copy(backend)
    assert copy.has(keys)

    def broken(names):
        raise RuntimeError("a policy's bug")

    monkeypatch.setattr(backend._store.index._order, "add", broken)
    backend.forget(keys[:1])
    assert await write(backend, keys[:1]) == [False]
    assert backend.usage().chunks == 1
    assert copy.has(keys[1:])
