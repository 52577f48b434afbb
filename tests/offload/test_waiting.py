"""What queued requests need stays: who keeps how much, who gives way, and what it costs."""

import gc
import random
import tracemalloc

import manager_parts
import pytest
from manager_parts import Store, figures, keys, put, write_through

from kvoffload.offload import claims, needed_chunks, waiting
from kvoffload.offload.base import ReqContext, tenant_id
from kvoffload.offload.claims import QueuedRequest
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.waiting import Place
from kvoffload.policies.handicap import HandicapPolicy
from kvoffload.policies.kept_order import KeptOrder
from kvoffload.testing import PolicySuite
from tests.support.manager_check import check

POLICIES = ["lru", "arc", "handicap"]


class TestKeptOrder(PolicySuite):
    """Without a claim it is the policy that it wraps."""

    def make(self, capacity):
        return KeptOrder(HandicapPolicy(capacity), {b"an absent key": None})


def new_manager(policy="handicap", slots=64, share=0.9, stores=()):
    return manager_parts.new_manager(slots, stores, policy, waiting_share=share)


def queue(manager, name, chunks, tenant=""):
    manager.request_queued(lambda: chunks, ReqContext(name, tenant=tenant_id(tenant)))
    manager.serve_queue()


def kept(manager, chunks):
    return sum(key in manager._host.claims for key in chunks)


def serve(manager, name, chunks):
    """Look a request up, load, compute the rest, store it, and end; return the hits."""
    context = ReqContext(name)
    hits, _ = manager.lookup_prefix(chunks, context)
    manager.touch(chunks, context)
    loaded = manager.begin_load(chunks[:hits], context) if hits else None
    manager.request_admitted(context)
    if loaded:
        manager.complete(loaded, [True] * hits)
    if hits < len(chunks):
        put(manager, chunks[hits:], name=name)
    manager.retire(chunks, context)
    return hits


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.9, 75, 80), (1.0, 75, 80)])
def test_five_sessions_in_memory_for_four_hit_nearly_what_is_possible(policy, share, least, most):
    manager = new_manager(policy, share=share)
    sessions = {f"session{i}": keys(f"session{i}", 16) for i in range(5)}
    hits = 0
    for name, chunks in sessions.items():
        queue(manager, name, chunks)
    for turn in range(20):
        for name, chunks in sessions.items():
            found = serve(manager, name, chunks)
            hits += found if turn > 5 else 0
            queue(manager, name, chunks)
            manager.serve_queue()
            check(manager)
    assert least <= 100 * hits / (16 * 5 * 14) <= most


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_in_the_queue_keep_and_the_last_gives_way(policy):
    manager = new_manager(policy, slots=40, share=1.0)
    first, second = keys("first", 16), keys("second", 16)
    put(manager, first)
    put(manager, second)
    queue(manager, "first", first)
    queue(manager, "second", second)
    # Eight slots are free; then the last in the queue gives way, its tail first.
    evicted = put(manager, keys("running", 12)).evicted_keys
    assert list(evicted) == second[:-5:-1]
    check(manager)
    evicted = put(manager, keys("another", 36)).evicted_keys
    assert set(evicted) >= {*second[:12]}
    assert not set(evicted) & {*first[:4]}
    assert figures(manager)["queue_chunks"]["given_up"] == 4 + 12 + 12
    check(manager)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_preempted_request_keeps_before_those_that_came_later(policy):
    manager = new_manager(policy, slots=40, share=1.0)
    for name in ("preempted", "waits"):
        put(manager, keys(name, 16))
    queue(manager, "waits", keys("waits", 16))
    manager.request_queued(lambda: keys("preempted", 16), ReqContext("preempted"), True)
    manager.serve_queue()
    put(manager, keys("running", 12))
    put(manager, keys("another", 20))
    check(manager)
    assert kept(manager, keys("preempted", 16)) == 16
    assert kept(manager, keys("waits", 16)) == 4
    manager.request_admitted(ReqContext("preempted"))
    assert kept(manager, keys("preempted", 16)) == 0


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_claims_keep_to_their_share_and_the_rest_follows_when_there_is_room(share):
    manager = new_manager(slots=100, share=share)
    prompts = {f"r{i}": keys(f"r{i}", 20) for i in range(5)}
    for chunks in prompts.values():
        put(manager, chunks)
    for name, chunks in prompts.items():
        queue(manager, name, chunks)
        manager.serve_queue()
        check(manager)
    assert len(manager._host.claims) == 100 * share
    left = [*prompts]
    while left:
        manager.request_admitted(ReqContext(left.pop(0)))
        for _ in left:
            manager.serve_queue()
        check(manager)
        assert len(manager._host.claims) == min(100 * share, 20 * len(left))


