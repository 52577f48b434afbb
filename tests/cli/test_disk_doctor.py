"""``doctor FOLDER`` on folders as engines leave them: it looks, and changes nothing."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from disk_commands import (
    PROGRAM,
    SIZE,
    answered,
    as_user,
    kvoffload,
    open_disk,
    two_namespaces,
)

from kvoffload import open_backend
from kvoffload.backends import admin
from kvoffload.backends.disk.paths import BOUNDS, LEDGER
from kvoffload.testing.backends import filled, keys_of
from tests.support import sshfs_mounts
from tests.support.hung_mount import frozen_disk, hung_mount


def tree(root):
    """Everything in a folder that a command could change; locks have no content."""
    found = {}
    for folder, _, files in os.walk(root):
        facts = os.lstat(folder)
        found[folder] = facts.st_mode, facts.st_ino
        for file in files:
            facts = os.lstat(f"{folder}/{file}")
            with open(f"{folder}/{file}", "rb") as content:
                found[f"{folder}/{file}"] = facts.st_mode, facts.st_mtime_ns, content.read()
    return found


@pytest.fixture
async def root(tmp_path):
    backend = open_disk(tmp_path / "kv", "llama")
    await backend.write(keys_of(40), filled(keys_of(40), SIZE))
    await backend.close()
    return tmp_path / "kv"


def findings(*words, code=0):
    found = answered("doctor", *map(str, words), code=code)["findings"]
    return {finding["check"]: finding for finding in found}


@pytest.mark.parametrize("words", [(), ("-o", "capacity=1MiB"), ("-o", "min_free=1000TiB")])
def test_a_store_is_the_same_after_its_examination(root, words):
    before = tree(root)
    found = findings(root, *words, code=1 if "min_free=1000TiB" in words else 0)
    assert tree(root) == before
    assert "64.0 MiB" in found["limits"]["detail"]
    if not words:
        assert found["space"]["verdict"] == "ok"
        assert found["io"]["detail"].startswith("auto: loads take ") or found["io"]["remedy"]
        assert "chunks of 2.0 MiB" in found["throughput"]["detail"]
    elif "capacity=1MiB" in words:
        assert found["space"]["verdict"] == "warning"
        assert "evicts" in found["space"]["remedy"]
    else:
        assert found["space"]["verdict"] == found["throughput"]["verdict"] == "failed"


async def test_beside_a_full_engine_nothing_is_alarming(tmp_path):
    """The engine's capacity is below what doctor stores for its measurement."""
    options = {"root": str(tmp_path), "capacity": "1MiB", "min_free": 0}
    backend = open_backend("disk", options, "llama")
    await backend.write(keys_of(28), filled(keys_of(28), SIZE))
    chunks = backend.usage().chunks
    found = findings(tmp_path)
    assert {each["verdict"] for name, each in found.items() if name not in SLOW} == {"ok"}
    assert found["throughput"]["verdict"] != "failed"
    assert found["sharing"]["detail"].startswith("1 process")
    assert backend.usage().chunks == chunks
    assert "evicted" not in backend.counters()
    await backend.close()


SLOW = ("throughput", "file system")
"""What a test cannot know of the machine it runs on."""


def test_a_mounted_folder_is_told_of_the_tiers_that_hosts_share(tmp_path):
    with sshfs_mounts.sshfs_mounts(tmp_path) as mounts:
        if mounts is None:
            pytest.skip(sshfs_mounts.MISSING)
        found = findings("--type", "disk", "-o", f"root={mounts[0]}")["file system"]
    assert (found["verdict"], found["detail"].partition(":")[0]) == ("warning", "fuse.sshfs")
    for shared in ("folder", "redis", "object"):
        assert shared in found["remedy"]


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "Downloads").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    before = tree(tmp_path)
    result = kvoffload("doctor", str(tmp_path))
    assert result.returncode == 2
    assert "notes.txt" in result.stderr
    assert "folder of its own" in result.stderr
    assert tree(tmp_path) == before


@pytest.mark.parametrize("command", ["doctor", "inspect"])
@pytest.mark.parametrize("path", ["/proc/kv", "/sys/kv"])
def test_where_no_folder_can_be_made_no_command_advises_to_make_one(command, path):
    result = kvoffload(command, path)
    assert (result.returncode, "mkdir" in result.stderr) == (2, False)
    assert f"{os.path.dirname(path)} keeps no files" in result.stderr
    if command == "doctor":
        refused = kvoffload(
            "doctor", "--type", "folder", "-o", f"root={path}", "-o", "capacity=1GiB"
        )
        assert (refused.returncode, "keeps no files" in refused.stderr) == (2, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_a_user_who_may_not_make_the_folder_is_told_who_may():
    result = as_user(65534, "doctor", "/usr/kv")
    assert result.returncode == 2
    assert "user 65534 may not make it: sudo install -d -m 700 -o 65534 /usr/kv" in result.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
@pytest.mark.skipif(not os.path.lexists("/proc/1/root"), reason="needs Linux")
def test_a_link_that_this_user_may_not_read_is_no_traceback():
    result = as_user(65534, "doctor", "/proc/1/root/kv")
    assert result.returncode == 2, result
    assert "belongs to user 0" in result.stderr


def test_a_link_to_a_folder_is_called_one(tmp_path):
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "kv").symlink_to(tmp_path / "real")
    result = kvoffload("doctor", str(tmp_path / "kv"))
    assert result.returncode == 2
    assert "is a symbolic link" in result.stderr


