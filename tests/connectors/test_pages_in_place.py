"""Pages that the engine's thread reads from the page cache: exact bytes, or the way of the rest."""

import contextlib
import ctypes
import errno
import os
import random
import secrets
import shutil
import signal
import threading
import time
from collections import Counter
from functools import partial

import pytest

from kvoffload.backends.disk import expiry, file_calls
from kvoffload.backends.disk.cached_files import MOST_MISSES, CachedFiles, Run
from kvoffload.backends.disk.chunk_file import probe_holes
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.memory import MemoryBackend
from kvoffload.io import link, reads_in_place
from kvoffload.io.open_stores import ReadInPlace
from kvoffload.io.protocol import Load, Locate, MessageReader, Store, Used
from kvoffload.io.remote_tier import RemoteTier
from kvoffload.io.service.layered_store import StoreView
from tests.support.disk_chunks import stored_in
from tests.support.host_pages import PAGE, Pool, disk
from tests.support.hung_mount import bind_mount, hung_mount

LATER_S = 1e9


def can_read_in_place(folder):
    """Whether kernel and file system have the calls."""
    path = folder / "probe"
    path.write_bytes(bytes(PAGE))
    with contextlib.suppress(OSError):
        fd = file_calls.open_cached(os.fsencode(path), os.O_RDONLY)
        with contextlib.closing(os.fdopen(fd, "rb")):
            into = bytearray(PAGE)
            is_cached = file_calls.is_cached(fd, PAGE)
            return is_cached and Vfs.read_cached(fd, [into], 0) == PAGE
    return False


@pytest.fixture(autouse=True)
def _needs_the_calls(tmp_path_factory):
    if not can_read_in_place(tmp_path_factory.mktemp("probe")):
        pytest.skip("no reads without waiting here: Linux 5.12, and a file system that has them")


