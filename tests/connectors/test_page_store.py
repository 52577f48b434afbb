"""Pages of an engine's memory on tiers: exact bytes, bounded calls, slots that late reads keep."""

import os
import threading

import pytest
from disk_parts import let_calls_hang_after
from msgspec.structs import replace

from kvoffload.backends.disk.vfs import Vfs
from kvoffload.connectors.sglang import page_store
from kvoffload.connectors.sglang.page_store import PageStore
from kvoffload.errors import ConfigError
from kvoffload.io.protocol import Load
from kvoffload.io.reads_in_place import ReadsInPlace
from kvoffload.metrics.names import METRICS
from kvoffload.metrics.samples import BUCKETS_S
from kvoffload.testing import Plan
from tests.support.disk_chunks import stored_in
from tests.support.host_pages import PAGE, Pool, disk
from tests.support.planned_store import Process


@pytest.fixture(autouse=True)
def _by_the_server(monkeypatch):
    """All pages pass the slab: ``test_pages_in_place.py`` is about the others."""
    monkeypatch.setattr(ReadsInPlace, "places", lambda *asked: [])


@pytest.fixture
def pool():
    return Pool()


@pytest.fixture
def stored(pool, until):
    """Store the first pages, and wait until they are listed."""

    def store(store, count):
        assert store.save(keys(count), pool.pages(range(count))) == [True] * count
        until(lambda: store.num_leading(keys(count)) == count)
        return store

    return store


def be_patient(store):
    """Give later loads and stores time: on a busy machine also sound tiers need some."""
    store._config = replace(store._config, load_timeout_s=60.0, store_timeout_s=60.0)
    store._client._load_timeout_s = store._client._store_timeout_s = 60.0


def keys(count, start=0):
    return [f"key {i}".encode() for i in range(start, start + count)]


def test_a_store_job_takes_a_bounded_number_of_bytes(pool, opened, tmp_path, monkeypatch):
    pool.fill(range(10))
    # Of less than a page: one at a time.
    for most, sizes in ((3 * 4096 + 1, [3, 3, 3, 1]), (1, [1] * 10)):
        monkeypatch.setattr(page_store, "MOST_STORE_BYTES", most)
        store = opened(disk(tmp_path / f"{most}"), io="thread", slots=32)
        jobs, begin = [], store._client.begin

        def begun(order, job, jobs=jobs, begin=begin):
            jobs.append(len(order.slots))
            return begin(order, job)

        monkeypatch.setattr(store._client, "begin", begun)
        assert store.save(keys(10), pool.pages(range(10))) == [True] * 10
        assert jobs == sizes
        assert store.load(keys(10), pool.pages(range(10))) == [True] * 10


def test_a_job_of_small_pages_has_as_many_as_its_bytes_allow(pool, opened, stored, tmp_path):
    def jobs_of(slots):
        root = tmp_path / f"{slots}"
        store = opened(disk(root), io="thread", slots=slots)
        jobs, begin = {"store": [], "load": []}, store._client.begin

        def begun(order, job):
            jobs["load" if isinstance(order, Load) else "store"].append(len(order.slots))
            return begin(order, job)

        store._client.begin = begun
        stored(store, 40)
        assert all(store.load(keys(40), pool.pages(range(40))))
        return jobs

    assert jobs_of(512) == {"store": [40], "load": [40]}
    assert jobs_of(64 + 128) == {"store": [24, 16], "load": [24, 16]}  # an eighth of all slots
    assert jobs_of(64) == {"store": [16, 16, 8], "load": [16, 16, 8]}  # as few as of large pages


@pytest.mark.parametrize("form", ["thread", "process"])
def test_pages_come_back_whole_in_a_new_store(pool, opened, tmp_path, form, until):
    source, target = range(20), range(30, 50)
    pool.fill(source)
    first = opened(disk(tmp_path), io=form)
    assert first.num_leading(keys(20)) == 0
    assert first.save(keys(20), pool.pages(source)) == [True] * 20
    until(lambda: first.num_leading(keys(21)) == 20)
    assert len(stored_in(tmp_path)) == 20  # a page is one chunk
    first.close()
    again = opened(disk(tmp_path), io=form)
    until(lambda: again.num_leading(keys(21)) == 20)
    assert again.load(keys(21), pool.pages(range(30, 51))) == [True] * 20 + [False]
    assert pool.read(target) == pool.read(source)
    other = opened(disk(tmp_path), io=form, facts={"model": "other"})
    assert other.num_leading(keys(20)) == 0


