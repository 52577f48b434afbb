"""Stores, loads, overwriting and preemption in any order: no request ever gets another's bytes.

A small engine computes on another stream, a thread with pauses, as a GPU does; copies pause too. It
checks every block of a load. Then tests remove each safeguard of the order, and the same walk must
find wrong blocks.
"""

import hashlib
import queue
import random
import threading
import time

import pytest

from kvoffload.connectors.local import LocalConnector
from kvoffload.offload.base import StoreJob
from kvoffload.transfer.base import CopyFence
from kvoffload.transfer.cpu.copier import CpuCopier
from kvoffload.transfer.engine import EngineJob

BLOCK_SIZE, BLOCKS_A_REQUEST, NUM_BLOCKS, NUM_SLOTS = 4, 3, 12, 8
NUM_WALKS = 1000
UNTIL_WRONG = 20 * NUM_WALKS
"""A walk ends with the first wrong block; threads decide when that is, seldom after the 500th."""
PAUSES_S = (0, 0, 0, 0.0002, 0.001)


class PointInStream:
    """Done when the stream has come to it."""

    error = None

    def __init__(self):
        self._event = threading.Event()

    def done(self):
        return self._event.is_set()

    def wait(self, timeout_s=None):
        return self._event.wait(timeout_s)

    def reach(self):
        self._event.set()


class Stream:
    """Runs its work in order, on a thread, now and then late."""

    def __init__(self, rng):
        self._rng = rng
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def put(self, work):
        self._queue.put(work)

    def fence(self):
        point = PointInStream()
        self._queue.put(point.reach)
        return point

    def close(self):
        self._queue.put(None)
        self._thread.join()

    def _run(self):
        while (work := self._queue.get()) is not None:
            time.sleep(self._rng.choice(PAUSES_S))
            work()


class Engine:
    """Gives blocks to requests, computes what no load brings, and checks what loads bring."""

    def __init__(self, kv_caches, new_request, rng):
        self.tensors = [entry.tensor for entry in kv_caches.tensors]
        settings = {"cpu_bytes": NUM_SLOTS * 4096, "blocks_per_chunk": 1}
        self.connector = LocalConnector(
            settings, kv_caches, block_size=BLOCK_SIZE, facts={"of": "test"}
        )
        self.stream = Stream(random.Random(rng.random()))
        self.wrong = 0
        self.loaded = 0
        self._new_request, self._rng = new_request, rng
        self._free = list(range(NUM_BLOCKS))
        self._running, self._loading = [], {}
        self._count = 0

    def begin(self):
        """Admit a request with one of few prompts."""
        if len(self._free) < BLOCKS_A_REQUEST + 1:
            return
        self._rng.shuffle(self._free)
        self._count += 1
        tokens = BLOCKS_A_REQUEST * BLOCK_SIZE + 1
        name = f"prompt {self._rng.randrange(6)}"
        request = self._new_request(name, tokens, BLOCK_SIZE, request_id=str(self._count))
        num_external = self.connector.get_num_new_matched_tokens(request, 0)
        blocks = [self._free.pop() for _ in range(BLOCKS_A_REQUEST)]
        if num_external:
            self._loading[request.request_id] = (request, blocks, True)
            self.connector.update_state_after_alloc(request, (blocks,), num_external)
        else:
            self._compute(request, blocks, 0)

    def poll(self):
        for outcome in self.connector.poll():
            if outcome.request_id not in self._loading:
                continue  # ended, and its blocks free, before the outcome of its load was known
            request, blocks, wanted = self._loading.pop(outcome.request_id)
            if not wanted:
                self._free.extend(blocks)
                continue
            done = outcome.num_loaded_tokens // BLOCK_SIZE
            self.loaded += done
            for i in range(done):
                # In the stream, so that blocks are read some time after they were promised.
                self.stream.put(lambda block=blocks[i], i=i, r=request: self._check(block, r, i))
            self._compute(request, blocks, done)

    def end(self):
        """Preempt or finish any request, also one that is loading."""
        if self._loading and self._rng.random() < 0.3:
            request, blocks, wanted = self._rng.choice(list(self._loading.values()))
            if wanted:
                del self._loading[request.request_id]
                if self.connector.request_finished(request):
                    self._loading[request.request_id] = (request, blocks, False)
                else:
                    self._free.extend(blocks)
        elif self._running:
            request, blocks = self._running.pop(self._rng.randrange(len(self._running)))
            self.connector.request_finished(request)
            self._free.extend(blocks)

    def close(self):
        while self._loading:
            self.poll()
        self.connector.close()
        self.stream.close()

    def _compute(self, request, blocks, done):
        self.connector.before_forward(blocks[done:])
        for i in range(done, BLOCKS_A_REQUEST):
            self.stream.put(lambda i=i: self._write(blocks[i], request, i))
        self.connector.after_forward(request, (blocks,), BLOCKS_A_REQUEST * BLOCK_SIZE)
        self._running.append((request, blocks))

    def _write(self, block, request, i):
        for tensor in self.tensors:
            tensor[block] = self._value(request, i)

    def _check(self, block, request, i):
        expected = self._value(request, i)
        self.wrong += any(bool((tensor[block] != expected).any()) for tensor in self.tensors)

    @staticmethod
    def _value(request, i):
        return hashlib.sha256(request.block_hashes[i]).digest()[0] - 128


