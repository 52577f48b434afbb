"""A root inspected from outside, without a backend."""

import asyncio
import os
import shutil
from functools import partial

import pytest
from disk_parts import ON_DISK, SIZE, open_disk, stored

from kvoffload.backends import header
from kvoffload.backends.disk.inspector import DiskInspector
from kvoffload.backends.disk.paths import LEDGER, WRITERS
from kvoffload.errors import ConfigError
from kvoffload.testing.backends import keys_of
from tests.support.file_faults import overwrite


def inspected(root):
    """Store three chunks under a root; return its inspector."""
    asyncio.run(stored(root, keys_of(3)))
    return DiskInspector(str(root))


def test_a_chunk_that_was_replaced_since_it_was_listed_is_not_removed(tmp_path):
    inspector = inspected(tmp_path)
    seen = {chunk.key: chunk for chunk in inspector.chunks()}
    one, two, three = seen.values()
    os.unlink(one.path)
    shutil.copy(two.path, tmp_path / "copy")
    os.replace(tmp_path / "copy", two.path)
    assert [inspector.remove(chunk) for chunk in (one, two, three)] == [0, 0, ON_DISK]
    assert inspector.ledger() == (2 * ON_DISK, None)
    assert [chunk.key for chunk in inspector.chunks()] == [two.key]


def test_a_chunk_is_verified_whole_or_reported_as_missing(tmp_path):
    inspector = inspected(tmp_path)
    one, two, three = inspector.chunks()
    os.unlink(one.path)
    overwrite(two.path, 9000, b"damage")
    for pieces in (4096, 100_000):
        buffer = memoryview(bytearray(pieces))
        assert inspector.verify(one, buffer) == ("missing", 0)
        assert inspector.verify(two, buffer) == ("corrupt_payload", 4096 + SIZE)
        assert inspector.verify(three, buffer) == (None, 4096 + SIZE)


def test_a_checksum_of_another_kind_is_of_another_version_as_for_loads(tmp_path, monkeypatch):
    with monkeypatch.context() as later_version:
        later_version.setattr(header, "header_body", partial(header.header_body, kind=3))
        inspector = inspected(tmp_path)
    buffer = memoryview(bytearray(100_000))
    assert {inspector.verify(chunk, buffer)[0] for chunk in inspector.chunks()} == {"other_version"}


def test_a_namespace_is_not_removed_from_outside_while_an_engine_has_the_root_open(tmp_path):
    inspector = inspected(tmp_path)
    (namespace,) = inspector.namespaces()
    for chunk in inspector.chunks(namespace):
        inspector.remove(chunk)
    backend = open_disk(tmp_path, "another")
    assert (inspector.processes(), inspector.has_owner()) == (1, True)
    assert not inspector.remove_namespace_folder(namespace)
    asyncio.run(backend.close())
    assert (inspector.processes(), inspector.has_owner()) == (0, False)
    assert inspector.remove_namespace_folder(namespace)
    assert namespace not in inspector.namespaces()


def test_the_inspector_reads_the_capacity_of_a_root(tmp_path):
    inspector = inspected(tmp_path)
    assert inspector.capacity() == (64 << 20, None)
    path = tmp_path / ".bounds.json"
    path.write_text("[]")
    capacity_bytes, fault = inspector.capacity()
    assert capacity_bytes is None
    assert fault
    path.unlink()
    assert inspector.capacity() == (None, None)


def test_the_inspector_reads_the_quota_file_of_a_root(tmp_path):
    inspector = inspected(tmp_path)
    assert inspector.ledger() == (3 * ON_DISK, None)
    (tmp_path / LEDGER).write_bytes(b"damage" * 10)
    assert inspector.ledger() == (None, "damaged")
    (tmp_path / LEDGER).unlink()
    assert inspector.ledger() == (None, "missing")
    (tmp_path / LEDGER).symlink_to("/etc/passwd")
    figure, fault = inspector.ledger()
    assert figure is None
    assert fault.startswith("unreadable (")


def test_an_empty_folder_is_no_root(tmp_path):
    with pytest.raises(ConfigError, match="is empty"):
        DiskInspector(str(tmp_path))
    (tmp_path / WRITERS).write_text("a file")
    with pytest.raises(ConfigError, match=f"{WRITERS}': is not a folder"):
        DiskInspector(str(tmp_path))
