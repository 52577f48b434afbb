"""Encrypted chunks: nothing readable is stored, nothing foreign is read, and keys are guarded."""

import asyncio
import json
import os
import re
import struct
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from disk_commands import answered, kvoffload
from stored_chunks import StoredFiles, StoredObjects, opened

from kvoffload import open_backend
from kvoffload.backends.admin import Check
from kvoffload.backends.base import ReadResult
from kvoffload.backends.encryption import CipherSeal, NamespaceKey
from kvoffload.backends.header import (
    ALIGNED_BYTES,
    COMPACT_BYTES,
    OTHER_KEY,
    namespace_digest,
    pack_header,
    parse_header,
)
from kvoffload.backends.key_files import Encryption
from kvoffload.backends.verification import Verification
from kvoffload.config import parse_config
from kvoffload.errors import ConfigError
from kvoffload.registry import read_options
from kvoffload.testing.backends import CHUNK_BYTES, filled, keys_of, payload_of, slots, wrong_bytes

KEY, NAMESPACE = keys_of(1)[0], namespace_digest("one")
OLD, NEW = "0123456789abcdef" * 4, "fedcba9876543210" * 4
SIZE = 8192


@pytest.mark.parametrize(
    ("key", "data", "wanted"),
    [
        (1, "", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"),
        (3, "c2sp.org/XAES-256-GCM", "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d"),
    ],
)
def test_the_key_of_a_chunk_is_that_of_the_published_vectors(key, data, wanted):
    nonce = b"ABCDEFGHIJKLMNOPQRSTUVWX"
    cipher = AESGCM(NamespaceKey(bytes([key]) * 32, b"").of_chunk(nonce))
    assert cipher.encrypt(nonce[12:], b"XAES-256-GCM", data.encode()).hex() == wanted


def test_each_namespace_and_each_secret_has_a_key_of_its_own_and_each_chunk_a_nonce():
    names = [namespace_digest("one"), namespace_digest("two")]
    ids = {
        NamespaceKey.derived(secret, name).id for secret in (b"a" * 32, b"b" * 32) for name in names
    }
    assert len(ids) == 4
    seal, nonces = CipherSeal([OLD.encode()]), set()
    for _ in range(200):
        header, stored = seal.pack(KEY, NAMESPACE, memoryview(bytes(64)))
        nonces.add((parse_header(header).nonce, bytes(stored)))
        seal.done(stored)
    assert len(nonces) == 200


@pytest.mark.parametrize("header_bytes", [COMPACT_BYTES, ALIGNED_BYTES])
def test_a_change_of_any_byte_is_noticed(header_bytes):
    """A header with a right seal as well: the tag covers all of it."""
    seal, chunk = CipherSeal([OLD.encode()]), memoryview(payload_of(KEY, SIZE))
    header, stored = seal.pack(KEY, NAMESPACE, chunk, header_bytes=header_bytes)
    for at in [*range(240), header_bytes - 9]:  # all fields, and the last of the zeros
        body = bytearray(header[:-8])
        body[at] ^= 1
        changed = resealed(body)
        assert seal.fault(memoryview(changed), memoryview(bytearray(stored)), KEY, NAMESPACE)
    for at in range(0, SIZE, 97):
        payload = bytearray(stored)
        payload[at] ^= 1
        assert seal.fault(memoryview(header), memoryview(payload), KEY, NAMESPACE) == "payload"
    into = memoryview(bytearray(stored))
    assert seal.fault(memoryview(header), into, KEY, NAMESPACE) is None
    assert into == chunk


def resealed(body):
    return bytes(body) + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def test_a_plain_chunk_is_not_taken_by_a_reader_with_a_key_nor_the_reverse():
    chunk, seal = memoryview(bytearray(SIZE)), CipherSeal([OLD.encode()])
    plain = memoryview(pack_header(KEY, NAMESPACE, chunk))
    assert seal.fault(plain, chunk, KEY, NAMESPACE) == OTHER_KEY
    assert plain[192:248] == bytes(56)  # as the first version wrote it


def test_memory_for_ciphertext_is_used_again_and_grows_with_the_stores_at_once():
    seal = CipherSeal([OLD.encode()])

    def store(size):
        seal.done(seal.pack(KEY, NAMESPACE, memoryview(bytes(size)))[1])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(store, [4096, 100, 8192] * 100))
    held = seal._buffers._free
    assert 1 <= len(held) <= 3
    assert max(map(len, held)) <= 8192 + ALIGNED_BYTES