def test_a_scrape_has_the_metrics_of_every_engine(pool, opened, tmp_path, until):
    """Names and labels are those of the list, and figures of two tiers add up."""
    store = opened({"type": "memory", "capacity": "4KiB"}, disk(tmp_path), tokens=16)
    pool.fill(range(4))
    assert store.save(keys(4), pool.pages(range(4))) == [True] * 4
    until(lambda: store.num_leading(keys(5)) == 4)
    assert store.load(keys(5), pool.pages(range(30, 35))) == [True] * 4 + [False]
    until(lambda: scraped(store)["evictions", "memory", "evicted"] >= 2)
    found = scraped(store)
    hits = [found["lookups", tier, "hit"] for tier in ("memory", "disk")]
    assert sum(hits) >= 4
    assert found["lookups", "", "miss"] >= 1
    assert found["hit_tokens", "disk"] >= 32
    tokens = [found["hit_tokens", tier] for tier in ("memory", "disk")]
    assert found[("saved_prefill_tokens",)] == sum(tokens) == 4 * 16
    assert found["tier_up", "disk"] == 1
    assert found["resident_bytes", "disk"] >= 4 * PAGE
    assert found["capacity_bytes", "disk"] == 64 << 20
    assert found["load_bytes", "cpu"] == 4 * PAGE
    assert found["store_chunks", "cpu"] == 4
    assert found["store_chunks", "disk"] == 4
    assert found["load_seconds", "cpu"].counts != [0] * len(BUCKETS_S)
    assert found["inflight_bytes", "cpu"] == 0
    assert len([name for name in found if name[0] == "namespace_info"]) == 1


def test_a_scrape_tells_faults_by_their_reasons(pool, opened, stored, tmp_path):
    store = stored(opened(disk(tmp_path)), 4)
    for chunk in stored_in(tmp_path):
        chunk.wipe()
    assert store.load(keys(4), pool.pages(range(30, 34))) == [False] * 4
    store.bar()
    store.load(keys(4), pool.pages(range(30, 34)))
    store.save(keys(4), pool.pages(range(4)))
    found = scraped(store)
    assert found["transfer_failures", "missing"] == 4
    assert found["transfer_failures", "corrupt"] == 0
    assert found["stores_dropped", "", "barred"] == 4
    assert ("transfer_failures", "barred") not in found


def scraped(store):
    """Return the value of each series by its name and labels; the list knows each of them."""
    found = {}
    for name, labels, value in store.figures.samples():
        assert len(METRICS[name].labels) == len(labels)
        assert (name, *labels) not in found
        found[name, *labels] = value
    return found


def test_a_page_that_all_tiers_have_is_not_written_again(pool, opened, stored, tmp_path):
    store = stored(opened(disk(tmp_path)), 4)
    assert store.save(keys(5), pool.pages(range(5))) == [True] * 5
    assert store.figures.by_event()["already_stored"] == 4


def test_a_reader_asks_the_store_for_what_its_index_lacks(pool, opened, tmp_path, until):
    pool.fill(range(8))
    writer = opened(disk(tmp_path), io="thread")
    reader = opened(disk(tmp_path), io="thread", asks=True)
    listed = []
    for turn in range(4):  # the copy of an index needs up to 2 s
        stored = keys(8, 10 * turn)
        assert reader.num_leading(stored) == 0
        assert all(writer.save(stored, pool.pages(range(8))))
        asked = [*stored, *keys(2, 900)]
        # A store that has just looked for new chunks, and took long, does not look again at once.
        until(lambda stored=stored: reader.num_leading(stored) == 8)
        count, num_listed = reader.leading(asked)
        assert count == 8
        listed.append(num_listed)
        assert reader.present(asked, num_listed) == [True] * 8 + [False] * 2
        assert reader.load(asked, pool.pages(range(20, 30))) == [True] * 8 + [False] * 2
        assert pool.read(range(20, 28)) == pool.read(range(8))
    assert 0 in listed


def test_what_one_tier_lost_the_next_one_serves(pool, opened, tmp_path, until):
    pool.fill(range(6))
    both = opened(disk(tmp_path / "a"), disk(tmp_path / "b"))
    assert all(both.save(keys(6), pool.pages(range(6))))
    until(lambda: both.num_leading(keys(6)) == 6)
    for chunk in stored_in(tmp_path / "a")[:3]:
        chunk.wipe()
    assert both.load(keys(6), pool.pages(range(10, 16))) == [True] * 6
    assert pool.read(range(10, 16)) == pool.read(range(6))
    assert both.figures.by_event()["load_missing"] == 3


