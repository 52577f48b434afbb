"""The Redis backend against real servers: it conforms over every kind of connection."""

import asyncio
import socket
import subprocess
import threading

import pytest

from kvoffload import open_backend
from kvoffload.backends.base import WriteResult
from kvoffload.errors import ConfigError
from kvoffload.testing.backends import CHUNK_BYTES, filled, keys_of, payload_of, slots
from tests.support.redis_engine import PATIENT, until
from tests.support.redis_server import (
    BINARY,
    MISSING,
    RedisServer,
    free_port,
    make_certificates,
    redis_cluster,
)
from tests.support.redis_suite import RedisSuite

pytestmark = pytest.mark.skipif(BINARY is None, reason=MISSING)


class TestOneServer(RedisSuite):
    @pytest.fixture(autouse=True)
    def _server(self, empty):
        self.servers = [empty]


class TestAuthenticatedValues(TestOneServer):
    @pytest.fixture(autouse=True)
    def _secret(self, key_file):
        self.options = {"secret_file": key_file()}


class TestEncryptedValues(TestOneServer):
    @pytest.fixture(autouse=True)
    def _key(self, encryption):
        self.options = {"encryption": encryption}


class TestCluster(RedisSuite):
    @pytest.fixture(autouse=True)
    def _cluster(self, cluster):
        self.servers = cluster
        self.options = {"url": f"redis+cluster://127.0.0.1:{cluster[0].port}"}


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """A server that speaks TLS only, and its certificates."""
    folder = tmp_path_factory.mktemp("tls")
    files = make_certificates(folder / "certificates")
    port = free_port()
    try:
        server = RedisServer(
            folder, "--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no",
            "--tls-cert-file", files["cert"], "--tls-key-file", files["key"],
            "--tls-ca-cert-file", files["ca"], port=port,
        )  # fmt: skip
    except RuntimeError as error:
        # What a server says that knows no such setting, and what one that knows it says.
        if not any(said in str(error) for said in ("Bad directive", "Failed finding TLS support")):
            raise
        pytest.skip(f"{BINARY} was built without TLS")
    yield server, files
    server.stop()


class TestTLS(RedisSuite):
    @pytest.fixture(autouse=True)
    def _tls(self, tls):
        server, files = tls
        self.servers, self.tls = [server], ("--tls", "--cacert", files["ca"])
        self.options = {"url": f"rediss://localhost:{server.port}", "ca_file": files["ca"]}
        server.cli("flushall", tls=self.tls)


async def stores_and_loads(options, namespace="n", count=4):
    """Return True if chunks make the round trip; check their bytes."""
    backend = open_backend("redis", {**PATIENT, **options}, namespace)
    keys, into = keys_of(count, namespace), slots(count)
    try:
        stored = await backend.write(keys, filled(keys))
        loaded = await backend.read(keys, into)
        for key, slot, ok in zip(keys, into, loaded, strict=True):
            assert not ok or bytes(slot) == payload_of(key, CHUNK_BYTES)
        return all(stored) and all(loaded)
    finally:
        await backend.close()


async def test_a_unix_socket_will_do(empty):
    assert await stores_and_loads({"url": f"unix://{empty.folder}/sock?db=3"})
    assert "keys=4" in empty.cli("info", "keyspace").split("db3:")[1]


async def test_a_certificate_for_another_name_is_refused(tls):
    server, files = tls
    wrong = {"url": f"rediss://127.0.0.1:{server.port}", "ca_file": files["ca"]}
    assert not await stores_and_loads(wrong)


async def test_a_certificate_of_nobody_known_is_refused(tls):
    server, _ = tls
    assert not await stores_and_loads({"url": f"rediss://localhost:{server.port}"})


async def test_a_plain_connection_to_a_tls_port_is_a_miss(tls):
    server, _ = tls
    assert not await stores_and_loads({"url": f"redis://localhost:{server.port}"})


MINIMAL_RIGHTS = "+getex +psetex +exists +pexpire +unlink +ping"


@pytest.mark.parametrize("extra", ["", "+info"])
async def test_a_user_with_few_rights_suffices(empty, login, extra):
    rights = [*MINIMAL_RIGHTS.split(), *extra.split()]
    empty.cli("acl", "setuser", "kv", "reset", "on", ">geheim", "~kvoffload:*", *rights)
    named = {"url": empty.url, **login("kv", "geheim")}
    assert await stores_and_loads(named)
    del named["username"]
    assert await stores_and_loads(named | {"url": f"redis://kv@127.0.0.1:{empty.port}"})


async def test_a_user_who_may_not_store_still_loads(empty, caplog, login, opened):
    assert await stores_and_loads({"url": empty.url})
    empty.cli("acl", "setuser", "kv", "reset", "on", ">p", "~kvoffload:*", "+getex", "+ping")
    reader = opened(empty, **login("kv", "p"))
    keys = keys_of(40)
    owner = opened(empty)
    assert all(await owner.write(keys, filled(keys)))
    for _ in range(3):
        assert not any(await reader.write(keys, filled(keys)))
        assert all(await reader.read(keys, slots(len(keys))))
    counters = reader.counters()
    assert reader.usage().gauges["breakers_open"] == 0
    assert counters["write_full"] >= 2 * len(keys)  # not tried again soon
    assert caplog.text.count("psetex allows them") == 1


