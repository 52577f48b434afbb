"""What a root tells of its namespaces: manifests and samples, and never more than a bound."""

import json
import os
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvoffload import open_backend
from kvoffload.backends.disk import manifest, namespace_sample
from kvoffload.testing.backends import filled, keys_of

pytestmark = pytest.mark.usefixtures("as_files")

SIZE = 28 * 1024
ON_DISK = 32 * 1024


@asynccontextmanager
async def opened(root, namespace):
    backend = open_backend("disk", {"root": str(root), "capacity": "1GiB"}, namespace)
    try:
        yield backend
    finally:
        await backend.close()


async def store(root, namespace, count, facts):
    async with opened(root, namespace) as backend:
        await backend.describe(facts)
        await backend.write(keys_of(count), filled(keys_of(count), SIZE))


async def described(root, namespace="own"):
    async with opened(root, namespace) as backend:
        return await backend.described()


async def test_other_namespaces_are_described_with_facts_and_size(tmp_path):
    await store(tmp_path, "aa" * 32, 3, {"model": "m"})
    own, other = await described(tmp_path)
    assert (own.namespace, own.chunks) == ("own", 0)
    assert other[:4] == ("aa" * 32, {"model": "m"}, 3, 3 * ON_DISK)
    assert 0 <= other.used_s < 60


async def test_a_process_that_does_not_evict_describes_them_as_well(tmp_path):
    await store(tmp_path, "aa" * 32, 3, {"model": "m"})
    async with opened(tmp_path, "evicts"):
        found = {each.namespace: each.chunks for each in await described(tmp_path)}
    assert (found["own"], found["aa" * 32]) == (0, 3)


async def test_a_namespace_with_chunks_is_alone_and_no_manifest_is_read(tmp_path, monkeypatch):
    await store(tmp_path, "other", 2, {"model": "m"})
    await store(tmp_path, "own", 2, {"model": "m"})
    monkeypatch.setattr(manifest, "read", None)
    assert [each[:3] for each in await described(tmp_path)] == [("own", {}, 2)]


async def test_a_large_namespace_is_estimated_from_its_first_shards(tmp_path):
    await store(tmp_path, "large", 2000, {"model": "m"})
    listed = []

    def walk(vfs, folder):
        for shard in real_walk(vfs, folder):
            listed.append(shard)
            yield shard

    real_walk, namespace_sample.walk = namespace_sample.walk, walk
    try:
        _, large = await described(tmp_path)
    finally:
        namespace_sample.walk = real_walk
    assert len(listed) < 30
    assert 1400 < large.chunks < 2800
    assert large.stored_bytes == pytest.approx(large.chunks * ON_DISK, rel=0.01)


HOSTILE = [
    b"",
    b"\xff\xfe",
    b"[]",
    b"null",
    b"[" * 100_000,
    b'{"facts": ' + b"9" * 5000 + b"}",
    b'{"facts": {"model": {"a": 1}, "dtype": 7}}',
    b'{"facts": ["model"], "namespace": 7}',
    b'{"namespace": "\\ud800"}',
    b'{"namespace": "' + b"own" + b'"}',
    b" " * (manifest.MOST_BYTES + 1),
]


@pytest.mark.parametrize("content", HOSTILE)
async def test_a_hostile_manifest_tells_no_facts_and_no_name(tmp_path, content):
    await store(tmp_path, "other", 1, {"model": "m"})
    (folder,) = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    (folder / "manifest.json").write_bytes(content)
    _, other = await described(tmp_path)
    assert other[:3] == (folder.name, {}, 1)


async def test_links_pipes_and_files_in_place_of_folders_and_manifests_are_passed_over(tmp_path):
    await store(tmp_path, "other", 1, {"model": "m"})
    (folder,) = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    (tmp_path / ("1" * 64)).symlink_to(folder)
    (tmp_path / ("2" * 64)).write_text("no folder")
    _, other = await described(tmp_path)
    assert other[:3] == (folder.name, {}, 1)


def many(root: Path, number: int) -> None:
    for i in range(number):
        folder = root / f"{i:064x}"
        (folder / "00").mkdir(parents=True, mode=0o700)
        text = json.dumps({"namespace": "n", "facts": {"model": f"m{i}"}})
        (folder / "manifest.json").write_text(text)
        os.utime(folder, (i, i))


async def test_of_10_000_namespaces_the_last_used_are_described_in_bounded_time(ram_path):
    many(ram_path, 10_000)
    began = time.monotonic()
    own, *found = await described(ram_path)
    assert time.monotonic() - began < namespace_sample.LONGEST_S + 60
    assert own.namespace == "own"
    assert 0 < len(found) <= namespace_sample.MOST_DESCRIBED
    newest = [f"{i:064x}" for i in range(10_000)][-namespace_sample.MOST_DESCRIBED :]
    assert {each.namespace for each in found} <= set(newest)


async def test_a_close_ends_the_description(ram_path, monkeypatch):
    many(ram_path, 300)
    backend = open_backend("disk", {"root": str(ram_path), "capacity": "1GiB"}, "own")
    await backend.close()
    assert await backend.described() == []
    async with opened(ram_path, "own") as backend:
        backend._stopping.set()
        assert len(await backend.described()) == 1
