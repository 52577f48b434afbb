"""Surveying, purging and examining, on real servers."""

import asyncio
import json

import pytest
from disk_commands import kvoffload

from kvoffload import open_backend
from kvoffload.backends.admin import COMMANDS, Garbage
from kvoffload.backends.redis import admin
from kvoffload.backends.redis.admin import Operator
from kvoffload.testing.backends import CHUNK_BYTES, keys_of
from tests.support.redis_engine import PATIENT, store
from tests.support.redis_server import BINARY, MISSING, RedisServer, free_port

pytestmark = pytest.mark.skipif(BINARY is None, reason=MISSING)


async def test_a_survey_counts_each_namespace_and_a_purge_removes_only_what_it_names(
    server, opened
):
    server.cli("set", "somebody:else", "1")
    await store(server.url, "one", 3, {"model": "m"})
    await store(server.url, "one:more", 2)  # its name begins with the other's
    backend = opened(server, "x")
    assert all(isinstance(backend, protocol) for protocol in COMMANDS.values())
    one, more = (await backend.survey()).held
    assert (one.namespace, one.chunks, one.facts) == ("one", 3, {"model": "m"})
    assert one.stored_bytes == 3 * (CHUNK_BYTES + 256)
    assert (more.namespace, more.chunks, more.facts) == ("one:more", 2, {})
    assert await backend.purge(["one"]) == 4
    (left,) = (await backend.survey()).held
    assert left.namespace == "one:more"
    assert server.cli("exists", "somebody:else") == "1"


async def test_a_whole_cluster_is_surveyed_and_purged(cluster, opened):
    url = f"redis+cluster://127.0.0.1:{cluster[0].port}"
    await store(url, "spread", 30)
    backend = opened(url, "x")
    assert [holding.chunks for holding in (await backend.survey()).held] == [30]
    findings = await backend.diagnose()
    assert not any(finding.verdict == "failed" for finding in findings), findings
    assert await backend.purge(["spread"]) == 30
    assert (await backend.survey()).held == []


async def test_a_slot_between_two_servers_ends_no_survey_and_no_purge_of_it_is_called_whole(moving):
    backend, _, end = moving
    assert [holding.expires_s for holding in (await backend.survey()).held] == []
    with pytest.raises(OSError, match="run it again"):
        await backend.purge(["moving"])
    end()
    assert await backend.purge(["moving"]) == 1


async def test_an_erasure_while_a_slot_moves_is_not_called_whole(moving):
    backend, _, end = moving
    with pytest.raises(OSError, match="run it again"):
        await backend.erase(b"a", Garbage())
    end()
    assert (await backend.erase(b"a", Garbage())).figures["unknown"] == 1


async def test_a_chunk_of_unknown_age_is_not_removed_as_an_old_one(moving, monkeypatch):
    """Its server takes the slot over between the question of its age and its removal."""
    backend, keys, end = moving

    def judged(*given):
        verdicts = are_unused(*given)
        end()
        return verdicts

    are_unused = admin._are_unused
    monkeypatch.setattr(admin, "_are_unused", judged)
    with pytest.raises(OSError, match="run it again"):
        await backend.collect(Garbage(unused_s=3600.0))
    end()
    assert await backend.contains(keys) == [True]


@pytest.mark.parametrize(
    "wanted", [None, Garbage(unused_s=0.0), Garbage(unused_s=0.0, dry_run=True)]
)
async def test_a_removal_while_chunks_change_servers_is_not_called_whole(
    moving, monkeypatch, wanted
):
    backend, _, end = moving
    monkeypatch.setattr(Operator, "pause", lambda operator, seconds=0.0: end())
    with pytest.raises(OSError, match="run it again"):
        await (backend.collect(wanted) if wanted else backend.purge(["moving"]))
    is_left = wanted is not None and wanted.dry_run
    assert await backend.purge(["moving"]) == is_left


async def test_a_server_that_left_the_cluster_hides_no_chunk_from_an_operator(
    cluster, opened, tmp_path
):
    alone = RedisServer(tmp_path / "alone", "--cluster-enabled", "yes")
    await store(f"redis+cluster://127.0.0.1:{cluster[0].port}", "spread", 30)
    hosts = f"127.0.0.1:{alone.port},127.0.0.1:{cluster[0].port}"
    assert await opened(f"redis+cluster://{hosts}", "x").purge(["spread"]) == 30
    url = f"redis+cluster://127.0.0.1:{alone.port}"
    assert (await verdicts(url))["reachable"] == "failed"
    alone.stop()