def test_an_empty_folder_is_examined_and_stays_empty(tmp_path):
    tmp_path.chmod(0o755)
    found = findings(tmp_path, "-o", "capacity=4MiB")
    assert "4.0 MiB" in found["limits"]["detail"]
    assert found["throughput"]["verdict"] != "failed"
    assert os.listdir(tmp_path) == []
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_a_damaged_ledger_is_reported_and_not_repaired(root):
    (root / LEDGER).write_bytes(b"damage" * 10)
    before = tree(root)
    found = findings(root)
    assert (found["ledger"]["verdict"], found["ledger"]["detail"]) == ("warning", "damaged")
    assert "1.2 MiB used" in found["space"]["detail"]  # counted, as the ledger says nothing
    assert tree(root) == before


def test_limits_that_cannot_be_used_are_reported_and_not_repaired(root):
    (root / BOUNDS).write_text("{}")
    before = tree(root)
    assert findings(root)["limits"]["verdict"] == "warning"
    assert tree(root) == before


def test_the_root_of_an_older_version_is_not_measured_by_a_default(root):
    (root / BOUNDS).unlink()
    found = findings(root)
    assert "capacity unknown" in found["space"]["detail"]
    assert "-o capacity" in found["limits"]["remedy"]
    assert not (root / BOUNDS).exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("-o", "root=/tmp"), "root"),
        (("-o", "capacty=1GiB"), "did you mean 'capacity'"),
        (("-o", "io=fast"), "io"),
    ],
)
def test_wrong_settings_are_named(root, words, problem):
    before = tree(root)
    result = kvoffload("doctor", str(root), *words)
    assert (result.returncode, problem in result.stderr) == (2, True), result.stderr
    assert tree(root) == before


def test_the_rights_of_a_root_and_of_the_folders_above_it_are_looked_at(root):
    found = findings(root)["rights"]
    assert (found["verdict"], found["detail"][:9]) == ("ok", "mode 0700")
    root.chmod(0o770)
    assert f"chmod g-w {root}" in kvoffload("doctor", str(root)).stderr
    root.chmod(0o700)
    above = root.parent
    above.chmod(0o777)
    refused = kvoffload("doctor", str(root))
    assert (refused.returncode, f"chmod g-w,o-w {above}" in refused.stderr) == (2, True)
    found = findings(root, "-o", "trust_parent_folders=true")
    assert found["rights"]["verdict"] == "warning"
    assert str(above) in found["rights"]["detail"]
    assert found["throughput"]["verdict"] != "failed"
    above.chmod(0o700)
    (namespace,) = [path for path in root.iterdir() if len(path.name) == 64]
    namespace.chmod(0o770)
    found = findings(root, code=1)
    assert found["rights"]["verdict"] == "failed"
    assert f"chmod g-w {namespace}" in found["rights"]["detail"]
    assert "sub-folder" not in found["rights"]["detail"]


def test_what_is_printed_for_people_is_whole_in_a_narrow_terminal(root, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    text = "".join(kvoffload("doctor", str(root)).stdout.split())
    assert "…" not in text
    assert "throughput" in text


def test_what_a_script_reads_has_one_line_for_each_check(root, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    text = kvoffload("doctor", str(root), "-o", "capacity=1MiB").stdout
    rows = [line.split("\u2502") for line in text.splitlines() if line.startswith("\u2502")]
    assert all(row[1].strip() for row in rows), text
    (space,) = [row for row in rows if row[1].strip() == "space"]
    assert "an engine opened with this one evicts" in space[4]


def test_a_settings_file_that_others_may_change_is_warned_about_once(root, tmp_path, caplog):
    tiers = [{"type": "disk", "root": str(root), "capacity": "1GiB"}]
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"cpu_bytes": "64MiB", "backends": tiers}))
    path.chmod(0o666)
    answered("doctor", "--config", str(path), code=0)
    assert caplog.text.count("chmod go-w") == 1


def test_a_mount_that_hangs_is_a_finding_of_each_tier_on_it(tmp_path, monkeypatch):
    monkeypatch.setattr(admin, "HUNG_S", 1.0)
    kinds = "disk", "folder"
    tiers = [{"type": kind, "root": f"{tmp_path}/{kind}", "capacity": "1GiB"} for kind in kinds]
    settings = json.dumps({"cpu_bytes": "64MiB", "backends": tiers})
    with hung_mount(tmp_path):
        found = [findings(tmp_path, code=1), findings(tmp_path / "kv", code=1)]
        told = answered("doctor", "--config", settings, code=1)["tiers"]
    found += [{each["check"]: each for each in tier} for tier in told.values()]
    assert len(found) == 4
    for each in found:
        assert each["reachable"]["verdict"] == "failed"
        assert f"{tmp_path}" in each["reachable"]["detail"]
        assert "has not answered for 1 s" in each["reachable"]["detail"]


