"""Blocking work on threads: batches, errors, closing, and stuck threads."""

import asyncio
import threading
import time
import weakref

import pytest
from disk_parts import until

from kvoffload.backends import blocking_pool
from kvoffload.backends.blocking_pool import ITEMS_PER_TURN, BlockingPool, run_once
from kvoffload.backends.threaded import ThreadPoolBackend


@pytest.fixture
def stalls():
    """Calls of ``on_stall``: the number of items, and whether the call was a stall's first."""
    return []


@pytest.fixture
def make(stalls, closing):
    class Pool(BlockingPool):
        async def fill(self, answers, work, **options):
            await super().fill(answers, work, lambda *call: stalls.append(call), **options)

    def made(threads=2, stall_s=60.0):
        return closing(Pool("pool", threads, stall_s))

    return made


class Stuck:
    """Work that returns only after ``go_on``; lists every item begun."""

    def __init__(self):
        self.begun, self.go_on = [], threading.Event()

    def __call__(self, i):
        self.begun.append(i)
        self.go_on.wait()
        return True


async def test_every_item_of_a_batch_is_done_once_and_answered_in_its_place(make):
    pool, done = make(3), []

    def work(i):
        done.append(i)
        return i % 3 == 0

    answers = [False] * 50
    await pool.fill(answers, work)
    assert sorted(done) == list(range(50))
    assert answers == [i % 3 == 0 for i in range(50)]
    await pool.fill([], work)
    assert len(done) == 50


async def test_items_are_begun_in_order_on_as_many_threads_as_there_are(make):
    pool, stuck = make(2), Stuck()
    answers = [False] * 5
    filling = asyncio.ensure_future(pool.fill(answers, stuck))
    assert await until(lambda: len(stuck.begun) == 2)
    await asyncio.sleep(0.05)
    assert sorted(stuck.begun) == [0, 1]
    assert not filling.done()
    stuck.go_on.set()
    await filling
    assert (answers, sorted(stuck.begun)) == ([True] * 5, [0, 1, 2, 3, 4])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("is_quick", [False, True])
async def test_a_batch_of_thousands_of_items_has_turns_with_those_behind_it(
    make, threads, is_quick
):
    pool, may_begin, done = make(threads), threading.Event(), []

    def work(name):
        def one(i):
            may_begin.wait()
            done.append(name)
            return True

        return one

    large, small = [False] * 20 * ITEMS_PER_TURN, [False] * 10
    first = asyncio.ensure_future(pool.fill(large, work("large")))
    assert await until(lambda: pool._begun[0] is not None)
    second = asyncio.ensure_future(pool.fill(small, work("small"), is_quick=is_quick))
    await asyncio.sleep(0)
    may_begin.set()
    await asyncio.gather(first, second)
    assert all(large)
    assert all(small)
    before = len(done) - 1 - done[::-1].index("small") - len(small) + 1
    assert before <= 3 * ITEMS_PER_TURN, "they waited for the large one"


async def test_a_pool_that_closes_ends_a_batch_that_passes_its_turn(make):
    pool, stuck, done = make(1), Stuck(), []

    def work(i):
        done.append(i)
        if len(done) == 1:
            stuck(i)
        return True

    large = [False] * 2 * ITEMS_PER_TURN
    first = asyncio.ensure_future(pool.fill(large, work))
    assert await until(lambda: stuck.begun)
    second = asyncio.ensure_future(pool.fill([False], work))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(run_once(pool.close))
    assert await until(lambda: pool._closed)
    stuck.go_on.set()
    await asyncio.gather(first, second)
    assert len(done) == ITEMS_PER_TURN
    assert await closing


@pytest.mark.parametrize("is_quick", [False, True])
async def test_an_ended_batch_leaves_no_reference(make, is_quick):
    """The work of a batch refers to memory of the engine."""
    pool = make(2)

    class Work:
        def __call__(self, i):
            return True

    work = Work()
    kept = weakref.ref(work)
    await asyncio.gather(*(pool.fill([False] * 4, work, is_quick=is_quick) for _ in range(3)))
    del work
    assert await until(lambda: kept() is None)


async def test_an_error_of_one_item_is_raised_when_the_others_have_ended(make):
    pool, done = make(2), []

    def work(i):
        done.append(i)
        if i == 1:
            raise ValueError("item 1")
        return True

    answers = [False] * 6
    with pytest.raises(ValueError, match="item 1"):
        await pool.fill(answers, work)
    assert sorted(done) == list(range(6))
    assert answers == [True, False, True, True, True, True]
    await pool.fill(answers, lambda i: True)  # the threads live on
    assert answers == [True] * 6


async def test_a_cancelled_batch_ends_the_items_begun_and_begins_no_more(make):
    pool, stuck = make(2), Stuck()
    answers = [False] * 5
    filling = asyncio.ensure_future(pool.fill(answers, stuck))
    assert await until(lambda: len(stuck.begun) == 2)
    for _ in range(2):
        filling.cancel()
        await asyncio.sleep(0.02)
    assert not filling.done()
    stuck.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await filling
    assert (answers, len(stuck.begun)) == ([True, True, False, False, False], 2)