async def test_a_server_away_is_an_error_for_an_operator():
    backend = open_backend("redis", {"url": f"redis://127.0.0.1:{free_port()}"}, "x")
    with pytest.raises(OSError, match="connecting"):
        await backend.survey()
    (finding,) = await backend.diagnose()
    assert (finding.check, finding.verdict) == ("reachable", "failed")
    await backend.close()


async def verdicts(url, **options):
    backend = open_backend("redis", {"url": url, **PATIENT, **options}, "x")
    findings = await backend.diagnose()
    await backend.close()
    assert all(finding.remedy for finding in findings if finding.verdict != "ok")
    return {finding.check: finding.verdict for finding in findings}


async def test_an_examination_names_what_should_be_changed(server, key_file):
    assert (await verdicts(server.url))["policy"] == "warning"
    server.cli("config", "set", "maxmemory", "256mb")
    assert (await verdicts(server.url))["policy"] == "warning"  # noeviction
    server.cli("config", "set", "maxmemory-policy", "allkeys-lru")
    assert (await verdicts(server.url))["authenticity"] == "warning"
    found = await verdicts(server.url, secret_file=key_file())
    # How fast a busy machine is says nothing of the server's settings.
    speed = {found.pop("latency"), found.pop("throughput")}
    assert set(found.values()) == {"ok"}, found
    assert "failed" not in speed
    server.cli("config", "set", "appendonly", "yes")
    assert (await verdicts(server.url))["persistence"] == "warning"
    assert server.cli("dbsize") == "0"  # it leaves nothing behind


async def test_an_examination_finds_rights_that_are_missing(server, login):
    server.cli("acl", "setuser", "kv", "reset", "on", ">p", "~kvoffload:*", "+ping", "+psetex")
    found = await verdicts(server.url, **login("kv", "p"))
    assert found["rights"] == "failed"
    assert found["info"] == "warning"


async def test_an_examination_of_a_cluster_finds_that_moving_slots_cannot_be_followed(
    cluster, login
):
    url = f"redis+cluster://127.0.0.1:{cluster[0].port}"
    for right, verdict in (("-asking", "failed"), ("+asking", "ok")):
        for server in cluster:
            server.cli("acl", "setuser", "kv", "reset", "on", ">p", "~*", "+@all", right)
        assert (await verdicts(url, **login("kv", "p")))["rights"] == verdict


async def test_an_examination_finds_a_replica(server, tmp_path):
    replica = RedisServer(tmp_path / "replica", "--replicaof", "127.0.0.1", str(server.port))
    try:
        found = await verdicts(replica.url)
        assert found["role"] == "failed"
        assert found["rights"] == "failed"
    finally:
        replica.stop()


async def test_inspect_and_gc_show_and_remove_a_namespace(server):
    for namespace in ("one", "two"):
        await store(server.url, namespace, 3, {"model": namespace})

    def held():
        shown = kvoffload("inspect", server.url, "--json")
        assert shown.returncode == 0, shown.stderr
        return {n["namespace"]: n["chunks"] for n in json.loads(shown.stdout)["namespaces"]}

    assert held() == {"one": 3, "two": 3}
    assert "model=two" in kvoffload("inspect", server.url, "-v").stdout
    would = kvoffload("gc", server.url, "--namespace", "one", "--dry-run", "--json")
    assert json.loads(would.stdout)["removed"] == 3
    assert held() == {"one": 3, "two": 3}
    assert kvoffload("gc", server.url, "--namespace", "one").returncode == 0
    assert held() == {"two": 3}


async def test_inspect_says_how_full_the_server_is_and_when_namespaces_expire(server, login):
    for namespace, count in (("one", 2), ("two", 4)):
        await store(server.url, namespace, count, {"model": f"model-{namespace}"})
    server.cli("config", "set", "maxmemory", "256mb")
    for chunk in range(4):
        aged(server, "two", chunk, 18 * 3600)
    report = json.loads(kvoffload("inspect", server.url, "--json").stdout)
    (total,) = report["servers"]
    assert (total["server"], total["limit_bytes"]) == (f"127.0.0.1:{server.port}", 256 << 20)
    assert total["used_bytes"] > 0
    one, two = report["namespaces"]
    assert 86_000 < one["expires_s"] <= 86_400
    assert 21_000 < two["expires_s"] <= 21_600
    text = kvoffload("inspect", server.url).stdout
    assert "limit: 256.0 MiB" in text
    assert text.index("model-two") < text.index("model-one")  # the larger one first
    assert "6.0 h" in text
    text = kvoffload("inspect", server.url, "--sort", "name").stdout
    assert text.index("model-one") < text.index("model-two")
    server.cli("acl", "setuser", "low", "on", ">p", "~kvoffload:*", "+scan", "+strlen", "+get")
    words = [word for pair in login("low", "p").items() for word in ("-o", "=".join(pair))]
    low = kvoffload("inspect", server.url, "--json", *words)
    assert low.returncode == 0, low.stderr
    report = json.loads(low.stdout)
    assert report["servers"] == []
    assert [(n["chunks"], n["expires_s"]) for n in report["namespaces"]] == [(2, None), (4, None)]


