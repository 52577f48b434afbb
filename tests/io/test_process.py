"""The I/O process under everything that can happen to it and to its engine."""

import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvoffload.io import client as io_client
from kvoffload.io.process import NICE, ToEngine
from kvoffload.testing.backends import keys_of
from tests.support.planned_store import Process

KEYS = keys_of(8)


def has_ended(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


OPENED = """
import sys, kvoffload.io.process
from kvoffload import open_backend
store = open_backend("disk", {"root": sys.argv[1], "min_free": 0}, "n")
print(*{"torch", "numpy", "kvoffload.backends.disk.admin"} & set(sys.modules), "none")
"""


def test_it_opens_a_disk_without_what_takes_long_to_import(tmp_path):
    """Imports are most of the time until a new process has the chunks of a dead one."""
    command = [sys.executable, "-c", OPENED, str(tmp_path / "kv")]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert told.stdout == "none\n"


def test_a_core_file_of_it_has_no_chunks(process_rig):
    pid = process_rig.open()._peer.pid
    maps = Path(f"/proc/{pid}/smaps").read_text()
    (flags,) = re.findall(r"memfd:kvoffload-slab.*?VmFlags: ([a-z0-9 ]+)", maps, re.DOTALL)
    assert "dd" in flags.split(), flags


def test_its_threads_leave_the_cores_to_the_engine(process_rig):
    client = process_rig.open()
    threads = [int(path.name) for path in Path(f"/proc/{client._peer.pid}/task").iterdir()]
    assert len(threads) > 1, "those of the disk are among them"
    assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_BATCH}
    least = max(NICE, os.getpriority(os.PRIO_PROCESS, 0))
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {least}


def test_jobs_submitted_while_it_is_away_are_misses_at_once(process_rig, until, monkeypatch):
    client = process_rig.open()
    monkeypatch.setattr(client, "_restart", lambda: None)  # or it may be back in no time
    client._peer.kill()
    until(lambda: not client._link.is_up)
    load = process_rig.load(client, "memory", KEYS)
    assert until(lambda: load.answers) == [([False] * 8, "io_died", True)]


def test_what_is_forgotten_while_it_is_away_is_found_again(
    process_rig, until, tmp_path, monkeypatch
):
    """A load that ends with its process says nothing of the chunks in the store."""
    client = process_rig.open(("disk", "disk", {"root": str(tmp_path), "min_free": 0}))
    process_rig.store(client, "disk", KEYS, until)
    with monkeypatch.context() as away:
        away.setattr(client, "_restart", lambda: None)
        client._peer.kill()
        until(lambda: client.died)
        client.tiers["disk"].forget(KEYS)
    until(lambda: all(client.tiers["disk"].holds(key) for key in KEYS))


def test_stopped_it_is_answered_for_at_the_deadline_and_killed_when_silent(
    process_rig, until, monkeypatch
):
    client = process_rig.open(load_timeout_s=0.2)
    process_rig.store(client, "memory", KEYS, until)
    first = client._peer
    os.kill(first.pid, signal.SIGSTOP)
    monkeypatch.setattr(io_client, "SILENT_S", 0.7)
    load = process_rig.load(client, "memory", KEYS)
    until(lambda: load.answers)
    assert (load.answers, load.releases) == ([([False] * 8, "deadline", False)], 0)
    until(lambda: load.releases)
    assert has_ended(first.pid)
    monkeypatch.setattr(io_client, "SILENT_S", 60.0)  # the next one may be slow on a busy machine
    until(lambda: client._peer is not first and not client._is_opening)
    process_rig.store(client, "memory", KEYS, until)


def test_silent_while_it_starts_it_is_not_killed(process_rig, until, monkeypatch):
    """Its first word may take long on a busy machine; another start would take as long."""
    monkeypatch.setattr(io_client, "SILENT_S", 0.2)
    client = process_rig.open(load_timeout_s=0.2)
    real = client._start

    def start_stopped():
        peer = real()
        os.kill(peer.pid, signal.SIGSTOP)
        return peer

    monkeypatch.setattr(client, "_start", start_stopped)
    first = client._peer
    first.kill()
    until(lambda: client._peer is not first and client._link.is_up)
    second, load = client._peer, process_rig.load(client, "memory", KEYS)
    until(lambda: load.answers)
    time.sleep(1.0)
    monkeypatch.setattr(io_client, "SILENT_S", 10.0)
    os.kill(second.pid, signal.SIGCONT)
    until(lambda: load.releases and not client._is_opening)
    assert client._peer is second
    assert client.died == 1


def test_silent_while_a_store_opens_again_it_is_not_killed(
    process_rig, planned, until, monkeypatch
):
    client = process_rig.open(("planned", "planned", planned.options))
    monkeypatch.setattr(io_client, "SILENT_S", 0.5)
    planned.set(process=Process("hung_open", 2.0))  # blocks the loop, as at the start
    client.renew("another", {}, [], 120)
    monkeypatch.setattr(io_client, "SILENT_S", 60.0)
    assert client.died == 0
    process_rig.store(client, "planned", KEYS, until)


def test_silent_when_others_are_to_be_opened_it_is_replaced_as_soon(
    process_rig, until, monkeypatch
):
    client = process_rig.open(load_timeout_s=0.2)
    os.kill(client._peer.pid, signal.SIGSTOP)
    monkeypatch.setattr(io_client, "SILENT_S", 0.7)
    load = process_rig.load(client, "memory", KEYS)
    until(lambda: load.answers)
    client.renew("another", {}, [], 120)
    assert client.died == 1