async def test_a_closed_pool_does_nothing_and_reports_that_all_threads_ended(make):
    pool, done = make(2), []
    assert pool.close()
    answers = [False] * 3
    await pool.fill(answers, done.append)
    assert (answers, done) == ([False] * 3, [])
    assert pool.close()


async def test_closing_gives_up_waiting_items_and_waits_for_items_begun(make):
    pool, stuck = make(1), Stuck()
    first = asyncio.ensure_future(pool.fill([False], stuck))
    assert await until(lambda: stuck.begun == [0])
    answers = [False] * 3
    second = asyncio.ensure_future(pool.fill(answers, stuck))
    await asyncio.sleep(0.02)
    closing = asyncio.ensure_future(asyncio.to_thread(pool.close))
    await asyncio.wait_for(second, 10)
    assert (answers, stuck.begun) == ([False] * 3, [0])
    assert not closing.done()
    stuck.go_on.set()
    assert await closing is True
    await first


async def test_a_callback_that_raises_begins_no_item_and_waits_for_those_begun(closing):
    """An item begun may still write into the caller's memory."""

    called = []

    def broken(*given):
        called.append(given)
        raise KeyError("a bug")

    async def waits(stall_s, callbacks, end):
        pool, stuck = closing(BlockingPool("pool", 1, stall_s)), Stuck()
        filling = asyncio.ensure_future(pool.fill([False] * 3, stuck, *callbacks))
        assert await until(lambda: stuck.begun)
        end(filling)
        assert await until(lambda: called)
        await asyncio.sleep(0.02)
        was_done = filling.done()
        stuck.go_on.set()
        with pytest.raises(KeyError, match="a bug"):
            await filling
        assert (was_done, stuck.begun) == (False, [0])
        called.clear()

    await waits(60.0, (print, broken), lambda filling: filling.cancel())
    await waits(0.05, (broken,), lambda filling: None)


async def test_once_every_thread_is_stuck_the_pool_begins_no_item_and_reports_it(make, stalls):
    pool, stuck = make(2, stall_s=0.5), Stuck()
    assert not pool.stalled()
    one = asyncio.ensure_future(pool.fill([False], stuck))
    assert await until(lambda: stuck.begun == [0])
    await asyncio.sleep(0.7)
    assert not pool.stalled()  # the other thread is free
    answers = [False] * 2
    await pool.fill(answers, lambda i: True)
    assert answers == [True] * 2
    two_answers = [False] * 4
    two = asyncio.ensure_future(pool.fill(two_answers, stuck))
    assert await until(pool.stalled)
    assert await until(lambda: stalls == [(3, True)])
    await asyncio.wait_for(pool.fill([False] * 7, stuck), 10)
    assert stalls == [(3, True), (7, False)]
    assert not pool.close()  # close() does not wait for stuck threads
    stuck.go_on.set()
    await asyncio.gather(one, two)
    assert two_answers == [True, False, False, False]
    assert len(stuck.begun) == 2
    assert not pool.stalled()


async def test_every_stall_has_one_first_report(make, stalls):
    pool = make(1, stall_s=0.05)
    for _ in range(2):
        stuck = Stuck()
        filling = asyncio.ensure_future(pool.fill([False], stuck))
        assert await until(pool.stalled)
        await pool.fill([False] * 2, stuck)
        stuck.go_on.set()
        await filling
    assert stalls == [(2, True), (2, True)]


def test_a_pool_of_which_a_thread_cannot_start_ends_the_others(monkeypatch):
    real, started = threading.Thread.start, []

    def start(thread):
        if len(started) == 2:
            raise RuntimeError("no more threads")
        real(thread)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="no more threads"):
        BlockingPool("pool", 3, 60.0)
    for thread in started:
        thread.join(10)
        assert not thread.is_alive()


# ---- single calls --------------------------------------------------------------------------------


async def test_one_call_runs_on_a_daemon_thread_of_its_own():
    thread, total = await run_once(lambda a, b: (threading.current_thread(), a + b), 2, 3)
    assert (total, thread.daemon, thread is threading.current_thread()) == (5, True, False)
    assert thread.name == "kvoffload-once"
    with pytest.raises(KeyError, match="x"):
        await run_once({}.__getitem__, "x")


async def test_a_call_that_was_cancelled_before_it_began_is_not_made(monkeypatch):
    waiting, called = [], []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lambda thread: waiting.append(thread))
        task = asyncio.ensure_future(run_once(called.append, 1))
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (thread,) = waiting
    thread.start()
    thread.join(10)
    assert called == []


async def test_calls_run_in_parallel():
    go_on = threading.Event()
    waiting = [asyncio.ensure_future(run_once(go_on.wait, 10)) for _ in range(5)]
    await run_once(go_on.set)
    assert await asyncio.wait_for(asyncio.gather(*waiting), 10) == [True] * 5


# ---- quick batches -----------------------------------------------------------------------------