@pytest.fixture
def lacking(empty, login, opened):
    """Returns a backend whose user lacks one of the rights it needs."""

    def lacks(right):
        rights = [it for it in MINIMAL_RIGHTS.split() if it != f"+{right}"]
        empty.cli("acl", "setuser", "kv", "reset", "on", ">p", "~kvoffload:*", *rights)
        return opened(empty, **login("kv", "p"))

    return lacks


@pytest.mark.parametrize("right", ["exists", "pexpire", "unlink"])
async def test_a_right_that_is_missing_is_named_once_and_costs_no_connection(
    lacking, caplog, right
):
    backend, keys = lacking(right), keys_of(4)
    for _ in range(3):
        assert all(await backend.write(keys, filled(keys)))
        assert all(await backend.read(keys, slots(4)))
        assert await backend.contains(keys) == [right != "exists"] * 4
        await backend.remove(keys[:1])
    assert backend.counters()["connected"] <= 5
    assert backend.usage().gauges["breakers_open"] == 0
    assert caplog.text.count(f"+{right} ~kvoffload:* allows it") == 1


async def test_a_user_who_may_not_load_is_told_so(lacking, caplog):
    backend, keys = lacking("getex"), keys_of(4)

    async def is_left_alone():  # a probe may close it meanwhile: the next load opens it again
        assert not any(await backend.read(keys, slots(4)))
        return backend.usage().gauges["breakers_open"] == 1

    await until(is_left_alone)
    assert caplog.text.count("+getex ~kvoffload:* allows it") == 1


async def test_a_name_that_nobody_resolves_holds_up_no_other_server(empty, monkeypatch, opened):
    hung = threading.Event()
    resolve = socket.getaddrinfo

    def resolver(host, *args, **kwargs):
        return hung.wait() and [] if host == "nowhere.invalid" else resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    away = [open_backend("redis", {"url": "redis://nowhere.invalid"}, "n") for _ in range(40)]
    near = opened(f"redis://localhost:{empty.port}")
    try:
        keys = keys_of(2)
        lost = asyncio.gather(*(it.read(keys, slots(2)) for it in away))
        assert all(await near.write(keys, filled(keys)))
        assert all(await near.read(keys, slots(2)))
        assert await lost == [[False, False]] * len(away)
    finally:
        hung.set()
        for backend in (near, *away):
            await backend.close()


async def test_a_wrong_password_is_a_miss_and_never_shown(empty, caplog, login):
    caplog.set_level("DEBUG")
    empty.cli("acl", "setuser", "kv", "reset", "on", ">geheim", "~kvoffload:*", "+@all")
    options = {"url": empty.url, **login("kv", "verysecret")}
    backend = open_backend("redis", options, "n")
    assert "verysecret" not in repr(backend)
    assert await backend.read(keys_of(2), slots(2)) == [False, False]
    await backend.close()
    assert caplog.text
    assert "verysecret" not in caplog.text


async def test_a_changed_password_file_is_read_again(empty, tmp_path):
    empty.cli("acl", "setuser", "kv", "reset", "on", ">old", "~kvoffload:*", "+@all")
    secret = tmp_path / "password"
    secret.write_text("old\n")
    options = {"url": empty.url, "username": "kv", "password_file": str(secret)}
    assert await stores_and_loads(options)
    empty.cli("acl", "setuser", "kv", "resetpass", ">new")
    assert not await stores_and_loads(options)
    secret.write_text("new\n")
    assert await stores_and_loads(options)


async def test_a_cluster_url_is_needed_for_a_cluster(cluster):
    assert not await stores_and_loads({"url": cluster[0].url}, count=8)


async def test_chunks_spread_over_a_cluster(cluster):
    url = f"redis+cluster://127.0.0.1:{cluster[1].port}"
    assert await stores_and_loads({"url": url}, "spread", count=48)
    assert all(int(server.cli("dbsize")) > 0 for server in cluster)


async def test_in_a_cluster_a_user_with_few_rights_suffices(cluster, login):
    for server in cluster:
        rights = [*MINIMAL_RIGHTS.split(), "+cluster|slots"]
        server.cli("acl", "setuser", "kv", "reset", "on", ">geheim", "~kvoffload:*", *rights)
    options = {"url": f"redis+cluster://127.0.0.1:{cluster[2].port}", **login("kv", "geheim")}
    assert await stores_and_loads(options, "rights", count=16)