@pytest.fixture(autouse=True)
def _patience():
    """On a busy machine a server may be late, and these tests are about what it answers."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reads_in_place, "LATE_S", 60.0)
        yield


@pytest.fixture
def pool():
    made = Pool()
    made.fill(range(8))
    return made


@pytest.fixture
def opened(opened):
    return partial(opened, slots=256, io="thread")


OF_FILES, OF_SLOTS = 64, 40
"""A chunk whose key has more than 47 bytes is a file."""


@pytest.fixture(params=["files", "slots"])
def form(request, monkeypatch, tmp_path_factory):
    """Chunks have this form from now on; without this fixture they are files."""
    if request.param == "slots":
        if probe_holes(Vfs(), str(tmp_path_factory.mktemp("holes") / "probe")) is not None:
            pytest.skip("this file system has no slots")
        monkeypatch.setitem(globals(), "OF_FILES", OF_SLOTS)
    return request.param


def keys(count, start=0):
    names = [f"key {i:3}".encode() for i in range(start, start + count)]
    return [name.ljust(OF_FILES, b".") for name in names]


@pytest.fixture
def stored(pool, until):
    """Store pages, and wait until they are listed."""

    def store(store, count=8, start=0):
        assert store.save(keys(count, start), pool.pages(range(count))) == [True] * count
        until(lambda: store.num_leading(keys(count, start)) == count)
        return store

    return store


@pytest.fixture
def sent(monkeypatch):
    """What an engine sends to its server from now on, by type."""

    def watch(store):
        messages, reader, link = [], MessageReader(to_server=True), store._client._link
        push = link.push

        def pushed(data):
            messages.extend(reader.feed(data))
            push(data)

        monkeypatch.setattr(link, "push", pushed)
        return messages

    return watch


SUFFIX = {"files": "", "slots": ".slots"}


def of(messages, kind):
    return [each for each in messages if isinstance(each, kind)]


def places_of(store, asked):
    return store._client.in_place.places(store._client.tiers["disk"], asked, LATER_S)


class Reader:
    """Reads chunks in place where a store has said that they are, whatever has become of them."""

    def __init__(self, store):
        self.reader, self.known = CachedFiles(**store._client.tiers["disk"].in_place), {}
        for asked in (keys(24), keys(1, 900)):
            for first, chunks, name, offset, step in places_of(store, asked):
                for i in range(chunks):
                    self.known[asked[first + i]] = Run(0, 1, name, offset + i * step, step)

    def read(self, asked, pages, until_s):
        runs = [
            run._replace(first=i) for i, key in enumerate(asked) if (run := self.known.get(key))
        ]
        return self.reader.read(asked, pages, runs, until_s)


reader_of = Reader


def read(reader, pool, asked=8, start=0):
    return reader.read(keys(asked, start), pool.pages(range(20, 20 + asked)), LATER_S)


def figures(store):
    return {(name, *labels): value for name, labels, value in store.figures.samples()}


@pytest.mark.parametrize("io", ["thread", "process"])
def test_cached_pages_are_loaded_without_an_order_and_their_use_is_told_once(
    pool, opened, stored, sent, tmp_path, form, io
):
    store = stored(opened(disk(tmp_path), io=io, tokens=16))
    messages = sent(store)
    assert store.load(keys(8), pool.pages(range(20, 28))) == [True] * 8
    assert pool.read(range(20, 28)) == pool.read(range(8))
    assert of(messages, Load) == []
    assert [told.keys for told in of(messages, Locate)] == [keys(8)]
    assert of(messages, Used) == [Used("disk", keys(8))]
    assert {chunk.path.suffix for chunk in stored_in(tmp_path)} == {SUFFIX[form]}
    found = figures(store)
    assert found["load_chunks", "disk"] == 8
    assert found["load_bytes", "disk"] == 8 * PAGE
    assert found["hit_tokens", "disk"] == 8 * 16
    assert store.figures.by_event()["loaded"] == 8


@pytest.mark.parametrize("of_them", [(2, 6), (8, 0)])
def test_pages_that_were_used_leave_last_and_the_head_after_the_tail(
    form, pool, opened, stored, tmp_path, of_them
):
    used = keys(*of_them)
    options = disk(tmp_path, policy="lru", capacity="96KiB", high_watermark=1.0, low_watermark=0.9)
    store = stored(opened(options), 8)  # of 12 that fit
    assert all(store.load(used, pool.pages(range(20, 20 + len(used)))))
    stored(store, 4, 8)
    stored(store, 2, 12)
    left = {chunk.key for chunk in stored_in(tmp_path)}
    assert len(left) <= 12
    assert {*used[:2]} <= left


def test_a_use_of_what_has_left_is_not_noted(pool, opened, stored, tmp_path):
    store = stored(opened(disk(tmp_path)))
    backend = store._client._peer.session._stores["disk"].backend
    backend.used(keys(2, 7))
    assert [name[2:] for name in backend._store.uses.take_unwritten()] == keys(1, 7)
    store.close()
    backend.used(keys(2))
    assert not backend._store.uses.take_unwritten()


def test_pages_of_several_lengths_and_many_parts_come_back(
    form, pool, opened, stored, tmp_path, until
):
    base, _ = pool.page(0)[0]
    lengths = [[1, 0, 700], [1000], [], [3] * 300, [1] * 1500]  # a call takes 1,024 parts

    def placed(at):
        starts = [base + at + 4000 * i for i in range(len(lengths))]
        return [
            [(start + sum(sizes[:i]) + i, size) for i, size in enumerate(sizes)]
            for start, sizes in zip(starts, lengths, strict=True)
        ]

    def content(pages):
        return [[ctypes.string_at(*part) for part in page] for page in pages]

    pool.fill(range(64))
    source, target, taken = placed(0), placed(64000), keys(len(lengths))
    store = opened(disk(tmp_path))
    assert all(store.save(taken, source))
    until(lambda: store.num_leading(taken) == len(taken))
    assert reader_of(store).read(taken, target, LATER_S) == [0, 1, 2, 3]
    assert content(target)[:4] == content(source)[:4]
    assert store.load(taken, target) == [True] * len(taken)
    assert content(target) == content(source)


@pytest.mark.parametrize("at", [9, 100, -1])
def test_a_damaged_page_is_counted_and_removed_by_the_server(
    form, pool, opened, stored, tmp_path, until, at
):
    store = stored(opened(disk(tmp_path)))
    stored_in(tmp_path)[3].flip(at)
    answers = [True] * 3 + [False] + [True] * 4
    assert store.load(keys(8), pool.pages(range(20, 28))) == answers
    assert store.figures.by_event()["load_corrupt"] == 1
    until(lambda: sum(n for e, n in store.figures.by_event().items() if "disk_corrupt_" in e) == 1)
    assert len(stored_in(tmp_path)) == 7
    stored(store)
    assert store.load(keys(8), pool.pages(range(20, 28))) == [True] * 8


def test_a_page_that_is_cut_or_too_long_is_a_miss(pool, opened, stored, tmp_path):
    store = stored(opened(disk(tmp_path)))
    cut, long, *_ = stored_in(tmp_path)
    cut.cut(4096 + PAGE - 1)
    with open(long.path, "ab") as file:
        file.write(b"x")
    assert store.load(keys(8), pool.pages(range(20, 28))) == [False] * 2 + [True] * 6


def test_a_file_that_has_become_another_pages_is_a_miss(pool, opened, stored, tmp_path):
    store = stored(opened(disk(tmp_path)))
    first, second, *_ = stored_in(tmp_path)
    os.replace(first.path, second.path)
    reader = reader_of(store)
    assert read(reader, pool) == [2, 3, 4, 5, 6, 7]
    assert store.load(keys(8), pool.pages(range(20, 28))) == [False] * 2 + [True] * 6


@pytest.fixture
def of_slots(monkeypatch):
    monkeypatch.setitem(globals(), "OF_FILES", OF_SLOTS)


def slots_in(root):
    """Return the files with slots, if all chunks are in some."""
    chunks = stored_in(root)
    if any(chunk.path.suffix != ".slots" for chunk in chunks):
        pytest.skip("this file system has no slots")
    return sorted({chunk.path for chunk in chunks})


def test_a_slot_that_has_another_page_by_now_is_left_to_the_server(
    of_slots, pool, opened, stored, tmp_path
):
    options = disk(tmp_path, policy="lru", capacity="64KiB", high_watermark=1.0, low_watermark=0.9)
    store = stored(opened(options))
    slots_in(tmp_path)
    reader = reader_of(store)
    stored(store, 3, 8)
    left = [i for i, key in enumerate(keys(8)) if key in {c.key for c in stored_in(tmp_path)}]
    assert len(left) == 5
    assert read(reader, pool) == left
    assert pool.read([20 + i for i in left]) == pool.read(left)


@pytest.mark.parametrize("at", [100, 4096, -1])
def test_a_slot_that_is_overwritten_while_it_is_read_is_left_to_the_server(
    of_slots, pool, opened, stored, tmp_path, monkeypatch, at
):
    store = stored(opened(disk(tmp_path)))
    slots_in(tmp_path)
    third, read_cached = stored_in(tmp_path)[3], Vfs.read_cached

    def read_and_change(fd, buffers, offset):
        third.flip(at)
        moved = read_cached(fd, buffers, offset)
        third.flip(at)
        return moved

    with monkeypatch.context() as patched:
        patched.setattr(Vfs, "read_cached", staticmethod(read_and_change))
        assert read(reader_of(store), pool) == [0, 1, 2, 4, 5, 6, 7]
        pool.fill(range(20, 28), seed=5)
    assert store.load(keys(8), pool.pages(range(20, 28))) == [True] * 8
    assert pool.read(range(20, 28)) == pool.read(range(8))
    events = store.figures.by_event()
    assert not [event for event in events if "corrupt" in event and events[event]]


@pytest.mark.parametrize("how", ["moved", "holes", "short", "gone", "folder", "other"])
def test_a_file_of_slots_that_is_another_one_by_now_is_not_believed(
    of_slots, pool, opened, stored, tmp_path, how
):
    store = stored(opened(disk(tmp_path)))
    (slots,) = slots_in(tmp_path)
    reader, content = reader_of(store), slots.read_bytes()
    slots.unlink()
    left = []
    if how == "moved":  # each page is in the slot before its own
        slots.write_bytes(content[8192:])
    elif how == "holes":
        slots.write_bytes(bytes(len(content)))
    elif how == "short":
        slots.write_bytes(content[: 2 * 8192 + 4096 + PAGE - 1])
        left = [0, 1]
    elif how == "folder":
        slots.mkdir()
    elif how == "other":
        stored(opened(disk(tmp_path / "b"), facts={"model": "other"}))
        (theirs,) = slots_in(tmp_path / "b")
        slots.write_bytes(theirs.read_bytes())
    assert read(reader, pool) == left


def test_neighbouring_slots_are_read_by_one_call_up_to_what_is_cached(
    of_slots, pool, opened, stored, tmp_path, monkeypatch
):
    store = stored(opened(disk(tmp_path)))
    slots_in(tmp_path)
    ((first, chunks, name, offset, step),) = places_of(store, keys(10))  # two are not there
    assert (first, chunks, step) == (0, 8, 8192)
    read_cached, calls = Vfs.read_cached, []

    def cut_off(fd, buffers, offset):
        calls.append(offset)
        return min(read_cached(fd, buffers, offset), 3 * step)

    monkeypatch.setattr(Vfs, "read_cached", staticmethod(cut_off))
    reader = CachedFiles(**store._client.tiers["disk"].in_place)
    runs = [Run(first, chunks, name, offset, step)]
    assert reader.read(keys(8), pool.pages(range(20, 28)), runs, LATER_S) == [0, 1, 2]
    assert calls == [offset]
    assert pool.read(range(20, 23)) == pool.read(range(3))
    shorter = [page[:1] for page in pool.pages(range(20, 28))]
    assert reader.read(keys(8), shorter, runs, LATER_S) == []


def test_neighbouring_slots_of_pages_with_many_parts_are_read(
    of_slots, pool, opened, tmp_path, until
):
    """One call takes 1,024 parts."""
    base, parts, taken = pool.page(0)[0][0], 300, keys(8)

    def placed(at):
        return [[(base + at + 4 * (parts * i + j), 3) for j in range(parts)] for i in range(8)]

    pool.fill(range(64))
    source, target = placed(0), placed(64000)
    store = opened(disk(tmp_path))
    assert all(store.save(taken, source))
    until(lambda: store.num_leading(taken) == 8)
    slots_in(tmp_path)
    (run,) = places_of(store, taken)
    reader = CachedFiles(**store._client.tiers["disk"].in_place)
    assert reader.read(taken, target, [run], LATER_S) == [*range(8)]
    content = [[[ctypes.string_at(*part) for part in page] for page in p] for p in (source, target)]
    assert content[0] == content[1]


def test_a_server_that_is_late_to_say_where_pages_are_gets_an_order_for_them(
    form, pool, opened, stored, sent, tmp_path, monkeypatch
):
    store = stored(opened(disk(tmp_path)))
    client, messages = store._client, sent(store)
    late = []
    monkeypatch.setattr(reads_in_place, "LATE_S", 0.01)
    monkeypatch.setattr(client.in_place, "answered", late.append)
    assert store.load(keys(8), pool.pages(range(20, 28))) == [True] * 8
    assert pool.read(range(20, 28)) == pool.read(range(8))
    assert [order.keys for order in of(messages, Load)] == [keys(8)]
    monkeypatch.undo()
    client.in_place.answered(late[0])  # of a question that is given up
    assert client.in_place._asked == {}


def test_a_question_ends_with_the_time_of_its_call(pool, opened, stored, tmp_path, monkeypatch):
    monkeypatch.setattr(reads_in_place, "LATE_S", LATER_S)
    in_place = (store := stored(opened(disk(tmp_path))))._client.in_place
    monkeypatch.setattr(in_place, "answered", lambda answer: None)
    assert in_place.places(store._client.tiers["disk"], keys(8), time.monotonic()) == []


def test_a_server_that_reads_nothing_is_not_asked(
    pool, opened, stored, sent, tmp_path, monkeypatch
):
    store = stored(opened(disk(tmp_path)))
    messages = sent(store)
    monkeypatch.setattr(link, "CLOGGED_BYTES", -1)
    assert places_of(store, keys(8)) == []
    assert of(messages, Locate) == []


def test_a_root_that_others_may_change_is_not_read(pool, opened, stored, tmp_path):
    store = stored(opened(disk(tmp_path)))
    backend = store._client._peer.session._stores["disk"].backend
    assert len(backend.places(keys(8))) == 8
    backend._store.root.refusal = "others may change it"
    assert backend.places(keys(8)) == []


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_a_question_ends_with_its_server(pool, opened, stored, tmp_path, monkeypatch, until, end):
    monkeypatch.setattr(reads_in_place, "LATE_S", LATER_S)
    store = stored(opened(disk(tmp_path), io="process", load_timeout_s=8))
    client, answers = store._client, []
    os.kill(client._peer.pid, signal.SIGSTOP)
    load = partial(store.load, keys(8), pool.pages(range(20, 28)), LATER_S)
    thread = threading.Thread(target=lambda: answers.append(load()), daemon=True)
    thread.start()
    until(lambda: client.in_place._asked)
    if end == "killed":
        os.kill(client._peer.pid, signal.SIGKILL)
    else:
        client.close(0.1)
    thread.join(30)
    (loaded,) = answers
    # Not by the question: a new process may be there in time for an order.
    assert loaded == [end == "killed" and all(loaded)] * 8


def test_no_server_is_asked_when_there_is_none(pool, opened, stored, sent, tmp_path):
    store = stored(opened(disk(tmp_path)))
    tier, messages = store._client.tiers["disk"], sent(store)
    store.close()
    assert store._client.in_place.places(tier, keys(8), LATER_S) == []
    assert of(messages, Locate) == []


@pytest.mark.parametrize("change", ["clear", "new weights"])
def test_where_pages_were_before_a_change_is_not_where_they_are_read(
    form, pool, opened, stored, sent, tmp_path, monkeypatch, change
):
    store = stored(opened(disk(tmp_path)))
    in_place = store._client.in_place
    places = in_place.places

    def answer_and_change(*asked):
        found = places(*asked)
        assert sum(run[1] for run in found) == 8
        if change == "clear":
            store.clear()
        else:
            store.bar()
            store.begin_generation("1 of this start")
        monkeypatch.undo()
        pool.fill(range(8), seed=1)
        stored(store)
        return found

    monkeypatch.setattr(in_place, "places", answer_and_change)
    messages = sent(store)
    found = store.load(keys(8), pool.pages(range(20, 28)))
    assert of(messages, Used) == []
    if found != [False] * 8:  # the server loads what has been stored since
        assert (change, found) == ("clear", [True] * 8)
        assert pool.read(range(20, 28)) == pool.read(range(8))
    assert store.load(keys(8), pool.pages(range(20, 28))) == [True] * 8
    assert pool.read(range(20, 28)) == pool.read(range(8))


def test_engines_read_in_place_what_the_other_stores_while_chunks_leave(
    opened, tmp_path, monkeypatch
):
    """Pages of three lengths, as files and in slots, in threads of two engines on one root."""
    lengths, num_keys, read_from = (4096, PAGE, 100), 240, Counter()
    options = disk(tmp_path, capacity="640KiB", high_watermark=0.9, low_watermark=0.8)
    stores = [opened(options), opened(options)]
    read_piece = CachedFiles._read

    def counted(self, fd, piece, *asked):
        loaded = read_piece(self, fd, piece, *asked)
        read_from["slots" if piece.slot_bytes else "files"] += len(loaded)
        return loaded

    monkeypatch.setattr(CachedFiles, "_read", counted)

    def key_of(i):
        return f"key {i:3}".encode().ljust(OF_FILES if i // 40 % 2 else OF_SLOTS, b".")

    def content(i):
        return random.Random(i).randbytes(lengths[i // 20 % 3])

    wrong = []

    def work(number):
        chosen, store = random.Random(number), stores[number % 2]
        pool = Pool((1000, 3096), 16)
        for _ in range(150):
            first = chosen.randrange(num_keys - 16)
            taken = range(first, first + chosen.randrange(1, 17))
            pages = []
            for page, i in zip(pool.pages(range(16)), taken, strict=False):
                cut = [(page[0][0], min(1000, len(content(i))))]
                if (rest := len(content(i)) - 1000) > 0:
                    cut.append((page[1][0], rest))
                pages.append(cut)
            names = [key_of(i) for i in taken]
            pool.fill(range(16), seed=chosen.random())
            if not store.num_leading(names[:1]) or chosen.random() < 0.1:
                for page, i in zip(pages, taken, strict=True):
                    done = 0
                    for address, size in page:
                        ctypes.memmove(address, content(i)[done : done + size], size)
                        done += size
                store.save(names, pages)
            for page, i, fine in zip(pages, taken, store.load(names, pages), strict=True):
                found = b"".join(ctypes.string_at(*part) for part in page)
                if fine and found != content(i):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert read_from["files"] > 100
    events = stores[0].figures.by_event()
    if probe_holes(Vfs(), str(tmp_path / "probe")) is None:
        assert read_from["slots"] > 100
    assert any("evict" in event or "overwritten" in event for event in events), events


def test_a_page_of_another_namespace_is_a_miss(form, pool, opened, stored, tmp_path):
    store = stored(opened(disk(tmp_path)))
    other = stored(opened(disk(tmp_path), facts={"model": "other"}), 1, 900)
    theirs, ours = reader_of(other), reader_of(store)
    theirs.known = ours.known
    assert read(theirs, pool) == []
    assert read(ours, pool) == [*range(8)]


def test_an_expired_page_is_a_miss(form, pool, opened, stored, tmp_path, monkeypatch, until):
    store = stored(opened(disk(tmp_path, ttl_s=1000)))
    assert read(reader_of(store), pool) == [*range(8)]
    now_ns = expiry.now_ns() + 900 * 10**9
    monkeypatch.setattr(expiry, "now_ns", lambda: now_ns)
    assert all(store.load(keys(5), pool.pages(range(20, 25))))
    assert all(store.load(keys(2, 6), pool.pages(range(20, 22))))
    until(lambda: places_of(store, keys(1)) != [])
    now_ns += 101 * 10**9
    assert read(reader_of(store), pool) == [0, 1, 2, 3, 4, 6, 7]
    assert read(reader_of(store), pool) == [0, 1, 2, 3, 4, 6, 7], "a look is no use"
    answers = [True] * 5 + [False] + [True] * 2
    assert store.load(keys(8), pool.pages(range(20, 28))) == answers


@pytest.mark.parametrize("kind", ["encrypted", "direct"])
def test_a_tier_that_is_encrypted_or_reads_directly_is_left_to_the_server(
    form, pool, opened, stored, sent, tmp_path, kind
):
    if kind == "encrypted":
        pytest.importorskip("cryptography")
        secret = tmp_path / "secret"
        secret.write_text(secrets.token_hex(32))
        secret.chmod(0o600)
        tier = disk(tmp_path / "kv", encryption={"key_file": str(secret)})
    else:
        tier = disk(tmp_path / "kv", io="direct")
    store = stored(opened(tier))
    messages = sent(store)
    assert store._client.tiers["disk"].in_place == {}
    assert store.load(keys(8), pool.pages(range(20, 28))) == [True] * 8
    assert pool.read(range(20, 28)) == pool.read(range(8))
    assert of(messages, Load) != []
    assert of(messages, Used) == []


def test_a_view_of_a_shared_store_is_left_to_its_server():
    assert not issubclass(StoreView, ReadInPlace)


def test_pages_that_are_not_cached_are_loaded_by_the_server(
    pool, opened, stored, sent, tmp_path, monkeypatch
):
    store = stored(opened(disk(tmp_path)))
    chunks = stored_in(tmp_path)
    for chunk in chunks[4:]:
        fd = os.open(chunk.path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        is_there = file_calls.is_cached(fd, 4096)
        os.close(fd)
        if is_there:
            pytest.skip("this file system keeps what it is told to forget")
    messages, asked, read_cached = sent(store), [], Vfs.read_cached

    def counted(*args):
        asked.append(args)
        return read_cached(*args)

    monkeypatch.setattr(Vfs, "read_cached", staticmethod(counted))
    assert store.load(keys(8), pool.pages(range(20, 28))) == [True] * 8
    assert len(asked) == 4, "a read of what is not cached begins to read ahead"
    assert pool.read(range(20, 28)) == pool.read(range(8))
    assert [order.keys for order in of(messages, Load)] == [keys(4, 4)]
    assert [told.keys for told in of(messages, Used)] == [keys(4)]


def test_slots_that_are_not_cached_are_not_read(
    of_slots, pool, opened, stored, tmp_path, monkeypatch
):
    store = stored(opened(disk(tmp_path)))
    (slots,) = slots_in(tmp_path)
    fifth = stored_in(tmp_path)[4]
    with open(slots, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), fifth.offset, 0, os.POSIX_FADV_DONTNEED)
        if file_calls.is_cached(file.fileno(), 4096, fifth.offset):
            pytest.skip("this file system keeps what it is told to forget")
        assert file_calls.is_cached(file.fileno(), 4096)
    asked = []
    monkeypatch.setattr(Vfs, "read_cached", staticmethod(lambda *args: asked.append(args)))
    assert read(reader_of(store), pool, 4, 4) == []
    assert asked == [], "such a read begins to read ahead"


def test_after_some_misses_in_a_row_no_further_page_is_tried(pool, opened, stored, monkeypatch):
    tried = []

    def miss(*asked):
        tried.append(asked)
        return []

    reader = CachedFiles(b"/", *root_of("/"), "00" * 32)
    asked = keys(8), pool.pages(range(8)), [Run(i, 1, f"{i}", 0, 0) for i in range(8)]
    monkeypatch.setattr(reader, "_read", miss)
    assert reader.read(*asked, LATER_S) == []
    assert len(tried) == MOST_MISSES
    tried.clear()
    monkeypatch.setattr(reader, "_read", lambda *a: miss(*a) or [len(tried) - 1][len(tried) % 4 :])
    assert reader.read(*asked, LATER_S) == [3, 7]
    assert reader.read(*asked, time.monotonic()) == [], "it is late"


class Broken:
    """Reads more than it was asked for."""

    def __init__(self, place):
        self.place = place

    def read(self, asked, pages, places, until_s):
        return [len(asked)]


def root_of(path):
    facts = os.stat(path)
    return facts.st_dev, facts.st_ino


def test_a_clear_while_pages_are_read_makes_them_misses(
    form, pool, opened, stored, tmp_path, monkeypatch
):
    store = stored(opened(disk(tmp_path)))
    original = CachedFiles.read

    def read_and_clear(*asked):
        loaded = original(*asked)
        assert loaded == [*range(8)]
        store.clear()
        return loaded

    monkeypatch.setattr(CachedFiles, "read", read_and_clear)
    assert store.load(keys(8), pool.pages(range(20, 28))) == [False] * 8
    monkeypatch.undo()
    stored(store)
    assert store.load(keys(8), pool.pages(range(20, 28))) == [True] * 8


def test_new_weights_while_pages_are_read_make_them_misses(
    form, pool, opened, stored, sent, tmp_path, monkeypatch
):
    store = stored(opened(disk(tmp_path)))
    original = CachedFiles.read

    def read_and_change(*asked):
        loaded = original(*asked)
        store.bar()
        store.begin_generation("1 of this start")
        return loaded

    monkeypatch.setattr(CachedFiles, "read", read_and_change)
    assert store.load(keys(8), pool.pages(range(20, 28))) == [False] * 8
    monkeypatch.undo()
    assert store.load(keys(8), pool.pages(range(20, 28))) == [False] * 8
    pool.fill(range(8), seed=1)
    stored(store)  # under the new namespace; that of before has other bytes
    messages = sent(store)
    assert store.load(keys(8), pool.pages(range(20, 28))) == [True] * 8
    assert pool.read(range(20, 28)) == pool.read(range(8))
    assert of(messages, Load) == []


@pytest.mark.parametrize("asks", [False, True])
def test_a_page_that_is_not_listed_is_not_read_in_place(
    form, pool, opened, stored, sent, tmp_path, asks
):
    store = stored(opened(disk(tmp_path), asks=asks))
    tier = store._client.tiers["disk"]
    store._lookup.forget(tier, tier.listing, keys(1, 2))
    messages = sent(store)
    answers = store.load(keys(8), pool.pages(range(20, 28)))
    # A process that reads what another one stores asks the server for what is not listed.
    assert answers == [True] * 2 + [asks] + [True] * 5
    assert [told.keys for told in of(messages, Used)] == [keys(2) + keys(5, 3)]


def test_a_tier_that_is_opened_again_has_no_reader_before_its_listing_counts():
    seen = []

    def note(tier, count):
        tier.__dict__["count"] = count
        seen.append(tier.__dict__.get("in_place"))

    class Watched(RemoteTier):
        listing = property(lambda tier: tier.__dict__["count"], note)

    tier = Watched("disk", 1.0, lambda: None)
    tier.opened(True, True, {"root": b"/"})
    assert tier.in_place == {"root": b"/"}
    tier.reset()
    assert tier.in_place == seen[-1] == {}


@pytest.mark.parametrize("call", ["open_cached", "read_cached"])
def test_a_kernel_that_would_wait_once_has_the_calls(
    pool, opened, stored, sent, tmp_path, monkeypatch, call
):
    def would_wait(*args):
        raise BlockingIOError(errno.EAGAIN, "it would wait")

    with monkeypatch.context() as patched:
        patched.setattr(Vfs, call, staticmethod(would_wait))
        store = opened(disk(tmp_path))
    stored(store)
    messages = sent(store)
    assert store.load(keys(8), pool.pages(range(20, 28))) == [True] * 8
    assert of(messages, Load) == []


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("open_cached", errno.ENOSYS),
        ("open_cached", errno.EINVAL),
        ("open_cached", errno.EPERM),
        ("read_cached", errno.EOPNOTSUPP),
    ],
)
def test_a_kernel_or_file_system_without_the_calls_is_asked_once(
    pool, opened, stored, sent, tmp_path, monkeypatch, call, number
):
    asked = []

    def refuse(*args):
        asked.append(args)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(Vfs, call, staticmethod(refuse))
        store = opened(disk(tmp_path))
    stored(store)
    assert len(asked) == 1
    assert store._client.tiers["disk"].in_place == {}
    messages = sent(store)
    assert store.load(keys(8), pool.pages(range(20, 28))) == [True] * 8
    assert len(of(messages, Load)) == 1
    assert pool.read(range(20, 28)) == pool.read(range(8))


def test_a_file_system_without_such_reads_is_not_asked_to_open_a_file_so(
    opened, tmp_path, monkeypatch
):
    """Its server might hang then, and the call keeps the GIL: the engine would stop."""
    asked, open_cached = [], Vfs.open_cached

    def refuse(*args):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    def noted(*args):
        asked.append(args)
        return open_cached(*args)

    monkeypatch.setattr(Vfs, "read_cached", staticmethod(refuse))
    monkeypatch.setattr(Vfs, "open_cached", staticmethod(noted))
    assert opened(disk(tmp_path))._client.tiers["disk"].in_place == {}
    assert asked == []


def test_names_that_the_kernel_has_not_in_memory_are_left_to_the_server(
    pool, opened, stored, sent, tmp_path, monkeypatch
):
    store = stored(opened(disk(tmp_path)))

    def would_wait(*call):
        raise BlockingIOError(errno.EAGAIN, "it would wait")

    with monkeypatch.context() as patched:
        patched.setattr(Vfs, "open_cached", staticmethod(would_wait))
        assert store.load(keys(8), pool.pages(range(20, 28))) == [True] * 8
    messages = sent(store)
    assert store.load(keys(8), pool.pages(range(20, 28))) == [True] * 8
    assert of(messages, Load) == [], "it is tried again"


def test_the_next_tier_is_asked_for_what_the_first_one_lost(
    form, pool, opened, stored, sent, tmp_path
):
    store = stored(opened(disk(tmp_path / "a"), disk(tmp_path / "b")))
    for chunk in stored_in(tmp_path / "a")[:3]:
        chunk.wipe()
    messages = sent(store)
    assert store.load(keys(8), pool.pages(range(20, 28))) == [True] * 8
    assert pool.read(range(20, 28)) == pool.read(range(8))
    told = [(each.tier, each.keys) for each in of(messages, Used)]
    assert told == [("disk", keys(5, 3)), ("disk1", keys(3))]
    assert [order.keys for order in of(messages, Load)] == [keys(3)]


def test_another_folder_under_the_roots_name_is_not_read(form, pool, opened, stored, tmp_path):
    root = tmp_path / "kv"
    store = stored(opened(disk(root)))
    reader = reader_of(store)
    assert read(reader, pool) == [*range(8)]
    root.rename(tmp_path / "old")
    assert read(reader, pool) == []
    shutil.copytree(tmp_path / "old", root)
    assert read(reader, pool) == []
    shutil.rmtree(root)
    root.symlink_to(tmp_path / "old")
    assert read(reader, pool) == []


def test_a_mount_over_the_root_that_hangs_is_not_asked(tmp_path):
    root = tmp_path / "kv"
    root.mkdir()
    reader, answers = CachedFiles(bytes(root), *root_of(root), "00" * 32), []
    asked = keys(1), [[]], [Run(0, 1, "a", 0, 0)], LATER_S
    thread = threading.Thread(target=lambda: answers.append(reader.read(*asked)), daemon=True)
    with hung_mount(root):
        thread.start()
        thread.join(5)
        assert answers == [[]]


@pytest.mark.parametrize("of_them", ["none", "read"])
def test_pages_of_a_plug_in_without_a_right_reader_are_loaded_by_the_server(
    pool, opened, stored, sent, caplog, plug_in, of_them
):
    class Theirs(MemoryBackend):
        reader = Broken if of_them == "read" else None
        used = list

        def in_place(self):
            return {"place": 1}

        def places(self, keys):
            return [0]

    plug_in("mine", Theirs)
    store = stored(opened({"type": "mine", "capacity": "1MiB"}, {"type": "memory"}))
    messages = sent(store)
    assert store.load(keys(8), pool.pages(range(20, 28))) == [True] * 8
    assert pool.read(range(20, 28)) == pool.read(range(8))
    assert [order.keys for order in of(messages, Load)] == [keys(8)]
    assert [line for line in caplog.messages if line.startswith("mine: reads in place failed: ")]


def test_no_link_is_followed(form, pool, opened, stored, tmp_path):
    store = stored(opened(disk(tmp_path / "kv")))
    chunk, *_ = stored_in(tmp_path / "kv")
    aside = tmp_path / "aside"
    os.rename(chunk.path, aside)
    chunk.path.symlink_to(aside)
    assert 0 not in read(reader_of(store), pool)
    chunk.path.unlink()
    os.rename(aside, chunk.path)
    assert read(reader_of(store), pool) == [*range(8)]
    shard = chunk.path.parent
    os.rename(shard, aside)
    shard.symlink_to(aside)
    assert 0 not in read(reader_of(store), pool)


@pytest.mark.parametrize("part", ["namespace", "shard", "file"])
def test_a_mount_below_the_root_is_not_entered(form, pool, opened, stored, tmp_path, part):
    """The call that opens a file keeps the GIL, and the server of such a mount might hang in it."""
    reader = reader_of(stored(opened(disk(tmp_path / "kv"))))
    chunk, *_ = stored_in(tmp_path / "kv")
    place = {"file": chunk.path, "shard": chunk.path.parent, "namespace": chunk.path.parent.parent}
    assert read(reader, pool) == [*range(8)]
    with bind_mount(place[part]):
        assert 0 not in read(reader, pool)
    assert read(reader, pool) == [*range(8)]


def test_a_forked_child_reads_nothing(form, pool, opened, stored, tmp_path):
    reader = reader_of(stored(opened(disk(tmp_path))))
    if (child := os.fork()) == 0:
        os._exit(len(read(reader, pool)))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert read(reader, pool) == [*range(8)]


def test_nothing_stays_open(form, pool, opened, stored, tmp_path):
    store = stored(opened(disk(tmp_path)))
    reader = reader_of(store)
    stored_in(tmp_path)[2].flip(-1)
    store.close()  # its threads open files as well
    assert len(read(reader, pool)) == 7
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        read(reader, pool, 8)
        read(reader, pool, 8, 900)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_read_leaves_the_access_time_as_it_is(pool, opened, stored, tmp_path):
    reader = reader_of(stored(opened(disk(tmp_path))))
    chunks = stored_in(tmp_path)
    for chunk in chunks:
        os.utime(chunk.path, (1, 2))
    assert read(reader, pool) == [*range(8)]
    assert {os.stat(chunk.path).st_atime for chunk in chunks} == {1}


def test_stores_of_a_server_without_a_tier_of_files_are_not_asked(pool, opened, stored, sent):
    store = stored(opened({"type": "memory", "capacity": "1MiB"}))
    messages = sent(store)
    assert store.load(keys(8), pool.pages(range(20, 28))) == [True] * 8
    assert len(of(messages, Load)) == 1
    assert of(messages, Used) == of(messages, Store) == []