async def test_one_thread_serves_all_quick_batches(make, monkeypatch):
    monkeypatch.setattr(blocking_pool, "QUICK_S", 60)
    pool, threads = make(4), []

    def work(i):
        threads.append(threading.get_ident())
        time.sleep(0.001)
        return True

    batches = [[False] * 8 for _ in range(6)]
    for _ in range(2):
        await asyncio.gather(*(pool.fill(answers, work, is_quick=True) for answers in batches))
        assert batches == [[True] * 8] * 6
    assert len(threads) == 2 * 6 * 8
    # Another thread may begin again once all batches have ended.
    assert len(set(threads[:48])) == len(set(threads[48:])) == 1
    meeting = threading.Barrier(2)

    def meet(i):
        threads.append(threading.get_ident())
        return meeting.wait(60)

    await pool.fill([False] * 8, meet)
    assert len(set(threads[96:])) > 1


async def test_an_item_that_expects_to_wait_brings_the_other_threads(make, monkeypatch):
    monkeypatch.setattr(blocking_pool, "QUICK_S", 60)
    pool, meeting = make(3), threading.Barrier(3)

    def work(i):
        pool.expect_wait()
        meeting.wait(20)
        return True

    answers = [False] * 9
    await asyncio.wait_for(pool.fill(answers, work, is_quick=True), 30)
    assert answers == [True] * 9
    pool.expect_wait()  # of a thread that is none of the pool's: nothing
    meeting.reset()
    answers = [False] * 9
    await asyncio.wait_for(pool.fill(answers, work), 30)
    assert answers == [True] * 9


@pytest.mark.parametrize("items", [1, 4])
async def test_other_threads_serve_what_a_hung_thread_of_quick_batches_has_not_begun(
    make, stalls, items, monkeypatch
):
    pool, stuck = make(2), Stuck()
    hung = asyncio.ensure_future(pool.fill([False] * 2, lambda i: i or stuck(i), is_quick=True))
    assert await until(lambda: stuck.begun == [0])
    later = [[False] * items for _ in range(3)]
    fills = (pool.fill(answers, lambda i: True, is_quick=True) for answers in later)
    await asyncio.wait_for(asyncio.gather(*fills), 20)
    assert later == [[True] * items] * 3
    for quick_s in (blocking_pool.QUICK_S, 60):  # only one batch waits for the hung thread
        monkeypatch.setattr(blocking_pool, "QUICK_S", quick_s)
        answers = [False] * 4
        await asyncio.wait_for(pool.fill(answers, lambda i: True, is_quick=True), 20)
        assert answers == [True] * 4
    assert not hung.done()
    assert not pool._quick
    assert stalls == []
    stuck.go_on.set()
    await hung
    answers = [False] * 4
    await asyncio.wait_for(pool.fill(answers, lambda i: True, is_quick=True), 20)
    assert answers == [True] * 4


async def test_a_quick_batch_that_is_cancelled_before_its_turn_begins_nothing(make, monkeypatch):
    monkeypatch.setattr(blocking_pool, "QUICK_S", 60)
    pool, stuck, done = make(2), Stuck(), []
    hung = asyncio.ensure_future(pool.fill([False] * 2, stuck, is_quick=True))
    assert await until(lambda: stuck.begun == [0])
    waiting = asyncio.ensure_future(pool.fill([False] * 4, done.append, is_quick=True))
    await asyncio.sleep(0.02)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert not pool._quick
    stuck.go_on.set()
    await hung
    assert done == []


async def test_closing_ends_quick_batches_that_wait(make):
    pool, stuck = make(1), Stuck()
    fills = [asyncio.ensure_future(pool.fill([False] * 2, stuck, is_quick=True)) for _ in range(3)]
    assert await until(lambda: len(stuck.begun) == 1)
    closing = asyncio.ensure_future(asyncio.to_thread(pool.close))
    assert await until(lambda: pool._closed)
    stuck.go_on.set()
    assert await closing
    await asyncio.wait_for(asyncio.gather(*fills), 20)


class Runs(ThreadPoolBackend):
    """A backend of one thread, whose work on runs of chunks waits."""

    load = store = has = None

    def __init__(self):
        super().__init__(threads=1, stall_s=0.05)
        self.go_on, self.done = threading.Event(), []

    def work(self, run):
        self.go_on.wait()
        self.done.append(run)
        return list(run)


async def test_a_run_of_chunks_is_one_item_and_counts_all_its_chunks():
    backend, runs = Runs(), [range(2), range(2, 5), range(5, 6)]
    reading = asyncio.ensure_future(backend.run_all("read", runs, backend.work, None))
    assert await until(lambda: backend.counters().get("read_stalled"))
    backend.go_on.set()
    assert await reading == [0, 1, None, None, None, None]
    assert backend.counters()["read_stalled"] == 4
    assert await backend.run_all("read", runs, backend.work, None) == [0, 1, 2, 3, 4, 5]
    assert backend.done == [runs[0], *runs]
    await backend.close()
