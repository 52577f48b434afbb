"""Whatever a store does, every request finishes with the same output, and the engine lives on.

Each fault strikes while requests run: the same six prompts over and over, more than host memory
holds, so that most of what is asked for comes from the store.
"""

import contextlib
import os
import shutil
from collections import Counter

import pytest

from tests.engines.vllm_engine.counted import events
from tests.support import file_faults
from tests.support.older_engine import older_engine
from tests.support.small_disk import small_disk

pytestmark = pytest.mark.timeout(1800)

LENGTH, CACHED, CHUNKS = 1000, 992, 31  # whole blocks of 32 tokens in a prompt
PROMPTS = 6


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Where chunks are stored: a file system of its own where that can be had, of few files."""
    where = tmp_path_factory.mktemp("store")
    # Its faults are those of files: beside an older engine, small chunks are files.
    with small_disk(where, "size=64m,nr_inodes=3000"), older_engine(where / "kv"):
        yield where


@pytest.fixture(scope="module")
def engine(start, root, faulty_tier):
    """Host memory for little more than two prompts, so that most loads come from the store."""
    env, plan, _ = faulty_tier
    extra = {
        "cpu_bytes": 70 * 65536,
        "backends": [{"type": "faulty", "root": str(root / "kv"), "plan": plan}],
        "load_timeout_s": 4.0,
        "store_timeout_s": 4.0,
    }
    return start(extra, env=env)


@pytest.fixture(scope="module")
def told(engine, prompts):
    """Answers computed before anything was stored, and then stored one after the other."""
    answers = []
    for prompt in prompts(PROMPTS, LENGTH):
        answers += engine.generate([prompt])["tokens"]
        engine.ask("quiet")
    return answers


@pytest.fixture
def chunk_files(root):
    return lambda: sorted((root / "kv").glob("*/??/*"))


@pytest.fixture
def running(engine, traffic, prompts, told, set_plan):
    """Requests under way; at the end of the test, what went wrong is counted, no slot is busy."""

    @contextlib.contextmanager
    def run():
        before = events(engine)
        counted = Counter()
        with traffic(engine, prompts(PROMPTS, LENGTH), told) as requests:
            requests.wait_for(2)
            yield requests, counted
            requests.wait_for(2 * PROMPTS)
        counted.update(events(engine) - before)

    yield run
    set_plan()


def test_without_a_fault_the_store_serves(running):
    with running() as (requests, counted):
        requests.wait_for_hits(PROMPTS * CACHED)
    assert counted["recomputed_blocks"] == 0


def delete_in_parts(requests, files, after_each=lambda: None):
    """Delete files in six parts, each just before two requests begin.

    The store notices by itself within a second that files are gone, and says no more that they are
    there. A load meets the loss only if it comes first: of six times, it does in one.
    """
    for i in range(6):
        requests.between_pairs(lambda part=files[i::6]: delete(part, after_each))


def delete(files, after_each):
    for file in files:
        file.unlink(missing_ok=True)
        after_each()


def test_chunk_files_deleted(running, chunk_files):
    with running() as (requests, counted):
        delete_in_parts(requests, chunk_files()[::3])
    assert counted["failed_missing"] > 0
    assert counted["recomputed_blocks"] > 0


def found_corrupt(counted):
    return sum(n for name, n in counted.items() if name.startswith("corrupt_faulty_"))


def test_chunk_files_truncated(running, chunk_files):
    with running() as (_, counted):
        for file in chunk_files()[::3]:
            file_faults.cut(file)
    assert counted["recomputed_blocks"] > 0
    assert found_corrupt(counted) > 0, counted


def test_bits_flipped_in_chunk_files(running, chunk_files):
    with running() as (_, counted):
        for file in chunk_files()[::3]:
            file_faults.flip(file)
    assert counted["recomputed_blocks"] > 0
    assert found_corrupt(counted) > 0, counted


def test_chunk_files_swapped(running, chunk_files):
    with running() as (_, counted):
        file_faults.swap(chunk_files()[:60])
    assert counted["recomputed_blocks"] > 0
    assert found_corrupt(counted) > 0, counted


@pytest.fixture
def ballast(root):
    """A folder of others' files on the store's file system."""
    if not os.path.ismount(root):
        pytest.skip("mounting a small tmpfs needs root")
    folder = root / "ballast"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("what", ["files", "bytes"])
def test_the_disk_is_full_of(running, chunk_files, ballast, what):
    with running() as (requests, counted):
        # What is gone is computed again, and would be stored again. It is full before the first
        # of them is gone, and again after each: none comes back before there is no room for it.
        file_faults.fill(ballast, what)
        delete_in_parts(requests, chunk_files()[::2], lambda: file_faults.fill(ballast, what))
    if what == "files":
        assert counted["recomputed_blocks"] > 0
        assert counted["faulty_write_io_ENOSPC"] > 0, counted
    else:
        # The tier evicts for ``min_free``. It may have evicted all of them before the next load.
        assert counted["faulty_evicted"] + counted["failed_refused"] > 0, counted


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        pytest.param({"fault": "raise"}, "failed_error", id="raises"),
        pytest.param({"fault": "hang"}, "failed_deadline", id="never answers"),
        pytest.param({"fault": "hang", "verbs": ["read"]}, "failed_deadline", id="reads hang"),
        pytest.param({"fault": "hang", "verbs": ["write"]}, "", id="writes hang"),
        pytest.param({"fault": "miss"}, "failed_missing", id="finds nothing"),
        pytest.param(
            {"fault": "lie", "verbs": ["write", "contains"]}, "", id="says it wrote and did not"
        ),
        pytest.param({"fault": "short"}, "failed_missing", id="does half"),
        pytest.param({"fault": "delay", "seconds": 0.05}, "", id="is slow"),
    ],
)
def test_a_backend_that(running, set_plan, plan, why):
    with running() as (_, counted):
        set_plan(plan)
    assert not why or counted[why] > 0, counted


@pytest.mark.parametrize("plan", [{"fault": "fail", "every": 3}, {"fault": "raise", "every": 3}])
def test_a_copy_between_the_kv_cache_and_host_memory_that_fails(running, set_plan, plan):
    with running() as (_, counted):
        set_plan(copy=plan)
    assert counted["recomputed_blocks"] > 0
    assert counted["failed_copy_error"] + counted["failed_refused_transfer"] > 0, counted


def test_afterwards_everything_serves_again(running):
    with running() as (requests, _):
        requests.wait_for_hits(3 * PROMPTS * CACHED)
    with running() as (requests, counted):
        requests.wait_for_hits(PROMPTS * CACHED)
    assert counted["recomputed_blocks"] == 0
