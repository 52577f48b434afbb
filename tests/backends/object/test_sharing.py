"""Engines that share a bucket: who stores what, credentials that change, redirects."""

import asyncio
import itertools
import time

import pytest

from kvoffload import open_backend
from kvoffload.backends.base import WriteResult
from kvoffload.backends.header import namespace_digest, pack_header
from kvoffload.backends.object import bucket
from kvoffload.backends.object.naming import chunk_name, namespace_tag
from kvoffload.testing.backends import filled, keys_of, slots, wrong_bytes
from tests.support.moto import PATIENT_S
from tests.support.other_version import VERSION, resealed
from tests.support.s3_stand_in import MISSING, STORED, Answer, S3StandIn, error, whole
from tests.support.swift import Swift


async def test_two_writers_at_once_store_each_chunk_once(server, options):
    engines, keys = [open_backend("object", options, "n") for _ in range(2)], keys_of(24)
    answers = await asyncio.gather(*(each.write(keys, filled(keys)) for each in engines))
    assert answers == [[True] * 24] * 2
    counts = [each.counters() for each in engines]
    stored, met = (sum(each.get(f"write_{n}", 0) for each in counts) for n in ("ok", "present"))
    assert stored + met == 48
    assert stored >= 24 if isinstance(server, Swift) else stored == 24  # whose creates may overlap
    into = slots(24)
    assert await engines[0].read(keys, into) == [True] * 24
    assert wrong_bytes(keys, into) == []
    for each in engines:
        await each.close()


@pytest.mark.parametrize("is_damaged", [False, True], ids=["new", "damaged"])
async def test_a_store_that_met_another_one_counts_by_what_the_bucket_then_has(is_damaged):
    key, size = keys_of(1)[0], 65536
    content = pack_header(key, namespace_digest("n"), filled([key])[0]) + bytes(filled([key])[0])
    there = [whole(content[:-1] + b"\0")] if is_damaged else [MISSING]

    def answer(verb, path):
        return error(409, "ConditionalRequestConflict") if verb == "PUT" else there[-1]

    with S3StandIn(answer) as server:
        backend = open_backend("object", server.options(ttl_s=10**8), "n")
        assert await backend.read([key], slots(1, size)) == [False]
        for _ in range(5):
            assert await backend.write([key], filled([key])) == [False], "nothing can be loaded"
        there.append(whole(content, "Sun, 22 Nov 2026 01:58:42 GMT"))  # the other store ends
        assert await backend.write([key], filled([key])) == [True]
        assert await backend.read([key], slots(1, size)) == [True]
        counters = backend.counters()
        assert (counters["write_conflict"], counters["write_present"]) == (5, 1)
        assert not {"write_ok", "write_replaced"} & set(counters), "no byte there is this engine's"
        assert backend.usage().gauges["breakers_open"] == 0, "each request was answered"
        await backend.close()


@pytest.mark.parametrize("status", [409, 304])
async def test_a_server_to_which_each_store_is_a_conflict_is_said_once(status, caplog):
    refused = Answer(304) if status == 304 else error(409, "OperationAborted")
    with S3StandIn(lambda verb, path: refused if verb == "PUT" else MISSING) as server:
        backend = open_backend("object", server.options(), "n")
        for turn in range(3):
            keys = keys_of(63, f"{turn}-")
            assert await backend.write(keys, filled(keys)) == [False] * 63
            assert caplog.text.count("each store is refused") == (turn > 0)
        assert "look at the server's log" in caplog.text
        await backend.close()


async def test_conflicts_of_two_writers_are_not_said(caplog):
    """The other host's stores meet two of three of this one's, and have not ended when it looks."""
    turns, real = itertools.count(), {}

    def answer(verb, path):
        if verb != "PUT":
            return whole(real[path]) if path in real else MISSING
        if path not in real and next(turns) % 3:
            return error(409, "ConditionalRequestConflict")
        real[path] = server.bodies[path]
        return STORED

    with S3StandIn(answer) as server:
        backend, keys = open_backend("object", server.options(ttl_s=10**8), "n"), keys_of(200)
        while not all(await backend.write(keys, filled(keys))):
            pass
        assert backend.counters()["write_conflict"] > 64
        assert await backend.read(keys, into := slots(200)) == [True] * 200
        assert wrong_bytes(keys, into) == []
        await backend.close()
    assert "each store is refused" not in caplog.text


async def test_a_damaged_object_that_another_engine_replaced_is_loaded_again(
    monkeypatch,
):
    key, size = keys_of(1)[0], 65536
    content = pack_header(key, namespace_digest("n"), filled([key])[0]) + bytes(filled([key])[0])
    stored = [whole(content[:-1] + b"\0", "Sun, 22 Nov 2026 01:58:41 GMT")]
    with S3StandIn(lambda verb, path: STORED if verb == "PUT" else stored[-1]) as server:
        backend = open_backend("object", server.options(ttl_s=10**8), "n")
        assert await backend.read([key], slots(1, size)) == [False]
        assert await backend.contains([key]) == [False]
        with monkeypatch.context() as patch:  # a network's fault is no reason to miss it for ever
            patch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 600)
            assert backend.has(key)
        stored.append(whole(content, "Sun, 22 Nov 2026 01:58:42 GMT"))
        assert await backend.contains([key]) == [True]
        assert await backend.read([key], slots(1, size)) == [True]
        await backend.close()


