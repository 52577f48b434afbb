"""Attacks by other users of the host: folders put in place of the store's own."""

import asyncio
import os
import shutil
import subprocess
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from disk_parts import ON_DISK, SIZE, load, open_disk, stored, until, write

from kvoffload.backends.admin import Garbage
from kvoffload.backends.disk import root_checks
from kvoffload.backends.disk.admin import collect, survey
from kvoffload.backends.disk.inspector import DiskInspector, inspected
from kvoffload.backends.disk.paths import QUARANTINE, SCRATCH, WRITERS, shard_of
from kvoffload.backends.header import namespace_digest
from kvoffload.errors import ConfigError
from kvoffload.testing.backends import filled, keys_of

NOBODY = 65534


@pytest.fixture
def public():
    """A folder that everyone may write, on a way that everyone may go."""
    folder = tempfile.mkdtemp(prefix="kvoffload-public-", dir="/tmp")
    os.chmod(folder, 0o777)
    yield Path(folder)
    shutil.rmtree(folder)


@pytest.fixture
def shared_group(monkeypatch):
    """Give the group of new folders other members, for any user who runs the tests."""
    monkeypatch.setattr(root_checks, "is_private_group", lambda gid: False)


def refusal(root, **settings):
    with pytest.raises(ConfigError) as caught:
        open_disk(root, **settings)
    return str(caught.value)


def tick(backend):
    """Look at the folders now, as the housekeeping thread does once a second."""
    backend._store.files.forget_shards()
    backend._store.root.maintain()


async def forged(folder, keys):
    """Make a root with other bytes under the same keys and the same namespace."""
    backend = open_disk(folder, trust_parent_folders=True)
    other = filled(keys_of(len(keys), "forged"), SIZE)
    assert all(await backend.write(keys, other))
    await backend.close()


def swap(root, ours, evil, nobody):
    """Move a root away and another folder to its name, as another user if so wanted."""
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if nobody else {}
    for source, target in ((root, ours), (evil, root)):
        subprocess.run(["mv", str(source), str(target)], check=True, **user)


@pytest.mark.parametrize(("mode", "remedy"), [(0o770, "chmod g-w"), (0o777, "chmod g-w,o-w")])
@pytest.mark.usefixtures("shared_group")
def test_a_root_that_a_group_or_everyone_may_write_is_refused(tmp_path, mode, remedy):
    root = tmp_path / "kv"
    root.mkdir()
    root.chmod(mode)
    assert f"{remedy} {root}" in refusal(root)
    root.chmod(0o755)
    asyncio.run(open_disk(root).close())


@pytest.mark.parametrize(("mode", "remedy"), [(0o770, "chmod g-w"), (0o777, "chmod g-w,o-w")])
@pytest.mark.usefixtures("shared_group")
def test_a_root_below_a_folder_that_others_may_write_is_refused(tmp_path, mode, remedy):
    above = tmp_path / "above"
    root = above / "between" / "kv"
    above.mkdir()
    above.chmod(mode)
    told = refusal(root)
    assert f"{remedy} {above}" in told
    assert '"trust_parent_folders": true' in told
    assert not (above / "between").exists()
    asyncio.run(open_disk(root, trust_parent_folders=True).close())
    shutil.rmtree(above / "between")
    above.chmod(mode | 0o1000)  # as /tmp: no user renames the files of another
    asyncio.run(open_disk(root).close())


@pytest.mark.parametrize(
    ("gid", "members", "others", "private"),
    [
        (1000, [], [], True),
        (1000, ["me"], [], True),
        (1000, ["me", "you"], [], False),
        (1000, [], [1000], False),  # whose primary group it is, too
        (100, [], [], False),  # not this user's own
        (0, [], [], False),
        (7, None, [], False),  # a group without a name
    ],
)
def test_a_user_is_alone_in_a_group_of_its_own(monkeypatch, gid, members, others, private):
    def account(name, uid, primary):
        return SimpleNamespace(pw_name=name, pw_uid=uid, pw_gid=primary)

    def group(number):
        if members is None:
            raise KeyError(number)
        return SimpleNamespace(gr_mem=members)

    me = account("me", os.geteuid(), 1000 if gid == 1000 else 0 if gid == 0 else 1)
    accounts = [me, *(account("you", 4321, other) for other in others)]
    monkeypatch.setattr(root_checks.pwd, "getpwuid", lambda uid: me)
    monkeypatch.setattr(root_checks.pwd, "getpwall", lambda: accounts)
    monkeypatch.setattr(root_checks.grp, "getgrgid", group)
    root_checks.is_private_group.cache_clear()
    try:
        assert root_checks.is_private_group(gid) is private
    finally:
        root_checks.is_private_group.cache_clear()