def test_a_damaged_page_is_a_miss_and_is_stored_again(pool, opened, stored, tmp_path):
    pool.fill(range(4))
    store = stored(opened(disk(tmp_path)), 4)
    for chunk in stored_in(tmp_path):
        chunk.flip(-1)
    assert store.load(keys(4), pool.pages(range(10, 14))) == [False] * 4
    assert store.num_leading(keys(4)) == 0
    stored(store, 4)
    assert store.load(keys(4), pool.pages(range(10, 14))) == [True] * 4
    assert pool.read(range(10, 14)) == pool.read(range(4))


def test_a_late_read_does_not_write_into_the_engines_page(pool, opened, planned, until):
    pool.fill(range(8))
    backend = {"type": "planned", **planned.options}
    store = opened(backend, slots=4, load_timeout_s=0.5)
    assert all(store.save(keys(4), pool.pages(range(4))))
    planned.set(process=Process("stubborn", 60.0))
    assert store.load(keys(2), pool.pages(range(10, 12))) == [False] * 2
    assert store._staging.num_busy == 2, "the read is over: it was waited for"
    pool.fill(range(10, 12), seed=1)  # the engine uses its pages for another prompt
    now = pool.read(range(10, 12))
    planned.set()
    until(lambda: store._staging.num_busy == 0)  # its late write has come
    assert pool.read(range(10, 12)) == now
    be_patient(store)
    assert all(store.save(keys(4, 50), pool.pages(range(4))))  # all slots are free again
    assert all(store.load(keys(4, 50), pool.pages(range(10, 14))))


def test_a_store_in_a_hurry_loses_the_end_of_a_batch(pool, opened, planned):
    backend = {"type": "planned", **planned.options}
    store = opened(backend, slots=4, store_timeout_s=0.8)
    planned.set(Plan("delay", frozenset({"write"}), seconds=0.2))
    ok = store.save(keys(32), pool.pages(range(32)))
    assert ok == [True] * sum(ok) + [False] * (32 - sum(ok))
    assert 0 < sum(ok) < 32
    assert store.figures.by_event()["store_deadline"] == 32 - sum(ok)


