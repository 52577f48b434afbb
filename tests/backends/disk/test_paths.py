"""Names under a root, which never change, and the removal of namespace folders."""

import errno
import os

import pytest

from kvoffload.backends.disk.paths import LEDGER, MANIFEST, SNAPSHOT, is_namespace, key_of, shard_of
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.disk.walker import remove_namespace
from tests.support.vfs import FailingVfs, calls_on

NAMESPACE = "ab" * 32


def test_the_shard_of_a_key_is_that_of_all_versions():
    shards = [shard_of(key) for key in (b"a", b"b", bytes(36), bytes(range(36)))]
    assert shards == ["56", "bf", "46", "69"]


def test_names_of_chunks_and_namespaces_are_lower_case_digits():
    assert key_of("00ff") == b"\0\xff"
    assert [key_of(name) for name in ("", "0", "00FF", "00 ff", "zz", "00ff.tmp")] == [None] * 6
    assert is_namespace(NAMESPACE)
    others = (NAMESPACE[:-1], NAMESPACE + "a", NAMESPACE.upper(), "g" + NAMESPACE[1:], LEDGER)
    assert not any(map(is_namespace, others))


# ---- removal of a namespace ----------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Return a namespace folder without chunks."""
    folder = tmp_path / NAMESPACE
    (folder / "00").mkdir(parents=True)
    (folder / "ff").mkdir()
    (folder / MANIFEST).write_text("{}")
    (folder / SNAPSHOT).write_text("")
    return folder


def test_a_namespace_without_chunks_is_removed_whole(folder):
    assert remove_namespace(Vfs(), str(folder))
    assert not folder.exists()
    assert remove_namespace(Vfs(), str(folder))  # as if another process was faster


@pytest.mark.parametrize("inner", ["00/aa", "README"])
def test_a_namespace_with_anything_else_in_it_stays_with_its_manifest(folder, inner):
    (folder / inner).write_text("here")
    assert not remove_namespace(Vfs(), str(folder))
    assert (folder / inner).read_text() == "here"
    assert {MANIFEST, SNAPSHOT} <= set(os.listdir(folder))


def test_a_file_or_a_link_in_place_of_a_namespace_stays_and_is_not_followed(folder, tmp_path):
    link, file = tmp_path / ("cd" * 32), tmp_path / ("ef" * 32)
    link.symlink_to(folder)
    file.write_text("mine")
    assert not remove_namespace(Vfs(), str(link))
    assert not remove_namespace(Vfs(), str(file))
    assert sorted(os.listdir(folder)) == ["00", "ff", MANIFEST, SNAPSHOT]
    assert (link.is_symlink(), file.read_text()) == (True, "mine")


def test_a_namespace_that_cannot_be_removed_is_not_reported_as_gone(folder):
    failing = FailingVfs(1, errno.EACCES, sticky=True, when=calls_on("namespace", "rmdir"))
    assert not remove_namespace(failing, str(folder))
    assert folder.exists()