# ---- a store --------------------------------------------------------------------------------


@pytest.fixture(params=["disk", "folder", "object"])
def place(request, tmp_path):
    """An empty store of each kind."""
    if request.param == "object":
        return StoredObjects(request.getfixturevalue("s3").options())
    return StoredFiles(request.param, tmp_path / "kv")


def with_keys(path):
    return {"encryption": {"key_file": path}}


def other_keys(backend):
    """Return how many chunks were misses for their keys, if nothing else went wrong."""
    counts = {name.removeprefix("read_"): n for name, n in backend.counters().items()}
    assert not [name for name in counts if "corrupt" in name]
    return counts.get("other_key", 0)


@pytest.mark.parametrize("io", ["buffered", "auto", "direct"])
async def test_each_way_to_the_disk_is_encrypted(tmp_path, key_file, io):
    await check_that_nothing_is_readable(StoredFiles("disk", tmp_path / "kv"), key_file(), io=io)


async def test_no_piece_of_a_chunk_is_stored_and_the_callers_memory_is_untouched(place, key_file):
    await check_that_nothing_is_readable(place, key_file())


async def check_that_nothing_is_readable(place, path, **settings):
    backend, keys = opened(place, **with_keys(path), **settings), keys_of(3)
    memory, into = filled(keys), slots(3)
    assert await backend.write(keys, memory) == [True] * 3
    assert wrong_bytes(keys, memory) == []
    stored = b"".join(place.contents().values())
    assert len(stored) > sum(map(len, memory))
    assert not any(payload_of(key, 32) in stored for key in keys)
    assert await backend.read(keys, into) == [True] * 3
    assert wrong_bytes(keys, into) == []


async def test_after_a_rotation_old_chunks_are_read_until_the_old_key_goes(place, key_file):
    old, new = keys_of(2)
    for names, stored in (((OLD,), old), ((NEW, OLD), new)):
        backend = opened(place, **with_keys(key_file(*names)))
        assert await backend.write([stored], filled([stored])) == [True]
        into = slots(1)
        assert await backend.read([old], into) == [True]
        assert wrong_bytes([old], into) == []
        await backend.close()
    backend, into = opened(place, **with_keys(key_file("# the old one is gone", NEW))), slots(2)
    assert await backend.read([old, new], into) == [False, True]
    assert wrong_bytes([new], into[1:]) == []
    assert other_keys(backend) == 1


@pytest.mark.parametrize("lost", ["another key", "no key"])
async def test_a_lost_key_is_a_miss_with_a_reason_and_gives_way_to_a_store(place, key_file, lost):
    backend, keys = opened(place, **with_keys(key_file(OLD))), keys_of(2)
    assert await backend.write(keys, filled(keys)) == [True] * 2
    await backend.close()
    before = place.contents()
    backend = opened(place, **(with_keys(key_file(NEW)) if lost == "another key" else {}))
    assert await backend.read(keys, slots(2)) == [ReadResult.MISSING] * 2
    assert other_keys(backend) == 2
    assert await backend.contains(keys) == [False] * 2
    assert place.contents() == before
    assert await backend.write(keys, filled(keys)) == [True] * 2
    assert await backend.read(keys, slots(2)) == [True] * 2


def turned(content):
    return content[:-1] + bytes([content[-1] ^ 1])


def forged(content, key):
    """Return a plain chunk of the same key, as a writer without the encryption key makes it."""
    header_bytes = len(content) - CHUNK_BYTES
    payload = bytes(CHUNK_BYTES)
    return pack_header(key, NAMESPACE, payload, header_bytes=header_bytes) + payload