def test_folders_that_a_group_of_one_may_write_are_the_users_own(tmp_path, monkeypatch):
    """As Ubuntu makes them in a user's home."""
    monkeypatch.setattr(root_checks, "is_private_group", lambda gid: True)
    root = tmp_path / "home" / "kv"
    root.mkdir(parents=True)
    for folder in (root, root.parent):
        folder.chmod(0o775)
    asyncio.run(open_disk(root).close())
    root.parent.chmod(0o777)
    assert "writable by everyone" in refusal(root)


def test_links_on_the_way_are_followed_by_the_look_at_it_too(tmp_path):
    exposed = tmp_path / "exposed"
    (exposed / "below").mkdir(parents=True)
    exposed.chmod(0o777)
    (tmp_path / "first").symlink_to("second/")
    (tmp_path / "second").symlink_to(exposed / ".." / "exposed" / "below")
    assert f"chmod g-w,o-w {exposed}" in refusal(tmp_path / "first" / "kv")
    exposed.chmod(0o755)
    asyncio.run(open_disk(tmp_path / "first" / "kv").close())
    (tmp_path / "loop").symlink_to("loop")
    told = f"symbolic links: '{tmp_path / 'loop'}'; remove it"
    assert told in refusal(tmp_path / "loop" / "kv")


def test_folders_and_links_of_other_users_on_the_way_are_refused(tmp_path):
    if os.geteuid():
        pytest.skip("needs root to give folders to another user")
    foreign, real, link = tmp_path / "foreign", tmp_path / "real", tmp_path / "link"
    foreign.mkdir()
    os.chown(foreign, NOBODY, NOBODY)
    assert f"{foreign}, which belongs to user {NOBODY}" in refusal(foreign / "kv")
    real.mkdir()
    link.symlink_to(real)
    os.lchown(link, NOBODY, NOBODY)
    assert f"{link}, which belongs to user {NOBODY}" in refusal(link / "kv")


def test_folders_made_on_the_way_are_not_for_others_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        for _ in range(2):
            asyncio.run(open_disk(tmp_path / "one" / "two" / "kv").close())
    finally:
        os.umask(before)
    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("attacker", ["another user", "this user"])
