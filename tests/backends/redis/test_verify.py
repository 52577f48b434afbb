"""``kvoffload verify`` of Redis: what it finds, what it leaves alone, and how fast it reads."""

import time
from itertools import starmap

import pytest
from disk_commands import answered, kvoffload

from kvoffload.testing.backends import CHUNK_BYTES
from tests.support.redis_engine import store
from tests.support.redis_server import BINARY, MISSING

pytestmark = pytest.mark.skipif(BINARY is None, reason=MISSING)

STORED = CHUNK_BYTES + 256
"""Bytes of a value: a header and a chunk."""


def chunks_of(server, namespace):
    return sorted(server.cli("--scan", "--pattern", f"kvoffload:{namespace}:*{{*").splitlines())


async def test_a_sound_server_is_read_whole_and_nothing_on_it_changes(empty):
    await store(empty.url, "one", 3, {"model": "m"})
    await store(empty.url, "two:more", 2)
    empty.cli("set", "kvoffload:not a name", "1")
    names = chunks_of(empty, "one")
    ends = [int(empty.cli("pexpiretime", name)) for name in names]
    found = answered("verify", empty.url)
    assert (found["chunks"], found["of_chunks"], found["damaged"]) == (5, 5, [])
    assert found["bytes"] == 5 * STORED
    assert [int(empty.cli("pexpiretime", name)) for name in names] == ends
    said = kvoffload("verify", empty.url)
    assert (said.returncode, "5 chunks" in said.stdout) == (0, True)


async def test_each_kind_of_damage_is_named_and_a_repair_removes_it_alone(empty):
    await store(empty.url, "one", 6, {"model": "m"})
    flipped, header, short, other, kind, sound = chunks_of(empty, "one")
    empty.cli("setrange", flipped, "300", "!")
    empty.cli("setrange", header, "20", "!")
    empty.cli("set", short, "a few bytes")
    empty.cli("copy", sound, other, "replace")
    empty.cli("del", kind)
    empty.cli("rpush", kind, "1")
    found = answered("verify", empty.url, code=1)
    reasons = {each["path"].split()[-1]: each["reason"] for each in found["damaged"]}
    assert reasons == {
        flipped: "corrupt_payload",
        header: "corrupt_header",
        short: "corrupt_short",
        other: "corrupt_key",
        kind: "corrupt_type",
    }
    assert chunks_of(empty, "one") == sorted([*reasons, sound])
    repaired = answered("verify", empty.url, "--repair", code=1)
    assert all(each["removed"] for each in repaired["damaged"])
    assert chunks_of(empty, "one") == [sound]
    assert answered("verify", empty.url)["chunks"] == 1


async def test_a_sample_reads_a_part_and_a_rate_takes_its_time(empty):
    await store(empty.url, "one", 20)
    assert answered("verify", empty.url, "--sample", "25%")["chunks"] == 5
    began = time.monotonic()
    found = answered("verify", empty.url, "--rate", f"{20 * STORED}B/s")
    assert time.monotonic() - began > 0.9
    assert found["chunks"] == 20


async def test_authenticated_values_are_checked_with_the_secret_and_without(empty, key_file):
    pytest.importorskip("blake3")
    secret = key_file()
    await store(empty.url, "one", 2, secret_file=secret)
    assert answered("verify", empty.url)["unauthenticated"] == 2
    known = ("verify", empty.url, "-o", f"secret_file={secret}")
    assert answered(*known)["unauthenticated"] == 0
    name = chunks_of(empty, "one")[0]
    empty.cli("setrange", name, str(STORED), "!")  # the code alone
    assert answered("verify", empty.url)["damaged"] == []
    (damage,) = answered(*known, code=1)["damaged"]
    assert damage["reason"] == "corrupt_mac"


async def test_a_whole_cluster_is_verified(cluster):
    url = f"redis+cluster://127.0.0.1:{cluster[0].port}"
    await store(url, "spread", 30)
    names = list(starmap(chunks_of, ((server, "spread") for server in cluster)))
    cluster[1].cli("setrange", names[1][0], "300", "!")
    found = answered("verify", url, code=1)
    assert (found["chunks"], len(found["damaged"])) == (30, 1)
    assert f"127.0.0.1:{cluster[1].port}" in found["damaged"][0]["path"]


async def test_a_chunk_that_moves_to_another_server_is_no_damage(moving, cluster):
    url = f"redis+cluster://127.0.0.1:{cluster[0].port}"
    found = answered("verify", url, "--repair")
    assert (found["chunks"], found["of_chunks"], found["damaged"]) == (0, 1, [])


def test_a_server_that_is_away_is_a_sentence(empty):
    away = kvoffload("verify", "redis://127.0.0.1:1")
    assert (away.returncode, away.stderr.startswith("kvoffload: ")) == (1, True), away.stderr