async def test_a_slot_that_moves_is_followed(moving):
    """ASK while it moves, MOVED afterwards: both lead to the chunk at once."""
    backend, keys, end = moving
    assert await backend.read(keys, slots(1)) == [True]
    assert backend.counters()["refused_ask"] == 1
    end()
    assert await backend.read(keys, slots(1)) == [True]
    assert backend.counters()["refused_moved"] == 1
    assert await backend.read(keys, slots(1)) == [True]
    assert backend.counters()["refused_moved"] == 1  # the table was corrected


async def test_lookups_and_removals_follow_a_slot_that_moves(moving):
    backend, keys, end = moving
    assert await backend.contains(keys) == [True]
    assert await backend.write(keys, filled(keys)) == [WriteResult.PRESENT]
    await backend.remove(keys)
    assert await backend.read(keys, slots(1)) == [False]
    assert (await backend.write(keys, filled(keys)))[0] is True
    end()
    assert await backend.contains(keys) == [True]
    assert backend.counters()["refused_moved"] == 1


async def test_a_user_who_may_not_ask_costs_a_slot_that_moves_and_not_its_server(
    cluster, moving, opened, login, caplog
):
    for server in cluster:
        rights = [*MINIMAL_RIGHTS.split(), "+cluster|slots"]
        server.cli("acl", "setuser", "kv", "reset", "on", ">p", "~kvoffload:*", *rights)
    _, keys, end = moving
    url = f"redis+cluster://127.0.0.1:{cluster[0].port}"
    backend = opened(url, "moving", **login("kv", "p"))
    for _ in range(4):
        assert await backend.contains(keys) == [False]
        assert await backend.read(keys, slots(1)) == [False]
        assert (await backend.write(keys, filled(keys)))[0] is False
    assert caplog.text.count("+asking") == 1
    assert backend.usage().gauges["breakers_open"] == 0
    end()
    assert await backend.read(keys, slots(1)) == [True]
    assert (await backend.write(keys, filled(keys))) == [WriteResult.PRESENT]


async def test_a_server_whose_address_the_cluster_lost_hides_none_of_the_others(tmp_path, opened):
    with redis_cluster(tmp_path) as servers:
        for server in servers:
            server.cli("config", "set", "cluster-require-full-coverage", "no")
        servers[0].cli("cluster", "reset", "hard")  # it has another name now
        await until(lambda: "noaddr" in servers[1].cli("cluster", "nodes"))
        backend, keys = opened(f"redis+cluster://127.0.0.1:{servers[1].port}"), keys_of(30)
        stored = await backend.write(keys, filled(keys))
        assert await backend.read(keys, slots(30)) == stored
        assert 0 < stored.count(False) < 30
        assert backend.counters()["write_no_server"] == stored.count(False)


@pytest.mark.parametrize("bad", [b"", b"x" * 121])
async def test_a_key_of_impossible_length_is_misuse(empty, bad, opened):
    backend = opened(empty)
    with pytest.raises(ValueError, match="1 to 120"):
        await backend.write([bad], slots(1))


WRITER = """
import asyncio, sys, random
from kvoffload import open_backend
from kvoffload.testing.backends import keys_of, filled, slots, payload_of, CHUNK_BYTES

async def main(url, seed):
    choose = random.Random(seed)
    backend = open_backend("redis", {"url": url, "timeout_s": 10.0, "connect_timeout_s": 10.0}, "n")
    keys, good = keys_of(24, "shared"), 0
    for _ in range(25):
        some = choose.sample(keys, 8)
        await backend.write(some, filled(some))
        some, into = choose.sample(keys, 8), slots(8)
        for key, slot, ok in zip(some, into, await backend.read(some, into)):
            assert not ok or bytes(slot) == payload_of(key, CHUNK_BYTES)
            good += ok
        await backend.remove(choose.sample(keys, 2))
    await backend.close()
    assert good > 50, good

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def test_four_processes_write_read_and_remove_the_same_keys(empty, python):
    workers = [subprocess.Popen([*python, "-c", WRITER, empty.url, str(seed)]) for seed in range(4)]
    assert [worker.wait(240) for worker in workers] == [0] * 4


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "url"),
        ({"url": "http://host"}, "url"),
        ({"url": "redis://host", "timeout_s": 0}, "timeout_s"),
        ({"url": "redis://host", "connections": 0}, "connections"),
        ({"url": "redis://host", "ttl_s": 1e-4}, "ttl_s"),
        ({"url": "redis://host", "ttl_s": 1e16}, "ttl_s"),
        ({"url": "redis://host", "max_inflight_bytes": 5}, "max_inflight_bytes"),
        ({"url": "redis://host", "password_env": "SURELY_NOT_SET"}, "password_env"),
        ({"url": "redis://host", "password_file": "/nowhere/x"}, "password_file"),
        ({"url": "redis://host", "secret_file": "/nowhere/x"}, "secret_file"),
        ({"url": "rediss://host", "ca_file": "/nowhere/x"}, "ca_file"),
        ({"url": "redis://host", "tmeout_s": 1}, "tmeout_s"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_start(options, field):
    with pytest.raises(ConfigError) as caught:
        open_backend("redis", options, "n")
    assert caught.value.field == field
