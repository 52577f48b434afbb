"""The operators' commands on a shared folder: they read it as they read a disk tier's root."""

import asyncio
import contextlib
import json
import os
import secrets
import threading
import time

import pytest
from disk_commands import kvoffload
from disk_parts import ON_DISK, SIZE, load
from folder_parts import new_evictor, open_folder, path_of, store

from kvoffload import open_backend
from kvoffload.backends.admin import Check, Garbage
from kvoffload.backends.encryption import CipherSeal
from kvoffload.backends.folder import doctor
from kvoffload.backends.folder.admin import FolderAdmin
from kvoffload.backends.folder.places import HOSTS, LEASE
from kvoffload.backends.header import sealed
from kvoffload.errors import ConfigError
from kvoffload.registry import open_admin
from kvoffload.testing.backends import filled, keys_of
from tests.support.small_disk import small_disk


@pytest.fixture
async def root(tmp_path):
    """A root with eight chunks of one namespace and four of another, closed."""
    for name, count in (("one", 8), ("two", 4)):
        backend = open_folder(tmp_path / "kv", name)
        await backend.describe({"model": name})
        await store(backend, keys_of(count))
        await backend.close()
    return tmp_path / "kv"


def admin(root, **options):
    return FolderAdmin({"root": str(root), **options})


async def test_inspect_shows_namespaces_users_and_bytes(root):
    backend = open_folder(root, "one")
    survey = await admin(root).survey()
    held = {each.namespace: each for each in survey.held}
    assert {name: each.chunks for name, each in held.items()} == {"one": 8, "two": 4}
    assert held["one"].facts == {"model": "one"}
    assert held["one"].used_s < 60
    figures = survey.figures
    assert (figures["processes"], figures["owner"]) == (1, True)
    assert figures["ledger_bytes"] == 12 * ON_DISK
    assert figures["capacity_bytes"] == 64 << 20
    await backend.close()
    assert (await admin(root).survey()).figures["processes"] == 0


async def test_a_lease_without_a_capacity_hides_no_chunk(root):
    lease = json.loads((root / LEASE).read_text())
    (root / LEASE).write_text(json.dumps(lease | {"capacity_bytes": 0}))
    assert sum(each.chunks for each in (await admin(root).survey()).held) == 12
    assert (await admin(root).verify(Check())).is_sound