def test_silent_when_others_are_to_be_opened_it_is_replaced_though_it_has_no_job(
    process_rig, monkeypatch
):
    client = process_rig.open()
    monkeypatch.setattr(io_client, "SILENT_S", 0.7)
    os.kill(client._peer.pid, signal.SIGSTOP)
    client.renew("another", {}, [], 120)
    assert client.died == 1


def test_stopped_and_continued_it_answers_late_and_lives_on(process_rig, until):
    client = process_rig.open(load_timeout_s=0.2)
    process_rig.store(client, "memory", KEYS, until)
    pid = client._peer.pid
    os.kill(pid, signal.SIGSTOP)
    load = process_rig.load(client, "memory", KEYS)
    until(lambda: load.answers)
    assert not load.releases
    os.kill(pid, signal.SIGCONT)
    until(lambda: load.releases)
    process_rig.store(client, "memory", KEYS, until)
    assert (client._peer.pid, client.died) == (pid, 0)


def test_a_socket_that_is_full_holds_up_no_submission(process_rig, until):
    client = process_rig.open(load_timeout_s=0.3)
    process_rig.store(client, "memory", KEYS, until)
    client._peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    os.kill(client._peer.pid, signal.SIGSTOP)
    keys = keys_of(64)
    loads = [process_rig.load(client, "memory", keys) for _ in range(400)]
    assert len(client._link._out) > 64 * 36 * 100, "the socket took it all"
    until(lambda: all(load.answers for load in loads))
    os.kill(client._peer.pid, signal.SIGCONT)
    until(lambda: all(load.releases for load in loads))
    assert all(len(load.answers) == load.releases == 1 for load in loads)
    client._load_timeout_s = 5.0
    again = process_rig.load(client, "memory", KEYS)
    assert until(lambda: again.answers) == [([True] * 8, "", True)]


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("no thread")])
def test_it_is_started_again_when_that_is_possible_again(
    process_rig, until, monkeypatch, caplog, error
):
    client = process_rig.open()
    real, tries = client._start, []

    def cannot():
        tries.append(1)
        if len(tries) < 3:
            raise error
        return real()

    monkeypatch.setattr(client, "_start", cannot)
    client._peer.kill()
    until(lambda: len(tries) == 3 and not client._is_opening)
    process_rig.store(client, "memory", KEYS, until)
    assert caplog.text.count("there is no I/O server") == 1, "the same reason is said once"


def test_stores_refused_at_a_restart_are_tried_again(process_rig, until, planned, caplog):
    client = process_rig.open(("planned", "planned", planned.options))
    planned.set(refuse="this")
    client._peer.kill()
    until(lambda: "cannot be opened again" in caplog.text)
    assert client.tiers["planned"].holds(KEYS[0]) is not True
    planned.set()
    until(lambda: not client._is_opening)
    process_rig.store(client, "planned", KEYS, until)


def test_a_program_that_is_no_server_cannot_be_started(process_rig, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(OSError, match="ended before it said anything"):
        process_rig.open()


def test_killed_before_it_opened_it_is_an_error_of_the_start(process_rig, planned):
    """A thread would be killed in its place, and the engine with it."""
    from kvoffload.errors import ConfigError

    planned.set(process=Process("kill_open", 0))
    with pytest.raises(ConfigError, match="ended before it had opened the tiers"):
        process_rig.open(("planned", "planned", planned.options))


def test_a_store_that_hangs_while_it_is_opened_is_an_error_of_the_start(
    process_rig, planned, monkeypatch
):
    from kvoffload.errors import ConfigError

    monkeypatch.setattr(io_client, "OPEN_S", 0.5)
    planned.set(process=Process("hung_open", 120))
    real, begun_s, peers = process_rig.start, time.monotonic(), []

    def start():
        peers.append(real())
        select.select([peers[-1].sock], [], [], 60)  # on a busy machine its first word is late
        return peers[-1]

    monkeypatch.setattr(process_rig, "start", start)
    with pytest.raises(ConfigError, match="to open the tiers"):
        process_rig.open(("planned", "planned", planned.options))
    assert time.monotonic() - begun_s < 100
    assert has_ended(peers[0].pid)


ENGINE = """
import sys, time
from kvoffload.io.client import IOClient
from kvoffload.io.forms import ServerProcess
from kvoffload.transfer.shared_memory import create_shared_memory
from tests.support.io_rig import opening
import os
fd = create_shared_memory(1 << 20)
client = IOClient(lambda: ServerProcess(fd), opening([("memory", "memory", {})]), 5.0, 5.0)
os.dup(client._link._sock.fileno())  # a child that C code forks closes no end of the socket
if os.fork() == 0:
    time.sleep(60)
print(client._peer.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_it_ends_with_its_engine_although_another_child_has_the_socket(until, is_stopped):
    engine = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", ENGINE],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    with engine.stdout:
        pid = int(engine.stdout.readline())
    children = psutil.Process(engine.pid).children()
    assert not has_ended(pid)
    if is_stopped:
        os.kill(pid, signal.SIGSTOP)
    engine.kill()
    engine.wait()
    until(lambda: has_ended(pid))
    for child in children:
        if child.pid != pid:
            child.kill()


def test_a_record_that_cannot_be_formatted_raises_nothing(capsys):
    ToEngine(None).handle(logging.LogRecord("theirs", 30, "", 1, "%d chunks", ("no",), None))
    assert "TypeError" in capsys.readouterr().err


def test_a_ctrl_c_is_for_the_engine(process_rig, until):
    client = process_rig.open()
    os.kill(client._peer.pid, signal.SIGINT)
    process_rig.store(client, "memory", KEYS, until)
    assert client.died == 0
