"""What servers tell of their namespaces: a bounded SCAN, with the rights that there are."""

import json
import logging

import pytest

from kvoffload import open_backend
from kvoffload.backends.redis import admin
from tests.support.redis_engine import PATIENT, store
from tests.support.redis_server import BINARY, MISSING, RedisServer

pytestmark = pytest.mark.skipif(BINARY is None, reason=MISSING)
ENGINE = ["+getex", "+psetex", "+exists", "+pexpire", "+unlink", "+ping", "+info"]
"""The rights that the guide gives an engine's user."""
PASSWORD = "Zt8-pQ2x_Lw5.Vn7+Rk4"


async def described(url, namespace="own", **options):
    backend = open_backend("redis", {"url": url, **PATIENT, **options}, namespace)
    try:
        return await backend.described()
    finally:
        await backend.close()


async def test_other_namespaces_are_described_with_facts_the_largest_first(empty):
    empty.cli("set", "foreign", "1")
    await store(empty.url, "small", 2, {"model": "m"})
    await store(empty.url, "a:b", 3, {"model": "n"})
    await store(empty.url, "own", 0, {"model": "m"})
    found = await described(empty.url)
    assert [each[:4] for each in found] == [
        ("a:b", {"model": "n"}, 3, None),
        ("small", {"model": "m"}, 2, None),
    ]


async def test_a_namespace_with_chunks_is_alone(empty):
    await store(empty.url, "other", 2, {"model": "m"})
    await store(empty.url, "own", 2, {"model": "m"})
    assert [each.namespace for each in await described(empty.url)] == ["own"]


async def test_the_servers_of_a_cluster_are_described_together(cluster):
    url = f"redis+cluster://127.0.0.1:{cluster[0].port}"
    await store(url, "one", 30, {"model": "m"})
    await store(url, "two", 20, {"model": "n"})
    found = {each.namespace: each[1:3] for each in await described(url)}
    assert found == {"one": ({"model": "m"}, 30), "two": ({"model": "n"}, 20)}


async def test_an_engines_user_without_scan_finds_nothing_and_no_line_says_so(empty, login, caplog):
    await store(empty.url, "other", 2, {"model": "m"})
    rights = ("acl", "setuser", "kv", "reset", "on", f">{PASSWORD}", "~kvoffload:*", *ENGINE)
    empty.cli(*rights)
    with caplog.at_level(logging.INFO):
        assert await described(empty.url, **login("kv", PASSWORD)) == []
        assert caplog.messages == []
        empty.cli(*rights, "+scan")
        (found,) = await described(empty.url, **login("kv", PASSWORD))
        assert found[:3] == ("other", {"model": "m"}, 2)


async def test_of_10_000_namespaces_a_bounded_number_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(admin, "MOST_NAMES", 5000)
    server = RedisServer(tmp_path)
    try:
        script = (
            "for i = 1, 10000 do local front = 'kvoffload:' .. i .. ':' "
            "redis.call('set', front .. 'facts', '{}') "
            "redis.call('set', front .. 'xxh3:{ab}', '') end"
        )
        server.cli("eval", script, "0")
        server.cli("config", "resetstat")
        found = await described(server.url)
        stats = server.cli("info", "commandstats").splitlines()
    finally:
        server.stop()
    calls = {line.partition(":")[0]: line for line in stats}
    assert len(found) == admin.MOST_DESCRIBED
    assert "calls=50," in calls["cmdstat_scan"]
    assert "calls=256," in calls["cmdstat_getex"]


@pytest.mark.parametrize(
    ("command", "value"),
    [
        ("set", "[1]"),
        ("set", "[" * 50_000),
        ("set", json.dumps({"model": 7})),
        ("set", '{"model": "\\ud800"}'),
        ("rpush", "no string"),
    ],
)
async def test_a_hostile_description_has_no_facts(empty, command, value):
    await store(empty.url, "other", 2, {"model": "m"})
    empty.cli("del", "kvoffload:other:facts")
    empty.cli(command, "kvoffload:other:facts", value)
    (found,) = await described(empty.url)
    assert (found.namespace, found.chunks) == ("other", 2)
    assert found.facts == {} or not found.facts["model"].isprintable()


async def test_a_description_of_100_kib_is_read_and_a_huge_one_is_not_received(empty):
    await store(empty.url, "other", 2, {"model": "m" * 100_000})
    (found,) = await described(empty.url)
    assert len(found.facts["model"]) == 100_000
    await store(empty.url, "small", 1, {"model": "m"})
    empty.cli("setrange", "kvoffload:other:facts", str(64 << 20), "x")
    empty.cli("config", "resetstat")
    (found,) = await described(empty.url)
    assert found[:3] == ("other", {}, 2)
    sent = dict(line.split(":") for line in empty.cli("info", "stats").splitlines() if ":" in line)
    assert int(sent["total_net_output_bytes"]) < 32 << 20