async def test_the_command_line_finds_a_shared_folder_by_its_mark(root):
    def run(*words):
        done = kvoffload(*words, str(root), "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert len(run("inspect")["namespaces"]) == 2
    assert run("verify")["chunks"] == 12
    assert run("gc", "--dry-run", "--older-than", "1h")["removed"] == 0


@pytest.mark.parametrize(
    "name", [".fuse_hidden0000000100000001", ".nfs0000000000000001", ".new-a-1"]
)
@pytest.mark.parametrize("folder", [".", HOSTS])
async def test_what_a_mount_leaves_of_a_removed_file_is_removed_later(root, folder, name):
    """sshfs leaves one after each failed store while it is full, in shards and in the root."""
    left = root / folder / name
    left.touch()
    evictor = new_evictor(root)
    evictor._records.set_clock()
    evictor.begin(None, is_new=False)
    evictor.turn({})
    assert left.exists()  # it may be in use
    assert (await admin(root).verify(Check())).figures["strays"] == []
    old = time.time() - 3600
    os.utime(left, (old, old))
    evictor.begin(None, is_new=False)
    evictor.turn({})
    assert not left.exists()


async def test_verify_finds_and_repairs_what_a_load_would_miss(root):
    path = path_of(root, keys_of(8)[7])
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    stray, unfinished = root / "thesis.tex", path.with_name(".0123456789abcdef-0")
    stray.touch()
    unfinished.touch()
    old = time.time() - 3600
    os.utime(unfinished, (old, old))
    found = await admin(root).verify(Check())
    assert not found.is_sound
    assert found.figures["reasons"] == {"corrupt_payload": 1}
    assert found.figures["strays"] == [str(stray)]
    assert [each["path"] for each in found.figures["leftovers"]] == [str(unfinished)]
    await admin(root).verify(Check(repair=True))
    stray.unlink()
    assert (await admin(root).verify(Check())).is_sound
    assert not path.exists()


async def test_verify_with_the_secret_checks_codes_and_without_it_checksums(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text(secrets.token_hex(32))
    backend, keys = open_folder(tmp_path / "kv", secret_file=str(secret)), keys_of(2)
    await store(backend, keys)
    await backend.close()
    path = path_of(tmp_path, keys[0])
    content = bytearray(path.read_bytes())
    content[4096 - 40] ^= 1  # of the code
    body = bytes(content[: 4096 - 8])
    path.write_bytes(sealed(body) + content[4096:])
    assert (await admin(tmp_path / "kv").verify(Check())).is_sound
    found = await admin(tmp_path / "kv", secret_file=str(secret)).verify(Check())
    assert found.figures["reasons"] == {"corrupt_mac": 1}
    assert found.figures["chunks"] == 2


async def test_doctor_measures_with_the_key(root, key_file, monkeypatch):
    sealed, pack = [], CipherSeal.pack
    monkeypatch.setattr(CipherSeal, "pack", lambda *a, **k: sealed.append(1) or pack(*a, **k))
    monkeypatch.setattr(doctor, "_DEPTHS", (1,))
    options = {"encryption": {"key_file": key_file()}, "trust_parent_folders": True}
    found = {each.check: each.verdict for each in await admin(root, **options).diagnose()}
    assert found["depth 1"] != "failed"
    assert len(sealed) == 8


async def test_doctor_says_how_to_make_a_root_that_is_not_there(tmp_path):
    root = tmp_path / "kv"
    with pytest.raises(ConfigError, match=f"mkdir -m 700 {root}"):
        await admin(root, trust_parent_folders=True).diagnose()
    assert not list(tmp_path.iterdir())


def test_a_secret_beside_the_key_is_refused_by_engines_and_commands(tmp_path, key_file):
    path = key_file()
    options = {"secret_file": path, "encryption": {"key_file": path}}
    for open_it in (open_backend, open_admin):
        given = ("folder", {"root": str(tmp_path / "kv"), **options})
        with pytest.raises(ConfigError, match="leave this out") as caught:
            open_it(*given, *(("n",) if open_it is open_backend else ()))
        assert caught.value.field == "secret_file"


async def test_gc_removes_by_age_and_by_namespace(root):
    old = time.time() - 7200
    for key in keys_of(3):
        for path in root.rglob(f"??/{key.hex()}"):
            os.utime(path, (old, old))
    collected = await admin(root).collect(Garbage(unused_s=3600))
    assert collected.figures["removed"] == 6
    collected = await admin(root).collect(Garbage(namespace="two"))
    assert collected.figures["removed"] == 1
    assert len((await admin(root).survey()).held) == 1
    backend = open_folder(root, "one")
    assert await load(backend, keys_of(8)) == [False] * 3 + [True] * 5


async def test_gc_erases_the_chunks_of_one_tenant(tmp_path):
    secret, keys = tmp_path / "secret", keys_of(4)
    secret.write_text(secrets.token_hex(32))
    for name, options in (("plain", {}), ("codes", {"secret_file": str(secret)})):
        root = tmp_path / name
        backend = open_folder(root, **options)
        tenants = [b"a" * 16, b"a" * 16, b"b" * 16, b""]
        assert all(await backend.write(keys, filled(keys, SIZE), tenants))
        found = await admin(root, **options).erase(b"a" * 16, Garbage())
        assert (found.figures["removed"], found.figures["unknown"]) == (2, 1)
        assert await load(backend, keys) == [False] * 2 + [True] * 2
        assert (await admin(root, **options).verify(Check())).is_sound


async def test_a_purge_leaves_the_other_namespaces(root):
    backend = open_folder(root, "one")
    assert await backend.purge(["one"]) == 8
    assert await load(backend, keys_of(8)) == [False] * 8
    assert await store(backend, keys_of(1)) == [True]
    assert await backend.purge(["two", "never seen"]) == 4
    assert [path.name for path in root.glob("*/manifest.json")] == ["manifest.json"]


async def test_doctor_measures_between_two_mounts(mounts, monkeypatch):
    monkeypatch.setattr(doctor, "_DEPTHS", (1, 2))
    open_folder(mounts[0] / "kv")
    options = {"root": str(mounts[0] / "kv"), "capacity": "64MiB", "trust_parent_folders": True}
    other = str(mounts[1] / "kv")
    findings = await FolderAdmin({**options, "other_mount": other}).diagnose()
    found = {finding.check: finding for finding in findings}
    told = ["file system", "rights", "sharing", "space", "rename", "clock", "other host", "times"]
    assert list(found) == [*told, "depth 1", "depth 2"]
    assert found["file system"].verdict == "warning"  # tmpfs is of one host
    assert {found[name].verdict for name in told[1:]} == {"ok"}
    assert "seen after 0.0" in found["other host"].detail
    assert "GiB/s" in found["depth 2"].detail or "MiB/s" in found["depth 2"].detail
    assert sorted(p.name for p in (mounts[0] / "kv").iterdir()) == [".hosts", LEASE, ".store.json"]


@pytest.mark.parametrize("limits", ["size=64k", "size=64m,ro"])
async def test_doctor_tells_of_a_mount_that_takes_no_file(tmp_path, limits):
    tmp_path.chmod(0o700)
    with small_disk(tmp_path, f"mode=700,{limits}") as mounted:
        if not mounted:
            pytest.skip("needs root, to mount a file system")
        if "ro" not in limits:
            with contextlib.suppress(OSError):
                (tmp_path / "lost+found").write_bytes(bytes(1 << 20))
        findings = {each.check: each for each in await admin(tmp_path).diagnose()}
    assert findings["file system"].detail.startswith("tmpfs at ")
    told = findings["usable"]
    assert told.verdict == "failed"
    remedies = ("Read-only", "mount it for writing"), ("No space", "make space on it")
    assert any(why in told.detail and what in told.remedy for why, what in remedies)


async def test_control_c_while_doctor_makes_its_scratch_folder_leaves_none(root, monkeypatch):
    loop, mkdir = asyncio.get_running_loop(), os.mkdir
    examined = asyncio.ensure_future(admin(root, trust_parent_folders=True).diagnose())
    began = threading.Event()

    def slow(*given):  # as on a mount far away
        loop.call_soon_threadsafe(lambda: (examined.cancel(), began.set()))
        assert began.wait(60)
        mkdir(*given)

    before = sorted(os.listdir(root))
    monkeypatch.setattr(os, "mkdir", slow)
    with pytest.raises(asyncio.CancelledError):
        await examined
    assert sorted(os.listdir(root)) == before


async def test_doctor_finds_another_folder_in_place_of_the_other_mount(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_DEPTHS", ())
    monkeypatch.setattr(doctor, "_LONGEST_S", 0.05)
    for name in ("one", "two"):
        await open_folder(tmp_path / name).close()
    options = {"root": str(tmp_path / "one"), "other_mount": str(tmp_path / "two")}
    findings = await FolderAdmin({**options, "trust_parent_folders": True}).diagnose()
    assert [each.check for each in findings if each.verdict == "failed"] == ["other host"]


@pytest.mark.parametrize("call", ["survey", "diagnose"])
async def test_a_folder_that_is_no_root_is_told(tmp_path, call):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="other files"):
        await getattr(admin(tmp_path), call)()