def test_threads_store_and_load_at_once(pool, opened, stored, tmp_path):
    pool.fill(range(20))
    store = stored(opened(disk(tmp_path), slots=4), 20)
    wrong = []

    def backup():
        for round in range(10):
            if not all(store.save(keys(20, 100 + 20 * round), pool.pages(range(20)))):
                wrong.append(round)

    def prefetch():
        for _ in range(10):
            if not all(store.load(keys(20), pool.pages(range(30, 50)))):
                wrong.append("load")

    threads = [threading.Thread(target=each) for each in (backup, prefetch)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert pool.read(range(30, 50)) == pool.read(range(20))


def test_a_cleared_store_serves_nothing_and_takes_pages_again(pool, opened, stored, tmp_path):
    store = opened(disk(tmp_path))
    assert all(store.save(keys(4), pool.pages(range(4))))
    store.clear()
    assert not stored_in(tmp_path)
    assert not any(store.present(keys(4), 4))
    stored(store, 4)


def test_while_a_store_is_cleared_pages_are_misses_at_once(
    pool, opened, tmp_path, until, planned, monkeypatch
):
    store = opened({"type": "planned", "root": str(tmp_path / "kv"), **planned.options})
    assert all(store.save(keys(4), pool.pages(range(4))))
    monkeypatch.setattr(page_store, "CLEAR_S", 0.1)
    planned.set(process=Process("slow_purge", 1.0))
    with pytest.raises(ConfigError, match="to open the tiers"):
        store.clear()
    assert store.save(keys(4, 4), pool.pages(range(4))) == [False] * 4
    assert store.load(keys(4), pool.pages(range(4))) == [False] * 4
    assert store.figures.by_event()["store_no_store"] == 4
    until(lambda: not store._client._is_opening)
    assert store.num_leading(keys(8)) == 0
    assert all(store.save(keys(4), pool.pages(range(4))))


def test_a_store_that_cannot_be_cleared_says_so(pool, opened, tmp_path, planned):
    store = opened({"type": "planned", "root": str(tmp_path / "kv"), **planned.options})
    planned.set(process=Process("failed_purge"))
    with pytest.raises(OSError, match="nobody is there"):
        store.clear()


def test_new_weights_find_nothing_of_before_and_a_restart_nothing_of_theirs(
    pool, opened, stored, tmp_path, until
):
    store = stored(opened(disk(tmp_path)), 4)
    for name in ("1 of this start", "2 of this start"):
        store.bar()
        assert store.num_leading(keys(4)) == 0
        assert not any(store.present(keys(4), 4))
        assert store.load(keys(4), pool.pages(range(4))) == [False] * 4
        assert store.save(keys(4, 4), pool.pages(range(4))) == [False] * 4
        store.begin_generation(name)
        assert store.load(keys(8), pool.pages(range(8))) == [False] * 8
        pool.fill(range(8), seed=name)
        stored(store, 8)
    until(lambda: len(stored_in(tmp_path)) == 12)  # nothing of "1" is left
    store.close()
    again = opened(disk(tmp_path))
    until(lambda: again.num_leading(keys(4)) == 4)
    assert not any(again.present(keys(4, 4), 4))


@pytest.mark.parametrize("store_first", [True, False])
def test_pages_in_flight_when_weights_change_are_neither_stored_nor_loaded(
    pool, opened, stored, tmp_path, store_first, monkeypatch
):
    pool.fill(range(8))
    store = opened(disk(tmp_path))
    if store_first:
        stored(store, 8)
    copy = PageStore._copy

    def copy_and_change(*args, **more):
        copy(store, *args, **more)
        monkeypatch.setattr(store, "_copy", copy.__get__(store))
        store.bar()
        store.begin_generation("1 of this start")

    monkeypatch.setattr(store, "_copy", copy_and_change)
    if store_first:
        assert store.load(keys(8), pool.pages(range(8))) == [False] * 8
        assert store.figures.by_event()["load_barred"] > 0
    else:
        assert store.save(keys(8), pool.pages(range(8))) == [False] * 8
        assert store.figures.by_event()["store_barred"] == 8
        assert not stored_in(tmp_path)
    assert all(store.save(keys(8, 8), pool.pages(range(8))))  # no slot is lost


def test_a_closed_store_misses(pool, opened, tmp_path):
    store = opened(disk(tmp_path))
    store.close()
    store.close()
    assert store.num_leading(keys(2)) == 0
    assert store.load(keys(2), pool.pages(range(2))) == [False] * 2
    assert store.save(keys(2), pool.pages(range(2))) == [False] * 2


def test_too_little_staging_memory_is_refused(opened, tmp_path):
    with pytest.raises(ConfigError, match="at least two pages"):
        opened(disk(tmp_path), slots=1)


def test_a_disk_that_hangs_costs_no_deadline_once_it_counts_as_dead(
    pool, opened, stored, tmp_path, until, monkeypatch
):
    read, may_end, begun = Vfs.preadv, threading.Event(), []
    options = disk(tmp_path, stall_s=60.0, read_threads=2, io="direct")
    pool.fill(range(20))
    store = stored(opened(options, slots=16, load_timeout_s=0.3, io="thread"), 20)

    def hang(*asked):
        if "-load_" in threading.current_thread().name:  # another one reads facts, at the start
            begun.append(asked)
            may_end.wait(60)
        return read(*asked)

    monkeypatch.setattr(Vfs, "preadv", staticmethod(hang))
    backend = store._client._peer.session._stores["disk"].backend
    let_calls_hang_after(backend, 0.1)
    try:
        assert not any(store.load(keys(4), pool.pages(range(30, 34))))
        be_patient(store)
        for first in range(4, 20, 4):
            assert not any(store.load(keys(4, first), pool.pages(range(30, 34))))
        assert store.figures.by_event()["load_deadline"] == 4
        assert store.figures.by_event()["load_unavailable"] == 16, store.figures.by_event()
        assert len(begun) == 2
    finally:
        let_calls_hang_after(backend, 60.0)
        may_end.set()
    until(lambda: all(store.save(keys(20), pool.pages(range(20)))))
    until(lambda: all(store.load(keys(20), pool.pages(range(30, 50)))))
    assert pool.read(range(30, 50)) == pool.read(range(20))


@pytest.fixture
def hang_under(monkeypatch):
    """Let reads of files under a folder hang until the test ends."""
    read, may_end = Vfs.preadv, threading.Event()

    def begin(folder):
        def hang(file, *rest):
            if os.readlink(f"/proc/self/fd/{file}").startswith(str(folder)):
                may_end.wait(60)
            return read(file, *rest)

        monkeypatch.setattr(Vfs, "preadv", staticmethod(hang))

    yield begin
    may_end.set()


def test_a_tier_that_hangs_does_not_make_the_next_one_forget(
    pool, opened, stored, tmp_path, hang_under
):
    slow, sound = disk(tmp_path / "a", stall_s=60, io="direct"), disk(tmp_path / "b")
    pool.fill(range(4))
    store = stored(opened(slow, sound, slots=16, load_timeout_s=0.3, io="thread"), 4)
    hang_under(tmp_path / "a")
    assert not any(store.load(keys(4), pool.pages(range(10, 14))))
    assert store.present(keys(4), 4) == [True] * 4
    assert store.figures.by_event()["load_deadline"] == 4
    be_patient(store)
    assert all(store.load(keys(4), pool.pages(range(10, 14))))
    assert pool.read(range(10, 14)) == pool.read(range(4))


def test_pages_of_a_tier_for_which_no_time_was_left_are_counted(
    pool, opened, tmp_path, until, hang_under
):
    slow, sound = disk(tmp_path / "a", stall_s=60, io="direct"), disk(tmp_path / "b")
    assert all(opened(sound).save(keys(4), pool.pages(range(4))))
    store = opened(slow, sound, slots=16, load_timeout_s=0.3, io="thread")
    assert all(store.save(keys(2), pool.pages(range(2))))
    until(lambda: store.num_leading(keys(4)) == 4)
    hang_under(tmp_path / "a")
    assert not any(store.load(keys(4), pool.pages(range(10, 14))))
    assert store.figures.by_event()["load_deadline"] == 4


def test_pages_that_no_tier_was_asked_for_are_not_forgotten(
    pool, opened, stored, tmp_path, hang_under
):
    store = opened(
        disk(tmp_path, stall_s=60, io="direct"), slots=4, load_timeout_s=1.0, io="thread"
    )
    store._client._load_timeout_s = 60.0  # or its answer comes first, if this thread runs late
    stored(store, 6)
    hang_under(tmp_path)
    assert not any(store.load(keys(6), pool.pages(range(10, 16))))
    assert store.present(keys(6), 6) == [False] * 4 + [True] * 2
    assert store.figures.by_event()["load_deadline"] == 6


def test_late_reads_of_a_tier_keep_its_share_of_slots_and_the_next_one_serves_on(
    pool, opened, planned, until
):
    """A plug-in's reads: nothing else bounds them."""
    tiers = {"type": "planned", **planned.options}, {"type": "memory", "capacity": "1MiB"}
    store = opened(*tiers, slots=32, load_timeout_s=0.2)
    pool.fill(range(60))
    prompts = [keys(4, 4 * i) for i in range(12)]
    assert all(all(store.save(each, pool.pages(range(4)))) for each in prompts)
    planned.set(process=Process("stubborn", 60.0))

    def load(prompts):
        return [all(store.load(each, pool.pages(range(4, 8)))) for each in prompts]

    assert load(prompts[:2]) == [False] * 2  # a share is 8 of 32 slots
    be_patient(store)
    assert load(prompts[2:]) == [True] * 10
    assert store._staging.num_busy == 8
    assert store.figures.by_event()["load_hung"] == 40
    assert all(store.save(keys(4, 100), pool.pages(range(4))))
    planned.set()
    until(lambda: store._staging.num_busy == 0)  # the calls have returned


def test_late_writes_of_a_tier_keep_its_share_of_slots_and_the_next_one_stores_on(
    pool, opened, planned, until
):
    tiers = {"type": "planned", **planned.options}, {"type": "memory", "capacity": "1MiB"}
    store = opened(*tiers, slots=32, store_timeout_s=1.0)
    pool.fill(range(60))
    planned.set(process=Process("stubborn_write", 60.0))
    for i in range(2):
        store.save(keys(4, 4 * i), pool.pages(range(4)))
    assert store._staging.num_busy == 8
    be_patient(store)  # a store that waited for the tier that hangs would wait for a minute
    for i in range(2, 12):
        store.save(keys(4, 4 * i), pool.pages(range(4)))
        assert store._staging.num_busy == 8
    assert store.figures.by_event()["store_hung"] == 40
    assert all(store.load(keys(48), pool.pages(range(48))))
    planned.set()
    until(lambda: store._staging.num_busy == 0)  # the calls have returned
    store.save(keys(4, 100), pool.pages(range(4)))
    assert store.figures.by_event()["store_hung"] == 40