def test_a_tenant_has_at_most_half_of_the_share_while_others_wait():
    manager = new_manager(slots=100, share=0.8)
    for name in "abcd":
        put(manager, keys(name, 25))
    for name in "abc":
        queue(manager, name, keys(name, 25), tenant="greedy")
    assert len(manager._host.claims) == 75
    queue(manager, "d", keys("d", 25), tenant="other")
    check(manager)
    assert kept(manager, keys("a", 25)) == 25
    assert kept(manager, keys("b", 25)) == 15
    assert kept(manager, keys("d", 25)) == 25
    queue(manager, "e", keys("c", 25), tenant="greedy")
    manager.serve_queue()
    check(manager)
    manager.retire(keys("d", 25), ReqContext("d"))
    for _ in range(3):
        manager.serve_queue()
    check(manager)
    assert len(manager._host.claims) == 75


def test_requests_of_one_tenant_behind_its_limit_do_not_keep_others_from_their_share():
    manager = new_manager(slots=1000, share=0.8)
    for i in range(90):
        put(manager, keys(i, 10))
        queue(manager, f"greedy{i}", keys(i, 10), tenant="greedy")
    put(manager, keys("late", 10))
    queue(manager, "late", keys("late", 10), tenant="other")
    for _ in range(10):
        manager.serve_queue()
    check(manager)
    assert kept(manager, keys("late", 10)) == 10


@pytest.mark.parametrize("end", ["admitted", "retired", "replaced", "reset"])
def test_nothing_kept_outlives_its_request(end):
    manager = new_manager()
    a, b = keys("a", 10), keys("b", 10)
    put(manager, a)
    put(manager, b)
    queue(manager, "r", a)
    queue(manager, "s", [*a[:5], *b])
    check(manager)
    if end == "admitted":
        manager.request_admitted(ReqContext("r"))
    elif end == "retired":
        manager.retire(a, ReqContext("r"))
    elif end == "replaced":
        queue(manager, "r", b)
    else:
        manager.reset_cache()
    check(manager)
    assert kept(manager, a) == (0 if end == "reset" else 5)
    manager.retire(b, ReqContext("s"))
    manager.retire(b, ReqContext("r"))
    assert not manager._host.claims
    assert len(manager._host.order) == len(manager._host.evictable)
    check(manager)


@pytest.mark.parametrize("policy", POLICIES)
def test_claims_on_a_long_prompt_end_over_several_calls_once_its_request_runs(policy):
    manager = new_manager(policy, slots=2400, share=1.0)
    a, b = keys("a", 2000), keys("b", 200)
    for name, chunks in (("a", a), ("b", b)):
        put(manager, chunks)
        queue(manager, name, chunks)
    for _ in range(10):
        manager.serve_queue()
    manager.request_admitted(ReqContext("a"))
    left = [kept(manager, a)]
    while left[-1]:
        check(manager)
        manager.serve_queue()
        left.append(kept(manager, a))
    ended = [before - now for before, now in zip([2000, *left], left, strict=False)]
    assert max(ended) <= waiting.PORTION
    assert kept(manager, b) == 200
    evicted = put(manager, keys("running", 400)).evicted_keys
    assert list(evicted) == a[: -len(evicted) - 1 : -1], "its tail leaves first"
    check(manager)


def test_claims_of_a_request_that_runs_give_way_before_those_of_the_queue():
    manager = new_manager(slots=1000, share=1.0)
    a, b = keys("a", 600), keys("b", 400)
    for name, chunks in (("b", b), ("a", a)):
        put(manager, chunks)
        queue(manager, name, chunks)
    for _ in range(5):
        manager.serve_queue()
    manager.request_admitted(ReqContext("a"))
    assert kept(manager, a) == 600 - waiting.PORTION
    evicted = put(manager, keys("running", 500)).evicted_keys
    assert set(evicted) == {*a[100:]}
    assert kept(manager, b) == 400
    assert figures(manager)["queue_chunks"].get("given_up", 0) == 0
    check(manager)