@pytest.mark.parametrize(
    "words",
    [
        *(f"{command} {{}}" for command in ("inspect", "verify", "gc", "top")),
        *(f"{command} --type=disk -o root={{}}" for command in ("inspect", "verify", "gc")),
        "inspect --type=folder -o root={}",
    ],
)
def test_other_commands_say_that_a_mount_hangs_and_end(tmp_path, words):
    program = f"from kvoffload.backends import admin; admin.HUNG_S = 1.0; {PROGRAM}"
    with hung_mount(tmp_path):
        given = [sys.executable, "-c", program, *words.format(tmp_path / "kv").split()]
        done = subprocess.run(given, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == f"kvoffload: {tmp_path}/kv has not answered for 1 s\n"


def test_the_command_ends_while_its_call_on_a_frozen_disk_does_not(tmp_path):
    program = f"from kvoffload.backends import admin; admin.HUNG_S = 2.0; {PROGRAM}"
    with frozen_disk(tmp_path) as root:
        words = [sys.executable, "-c", program, "doctor", str(root), "-o", "min_free=0", "--json"]
        started = subprocess.Popen(words, stdout=subprocess.PIPE)
        told, _ = started.communicate(timeout=60)  # a kill would wait for the disk
    assert started.returncode == 1
    last = json.loads(told)["findings"][-1]
    assert (last["check"], last["verdict"]) == ("reachable", "failed")


def test_a_signal_ends_gc_while_its_call_on_a_frozen_disk_does_not(tmp_path, until):
    def is_held():
        threads = [
            task
            for each in (gc, *gc.children())
            for task in Path(f"/proc/{each.pid}/task").iterdir()
            if task.name != str(each.pid)  # it removes on a thread of its own
        ]
        return any(") D " in (task / "stat").read_text() for task in threads)

    with frozen_disk(tmp_path, lambda root: asyncio.run(two_namespaces(root))) as root:
        words = [sys.executable, "-c", PROGRAM, "gc", "--namespace=qwen", str(root)]
        started = subprocess.Popen(words, stdin=subprocess.DEVNULL)
        gc = psutil.Process(started.pid)
        until(is_held)
        started.send_signal(signal.SIGINT)
        assert started.wait(30) == 128 + signal.SIGINT


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("send", [os.kill, os.killpg])  # a terminal sends it to the child as well
def test_a_signal_ends_the_command_and_its_output_while_its_call_hangs(tmp_path, number, send):
    program = f"from kvoffload.backends import admin; admin.HUNG_S = 600.0; {PROGRAM}"
    with hung_mount(tmp_path) as server:
        words = [sys.executable, "-c", program, "doctor", str(tmp_path)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started = subprocess.Popen(words, start_new_session=True, **pipes)
        os.read(server, 1 << 20)  # its first look at the mount
        send(started.pid, number)
        assert started.communicate(timeout=60) == (b"", b"")
        assert started.returncode == 128 + number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("kind", ["disk", "folder"])
def test_a_signal_leaves_no_scratch_folder(tmp_path, until, kind, number):
    root = tmp_path / "kv"
    root.mkdir(mode=0o700)
    words = [sys.executable, "-c", PROGRAM, "doctor", "--type", kind, "-o", f"root={root}"]
    started = subprocess.Popen([*words, "-o", f"capacity={SIZE}"], stdout=subprocess.DEVNULL)
    until(lambda: os.listdir(root))
    started.send_signal(number)
    started.wait(60)
    until(lambda: not os.listdir(root))


ENDLESS = """
import asyncio, os

from kvoffload.cli.apart import run_apart

async def work():
    print("begun", flush=True)
    try:
        await asyncio.sleep(600)
    finally:
        with open("tidied", "x"):
            pass

print(os.getpid(), flush=True)
run_apart(lambda: asyncio.run(work()))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_that_was_started_in_the_background(tmp_path, until, number):
    """Where a shell has no job control, such a command begins with SIGINT ignored."""
    words = ["sh", "-c", 'exec "$@" <&- &', "sh", sys.executable, "-c", ENDLESS]
    started = subprocess.Popen(words, stdout=subprocess.PIPE, cwd=tmp_path)
    pid, begun = int(started.stdout.readline()), started.stdout.readline()
    assert begun == b"begun\n"
    os.kill(pid, number)
    assert started.communicate(timeout=60) == (b"", None)
    until((tmp_path / "tidied").exists)


def test_a_command_ends_with_its_caller_that_is_killed(tmp_path, until):
    """Else gc would go on removing, where nobody sees it."""
    words = [sys.executable, "-c", ENDLESS]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=tmp_path) as started:
        assert started.stdout.read(len(f"{started.pid}\nbegun\n"))
        started.kill()
        until((tmp_path / "tidied").exists)
