"""Roots, settings and secrets that cannot work, and mounts that stop working."""

import asyncio
import json
import os
import shutil
import sys

import pytest
from disk_parts import ON_DISK, load, until
from folder_parts import open_folder, path_of, store, store_at_last
from msgspec import structs

from kvoffload import open_backend
from kvoffload.backends.folder import upkeep
from kvoffload.backends.folder.places import HOSTS, LEASE, NEW, STORE
from kvoffload.errors import ConfigError
from kvoffload.registry import open_admin
from kvoffload.testing.backends import keys_of
from tests.support.file_faults import fill
from tests.support.small_disk import small_disk
from tests.support.two_mounts import MISSING, mount, unmount

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason=MISSING)


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(upkeep, "TURN_S", 0.02)
    monkeypatch.setattr(upkeep, "_LOOK_S", 0.05)
    monkeypatch.setattr(upkeep, "_RENEW_S", 0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"root": ""}, "root = '': must name a folder"),
        ({"root": "a\0b"}, "root"),
        ({"root": "\ud800"}, "root"),
        ({"capacity": 0}, "capacity"),
        ({"threads": 0}, "threads = 0: must be 1 to 256"),
        ({"threads": 257}, "threads"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"lease": 1}, "lease"),
        *(({"tenant_share": share}, "tenant_share = ") for share in (0, -1, 1.5, float("nan"))),
        ({"secret_file": "/nowhere/secret"}, "secret_file = '/nowhere/secret': cannot be read"),
    ],
)
def test_a_bad_setting_is_named_before_anything_is_touched(tmp_path, options, message):
    root = tmp_path / "kv"
    with pytest.raises(ConfigError) as error:
        open_backend("folder", {"root": str(root), **options}, "ns")
    assert message in str(error.value)
    assert not root.exists()


def test_without_its_extra_the_setting_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "aiofiles.os", None)
    with pytest.raises(ConfigError, match=r"needs its extra: pip install .*\[folder\]"):
        open_backend("folder", {"root": str(tmp_path / "kv")}, "ns")


@pytest.mark.parametrize("secret", [b"", b"short", b"a" * 64, b"\n" * 64])
def test_a_weak_secret_is_refused(tmp_path, secret):
    (tmp_path / "secret").write_bytes(secret)
    with pytest.raises(ConfigError, match="32 random bytes"):
        open_folder(tmp_path / "kv", secret_file=str(tmp_path / "secret"))


@pytest.mark.parametrize(("mode", "is_said"), [(0o600, False), (0o640, True), (0o604, True)])
async def test_a_secret_that_other_users_may_read_is_said(tmp_path, caplog, mode, is_said):
    (tmp_path / "secret").write_bytes(bytes(range(32)))
    (tmp_path / "secret").chmod(mode)
    await open_folder(tmp_path / "kv", secret_file=str(tmp_path / "secret")).close()
    assert (f"its mode {mode:04o} opens the secret" in caplog.text) is is_said


def made(root, what):
    root.mkdir(mode=0o700)
    if what == "of the disk tier":
        (root / ".writers").mkdir()
    elif what == "with other files":
        (root / "thesis.tex").touch()
    elif what == "writable by all":
        root.chmod(0o777)
    elif what == "of another user":
        os.chown(root, 1234, 1234)
    elif what == "a file":
        root.rmdir()
        root.touch()
    elif what == "a link":
        root.rename(root.with_name("real"))
        root.symlink_to(root.with_name("real"))
    elif what == "without its parent":
        root.rmdir()
        return root / "kv"
    return root


@AS_ROOT
@pytest.mark.parametrize(
    ("what", "remedy"),
    [
        ("of the disk tier", "belongs to a disk tier; a store needs a folder of its own"),
        ("with other files", r"has other files in it \(thesis.tex\)"),
        ("writable by all", "chmod g-w,o-w"),
        ("of another user", "belongs to user 1234"),
        ("a file", "is not a folder"),
        ("a link", "is a symbolic link"),
        ("without its parent", "is it mounted"),
    ],
)
def test_a_folder_that_is_no_root_is_refused_with_the_reason(tmp_path, what, remedy):
    with pytest.raises(ConfigError, match=remedy):
        open_folder(made(tmp_path / "kv", what))