@pytest.mark.parametrize("end", ["retired", "reset", "lost", "queued"])
def test_what_a_running_request_still_keeps_ends_with_it(end):
    manager = new_manager(slots=2000, share=1.0)
    a, context = keys("a", 1000), ReqContext("a")
    put(manager, a)
    queue(manager, "a", a)
    for _ in range(5):
        manager.serve_queue()
    job = manager.begin_load(a, context)
    manager.request_admitted(context)
    assert kept(manager, a) == 1000 - waiting.PORTION
    if end == "retired":
        manager.retire(a, context)
    elif end == "reset":
        manager.reset_cache()
    elif end == "queued":  # preempted, and admitted again
        manager.request_queued(lambda: a, context, was_preempted=True)
        for _ in range(10):
            manager.serve_queue()
        assert kept(manager, a) == 1000
        manager.retire(a, context)
    check(manager)
    manager.complete(job, [end != "lost"] * 1000, True, "corrupt")
    for _ in range(3 if end == "lost" else 0):  # a call ends a portion of them
        check(manager)
        assert not any(map(manager._host.is_ready, manager._host.claims))
        manager.serve_queue()
    assert not manager._host.claims
    check(manager)
    manager.serve_queue()
    assert not manager.waiting.claims.tenants
    assert not manager.waiting.claims.leaving
    if end in ("reset", "lost"):
        put(manager, a)
    assert not manager._host.claims
    check(manager)


def test_requests_that_wait_through_a_reset_keep_what_is_stored_after_it():
    manager = new_manager(slots=40, share=1.0)
    first, second, absent, late = (keys(name, 12) for name in ("1", "2", "3", "4"))
    for chunks in (first, second):
        put(manager, chunks)
    queue(manager, "first", first, tenant="a")
    queue(manager, "second", [*first[:4], *second], tenant="b")
    queue(manager, "absent", absent, tenant="b")
    put(manager, keys("running", 30))  # second gives way
    manager.request_queued(lambda: late, ReqContext("late"))
    manager.reset_cache()
    check(manager)
    assert not manager._host.claims
    for chunks in (absent, first, late):
        put(manager, chunks)
        manager.serve_queue()
        check(manager)
    assert [kept(manager, chunks) for chunks in (first, absent, late)] == [12, 12, 12]
    for name in ("first", "second", "absent", "late"):
        manager.retire([], ReqContext(name))
    assert not manager._host.claims
    check(manager)


class Chunks(list):
    """Counts the chunks that are looked at by a pass over them, or by their place."""

    seen = 0

    def __iter__(self):
        for key in super().__iter__():
            Chunks.seen += 1
            yield key

    def __getitem__(self, at):
        found = super().__getitem__(at)
        Chunks.seen += len(found) if isinstance(at, slice) else 1
        return found


@pytest.mark.parametrize("comes_again", [False, True])
@pytest.mark.parametrize("length", [40, 400])
def test_a_chunk_that_many_requests_keep_fails_without_a_look_at_all_of_them(length, comes_again):
    manager = new_manager(slots=2000)
    shared = Chunks(keys("shared", length))
    put(manager, shared)
    for i in range(300):
        manager.request_queued(lambda: shared, ReqContext(f"{i}"))
    while manager.waiting._unfinished or manager.waiting._newcomers:
        manager.serve_queue()
    load = manager.begin_load(list(shared), ReqContext("running"))

    def looks(call, *arguments):
        Chunks.seen = 0
        call(*arguments)
        return Chunks.seen

    most = 4 * claims.COMPARED
    assert looks(manager.complete, load, [i != 1 for i in range(length)], True, "corrupt") < most
    if comes_again:
        assert looks(put, manager, [*shared][1:2]) < most
    check(manager)
    num_kept = {length if comes_again else 1}
    for _ in range(3000):
        assert looks(manager.serve_queue) < most
        if {each.num_kept for each in manager.waiting.requests.values()} == num_kept:
            break
    assert {each.num_kept for each in manager.waiting.requests.values()} == num_kept
    for i in range(300):
        manager.retire([], ReqContext(f"{i}"))
    assert not manager._host.claims
    check(manager)


class Asked(Store):
    """A tier that has no answer yet."""

    def holds(self, key):
        return None


