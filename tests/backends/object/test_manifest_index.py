"""Manifests: engines learn from each other what is stored, and lookups send no request."""

import asyncio
import itertools
import threading
import time

import pytest

from kvoffload import open_backend
from kvoffload.backends.object import manifest_index
from kvoffload.backends.object.bucket import Bucket
from kvoffload.backends.object.failures import BUSY, Failed
from kvoffload.backends.object.manifest_index import ManifestIndex
from kvoffload.backends.object.naming import namespace_tag
from kvoffload.backends.object.options import ObjectOptions
from kvoffload.testing.backends import filled, keys_of, slots
from tests.support.s3_stand_in import MISSING, Answer, S3StandIn, error


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(manifest_index, "EVERY_S", 0.05)


@pytest.fixture
def seldom(monkeypatch):
    monkeypatch.setattr(manifest_index, "EVERY_S", 600)


async def test_lookups_send_no_request_and_find_what_another_engine_stored(options, until):
    options["manifest"] = True
    one, two, keys = (*(open_backend("object", options, "n") for _ in range(2)), keys_of(6))
    until(lambda: one._manifest.is_complete and two._manifest.is_complete)
    assert await one.write(keys[:3], filled(keys[:3])) == [True] * 3
    assert await one.contains(keys) == [True] * 3 + [False] * 3
    asked = []
    two._heads.head = asked.append
    until(lambda: len(two._manifest) == 3)
    assert await two.contains(keys) == [True] * 3 + [False] * 3
    assert asked == []
    assert await two.read(keys[:3], slots(3)) == [True] * 3
    await one.remove(keys[:1])
    assert await one.contains(keys[:1]) == [False]
    assert await two.read(keys[:1], slots(1)) == [False]
    assert await two.contains(keys[:1]) == [False], "a load missed it"
    await one.close()
    await two.close()
    late = open_backend("object", options, "n")
    until(lambda: late._manifest.is_complete)
    assert await late.contains(keys[1:3]) == [True] * 2
    await late.close()


def bucket_of(options):
    return Bucket(ObjectOptions(**options), 5.0)


@pytest.mark.usefixtures("seldom")
def test_what_is_told_at_the_end_reaches_the_next_reader(options, until):
    index = ManifestIndex(bucket_of(options), "a" * 16, 3600)
    index.add(b"key")
    index.close()
    index.join()
    again = ManifestIndex(bucket_of(options), "a" * 16, 3600)
    until(lambda: again.is_complete)
    assert b"key" in again
    again.close()
    again.join()


