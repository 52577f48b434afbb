"""Which servers a slot table or a Sentinel may name: no password goes anywhere else."""

import asyncio

import pytest
from redis_fakes import FakeRedis, masters_of, polite, table

from kvoffload.backends.redis import discovery
from kvoffload.backends.redis.allowed import AllowedServers
from kvoffload.backends.redis.connection import Address
from kvoffload.backends.redis.discovery import NUM_SLOTS, fetch_slots, masters
from kvoffload.backends.redis.options import Access, RedisOptions
from kvoffload.errors import ConfigError

NEAR = ["127.0.0.1", "127.9.9.9", "::1", "0.0.0.0", "localhost", "x.localhost", "::ffff:127.0.0.1"]
LINK = ["169.254.169.254", "fe80::1", "fe80::1%eth0", "::ffff:169.254.1.1"]
FAR = ["10.0.0.7", "cache1.internal", "2001:db8::1", "192.168.1.1"]


def admits(host, seeds=("10.0.0.1",), listed=""):
    allowed = AllowedServers([Address(seed, 6379) for seed in seeds], listed)
    try:
        return allowed.check(Address(host, 7000)).host == host
    except ValueError:
        return False


def test_by_default_no_loopback_or_link_local_server_is_allowed_unless_the_url_has_one():
    assert [host for host in NEAR + LINK + FAR if admits(host)] == FAR
    for seed in ("127.0.0.1", "localhost", "::1"):
        assert [host for host in NEAR + LINK + FAR if admits(host, [seed])] == NEAR + FAR
    assert [host for host in NEAR + LINK + FAR if admits(host, ["169.254.7.7"])] == LINK + FAR


def test_a_list_allows_what_it_names_and_the_servers_of_the_url():
    listed = "10.0.0.0/8, Cache1.internal,*.kv.internal, 127.0.0.1, 2001:db8::/32"
    hosts = ["10.255.0.1", "cache1.internal", "a.b.kv.internal", "127.0.0.1", "2001:db8::9"]
    assert all(admits(host, listed=listed) for host in hosts)
    others = ["11.0.0.1", "cache2.internal", "kv.internal", "127.0.0.2", "fe80::1", "localhost"]
    assert not any(admits(host, listed=listed) for host in others)
    seed = Address("elsewhere", 6379)
    assert AllowedServers([seed], listed).check(seed) == seed


@pytest.mark.parametrize("listed", ["*", "a/b", "10.0.0.1/8", "a b", "host:7000"])
def test_a_malformed_list_is_refused_at_the_start(listed):
    with pytest.raises(ConfigError) as caught:
        RedisOptions(url="redis://h", servers=listed)
    assert caught.value.field == "servers"
    assert "10.0.0.0/8" in caught.value.remedy


def test_where_a_name_leads_is_checked_too():
    """An attacker's name server maps a harmless name to an inner service."""
    allowed = AllowedServers([Address("seed.internal", 1)], "")
    named = allowed.check(Address("cache1.internal", 7000))
    allowed.check_ip(named, "10.0.0.7")
    for ip in ("127.0.0.1", "169.254.169.254", "::1"):
        with pytest.raises(OSError, match="servers does not allow"):
            allowed.check_ip(named, ip)
    AllowedServers([], "cache1.internal").check_ip(named, "127.0.0.1")
    # The operator's own name of a server may lead anywhere, and other servers may be there.
    allowed.check_ip(Address("seed.internal", 1), "127.0.0.1")
    allowed.check_ip(named, "127.0.0.1")


@pytest.fixture
def access_of(tmp_path, monkeypatch):
    """An access with a password, to a server on an address that counts as far away."""
    (tmp_path / "password").write_text("correct horse battery staple")
    (tmp_path / "password").chmod(0o600)

    def access(url, **options):
        files = dict.fromkeys(("password_file", "sentinel_password_file"), tmp_path / "password")
        given = {name: str(path) for name, path in files.items()} | options
        access = Access(RedisOptions(url=url, connect_timeout_s=10.0, **given))
        monkeypatch.setattr(access.allowed, "_near", {""})
        monkeypatch.setattr(access.allowed, "check_ip", lambda address, ip: None)
        return access

    return access


def test_a_slot_table_sends_the_password_to_no_inner_service(access_of, monkeypatch):
    asked = []
    rows = [[0, NUM_SLOTS - 1, [b"127.0.0.1", 7000]]]
    monkeypatch.setattr(discovery, "ask", lambda *given: asked.append(given) or rows)
    seed = Address("10.0.0.1", 6379)
    with pytest.raises(ValueError, match=r"127.0.0.1:7000 is no server of the URL"):
        fetch_slots(seed, access_of("redis+cluster://10.0.0.1"))
    allowed = access_of("redis+cluster://10.0.0.1", servers="127.0.0.0/8")
    assert fetch_slots(seed, allowed) == [(0, NUM_SLOTS - 1, Address("127.0.0.1", 7000))]


def masters_to(server):
    return lambda words: (
        table((0, NUM_SLOTS - 1, "127.0.0.1", server.port))
        if words[0] == b"CLUSTER"
        else masters_of("m", "127.0.0.1", str(server.port))
        if words[0] == b"SENTINEL"
        else polite(words)
    )


@pytest.mark.parametrize("kind", ["cluster", "sentinel"])
async def test_an_inner_service_that_a_server_names_gets_no_connection(access_of, kind):
    async with FakeRedis(polite) as inner, FakeRedis(masters_to(inner)) as server:
        path = "/m" if kind == "sentinel" else ""
        access = access_of(f"redis+{kind}://{server.address}{path}")
        with pytest.raises(OSError, match="servers does not allow"):
            await asyncio.to_thread(masters, access)
        assert inner.accepted == 0
        access = access_of(f"redis+{kind}://{server.address}{path}", servers="127.0.0.1")
        assert await asyncio.to_thread(masters, access) == [Address("127.0.0.1", inner.port)]