def test_a_step_does_not_look_at_all_that_requests_that_go_on_keep_while_a_chunk_is_gone():
    length, number = claims.COMPARED, 20
    manager = new_manager(slots=3 * number * length, stores=[Asked()])
    prompts = [Chunks([*keys("shared", 1), *keys(f"{i} ", length)]) for i in range(number)]
    for i, prompt in enumerate(prompts):
        put(manager, prompt[:-1])
        manager.request_queued(lambda prompt=prompt: prompt, ReqContext(f"{i}"))
    requests = manager.waiting.requests.values()
    while any(each.num_kept < length for each in requests):
        manager.serve_queue()
    write_through(manager)
    load = manager.begin_load(prompts[-1][:-1], ReqContext("running"))
    manager.complete(load, [i < length - 1 for i in range(length)], True, "corrupt")

    def looks(call=manager.serve_queue, *arguments):
        Chunks.seen = 0
        call(*arguments)
        return Chunks.seen

    assert looks(put, manager, keys("unrelated", 1)) == 0
    assert max(looks() for _ in range(2 * number)) < 4 * claims.COMPARED
    assert not manager.waiting.claims.gone
    assert [each.num_kept for each in requests] == [*(length,) * (number - 1), length - 1]
    put(manager, prompts[-1][-2:-1])
    for _ in range(number):  # it is looked at in turn
        manager.serve_queue()
    assert {each.num_kept for each in requests} == {length}
    check(manager)


@pytest.mark.parametrize("begin", ["prepare_store", "begin_load"])
def test_a_chunk_in_flight_that_does_not_come_is_read_from_another_tier(begin):
    a, near, far = keys("a", 6), Store(), Store()
    manager = new_manager(stores=[near, far])
    near.held.update(a if begin == "begin_load" else ())
    begun = getattr(manager, begin)(a, ReqContext("running"))
    queue(manager, "r", a)
    assert kept(manager, a) == 6
    manager.complete(getattr(begun, "job", begun), [False] * 6, True, "missing")
    check(manager)
    assert kept(manager, a) == 0
    far.held.update(a)
    for _ in range(3):
        manager.serve_queue()
    read, *_ = manager.take_transfers()
    assert (read.tier.name, read.keys) == ("tier1", tuple(a[: len(read.keys)]))


def test_nothing_is_kept_for_a_forgotten_chunk_that_a_load_still_uses():
    a, manager = keys("a", 6), new_manager()
    put(manager, a)
    first, second = (manager.begin_load(a, ReqContext(name)) for name in "12")
    manager.complete(first, [False] * 6, True, "corrupt")
    queue(manager, "r", a)
    manager.complete(second, [True] * 6)
    check(manager)
    assert kept(manager, a) == 0
    put(manager, a)
    manager.serve_queue()
    assert kept(manager, a) == 6


def test_what_an_earlier_request_stores_is_kept_for_later_ones():
    manager = new_manager(slots=64)
    shared = keys("shared", 10)
    for i in range(4):
        queue(manager, f"r{i}", [*shared, *keys(i, 2)])
    assert not manager._host.claims
    manager.request_admitted(ReqContext("r0"))
    put(manager, shared, name="r0")
    manager.serve_queue()
    check(manager)
    assert kept(manager, shared) == 10
    manager.request_admitted(ReqContext("r2"))
    put(manager, keys(1, 2), name="r0")
    manager.serve_queue()
    assert kept(manager, keys(1, 2)) == 2
    for i in range(4):
        manager.retire([], ReqContext(f"r{i}"))
    assert not manager._host.claims
    assert not manager.waiting._lacking
    check(manager)


@pytest.mark.parametrize("policy", POLICIES)
def test_turns_that_queue_all_at_once_hit_as_well(policy):
    manager, hits = new_manager(policy), []
    turns = [(f"turn{i}", keys(f"session{i % 5}", 16)) for i in range(60)]
    for name, chunks in turns:
        queue(manager, name, chunks)
    for name, chunks in turns:
        hits.append(serve(manager, name, chunks))
        manager.serve_queue()
        check(manager)
    assert sum(hits[20:]) >= 0.6 * 16 * 40


def test_an_evicted_chunk_of_a_queued_request_says_so():
    manager = new_manager(slots=20, share=0.5)
    a = keys("a", 16)
    put(manager, a)
    queue(manager, "r", a)
    put(manager, keys("running", 10))
    said = manager.explain(a, ReqContext("r"))
    assert said.count("CPU") == 10
    assert said.count("evicted_while_waiting") == 6
    assert manager.explain(a, ReqContext("other")).count("evicted") == 6
    manager.request_admitted(ReqContext("r"))
    assert manager.explain(a, ReqContext("r")).count("evicted") == 6


