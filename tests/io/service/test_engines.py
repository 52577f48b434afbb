"""Engines of one server: they share what they store, and the end of each costs the rest nothing."""

import json
import os
import random
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from disk_commands import answered, kvoffload

from kvoffload.cli.top import fetch, of_page
from kvoffload.metrics.names import SERVER_METRICS
from tests.support.host_server import ClientProcess
from tests.support.redis_server import free_port

LENDING_OR_NOT = pytest.mark.parametrize(
    "server", [False, True], indirect=True, ids=["by copy", "by slot"]
)


def same_truth(engine, name, rows):
    engine.truth[name] = [torch.tensor(each, dtype=torch.int8) for each in rows]


def test_engines_share_chunks_and_one_that_is_stopped_or_killed_harms_no_other(
    server, attach, engine_process, until
):
    first = engine_process(server.path)
    rows = first.do("store", "p")
    second = attach(server.path)
    same_truth(second, "p", rows)
    assert second.load("p") == 10
    assert server.slabs == 2
    first.send("load", "p")
    os.kill(first.process.pid, signal.SIGSTOP)
    for i in range(5):
        begun_s = time.monotonic()
        second.store(f"q{i}")
        assert second.load("p") == second.load(f"q{i}") == 10
        assert time.monotonic() < begun_s + 30.0
    os.kill(first.process.pid, signal.SIGCONT)
    assert first.process.stdout.readline().strip() == "10"
    first.kill()
    until(lambda: server.slabs == 1)  # what the dead engine's slab took is free
    third = attach(server.path)
    same_truth(third, "p", rows)
    assert third.load("p") == 10, "the first prompt of a new engine is a hit"


def test_an_engine_of_another_model_finds_nothing(server, attach):
    one, other = attach(server.path), attach(server.path, model="another")
    one.store("p")
    other.truth = one.truth
    assert other.load("p") == 0
    assert one.load("p") == 10


def test_an_engine_begins_without_its_server_and_attaches_when_it_comes(
    tmp_path, new_server, attach, new_request, until, caplog
):
    engine = attach(str(tmp_path / "s"))
    engine.store("p")
    assert engine.load("p") == 0
    told = engine.connector.explain(new_request("never", 20))
    assert {why for of_group in told for why in of_group} == {"tier_down"}
    assert caplog.text.count("there is no I/O server") == 1
    (said,) = (each.message for each in caplog.records if "no I/O server" in each.message)
    assert said.endswith(
        f"serve = '{tmp_path}/s': No such file or directory; "
        "start kvoffload serve there, as the user of the engines"
    )
    server = new_server()
    until(lambda: engine.client.tiers["serve"].is_complete and not engine.client._is_opening)
    back = f"the server at {server.path} is there, and its tiers are open"
    assert caplog.messages.count(back) == 1
    engine.store("p")
    assert engine.load("p") == 10
    assert engine.died == 0
    assert server.stop() == 0
    assert engine.load("p") == 0


def test_the_death_of_the_server_costs_misses(server, attach, until):
    engine = attach(server.path)
    engine.store("p")
    assert engine.load("p") == 10
    server.kill()
    until(lambda: engine.died)
    engine.store("q")
    assert engine.load("p") == engine.load("q") == 0
    server.start()
    until(lambda: not engine.client._is_opening)
    engine.store("p")
    engine.await_hits("p")