def renamed(content, key):
    """Return a chunk of another key with the name of this one in its header, and a right seal."""
    header_bytes = len(content) - CHUNK_BYTES
    body = bytearray(content[: header_bytes - 8])
    body[72 : 72 + len(key)] = key
    return resealed(body) + content[header_bytes:]


async def test_what_was_changed_swapped_cut_or_made_by_a_stranger_is_a_miss(place, key_file):
    backend, keys = opened(place, **with_keys(key_file())), keys_of(7)
    assert await backend.write(keys, filled(keys)) == [True] * 7
    found = {name.rpartition("/")[2]: name for name in place.contents()}
    names, stored = [found[key.hex()] for key in keys], place.contents()
    was = [stored[name] for name in names]
    now = [turned(was[0]), was[1][:-1], was[3], was[2], forged(was[4], keys[4]), b"", was[6]]
    now[5] = renamed(was[6], keys[5])
    for name, content in zip(names, now, strict=True):
        place.replace(name, content)
    into = slots(7)
    answers = await backend.read(keys, into)
    assert answers == [False] * 6 + [True]
    assert wrong_bytes(keys[6:], into[6:]) == []
    assert await backend.write(keys, filled(keys)) == [True] * 7
    assert await backend.read(keys, into) == [True] * 7
    assert wrong_bytes(keys, into) == []


async def test_without_the_key_operators_see_counts_and_ages_and_with_it_verify_checks(
    place, key_file
):
    def run(*words, code=0):
        return asyncio.to_thread(answered, words[0], *place.words, *words[1:], code=code)

    path = key_file()
    backend, keys = opened(place, **with_keys(path)), keys_of(2)
    assert await backend.write(keys, filled(keys)) == [True] * 2
    await backend.close()
    name, content = next(iter(place.contents().items()))
    place.replace(name, turned(content))
    given = ("-o", f"encryption={json.dumps({'key_file': path})}")
    (held,) = (await run("inspect"))["namespaces"]
    assert held["chunks"] == 2
    report = await run("verify")
    assert (report["chunks"], report["other_keys"], report["damaged"]) == (2, 2, [])
    report = await run("verify", *given, "--repair", code=1)
    assert (report["other_keys"], report["reasons"]) == (0, {"corrupt_payload": 1})
    report = await run("verify", *given)
    assert (report["chunks"], report["damaged"]) == (1, [])
    name, key = next((name, key) for name in place.contents() for key in keys if key.hex() in name)
    place.replace(name, forged(place.contents()[name], key))  # whole, and plain
    assert (await run("verify"))["other_keys"] == 0
    report = await run("verify", *given)
    assert (report["chunks"], report["other_keys"], report["damaged"]) == (1, 1, [])
    assert (await run("gc", "--older-than", "0s", "--yes"))["removed"] == 1
    assert place.contents() == {}


# ---- keys -----------------------------------------------------------------------------------


def refused(setting):
    with pytest.raises(ConfigError) as caught:
        read_options("disk", {"root": "/kv", "encryption": setting}, "backends[0].")
    return caught.value


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        ("", "has no key"),
        ("\n# only this\n", "has no key"),
        ("a" * 31, "line 1 has 31"),
        (f"{OLD}\nshort", "line 2 has 5"),
        ("ab" * 20, "few distinct"),
        (f"{OLD[:40]}\u00e9\u00e8", "printable"),
        ("\n".join(f"{OLD}{i}" for i in range(17)), "17 keys"),
        ("x" * 70_000, "right file"),
    ],
)
def test_keys_that_are_no_keys_are_refused_with_the_remedy_and_never_shown(
    key_file, monkeypatch, content, remedy
):
    path = key_file(content)
    error = refused({"key_file": path})
    assert error.field == "backends[0].encryption.key_file"
    assert remedy in error.remedy
    assert OLD[:16] not in str(error)
    if len(content) < 70_000:
        monkeypatch.setenv("KV_KEYS", content)
        error = refused({"key_env": "KV_KEYS"})
        assert error.field == "backends[0].encryption.key_env"
        assert remedy in error.remedy