def test_prompts_beyond_memory_ids_used_twice_and_odd_keys_do_no_harm():
    manager = new_manager(slots=50)
    a = keys("a", 30)
    put(manager, a)
    queue(manager, "r", [*a, *keys("absent", 10_000)])
    queue(manager, "r", a)
    queue(manager, "r" * 1_000_000, [a[0], a[0], a[1], a[0]], tenant="t" * 1_000_000)
    queue(manager, "", [])
    manager.serve_queue()
    check(manager)
    manager.request_admitted(ReqContext("unknown"))
    growing = list(a[:10])
    queue(manager, "resumable", growing)
    growing += a[10:]
    manager.serve_queue()
    check(manager)
    for name in ("r", "r" * 1_000_000, "resumable", "r"):
        manager.retire([], ReqContext(name))
    assert not manager._host.claims
    check(manager)


def test_the_check_finds_claims_without_a_request():
    manager = new_manager()
    a = keys("a", 4)
    put(manager, a)
    manager._host.claim(a, None)
    with pytest.raises(AssertionError, match="claim"):
        check(manager)


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_share_each_decision_is_the_same_as_without_a_queue(policy):
    """A replayed trace: event for event, slot for slot."""

    rng = random.Random(1)
    prompts = [keys(rng.randrange(4), 12) for _ in range(600)]

    def replay(share, says):
        manager, told = new_manager(policy, slots=30, share=share), []
        for i, chunks in enumerate(prompts):
            for later in range(i, min(i + 3, len(prompts))) if says else ():
                queue(manager, f"r{later}", prompts[later], tenant=f"{later % 3}")
                manager.serve_queue()
            told.append(serve(manager, f"r{i}", chunks))
            told += manager.take_events()
            told.append(sorted(manager._host.evictable.items()))
        return told

    assert replay(0.0, says=True) == replay(0.9, says=False)
    assert replay(0.0, says=True) != replay(0.9, says=True)


@pytest.mark.parametrize(
    ("policy", "average", "most"), [("lru", 48, 64), ("arc", 64, 128), ("handicap", 64, 128)]
)
def test_a_kept_chunk_takes_one_entry_of_a_table_and_the_policy_s_note(policy, average, most):
    """A table doubles in size at once, so one size of memory tells nothing: an octave of them does.

    The claim takes 31 to 63 bytes, and so does the note of ``arc`` and ``handicap`` on a chunk that
    leaves their order. They give that chunk's entry back late.
    """
    sizes = [round(3000 * 2 ** (i / 9)) for i in range(9)]
    found = [bytes_a_kept_chunk(policy, slots) for slots in sizes]
    print(f"{policy}: {[round(sum(taken) / len(taken)) for taken in found]} bytes")
    assert sum(sum(taken) / len(taken) for taken in found) / len(sizes) <= average
    assert max(map(max, found)) <= most