async def test_the_disk_tier_and_its_doctor_refuse_the_root_of_a_folder_tier(tmp_path):
    root = tmp_path / "kv"
    open_folder(root)
    before = {".store.json", ".hosts", ".lease.json"}

    def there():
        return {name for name in os.listdir(root) if not name.startswith(NEW)}

    assert there() == before
    told = f"^root = '{root}': belongs to a folder tier; give the disk tier a folder of its own$"
    with pytest.raises(ConfigError, match=told):
        open_backend("disk", {"root": str(root), "trust_parent_folders": True}, "ns")
    admin = open_admin("disk", {"root": str(root)})
    with pytest.raises(ConfigError, match=told):
        await admin.diagnose()
    assert there() == before
    await admin.close()


def test_a_folder_that_others_may_replace_is_refused_unless_parents_are_trusted(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="trust_parent_folders"):
        open_folder(tmp_path / "open" / "kv", trust_parent_folders=False)


@AS_ROOT
async def test_a_read_only_mount_is_refused_and_one_that_becomes_so_is_misses(tmp_path, fast):
    with small_disk(tmp_path, "size=8m,mode=700") as mounted:
        if not mounted:
            pytest.skip(MISSING)
        backend, keys = open_folder(tmp_path / "kv", capacity=4 << 20), keys_of(2)
        assert await store(backend, keys[:1]) == [True]
        mount("-o", "remount,ro", tmp_path)
        assert await store(backend, keys) == [True, False]
        assert backend.counters()["write_io_EROFS"] == 1
        assert await load(backend, keys) == [True, False]
        assert await until(lambda: backend.counters().get("housekeeping_failed"))
        with pytest.raises(ConfigError, match="mount it for writing"):
            open_folder(tmp_path / "new")
        mount("-o", "remount,rw", tmp_path)
        assert await store(backend, keys) == [True] * 2
        await backend.close()


@AS_ROOT
async def test_a_full_mount_evicts_although_the_capacity_is_larger(tmp_path, fast):
    with small_disk(tmp_path, "size=3m,mode=700") as mounted:
        if not mounted:
            pytest.skip(MISSING)
        backend = open_folder(tmp_path / "kv", capacity=1 << 30)
        stored = 0
        for key in keys_of(90):
            is_stored = all(await store(backend, [key]))
            stored += is_stored
            if not is_stored:
                await asyncio.sleep(0.05)
        assert backend.counters()["write_io_ENOSPC"] > 0
        assert backend.counters()["evicted"] > 0
        assert stored > 60  # far more than fits at once
        fill(tmp_path, "bytes")  # other programs take the rest
        last = keys_of(1, "last")
        assert await until(lambda: backend.counters()["evicted"] > 0)
        await store(backend, last)
        assert await load(backend, last) in ([True], [False])
        await backend.close()


@pytest.mark.parametrize("what", [LEASE, f"{HOSTS}/foreign.json", f"{HOSTS}/foreign.txt"])
async def test_records_that_are_folders_or_foreign_break_nothing(tmp_path, caplog, fast, what):
    backend = open_folder(tmp_path / "kv")
    await store(backend, keys_of(2))
    await backend.close()
    place = tmp_path / "kv" / what
    place.unlink(missing_ok=True)
    place.mkdir()
    backend = open_folder(tmp_path / "kv", "other")
    assert await load(backend, keys_of(1)) == [False]
    stored = await store(backend, keys_of(1))
    if what == LEASE:  # nobody may say what is free
        assert stored == [False]
        assert backend.counters()["refused_full"] == 1
        assert "remove it" in caplog.text
        place.rmdir()
        assert await until(lambda: backend.usage().gauges["evictor"])
    assert await until(lambda: (backend.usage().resident_bytes or 0) >= 2 * ON_DISK)
    assert await store_at_last(backend, keys_of(1, "now"))