@pytest.mark.parametrize(
    ("setting", "field", "remedy"),
    [
        ({}, "encryption.key_file", "name a file"),
        ({"key_file": "/a", "key_env": "B"}, "encryption.key_file", "key_env instead"),
        ({"key_file": "/nowhere/x"}, "encryption.key_file", "No such file"),
        ({"key_file": "/dev"}, "encryption.key_file", "must be a file"),
        ({"key_env": "SURELY_NOT_SET"}, "encryption.key_env", "not set"),
        ({"key_file": OLD}, "encryption.key_file", "cannot be read"),
        ({"key_env": OLD}, "encryption.key_env", "not set"),
        ({"key": OLD}, "encryption.key", "unknown key"),
        ({"key_file": 7}, "encryption.key_file", "must be a text"),
        (OLD, "encryption", "must be an object"),
    ],
)
def test_settings_that_name_no_key_are_refused(setting, field, remedy):
    error = refused(setting)
    assert error.field == f"backends[0].{field}"
    assert remedy in error.remedy
    assert OLD not in str(error)


@pytest.mark.parametrize(
    ("mode", "taken"),
    [(0o400, True), (0o440, True), (0o644, False), (0o602, False), (0o620, False)],
)
def test_a_file_that_others_may_read_or_change_is_refused(key_file, mode, taken):
    path = key_file(OLD, mode=mode)
    if taken:
        assert read_options("disk", {"root": "/kv", "encryption": {"key_file": path}})
    else:
        assert f"chmod 600 {path}" in refused({"key_file": path}).remedy


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_refused(key_file):
    path = key_file(OLD)
    os.chown(path, 12345, -1)
    assert "belongs to user 12345; chown it" in refused({"key_file": path}).remedy


def test_a_pipe_in_place_of_the_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "keys", 0o600)
    assert "must be a file" in refused({"key_file": str(tmp_path / "keys")}).remedy


def test_a_tier_that_cannot_encrypt_says_so(encryption):
    with pytest.raises(ConfigError, match="cannot encrypt"):
        open_backend("memory", {"encryption": encryption}, "n")


def test_the_extra_that_is_missing_is_named(encryption, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    error = refused(encryption)
    assert error.field == "backends[0].encryption"
    assert "kvoffload[encryption]" in error.remedy
    assert OLD not in f"{refused({'key_env': OLD})} {refused({'key_file': OLD})}"


async def test_no_key_is_in_a_repr_a_log_or_what_config_shows(tmp_path, key_file, caplog, capsys):
    caplog.set_level("DEBUG")
    path = key_file(OLD, NEW)
    tier = {"type": "disk", "root": str(tmp_path / "kv"), "encryption": {"key_file": path}}
    settings = {"cpu_bytes": 1, "backends": [tier]}
    out = await asyncio.to_thread(kvoffload, "config", "show", json.dumps(settings), "--json")
    assert path in out.stdout
    tier["encryption"] = {"key": OLD}  # a mistake
    shown = await asyncio.to_thread(kvoffload, "config", "show", json.dumps(settings), "--json")
    backend = opened(StoredFiles("disk", tmp_path / "kv"), **with_keys(path))
    await backend.write(keys_of(1), filled(keys_of(1)))
    await backend.close()
    seal = Encryption(key_file=path).seal()
    texts = [out.stdout, shown.stdout, shown.stderr, caplog.text, repr(seal), repr(backend)]
    texts += [repr(parse_config(settings)), repr(NamespaceKey.derived(OLD.encode(), b"n"))]
    assert not [text for text in texts if re.search(f"{OLD[:12]}|{NEW[:12]}", text)]


def test_a_report_speaks_of_no_keys_where_none_were_given():
    run = Verification([b"a chunk"], Check(), len)
    run.judge(b"a chunk", "where", OTHER_KEY, 0, lambda: None)
    *_, line = run.report().lines
    assert line.startswith("1 chunk that loads with these settings miss")
