"""SIGHUP: other backends without a restart, and wrong settings that change nothing."""

import os
import signal
import subprocess
import sys

from tests.support.disk_chunks import stored_in
from tests.support.host_server import ClientProcess, check_stopped_borrower


def reload(server, **settings):
    server.configure(**settings)
    server.process.send_signal(signal.SIGHUP)


def test_other_backends_are_used_after_a_reload_and_the_memory_stays(
    server, attach, until, tmp_path
):
    engine = attach(server.path)
    engine.store("p")
    disk = {"type": "disk", "root": str(tmp_path / "kv"), "capacity": "64MiB", "min_free": 0}
    reload(server, backends=[disk])
    until(lambda: "other backends are in use" in server.log and not engine.client._is_opening)
    engine.await_hits("p")
    engine.store("q")
    until(lambda: len(stored_in(tmp_path / "kv")) >= 10)
    reload(server)
    until(
        lambda: server.log.count("other backends are in use") == 2 and not engine.client._is_opening
    )
    engine.await_hits("q")
    assert engine.died == 2, "each time it has attached again, and no more"


def test_what_is_on_loan_stays_through_a_reload_and_an_engine_that_is_stopped_delays_none(
    tmp_path, new_server, attach, until
):
    server = new_server(memory="1MiB", policy="lru")
    client, engine = ClientProcess(server.path, 1, "held"), attach(server.path)
    client.await_loan()
    os.kill(client.process.pid, signal.SIGSTOP)
    disk = {"type": "disk", "root": str(tmp_path / "kv"), "capacity": "64MiB", "min_free": 0}
    reload(server, backends=[disk])
    until(lambda: "other backends are in use" in server.log and not engine.client._is_opening)
    check_stopped_borrower(client, engine, until)
    assert "Traceback" not in server.log


class EarlyReload:
    """Starts servers that get a SIGHUP when they listen, and handle no signal yet."""

    PROGRAM = """
import os, signal, sys
from kvoffload.cli import serve

run = serve.run_service
serve.run_service = lambda *given: (os.kill(os.getpid(), signal.SIGHUP), run(*given))
serve.command(sys.argv[1])
"""

    def start(self, command, **options):
        return subprocess.Popen([sys.executable, "-c", self.PROGRAM, command[-1]], **options)


def test_a_reload_that_comes_before_it_can_be_handled_is_carried_out_soon(
    tmp_path, new_server, until
):
    server = new_server(EarlyReload())
    until(lambda: "engines may attach" in server.log)
    disk = {"type": "disk", "root": str(tmp_path / "kv"), "capacity": "64MiB", "min_free": 0}
    reload(server, backends=[disk])
    until(lambda: "other backends are in use" in server.log)


WRONG = [
    ({"memory": "32MiB"}, "memory = 33554432: is 16777216 until the server is started again"),
    ({"lend": False}, "lend = False: is True until the server is started again"),
    ({"policy": "lru"}, "policy = 'lru': is 'handicap' until the server is started again"),
    ({"memory": "much"}, "memory = 'much': "),
    ({"backends": [{"type": "disc"}]}, "backends[0].type = 'disc': "),
    ({"backends": [{"type": "disk", "root": 7}]}, "backends[0].root = 7: "),
    ({"port": 1}, "port"),
]


def test_wrong_settings_are_named_and_the_old_ones_stay(server, attach, until):
    engine = attach(server.path)
    engine.store("p")
    for settings, named in WRONG:
        before = server.log
        reload(server, **settings)
        wanted = f"the old settings stay: {named}"
        until(lambda before=before, wanted=wanted: wanted in server.log[len(before) :])
        assert engine.load("p") == 10
    assert engine.died == 0
    assert "Traceback" not in server.log
