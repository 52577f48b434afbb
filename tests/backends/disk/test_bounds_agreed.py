"""The limits recorded in a root: which process sets them, warnings, damaged records."""

import asyncio
import json
import logging
import os
import subprocess
import sys
import time

import pytest
from disk_parts import ON_DISK, chunk_bytes, open_disk, stored, until, write

from kvoffload.backends.disk.paths import BOUNDS
from kvoffload.config import ByteSize
from kvoffload.testing.backends import keys_of
from tests.support.vfs import FailingVfs, calls_on

MIB = 1 << 20

ENGINE = """
import asyncio, logging, sys
from kvoffload.backends.disk.backend import DiskBackend, DiskOptions
from kvoffload.config import ByteSize
from kvoffload.testing.backends import filled, keys_of

async def main(root, capacity, chunks):
    options = DiskOptions(root=root, capacity=ByteSize(capacity), min_free=ByteSize(0))
    backend = DiskBackend(options, "disk")
    assert backend.wait_ready(20)
    keys = keys_of(chunks, "engine")
    stored = await backend.write(keys, filled(keys, 60 * 1024))
    print(sum(stored), backend.usage().capacity_bytes, flush=True)
    for line in sys.stdin:  # an engine at work, until it is told to end
        print(backend.usage().resident_bytes, flush=True)
    await backend.close()

logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


class Engine:
    """A process that has the root open."""

    python = (sys.executable,)

    def __init__(self, root, capacity, chunks=0):
        self.process = subprocess.Popen(
            [*self.python, "-c", ENGINE, str(root), str(capacity), str(chunks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.line = self.process.stdout.readline()

    def ready(self):
        self.stored, self.capacity = map(int, self.line.split())
        return self

    def resident_bytes(self):
        self.process.stdin.write("still here?\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def end(self):
        """End it in good order; its log."""
        _, log = self.process.communicate()
        assert self.process.returncode == 0, log
        return log


@pytest.fixture(autouse=True)
def quick(python, monkeypatch):
    monkeypatch.setattr(Engine, "python", python)


def recorded(root):
    return json.loads((root / BOUNDS).read_text())


def put(root, **changes):
    (root / BOUNDS).write_text(json.dumps(recorded(root) | changes))


def test_a_second_engine_takes_the_capacity_of_the_first_and_shrinks_nothing_later(tmp_path):
    first = Engine(tmp_path, 64 * MIB, 200).ready()
    second = Engine(tmp_path, 2 * MIB, 0).ready()
    assert (first.stored, first.capacity, second.capacity) == (200, 64 * MIB, 64 * MIB)
    assert first.end() == ""
    assert second.resident_bytes() == 200 * ON_DISK
    log = second.end()
    assert log.count("WARNING") == log.count("\n") == 1
    assert str(tmp_path) in log
    assert "capacity = 2.0 MiB" in log
    assert "64.0 MiB" in log
    assert "stop" in log
    assert chunk_bytes(tmp_path) == 200 * ON_DISK
    assert recorded(tmp_path)["capacity_bytes"] == 64 * MIB


def test_the_only_engine_sets_the_capacity_and_says_what_it_evicts(tmp_path):
    assert Engine(tmp_path, 64 * MIB, 200).ready().end() == ""
    smaller = Engine(tmp_path, 2 * MIB).ready()
    assert smaller.capacity == 2 * MIB
    for _ in range(500):
        if smaller.resident_bytes() <= 2 * MIB:
            break
        time.sleep(0.01)
    log = smaller.end()
    assert "WARNING" in log
    assert "capacity changes from 64.0 MiB to 2.0 MiB" in log
    assert "evicts 10.7 MiB" in log  # 12.5 MiB are there, 1.8 MiB is the low watermark
    assert 0 < chunk_bytes(tmp_path) <= 2 * MIB
    larger = Engine(tmp_path, 32 * MIB).ready()
    assert larger.capacity == recorded(tmp_path)["capacity_bytes"] == 32 * MIB
    log = larger.end()
    assert "INFO" in log
    assert "capacity changes from 2.0 MiB to 32.0 MiB" in log
    assert "evict" not in log


def test_engines_that_start_together_with_a_new_capacity_all_get_it(tmp_path):
    """As the ranks of one engine do after a restart: whichever is first sets it for all."""
    assert Engine(tmp_path, 64 * MIB, 2).ready().end() == ""
    command = [*Engine.python, "-c", ENGINE, str(tmp_path), str(8 * MIB), "1"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    ranks = [subprocess.Popen(command, text=True, **pipes) for _ in range(4)]
    assert [int(rank.stdout.readline().split()[1]) for rank in ranks] == [8 * MIB] * 4
    logs = [rank.communicate()[1] for rank in ranks]
    assert sum("capacity changes" in log for log in logs) == 1
    assert not any("is not used" in log for log in logs)


async def test_every_limit_that_differs_is_named_in_one_warning(tmp_path, caplog):
    first = open_disk(tmp_path, quarantine=3, low_watermark=0.5)
    caplog.clear()
    second = open_disk(tmp_path, min_free=ByteSize(4096), high_watermark=0.99, quarantine=4)
    (record,) = caplog.records
    for text in ("min_free = 4.0 KiB", "0 B", "high_watermark = 0.99", "quarantine = 4"):
        assert text in record.getMessage()
    assert "capacity =" not in record.getMessage()
    assert second._store.root.limits == first._store.root.limits


async def test_a_root_without_recorded_limits_stays_readable_and_gets_them(tmp_path, caplog):
    """As a version before these limits were kept left it."""
    await stored(tmp_path, keys_of(3))
    (tmp_path / BOUNDS).unlink()
    caplog.clear()
    backend = open_disk(tmp_path, capacity=ByteSize(8 * MIB))
    assert await backend.contains(keys_of(3)) == [True] * 3
    assert caplog.records == []
    assert recorded(tmp_path)["capacity_bytes"] == 8 * MIB
    assert (tmp_path / BOUNDS).stat().st_mode & 0o777 == 0o600


def hostile():
    yield "nothing", lambda path: path.write_bytes(b"")
    yield "no JSON", lambda path: path.write_bytes(b"\xff\xfe{")
    yield "a list", lambda path: path.write_text("[]")
    yield "nesting", lambda path: path.write_text("[" * 50_000)
    yield "much", lambda path: path.write_text(path.read_text() + " " * 70_000)
    yield "another version", lambda path: put(path.parent, version=2)
    yield "capacity 0", lambda path: put(path.parent, capacity_bytes=0)
    yield "capacity beyond", lambda path: put(path.parent, capacity_bytes=1 << 63)
    yield "capacity as text", lambda path: put(path.parent, capacity_bytes="1")
    yield "watermarks", lambda path: put(path.parent, low_watermark=0.99)
    yield (
        "not a number",
        lambda path: path.write_text(
            path.read_text().replace("0.9,", "NaN,").replace("0.9}", "NaN}")
        ),
    )
    yield "a pipe", lambda path: (path.unlink(), os.mkfifo(path))
    yield "a link", lambda path: (path.rename(f"{path}-"), path.symlink_to(f"{path}-"))


@pytest.mark.parametrize(("what", "damage"), list(hostile()), ids=[what for what, _ in hostile()])
async def test_limits_that_cannot_be_are_ignored_with_a_line_in_the_log(
    tmp_path, caplog, what, damage
):
    await open_disk(tmp_path).close()
    damage(tmp_path / BOUNDS)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        backend = await asyncio.wait_for(asyncio.to_thread(open_disk, tmp_path), 10)
    (record,) = caplog.records
    assert BOUNDS in record.getMessage()
    assert "ignored" in record.getMessage()
    assert backend.usage().capacity_bytes == 64 * MIB
    assert recorded(tmp_path)["capacity_bytes"] == 64 * MIB


async def test_limits_removed_under_a_running_engine_are_recorded_again(tmp_path):
    backend = open_disk(tmp_path)
    (tmp_path / BOUNDS).unlink()
    assert await until((tmp_path / BOUNDS).exists)
    assert recorded(tmp_path)["capacity_bytes"] == 64 * MIB
    assert "remade" not in backend.counters()


async def test_limits_damaged_under_a_running_engine_hold_for_the_next_engine(tmp_path, caplog):
    open_disk(tmp_path)
    (tmp_path / BOUNDS).write_bytes(b"\xff{")
    assert await until(lambda: b"capacity" in (tmp_path / BOUNDS).read_bytes())
    # The line follows the file.
    assert await until(lambda: any("recorded again" in r.getMessage() for r in caplog.records))
    assert sum("recorded again" in r.getMessage() for r in caplog.records) == 1
    second = open_disk(tmp_path, capacity=ByteSize(2 * MIB))
    assert second.usage().capacity_bytes == recorded(tmp_path)["capacity_bytes"] == 64 * MIB


async def test_an_engine_opens_where_its_limits_cannot_be_recorded(tmp_path, caplog):
    broken = FailingVfs(1, 28, sticky=True, when=calls_on("bounds", "rename"))
    backend = open_disk(tmp_path, vfs=broken)
    assert await write(backend, keys_of(2)) == [True, True]
    assert sum(BOUNDS in record.getMessage() for record in caplog.records) == 1
    assert os.listdir(backend._store.root.writer.folder) == ["lock"]