def bytes_a_kept_chunk(policy, slots):
    """Keep more and more of a full memory; return what it takes, from half of the share on."""
    prompts = [keys(f"{i}.", 250) for i in range(slots // 250)]
    tracemalloc.start()  # first: what leaves the eviction order gives its memory back
    manager, taken = new_manager(policy, slots=slots, share=0.9), []
    for chunks in prompts:
        put(manager, chunks)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for i, chunks in enumerate(prompts):
        queue(manager, str(i), chunks)
        if (count := len(manager._host.claims)) >= 0.45 * slots:
            taken.append((tracemalloc.get_traced_memory()[0] - before) / count)
    tracemalloc.stop()
    assert count >= 0.85 * slots
    return taken


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_that_never_finish_leave_each_running_request_its_slots(policy):
    """Some wait for ever, and some run for ever; all say when they return, and none does."""
    manager = new_manager(policy, slots=64)
    for i in range(300):
        chunks = keys(f"{i}", 8)
        told = {"kvoffload": {"session": f"{i}", "returns_in_s": 1}}
        context = ReqContext(f"r{i}", told, tenant=b"%d" % (i % 3))
        manager.request_queued(lambda chunks=chunks: chunks, context)
        manager.serve_queue()
        running = keys(f"running {i}", 20)
        manager.touch(running, ReqContext(f"running {i}", context.kv_transfer_params))
        assert len(put(manager, running).keys_to_store) == 20
        put(manager, chunks)
        check(manager)
    assert len(manager.waiting.requests) == 300
    assert manager.busy_slots == 0


def test_a_queue_of_ten_thousand_long_prompts_takes_a_kibibyte_a_request():
    manager = new_manager(slots=20_000, share=0.9)
    prompts = [keys(f"{i}.", 500) for i in range(40)]
    for chunks in prompts:
        put(manager, chunks)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for i in range(10_000):
        queue(manager, f"{i}", prompts[i % 40])
        manager.serve_queue()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(manager.waiting.requests) == 10_000
    assert grown <= 64 * 18_000 + 1024 * 10_000


def test_to_leave_a_queue_that_lacks_one_chunk_compares_no_request_with_each_other():
    class Number(int):
        compared = 0
        __hash__ = int.__hash__

        def __eq__(self, other):
            Number.compared += 1
            return int(self) == int(other)

    manager, lacked = new_manager(), keys("a", 1)
    manager.waiting._numbers[Place.ARRIVED] = map(Number, range(1, 1000))
    for i in range(500):
        queue(manager, f"{i}", lacked)
    while manager.waiting._unfinished:
        manager.serve_queue()
    Number.compared = 0
    manager.request_admitted(ReqContext("499"))
    assert Number.compared < 20
    check(manager)


def test_a_chunk_that_many_requests_lack_is_stored_without_a_call_for_each_two(monkeypatch):
    manager, lacked, compared = new_manager(), keys("a", 2), []
    for i in range(500):
        queue(manager, f"{i}", lacked)
    while manager.waiting._unfinished:
        manager.serve_queue()

    def compare(one, other):
        compared.append(1)
        return one.number < other.number

    monkeypatch.setattr(QueuedRequest, "__lt__", compare)
    put(manager, lacked[:1])
    assert len(compared) < 20
    assert [each.number for each in manager.waiting._unfinished] == [*range(1, 501)]


def test_many_short_prompts_that_come_at_once_are_listed_over_several_steps():
    manager, listed = new_manager(), []
    for i in range(1000):
        manager.request_queued(lambda i=i: listed.append(i) or (), ReqContext(f"{i}"))
    steps = []
    while len(listed) < 1000:
        before = len(listed)
        manager.serve_queue()
        steps.append(len(listed) - before)
    assert max(steps) == 128
    assert listed == [*range(1000)]


def test_requests_that_pass_while_stores_are_told_enough_leave_nothing(monkeypatch):
    monkeypatch.setattr(needed_chunks, "MOST_TOLD", 8)
    manager = new_manager(slots=64, share=0.9)
    manager.waiting.needed.is_telling = True
    queue(manager, "head", keys("b", 8))
    for i in range(100):
        queue(manager, f"c{i}", keys(f"c{i}", 2))
        manager.request_admitted(ReqContext(f"c{i}"))
        manager.waiting.needed.take()
    assert len(manager.waiting.requests) == 1
    assert not manager.waiting.needed._waiting


def test_what_nobody_tells_the_stores_does_not_pile_up():
    manager = new_manager(slots=64, share=0.9)
    needed = manager.waiting.needed
    needed.is_telling = True
    for i in range(100):
        queue(manager, f"c{i}", keys(f"c{i}", 2))
        if i >= 10:
            manager.request_admitted(ReqContext(f"c{i - 10}"))
    assert len(needed.to_tell) == 10
    assert [number for number, _ in needed.take()] == [*range(91, 101)]
    manager.reset_cache()  # the requests wait on
    assert needed.take() == []
    for i in range(90, 100):
        manager.retire([], ReqContext(f"c{i}"))
    assert needed.take() == [(number, []) for number in range(91, 101)]
    assert not needed.to_tell


def test_requests_that_wait_for_a_slow_tier_keep_none_behind_from_their_claims():
    class Slow(Store):
        def holds(self, key):
            return None

    manager = new_manager(slots=100, stores=[Slow()])
    put(manager, keys("here", 10))
    for i in range(40):
        queue(manager, f"slow{i}", keys(f"slow{i}", 4))
    for i in range(10):
        queue(manager, f"here{i}", keys("here", i + 1))
    for _ in range(10):
        manager.serve_queue()
    check(manager)
    assert kept(manager, keys("here", 10)) == 10


@pytest.mark.parametrize("later_s", [6.0, 2.0])
def test_a_chunk_that_a_tier_has_later_is_read_early_though_the_clock_jumps(monkeypatch, later_s):
    now_s, store, wanted = [5.0], Store(), keys("wanted", 4)
    monkeypatch.setattr(HostCache, "now_s", staticmethod(lambda: now_s[0]))
    manager = new_manager(slots=100, stores=[store])
    queue(manager, "r", wanted)
    for _ in range(3):
        manager.serve_queue()
    store.held.update(wanted)
    manager.serve_queue()
    assert not manager.take_transfers()
    now_s[0] = later_s
    manager.serve_queue()
    assert [read.keys for read in manager.take_transfers()] == [tuple(wanted)]
    check(manager)