async def test_a_root_put_in_place_of_ours_gives_misses_and_takes_no_chunk(public, attacker):
    """Swap folders by rename(), in a trusted parent that other users may write."""
    root, evil, keys = public / "kv", public / "evil", keys_of(4)
    nobody = attacker == "another user"
    if nobody and os.geteuid():
        pytest.skip("needs root to act as another user")
    await forged(evil, keys)
    backend = open_disk(root, trust_parent_folders=True)
    assert all(await write(backend, keys))
    if nobody:
        for path in (evil, *evil.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
    else:
        evil.chmod(0o770)
    with backend._store.root._repairing:  # or it makes the root anew between the two moves
        swap(root, public / "ours", evil, nobody)
        await load(backend, keys)  # at once: our bytes or none
    assert await until(lambda: backend._store.root.refusal is not None)
    before = Counter(backend.counters())
    evil_files = {path for path in root.rglob("*") if path.is_file()}
    assert await load(backend, keys) == [False] * 4
    assert await backend.contains(keys) == [False] * 4
    assert not backend.holds(keys[0])
    assert await write(backend, keys_of(4, "more")) == [False] * 4
    await backend.remove(keys)
    counters = Counter(backend.counters()) - before
    assert (counters["read_unsafe"], counters["write_unsafe"]) == (8, 8)
    assert {path for path in root.rglob("*") if path.is_file()} == evil_files
    with backend._store.root._repairing:
        os.rename(root, evil)
        os.rename(public / "ours", root)
    tick(backend)
    assert await load(backend, keys) == [True] * 4


async def test_a_root_that_others_may_write_later_is_left_alone_until_they_may_not(tmp_path):
    keys = keys_of(3)
    backend = open_disk(tmp_path / "kv")
    assert all(await write(backend, keys))
    for folder in (tmp_path / "kv", tmp_path / "kv" / namespace_digest("disk").hex()):
        folder.chmod(0o770)
        tick(backend)
        assert await load(backend, keys) == [False] * 3
        folder.chmod(0o700)
        tick(backend)
        assert await load(backend, keys) == [True] * 3


async def test_a_root_that_its_operator_moved_and_made_anew_is_used(tmp_path):
    keys = keys_of(3)
    backend = open_disk(tmp_path / "kv")
    assert all(await write(backend, keys))
    with backend._store.root._repairing:  # it would make the folder as well
        (tmp_path / "kv").rename(tmp_path / "old")
        (tmp_path / "kv").mkdir(mode=0o700)
    assert await until(lambda: backend.counters().get("remade"))
    assert await load(backend, keys) == [False] * 3
    assert all(await write(backend, keys))
    assert len(list((tmp_path / "kv").glob("*/??/*"))) == 3


@pytest.mark.parametrize("running", [False, True])
async def test_a_link_in_place_of_a_shard_is_neither_read_nor_written_through(tmp_path, running):
    (key,) = keys = keys_of(1)
    backend = open_disk(tmp_path / "kv")
    assert all(await write(backend, keys))
    if not running:
        await backend.close()
    shard = tmp_path / "kv" / namespace_digest("disk").hex() / shard_of(key)
    elsewhere = tmp_path / "elsewhere"
    shard.rename(elsewhere)
    shard.symlink_to(elsewhere)
    before = (elsewhere / key.hex()).stat()
    if running:
        tick(backend)
    else:
        backend = open_disk(tmp_path / "kv")
    assert await load(backend, keys) == [False]
    assert backend.counters()["corrupt_link"] == 1
    assert all(await write(backend, keys))
    assert not shard.is_symlink()
    assert await load(backend, keys) == [True]
    after = (elsewhere / key.hex()).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


async def test_a_link_among_the_writers_is_not_cleaned_up_through(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("kept")
    await open_disk(tmp_path / "kv").close()
    (tmp_path / "kv" / WRITERS / "0123456789abcdef").symlink_to(elsewhere)
    backend = open_disk(tmp_path / "kv")
    await backend.close()
    assert (elsewhere / "precious").read_text() == "kept"


def test_verify_names_a_link_in_place_of_a_shard_and_follows_none(tmp_path):
    (key,) = keys = keys_of(1)
    asyncio.run(stored(tmp_path / "kv", keys))
    shard = tmp_path / "kv" / namespace_digest("disk").hex() / shard_of(key)
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    found = DiskInspector(str(tmp_path / "kv"))
    assert not list(found.chunks())
    assert found.unreadable == [(str(shard), "corrupt_link")]


NAMESPACE = namespace_digest("disk").hex()


@pytest.mark.parametrize("name", [WRITERS, QUARANTINE, NAMESPACE])
@pytest.mark.parametrize("how", ["link", "modes", "owner"])
def test_commands_refuse_a_root_with_a_folder_that_is_not_its_users_alone(tmp_path, name, how):
    root, folder = tmp_path / "kv", tmp_path / "kv" / name
    asyncio.run(stored(root, keys_of(3)))
    if how == "link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    elif how == "modes":
        folder.chmod(0o777)
    elif os.geteuid():
        pytest.skip("needs root to give folders to another user")
    else:
        os.chown(folder, NOBODY, NOBODY)
    told = {"link": "link|is no folder", "modes": "chmod g-w,o-w", "owner": f"to user {NOBODY}"}
    with pytest.raises(ConfigError, match=told[how]), inspected(str(root)):
        pass


def test_commands_refuse_a_root_that_others_may_write(tmp_path):
    asyncio.run(stored(tmp_path / "kv", keys_of(3)))
    (tmp_path / "kv").chmod(0o777)
    with pytest.raises(ConfigError, match="writable by everyone"):
        DiskInspector(str(tmp_path / "kv"))


def test_gc_reaches_the_folder_that_it_has_opened_and_none_that_takes_its_name(tmp_path):
    root, other = tmp_path / "kv", tmp_path / "other"
    for place in (root, other):
        asyncio.run(stored(place, keys_of(3)))
        for dead in (place / WRITERS / "dead", place / f"{SCRATCH}1" / "below"):
            dead.mkdir(parents=True)
            (dead / "0").write_bytes(b"x" * 4096)
        os.utime(place / f"{SCRATCH}1", (0, 0))
        (place / QUARANTINE / "damaged").write_bytes(b"x" * 4096)
    before = sorted(other.rglob("*"))
    with inspected(str(root)) as found:
        root.rename(tmp_path / "away")
        other.rename(root)
        report = collect(found, Garbage(NAMESPACE)).figures
    assert (report["removed"], report["quarantined"], report["leftovers"]) == (3, 1, 2)
    assert report["freed_bytes"] == 3 * ON_DISK + 3 * 4096
    assert not report["not_removed"]
    assert not [path for path in (tmp_path / "away").rglob("*") if path.name in ("0", "damaged")]
    root.rename(other)
    assert sorted(other.rglob("*")) == before


@pytest.mark.parametrize("name", [f"{WRITERS}/0123456789abcdef/lock", ".owner"])
def test_a_pipe_in_place_of_a_lock_stops_no_look_from_outside(tmp_path, name):
    asyncio.run(open_disk(tmp_path / "kv").close())
    path = tmp_path / "kv" / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    reports = []
    look = threading.Thread(
        target=lambda: reports.append(survey(DiskInspector(str(tmp_path / "kv")))), daemon=True
    )
    look.start()
    look.join(30)
    assert reports, "it waits for the pipe"
    assert (reports[0].figures["processes"], reports[0].figures["owner"]) == (0, False)