def test_inspect_and_gc_say_what_is_wrong(server):
    away = f"redis://127.0.0.1:{free_port()}"
    for words, code in (
        (("inspect", away), 1),
        (("gc", away, "--namespace", "x"), 1),
        (("gc", server.url), 2),
    ):
        done = kvoffload(*words)
        assert done.returncode == code, words
        assert "kvoffload: " in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", ["", "+cluster", "+sentinel"])
def test_no_command_shows_a_secret(server, tmp_path, monkeypatch, caplog, kind):
    """No message has it: after wrong passwords, dead servers, bad URLs and settings."""
    secret = "verysecretindeed"
    (tmp_path / "password").write_text(secret)
    monkeypatch.setenv("KV_PASSWORD", secret)
    server.cli("acl", "setuser", "kv", "reset", "on", ">right", "~kvoffload:*", "+@all")
    path = "/master" if kind == "+sentinel" else ""
    by_url = f"redis{kind}://kv:{secret}@127.0.0.1:{server.port}{path}"
    away = f"redis{kind}://kv:{secret}@127.0.0.1:{free_port()}{path}"
    bare = f"redis{kind}://127.0.0.1:{server.port}{path}"
    for words in (
        (by_url,),
        (away,),
        (by_url.replace(str(server.port), "notaport"),),
        (by_url, "-o", "tmeout_s=1"),
        (bare, "-o", "username=kv", "-o", f"password_file={tmp_path}/password"),
        (bare, "-o", "username=kv", "-o", "password_env=KV_PASSWORD"),
        (bare, "-o", "sentinel_username=kv", "-o", "sentinel_password_env=KV_PASSWORD"),
    ):
        for command in ("doctor", "inspect") if words == (by_url,) else ("doctor",):
            done = kvoffload(command, *words)
            assert done.stdout or done.stderr, (command, words)
            assert secret not in done.stdout + done.stderr + caplog.text, (command, words)
            assert "Traceback" not in done.stderr


def aged(server, namespace, chunk, unused_s):
    """Let a chunk look as if nothing had used it for so long."""
    name = f"kvoffload:{namespace}:xxh3:{{{keys_of(chunk + 1, namespace)[chunk].hex()}}}"
    assert server.cli("pexpire", name, str(int((86400 - unused_s) * 1000))) == "1"


def test_gc_removes_by_age_what_no_engine_used(server):
    asyncio.run(store(server.url, "one", 4, {"model": "m"}))
    asyncio.run(store(server.url, "two", 2))
    server.cli("set", "somebody:else", "1")
    for namespace, chunk, hours in (("one", 0, 7), ("one", 1, 5), ("two", 0, 20)):
        aged(server, namespace, chunk, hours * 3600)
    server.cli("persist", f"kvoffload:one:xxh3:{{{keys_of(4, 'one')[3].hex()}}}")
    size = CHUNK_BYTES + 256
    words = ("gc", server.url, "--older-than", "6h", "--json")
    for more in (("--dry-run",), ()):
        report = json.loads(kvoffload(*words, "--namespace", "one", *more).stdout)
        assert report == {
            "dry_run": bool(more), "removed": 1, "freed_bytes": size, "undated": 1,
        }  # fmt: skip
    report = json.loads(kvoffload(*words).stdout)
    assert (report["removed"], report["freed_bytes"]) == (1, size)
    assert server.cli("dbsize") == "6"  # three of one and its facts, one of two, another's
    told = kvoffload("gc", server.url, "--older-than", "6h").stdout
    assert "1 chunks stay" in told
    assert "ttl_s" in told


def test_an_age_that_a_server_cannot_tell_is_refused(server):
    refused = kvoffload("gc", server.url, "--older-than", "2d")
    assert (refused.returncode, "-o ttl_s" in refused.stderr) == (2, True)
    assert kvoffload("gc", server.url, "--older-than", "2d", "-o", "ttl_s=604800").returncode == 0
    assert kvoffload("gc", server.url).returncode == 2