async def test_a_root_that_is_emptied_is_an_empty_root(tmp_path, fast):
    backend, keys = open_folder(tmp_path / "kv"), keys_of(4)
    await store(backend, keys)
    (tmp_path / "kv").rename(tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone")
    assert await load(backend, keys) == [False] * 4
    assert await until(lambda: (tmp_path / "kv" / STORE).exists())
    assert await store_at_last(backend, keys)
    assert await load(backend, keys) == [True] * 4


async def test_a_mount_that_is_gone_leaves_its_place_empty(mounts, fast, caplog):
    """Without it the root is a folder of this host, which another store would fill."""
    backend, keys = open_folder(mounts[1]), keys_of(4)
    await store(backend, keys)
    unmount(mounts[1])
    assert await load(backend, keys) == [False] * 4
    assert await store(backend, keys) == [False] * 4
    assert await until(lambda: backend.usage().gauges["up"] == 0)
    await asyncio.sleep(0.2)
    assert list(mounts[1].iterdir()) == []
    mount("--bind", *mounts)
    assert await until(lambda: backend.usage().gauges["up"] == 1)
    assert f"folder {mounts[1]}: it is there again" in caplog.text
    assert f"folder {mounts[1]}: a chunk cannot be stored" in caplog.text
    assert await load(backend, keys) == [True] * 4


async def test_another_server_under_the_same_path_is_another_store(tmp_path, caplog, fast):
    one, two = tmp_path / "one", tmp_path / "two"
    for root in (one, two):
        await open_folder(root).close()
    kv = tmp_path / "kv"
    one.rename(kv)
    backend, keys = open_folder(kv), keys_of(4)
    await backend.describe({"model": "m"})
    await store(backend, keys)
    kv.rename(one)
    two.rename(kv)
    assert await until(lambda: "another_store" in backend.counters())
    assert await backend.contains(keys) == [False] * 4
    assert await store_at_last(backend, keys)
    assert await load(backend, keys) == [True] * 4
    assert path_of(kv, keys[0]).exists()
    (manifest,) = kv.glob("*/manifest.json")
    assert json.loads(manifest.read_bytes())["facts"] == {"model": "m"}
    assert "another store" in caplog.text


async def test_a_namespace_that_another_host_removed_is_named_again_by_the_next_store(mounts):
    one, two = open_folder(mounts[0] / "kv"), open_folder(mounts[1] / "kv", "another")
    await one.describe({"model": "m"})
    assert await store_at_last(one, keys_of(4))
    assert await two.purge(["folder"]) == 4
    assert list(mounts[0].glob("kv/*/manifest.json")) == []
    assert await store_at_last(one, keys_of(4, "new"))
    (manifest,) = mounts[1].glob("kv/*/manifest.json")
    assert json.loads(manifest.read_bytes())["facts"] == {"model": "m"}
    await asyncio.gather(one.close(), two.close())


async def test_hosts_with_different_capacities_are_told_which_counts(mounts, caplog, fast):
    evictor = open_folder(mounts[0] / "kv", capacity=8 << 20)
    other = open_folder(mounts[1] / "kv", capacity=16 << 20)
    assert await until(lambda: "is not used" in caplog.text)
    assert caplog.text.count("is not used") == 1
    assert [each.usage().capacity_bytes for each in (evictor, other)] == [8 << 20] * 2
    lease, _ = other._records.lease()
    for capacity in (32 << 20, 8 << 20) * 3:  # of a third host, which takes turns with the first
        other._housekeeper._follow(structs.replace(lease, capacity_bytes=capacity))
    assert caplog.text.count("is not used") == 1
    await evictor.close()
    assert await until(lambda: other.usage().gauges["evictor"])
    assert other.usage().capacity_bytes == 16 << 20


async def test_names_keep_apart_where_case_does_not_count(tmp_path):
    backend = open_folder(tmp_path / "kv")
    keys = [bytes([i]) * 20 for i in range(0xA0, 0xFF, 7)]
    await store(backend, keys)
    names = [path.name for path in (tmp_path / "kv").glob("*/??/*")]
    assert len({name.lower() for name in names}) == len(keys)
    assert names == [name.lower() for name in names]


def test_a_store_for_fewer_than_four_chunks_is_refused(tmp_path):
    backend = open_folder(tmp_path / "kv", capacity=8 * ON_DISK)
    backend.check_fit(ON_DISK - 4096)
    with pytest.raises(ConfigError, match="at least four chunks"):
        backend.check_fit(3 * ON_DISK)
    asyncio.run(backend.close())
