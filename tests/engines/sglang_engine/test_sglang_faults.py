"""A real engine serves while its tiers fail: equal outputs, faults counted by reason.

Each round empties the engine's own caches, so that all prompts ask the storage. The faults strike
again and again while the rounds run.
"""

import contextlib
import os
import shutil
import signal
import threading
from collections import Counter

import pytest

from tests.support import file_faults, redis_server
from tests.support.older_engine import older_engine
from tests.support.server_faults import paused
from tests.support.small_disk import small_disk

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

NUM_PROMPTS, LENGTH = 3, 600
STORED = 592
ROUNDS = 6
LONGEST_S = 60.0
"""A request that waits for a tier may not take longer: a busy machine computes so slowly."""


class Served:
    """An engine with a storage, and what its prompts are answered without one.

    Args:
        engine: with the prefetch policy ``timeout``, and metrics.
        prompts: of 600 tokens.
        told: the answers.
    """

    def __init__(self, engine, prompts, told):
        self.engine, self.prompts, self.told = engine, prompts, told

    def run(self, fault=None, rounds=ROUNDS, every_s=0.3):
        """Run prompts while a fault strikes; return what was counted, and the hits."""
        before = self.events()
        ended = threading.Event()

        def strike():
            while not ended.wait(every_s):
                fault()

        striking = threading.Thread(target=strike)
        if fault:
            fault()
            striking.start()
        answers = self.engine.ask("rounds", prompts=self.prompts, count=rounds)
        ended.set()
        if fault:
            striking.join()
        assert isinstance(answers, list), (answers, self.engine.log[-3000:])
        for answer in answers:
            assert answer["tokens"] == self.told
            assert max(answer["latency_s"]) < LONGEST_S, answer["latency_s"]
        return self.events() - before, sum(sum(answer["storage"]) for answer in answers)

    def events(self):
        return Counter(self.engine.ask("events"))

    def recover(self):
        """Ask until all prompts come from storage: the prefetch thread and the backup live."""
        for prompt, told in zip(self.prompts, self.told, strict=True):
            self.engine.wait_stored(prompt, [told])


@pytest.fixture(scope="module")
def computed(start, prompt):
    """Three prompts and their answers."""
    prompts = [prompt(i, LENGTH) for i in range(NUM_PROMPTS)]
    plain = start(max_total_tokens=4096)
    answers = plain.ask("rounds", prompts=prompts, count=3)
    plain.kill()
    told = answers[0]["tokens"]
    assert all(answer["tokens"] == told for answer in answers)
    return prompts, told


@pytest.fixture(scope="module")
def serve(start, computed, tiers):
    """Start an engine with some backends, with all prompts stored."""

    def begin(*backends, **more):
        engine = start(
            "dynamic",
            tiers(
                *backends,
                load_timeout_s=0.5,
                store_timeout_s=0.5,
                lookup_timeout_s=0.25,
                **more,
            ),
            hicache_storage_prefetch_policy="timeout",
            max_total_tokens=4096,
            enable_metrics=True,
        )
        served = Served(engine, *computed)
        served.recover()
        return served

    return begin


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Where pages are stored: a small file system of its own where that can be had."""
    where = tmp_path_factory.mktemp("store")
    # Its faults are those of files: beside an older engine, small chunks are files.
    with small_disk(where, "size=32m,nr_inodes=1000"), older_engine(where / "kv"):
        yield where


@pytest.fixture(scope="module")
def on_disk(serve, disk, root):
    return serve(disk(root / "kv"))


@pytest.fixture
def files(root):
    """The files of pages, as they are now."""
    return lambda: sorted(file for file in (root / "kv").glob("*/??/*") if file.is_file())


def test_without_a_fault_all_pages_come_from_disk(on_disk):
    counted, hits = on_disk.run()
    assert hits == ROUNDS * NUM_PROMPTS * STORED
    assert counted["loaded"] == hits // 16


def test_files_deleted(on_disk, files):
    def delete():
        for file in files()[::3]:
            file.unlink(missing_ok=True)

    counted, _ = on_disk.run(delete)
    # A slow engine loads a page after the disk tier has noticed that it is gone.
    assert counted["load_missing"] + counted["disk_vanished"] > 0, counted
    on_disk.recover()


@pytest.mark.parametrize("fault", ["cut", "flip"])
def test_files_damaged(on_disk, files, fault):
    def damage():
        for file in files()[::3]:
            getattr(file_faults, fault)(file)

    counted, _ = on_disk.run(damage)
    assert counted["load_corrupt"] > 0, counted
    on_disk.recover()


def test_files_swapped_between_keys(on_disk, files):
    counted, _ = on_disk.run(lambda: file_faults.swap(files()[:40]))
    assert counted["load_corrupt"] > 0, counted
    on_disk.recover()


def test_io_process_killed_again_and_again(on_disk, io_process):
    def kill():
        with contextlib.suppress(ValueError, ProcessLookupError):  # none while it is started again
            os.kill(io_process(on_disk.engine), signal.SIGKILL)

    counted, _ = on_disk.run(kill, every_s=1.0)
    assert counted["io_died"] > 0, counted
    on_disk.recover()


def test_io_process_stopped(on_disk, io_process):
    number = io_process(on_disk.engine)
    os.kill(number, signal.SIGSTOP)
    try:
        counted, hits = on_disk.run(rounds=2)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGCONT)
    assert hits == 0
    assert sum(n for name, n in counted.items() if name.startswith("load_")) > 0, counted
    on_disk.recover()


@pytest.mark.parametrize(("what", "counts"), [("files", "store_"), ("bytes", "disk_evicted")])
def test_the_disk_is_full_of(on_disk, root, files, what, counts):
    """Chunks that leave make room for others; no file can be made before one has left."""
    if not os.path.ismount(root):
        pytest.skip("mounting a small tmpfs needs root")
    ballast = root / "ballast"
    ballast.mkdir()

    def delete_and_fill():
        file_faults.fill(ballast, what)
        for file in files()[::2]:
            file.unlink(missing_ok=True)
        file_faults.fill(ballast, what)

    try:
        counted, _ = on_disk.run(delete_and_fill)
    finally:
        shutil.rmtree(ballast)
    assert sum(n for name, n in counted.items() if name.startswith(counts)) > 0, counted
    on_disk.recover()


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    if redis_server.BINARY is None:
        pytest.skip(redis_server.MISSING)
    server = redis_server.RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def on_redis(serve, redis):
    return serve({"type": "redis", "url": redis.url})


def test_redis_killed_and_started_again_and_again(on_redis, redis):
    is_up = [True]

    def kill_or_start():
        redis.kill() if is_up[0] else redis.start()
        is_up[0] = not is_up[0]

    try:
        counted, hits = on_redis.run(kill_or_start, every_s=1.0)
    finally:
        if not is_up[0]:
            redis.start()
    assert hits < ROUNDS * NUM_PROMPTS * STORED
    lost = {name: n for name, n in counted.items() if name.startswith("redis_connection_lost")}
    assert lost, counted
    on_redis.recover()


def test_redis_paused(on_redis, redis):
    with paused(redis):
        counted, hits = on_redis.run(rounds=3)
    assert hits == 0
    assert counted["redis_breaker_opened"] > 0, counted
    on_redis.recover()