def test_connections_to_a_server_that_is_dying_are_no_further_deaths(server, attach, until, caplog):
    engine = attach(server.path)
    server.kill()
    until(lambda: engine.died)
    os.unlink(server.path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(server.path)
        listening.listen()
        for num_read in (1 << 10, 0):  # the second one is closed before the engine has greeted
            with listening.accept()[0] as connection:
                connection.recv(num_read)
        listening.accept()[0].close()  # it tries again, so it has taken in the ends of both
        assert engine.died == 1
    assert caplog.text.count("died with") == 1


def test_a_server_that_is_told_to_end_is_no_error_of_an_engine_and_one_that_dies_is(
    server, attach, until, caplog
):
    """Neither is a server that stays away afterwards."""

    def said():
        lines = [record for record in caplog.records if record.name == "kvoffload.io.client"]
        return {(line.levelname, line.message.split(";")[0].split(": serve")[0]) for line in lines}

    ended, away = f"the server at {server.path} %s with 0 jobs", "there is no I/O server, and all"
    away += " is a miss until there is"
    engine = attach(server.path)
    assert server.stop() == 0
    until(lambda: len(said()) == 2)
    assert said() == {("WARNING", ended % "was told to end, and ended"), ("WARNING", away)}
    server.start()
    until(lambda: not engine.client._is_opening)
    assert ("WARNING", f"the server at {server.path} is there, and its tiers are open") in said()
    caplog.clear()
    server.kill()
    until(lambda: len(said()) == 2)
    assert said() == {("ERROR", ended % "died"), ("ERROR", away)}


def test_a_server_that_ends_is_no_error_though_it_takes_a_last_connection(
    server, attach, until, caplog
):
    engine = attach(server.path)
    assert server.stop() == 0
    until(lambda: engine.died)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(server.path)
        listening.listen()
        listening.accept()[0].close()
    os.unlink(server.path)
    until(lambda: "there is no I/O server" in caplog.text)
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_other_backends_are_no_error_of_an_engine(tmp_path, new_server, attach, until, caplog):
    server = new_server()
    engine = attach(server.path)
    disk = {"type": "disk", "root": str(tmp_path / "kv"), "capacity": "64MiB", "min_free": 0}
    server.configure(backends=[disk])
    server.process.send_signal(signal.SIGHUP)
    until(lambda: engine.died and not engine.client._is_opening)
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_chunks_on_a_disk_survive_the_server(tmp_path, new_server, attach, until):
    disk = {"type": "disk", "root": str(tmp_path / "kv"), "capacity": "64MiB", "min_free": 0}
    server = new_server(memory="64KiB", backends=[disk])
    engine = attach(server.path)
    engine.store("p")
    engine.store("q")  # a part of p leaves the memory
    assert engine.load("p") == engine.load("q") == 10
    assert server.stop() == 0
    until(lambda: engine.died)
    server.start()
    engine.await_hits("p")


def test_the_next_server_knows_what_the_queues_of_its_engines_need(tmp_path, new_server, attach):
    disk = {"type": "disk", "root": str(tmp_path / "kv"), "capacity": 24 * 8192, "min_free": 0}
    server = new_server(memory="16KiB", backends=[disk])
    engine, other = attach(server.path), attach(server.path)
    engine.store("p")
    engine.client.awaits([(1, list(engine.client.tiers["serve"]._keys))])
    other.store("o")
    server.kill()
    server.start()
    engine.await_hits("p")
    other.await_hits("o")
    for i in range(6):
        other.store(f"q{i}")
    assert (engine.load("p"), other.load("o")) == (10, 0)


def test_a_chunk_that_a_farther_store_brings_is_its_tenants_in_the_nearer_one(
    tmp_path, new_server, attach, new_request, until
):
    def salted(name, *more, **further):
        request = new_request(name, *more, **further)
        request.cache_salt = f"salt of {name}"
        return request

    disk = {"type": "disk", "capacity": "64MiB", "min_free": 0}
    near, far = ({**disk, "root": str(tmp_path / name)} for name in ("near", "far"))
    server = new_server(backends=[near, far])
    engine = attach(server.path, tenants=True)
    engine._new_request = salted
    engine.store("p")
    engine.store("q")
    assert server.stop() == 0
    until(lambda: engine.died)
    shutil.rmtree(near["root"])
    server.start()
    engine.await_hits("p")
    engine.await_hits("q")
    assert server.stop() == 0
    erased = answered("gc", near["root"], "--tenant", "salt of p")
    assert (erased["removed"], erased["kept"], erased["unknown"]) == (10, 10, 0)


def test_a_server_that_is_stopped_costs_misses_until_it_runs_again(server, attach, until):
    engine = attach(server.path)
    engine.wait_at_most(0.2)
    engine.store("p")
    os.kill(server.process.pid, signal.SIGSTOP)
    begun_s = time.monotonic()
    assert engine.load("p") == 0
    assert time.monotonic() < begun_s + 30.0
    engine.wait_at_most(30.0)
    os.kill(server.process.pid, signal.SIGCONT)
    engine.store("p")
    engine.await_hits("p")


@pytest.mark.chaos
@LENDING_OR_NOT
@pytest.mark.parametrize("kills", [10, 1000])
def test_killed_clients_leave_right_bytes_and_nothing_else(server, attach, until, kills):
    """Each is killed in the middle of a store or a load, while another goes on."""
    rng, engine = random.Random(kills), attach(server.path)
    engine.store("p")
    held = Path(f"/proc/{server.process.pid}/fd")
    before = len(list(held.iterdir()))
    clients = [ClientProcess(server.path, seed) for seed in range(2)]
    for i in range(kills):
        time.sleep(rng.uniform(0, 0.05))
        said = clients.pop(rng.randrange(len(clients))).kill()
        assert said == "", "wrong bytes"
        clients.append(ClientProcess(server.path, 1000 + i))
        assert engine.load("p") == 10
    for client in clients:
        assert client.kill() == "", "wrong bytes"
    until(lambda: server.slabs == 1)
    until(lambda: len(list(held.iterdir())) <= before)
    engine.store("last")
    assert engine.load("last") == 10
    assert "Traceback" not in server.log


@pytest.mark.chaos
@LENDING_OR_NOT
@pytest.mark.parametrize("kills", [5, 60])
def test_killed_servers_cost_two_clients_no_right_byte(server, attach, until, kills):
    """Clients store and load all the time, and go on with each next server."""
    rng, engine = random.Random(kills), attach(server.path)
    clients = [ClientProcess(server.path, seed) for seed in range(2)]
    for i in range(kills):
        time.sleep(rng.uniform(0, 0.2))
        server.kill()
        server.start()
        if i % 5 == 4:  # else it is killed while engines attach
            until(lambda: engine.client._link.is_up and not engine.client._is_opening)
            engine.store("p")
            engine.await_hits("p")
    for client in clients:
        assert client.process.poll() is None
        assert client.kill() == "", "wrong bytes"


def test_operators_see_the_server_and_its_engines(new_server, attach, until):
    port, told = free_port(), {}
    server = new_server(metrics_port=port, namespace_max="8MiB")
    engine = attach(server.path)
    engine.store("p")
    assert engine.load("p") == 10

    def has_figures():
        told.update(of_page(fetch(f"http://127.0.0.1:{port}")).plain)
        attached = told.get("attached", {}).values()  # a load may be several jobs
        return any(0 < each["load_bytes"] == each["store_bytes"] for each in attached)

    until(has_figures)
    page = fetch(f"http://127.0.0.1:{port}")
    assert not [name for name in SERVER_METRICS if f"\nkvoffload_{name}" not in page]
    of_namespace = re.findall(r'^kvoffload_namespace_bytes{namespace="\w{16}"} (.*)$', page, re.M)
    assert [float(each) for each in of_namespace] == [told["tiers"]["memory"]["resident_bytes"]]
    assert told["engines"] == 1
    assert set(told["attached"]) == {str(os.getpid())}
    assert told["tiers"]["memory"]["capacity_bytes"] == 16 << 20
    (finding,) = json.loads(kvoffload("doctor", server.path, "--json").stdout)["findings"]
    assert (finding["verdict"], "doctor --config" in finding["detail"]) == ("ok", True)
    server.kill()
    for _ in range(2):
        (finding,) = json.loads(kvoffload("doctor", server.path, "--json").stdout)["findings"]
        assert (finding["check"], finding["verdict"]) == ("server", "failed")
        assert server.path in finding["detail"]
        assert "start kvoffload serve there" in finding["remedy"]
        Path(server.path).unlink(
            missing_ok=True
        )  # as a server does that ends as told; its lock stays