async def test_a_chunk_of_another_version_is_replaced_and_one_of_another_length_is_not(options):
    (key, other), size = keys_of(2), 65536
    backend = open_backend("object", options, "n")
    assert await backend.write([key, other], filled([key, other])) == [True] * 2
    name = chunk_name(namespace_tag("n"), key)
    chunk = resealed(bytes(backend._bucket.fetch(name, 1 << 20)), 256, VERSION, 2)
    backend._bucket.put(name, [chunk], replace=True)
    assert await backend.read([key], slots(1, size)) == [False]
    assert await backend.read([other], slots(1, size // 2)) == [False]
    assert await backend.contains([key, other]) == [False, True]
    assert await backend.write([key], filled([key])) == [True]
    assert await backend.read([key, other], slots(2, size)) == [True, True]
    counters = backend.counters()
    assert (counters["other_version"], counters["read_length"]) == (1, 1)
    assert counters["write_replaced"] == 1
    await backend.close()


async def test_google_stores_and_loads_and_a_second_store_is_refused(monkeypatch):
    monkeypatch.setenv("KV_TOKEN", "token-of-google")
    keys = keys_of(2)

    def answer(verb, path):
        if verb == "PUT":
            is_second = server.asked.count((verb, path)) > 1
            return error(412, "PreconditionFailed") if is_second else STORED
        return whole(server.bodies[path]) if path in server.bodies else MISSING

    with S3StandIn(answer) as server:
        place = {"url": "gs://bucket/kv", "endpoint": f"http://127.0.0.1:{server.port}"}
        options = {**place, "token_env": "KV_TOKEN", "ttl_s": 10**8, "timeout_s": PATIENT_S}
        backend = open_backend("object", options, "n")
        assert await backend.contains(keys) == [False] * 2
        for is_there in (False, True):
            (stored,) = await backend.write(keys[:1], filled(keys[:1]))
            assert stored is (WriteResult.PRESENT if is_there else True)
        assert await backend.contains(keys) == [True, False]
        into = slots(2)
        assert await backend.read(keys, into) == [True, False]
        assert wrong_bytes(keys[:1], into[:1]) == []
        counters = backend.counters()
        assert (counters["write_ok"], counters["write_present"]) == (1, 1)
        await backend.close()
    stored = [sent for (verb, _), sent in zip(server.asked, server.sent, strict=True)
              if verb == "PUT"]  # fmt: skip
    assert {sent["x-goog-if-generation-match"] for sent in stored} == {"0"}
    assert {sent["authorization"] for sent in server.sent} == {"Bearer token-of-google"}


async def test_credentials_come_from_the_platform_or_their_lack_is_said(monkeypatch, caplog):
    with S3StandIn(lambda verb, path: MISSING) as server:
        options = {name: value for name, value in server.options().items() if "_env" not in name}
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name, raising=False)
        backend = open_backend("object", options, "n")
        assert await backend.contains(keys_of(1)) == [False]
        await backend.close()
        assert server.asked == []
        assert "the platform gives no credentials" in caplog.text
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-platform")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        backend = open_backend("object", options, "n")
        await backend.contains(keys_of(1))
        await backend.close()
        assert "of-the-platform" in server.sent[0]["authorization"]


async def test_a_changed_file_of_credentials_is_read_without_a_restart(monkeypatch, tmp_path):
    monkeypatch.setattr(bucket, "_READ_AGAIN_S", -300.0)
    files = {name: tmp_path / name for name in ("access_key", "secret_key", "token")}
    for name, path in files.items():
        path.write_text(f"{name}-one\n")
        path.chmod(0o600)
    with S3StandIn(lambda verb, path: MISSING) as server:
        options = {name: value for name, value in server.options().items() if "_env" not in name}
        named = {f"{name}_file": str(path) for name, path in files.items()}
        backend = open_backend("object", {**options, **named}, "n")
        await backend.contains(keys_of(1))
        for name, path in files.items():
            path.write_text(f"{name}-two\n")
        await asyncio.sleep(0.15)  # the client library asks at most ten times a second
        await backend.contains(keys_of(1))
        await backend.close()
    first, last = server.sent[0], server.sent[-1]
    assert "access_key-one" in first["authorization"]
    assert "access_key-two" in last["authorization"]
    assert last["x-amz-security-token"] == "token-two"
    assert "secret" not in str(server.sent)


async def test_a_redirect_gets_no_chunk_and_no_signature():
    with S3StandIn(lambda verb, path: MISSING) as elsewhere:
        target = f"http://localhost:{elsewhere.port}/taken"
        with S3StandIn(lambda verb, path: Answer(307, b"", {"Location": target})) as server:
            backend = open_backend("object", server.options(), "n")
            assert await backend.write(keys_of(2), filled(keys_of(2))) == [False] * 2
            assert await backend.read(keys_of(1), slots(1)) == [False]
            await backend.close()
    assert {verb for verb, _ in elsewhere.asked} <= {"GET", "HEAD"}
    assert all("authorization" not in {name.lower() for name in sent} for sent in elsewhere.sent)