@pytest.mark.usefixtures("seldom")
def test_foreign_and_old_manifests_are_passed_over(options, until):
    bucket, folder = bucket_of(options), f"manifests/{'a' * 16}"
    now = int(time.time() // 60)
    bucket.put(f"{folder}/{now:010d}-{'0' * 16}", [b"6b31\nzz\n\n6B\n" + b"6" * 999], replace=True)
    bucket.put(f"{folder}/{now - 100:010d}-{'1' * 16}", [b"6b32"], replace=True)
    bucket.put(f"{folder}/{now:010d}-other", [b"6b33"], replace=True)
    index = ManifestIndex(bucket, "a" * 16, 3600)
    until(lambda: index.is_complete)
    assert (len(index), b"k1" in index) == (1, True)
    index.close()
    index.join()


def test_own_chunks_are_told_while_many_manifests_are_read(options, until, monkeypatch):
    """Those of a week take hours at the first start."""
    monkeypatch.setattr(manifest_index, "EVERY_S", 0)
    bucket, folder = bucket_of(options), f"manifests/{'a' * 16}"
    now, begin, told = int(time.time() // 60), threading.Event(), []
    for number in range(3):
        bucket.put(f"{folder}/{now:010d}-{number:016d}", [b"6b"], replace=True)

    def fetch(name, most, whole=bucket.fetch):
        begin.wait(60)
        told.append(len([*bucket.list(folder)]) - 3)
        return whole(name, most)

    bucket.fetch = fetch
    index = ManifestIndex(bucket, "a" * 16, 3600)
    index.add(b"new")
    begin.set()
    until(lambda: index.is_complete)
    assert told[-1] == 1
    index.close()
    index.join()


def test_what_others_told_during_a_pause_is_read_after_it(options, until, monkeypatch):
    """A first reading may take hours, and so may an outage of this host's network."""
    bucket, now = bucket_of(options), int(time.time() // 60)
    index = ManifestIndex(bucket, "a" * 16, 36000)
    until(lambda: index.is_complete)
    name = f"manifests/{'a' * 16}/{now + 30:010d}-{'0' * 16}"
    monkeypatch.setattr(manifest_index, "_minute", lambda: now + 100)
    bucket.put(name, [b"6b"], replace=True)
    until(lambda: b"k" in index)
    index.close()
    index.join()


def test_an_engine_that_may_write_no_manifest_reads_those_of_others(options, until):
    bucket, refused = bucket_of(options), []

    def put(name, parts, *, replace):
        refused.append(name)
        raise Failed(BUSY)

    bucket.put = put
    index = ManifestIndex(bucket, "a" * 16, 3600)
    until(lambda: index.is_complete)
    index.add(b"own")
    until(lambda: len(refused) > 1)
    name = f"manifests/{'a' * 16}/{time.time() // 60:010.0f}-{'0' * 16}"
    bucket_of(options).put(name, [b"6b"], replace=True)
    until(lambda: b"k" in index)
    index.close()
    index.join()


@pytest.mark.usefixtures("seldom")
def test_the_oldest_keys_are_forgotten_first(options, until, monkeypatch):
    monkeypatch.setattr(manifest_index, "MOST_KEYS", 3)
    bucket, folder = bucket_of(options), f"manifests/{'a' * 16}"
    now = int(time.time() // 60)
    for age in range(3):
        name = f"{folder}/{now - age:010d}-{'0' * 16}"
        bucket.put(name, [f"6b{age:02x}\n6c{age:02x}".encode()], replace=True)
    index = ManifestIndex(bucket, "a" * 16, 3600)
    until(lambda: index.is_complete)
    assert [key for key in (b"k\0", b"l\0", b"k\1", b"l\2") if key in index] == [
        b"k\0", b"l\0", b"k\1",
    ]  # fmt: skip
    index.add(b"new")
    assert (b"k\1" in index, b"k\0" in index, b"new" in index) == (False, True, True)
    index.close()
    index.join()


@pytest.mark.usefixtures("seldom")
def test_a_manifest_that_is_too_large_hides_no_other_one(options, until, monkeypatch):
    """It is no manifest of an engine: those tell no more keys than a reader takes."""
    monkeypatch.setattr(manifest_index, "MOST_BYTES", 100)
    bucket, folder = bucket_of(options), f"manifests/{'a' * 16}"
    bucket.put(f"{folder}/{time.time() // 60:010.0f}-{'f' * 16}", [b"6" * 101], replace=True)
    keys = keys_of(8)
    index = ManifestIndex(bucket, "a" * 16, 3600)
    for key in keys:
        index.add(key)
    index.close()
    index.join()
    again = ManifestIndex(bucket, "a" * 16, 3600)
    until(lambda: again.is_complete)
    assert all(key in again for key in keys)
    again.close()
    again.join()


async def test_what_was_purged_is_not_looked_up_any_more(options, until):
    """Else each chunk of before would be a load that brings nothing."""
    opened = [open_backend("object", {**options, "manifest": True}, name) for name in "nm"]
    keys = keys_of(3)
    until(lambda: all(each._manifest.is_complete for each in opened))
    for backend in opened:
        assert await backend.write(keys, filled(keys)) == [True] * 3
    assert await opened[0].purge(["n"]) >= 3
    assert await opened[0].contains(keys) == [False] * 3
    assert await opened[0].purge(["m"]) >= 3
    assert await opened[0].write(keys, filled(keys)) == [True] * 3
    await opened[0].purge(["m"])
    assert await opened[0].contains(keys) == [True] * 3
    for backend in opened:
        await backend.close()


async def test_an_object_that_expired_is_replaced_though_no_lookup_saw_it(
    monkeypatch, options, until
):
    """A store meets it, where no lookup sends a request."""
    backend, keys = open_backend("object", {**options, "manifest": True}, "n"), keys_of(1)
    until(lambda: backend._manifest.is_complete)
    assert await backend.write(keys, filled(keys)) == [True]
    backend._manifest.discard(keys[0])  # as its age will have it
    now = time.time() + backend._options.ttl_s + 60
    with monkeypatch.context() as patch:
        patch.setattr("kvoffload.backends.object.backend.time.time", lambda: now)
        assert await backend.contains(keys) == [False]
        assert await backend.write(keys, filled(keys)) == [True]
    counters = backend.counters()
    assert (counters["write_ok"], counters["write_replaced"]) == (1, 1)
    assert await backend.read(keys, slots(1)) == [True]
    await backend.close()


async def test_a_bucket_that_refuses_manifests_costs_lookups_by_request():
    with S3StandIn(lambda verb, path: error(403, "AccessDenied")) as server:
        options = server.options(manifest=True)
        backend = open_backend("object", options, "n")
        assert await backend.contains(keys_of(2)) == [False] * 2
        assert "HEAD" in {verb for verb, _ in server.asked}
        await backend.close()


@pytest.mark.parametrize("most", [1 << 30, 100], ids=["closed meanwhile", "too many"])
async def test_a_listing_without_end_holds_neither_memory_nor_the_end(monkeypatch, until, most):
    monkeypatch.setattr(manifest_index, "MOST_LISTED", most)
    pages = itertools.count()

    def answer(verb, path):
        if "list-type" not in path:
            return MISSING
        name = f"kv/manifests/{namespace_tag('n')}/{next(pages):010d}-{'0' * 16}"
        facts = "<LastModified>2026-11-22T01:58:41.000Z</LastModified><ETag>e</ETag><Size>1</Size>"
        content = f"<Contents><Key>{name}</Key>{facts}</Contents>"
        more = "<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>"
        return Answer(200, f"<ListBucketResult>{more}{content}</ListBucketResult>".encode())

    with S3StandIn(answer) as server:
        backend = open_backend("object", server.options(manifest=True), "n")
        until(lambda: next(pages) > 300)
        assert not backend._manifest.is_complete
        await asyncio.wait_for(backend.close(), 60)
    assert not backend._manifest._thread.is_alive()