@pytest.fixture
def walk(new_kv_caches, new_request, monkeypatch):
    """Make ``walk(count)``: that many random interleavings; returns the engine, closed."""
    copy = CpuCopier._copy
    rng = random.Random(11)
    pauses = random.Random(12)

    def late(self, *given):
        time.sleep(pauses.choice(PAUSES_S))
        copy(self, *given)

    monkeypatch.setattr(CpuCopier, "_copy", late)
    caches = new_kv_caches(num_blocks=NUM_BLOCKS, page_bytes=(64, 64))
    engine = Engine(caches, new_request, rng)
    fence = engine.stream.fence
    monkeypatch.setattr(CpuCopier, "record_fence", lambda _: fence())

    def run(count):
        try:
            for _ in range(count):
                for step in rng.choices([engine.begin, engine.poll, engine.end], [3, 4, 2], k=6):
                    step()
                    time.sleep(rng.choice(PAUSES_S))
                if engine.wrong:
                    break
        finally:
            engine.close()
        return engine

    return run


def test_a_thousand_interleavings_bring_every_request_its_own_bytes(walk):
    engine = walk(NUM_WALKS)
    assert engine.wrong == 0
    assert engine.loaded > 100
    engine.connector.check()


@pytest.fixture
def slow_copies(monkeypatch):
    """Copies that have seldom ended when their blocks are reused."""
    copy = CpuCopier._copy

    def slowly(self, *given):
        time.sleep(0.003)
        copy(self, *given)

    monkeypatch.setattr(CpuCopier, "_copy", slowly)


def test_without_waiting_for_copies_the_next_pass_overwrites_what_is_being_stored(
    walk, slow_copies, monkeypatch
):
    monkeypatch.setattr(LocalConnector, "before_forward", lambda self, blocks: None)
    assert walk(UNTIL_WRONG).wrong


def blocks_of_preempted_loads_are_given_away(monkeypatch):
    finished = LocalConnector.request_finished

    def never_says_so(self, request):
        finished(self, request)
        return False

    monkeypatch.setattr(LocalConnector, "request_finished", never_says_so)


def test_blocks_of_a_preempted_load_given_away_too_soon_are_still_waited_for(walk, monkeypatch):
    """An engine that ignores the answer of request_finished waits longer, and no more."""
    blocks_of_preempted_loads_are_given_away(monkeypatch)
    engine = walk(NUM_WALKS)
    assert engine.wrong == 0
    assert engine.loaded > 100


def test_blocks_of_a_preempted_load_that_nobody_waits_for_are_written_by_two(
    walk, slow_copies, monkeypatch
):
    blocks_of_preempted_loads_are_given_away(monkeypatch)

    def wait_for_stores_alone(self, blocks):
        jobs = self._transfers.jobs.using(blocks)
        self._worker.wait({i for i in jobs if isinstance(self._transfers.jobs[i], StoreJob)})

    monkeypatch.setattr(LocalConnector, "before_forward", wait_for_stores_alone)
    assert walk(UNTIL_WRONG).wrong


def test_without_a_fence_on_the_engines_stream_copies_come_before_compute(walk, monkeypatch):
    done = CopyFence()
    done.reach()
    monkeypatch.setattr(CpuCopier, "record_fence", lambda _: done)
    assert walk(UNTIL_WRONG).wrong


def test_without_waiting_for_the_copys_end_slots_are_used_again_too_soon(walk, monkeypatch):
    monkeypatch.setattr(EngineJob, "done", lambda self: True)
    assert walk(UNTIL_WRONG).wrong
