"""The local connector without a cache in host memory: chunks only pass through on their way."""

import random

import pytest
import torch
from local_requests import begin_load
from until import wait

from kvoffload.testing import Plan
from tests.support.manager_check import check

BLOCK = 4
SLOT = 4096
PROMPT = 81
CHUNKS = 10
TOKENS = CHUNKS * 2 * BLOCK


@pytest.fixture
def connect(connect):
    """Make connectors with slots that chunks pass through."""

    def make(slots=4, *backends, **settings):
        return connect(*backends, cpu_bytes=0, staging_bytes=slots * SLOT, **settings)

    return make


def store(connector, request, first_block=5):
    """Compute a prompt, and go on until all of it is stored; returns its blocks."""
    blocks = list(range(first_block, first_block + request.num_tokens // BLOCK))
    connector.after_forward(request, [blocks], request.num_tokens)
    while connector._requests.find(request).refused:
        assert connector.flush()
        connector.after_forward(request, [blocks], request.num_tokens)
    assert connector.flush()
    connector.request_finished(request)
    return blocks


def at_rest(connector):
    """Nothing is in flight, and nothing stays once reads that are late have ended."""
    assert connector.flush()
    check(connector)

    def is_empty():
        connector.flush()
        stats = connector.stats()
        in_bytes = stats["inflight_bytes"]["cpu"], stats["resident_bytes"]["cpu"]
        return (stats["host_chunks_busy"], *in_bytes) == (0, 0, 0)

    wait(is_empty)


def release(connector, hanging):
    connector._spec.io._peer.session.loop.call_soon_threadsafe(hanging.release)


@pytest.mark.parametrize("seed", range(16))
def test_a_prompt_larger_than_the_staging_memory_comes_back_byte_for_byte(
    connect, new_kv_caches, new_request, until, tmp_path, seed
):
    rng = random.Random(seed)
    pages = [rng.randrange(1, 700) for _ in range(rng.randrange(1, 4))]
    caches = new_kv_caches(64, pages, padding=rng.choice([0, 7, 64]), seed=seed)
    slot = -(-2 * sum(pages) // SLOT)
    slots = rng.choice([1, 2, 3, 5, 9])
    disk = {"type": "disk", "root": str(tmp_path), "capacity": "1MiB", "min_free": 0}
    backends = [rng.choice([disk, {"type": "memory", "capacity": "1MiB"}])]
    connector = connect(slots * slot, *backends, caches=caches)
    stored = store(connector, new_request("p", PROMPT))[: 2 * CHUNKS]
    originals = [t.tensor[stored].clone() for t in caches.tensors]
    at_rest(connector)
    request = new_request("p", PROMPT)
    target = rng.sample(sorted(set(range(64)) - set(stored)), 20)
    assert begin_load(connector, request, target) == TOKENS
    (outcome,) = until(connector.poll)
    medium = backends[0]["type"].upper()
    assert outcome.ok
    assert outcome.tokens_by_medium == {medium: TOKENS}
    for t, original in zip(caches.tensors, originals, strict=True):
        assert torch.equal(t.tensor[target], original)
    at_rest(connector)
    events = connector.take_events()
    assert {event.medium for event in events} == {medium}
    assert sum(len(event.keys) for event in events) == CHUNKS
    figures = connector.stats()
    assert figures["lookups"]["cpu"]["hit"] == 0
    assert figures["load_chunks"] == {"cpu": CHUNKS, medium.lower(): CHUNKS}
    assert figures["hit_tokens"] == {"cpu": 0, medium.lower(): TOKENS}


def test_what_a_tier_has_is_not_copied_again(connect, new_request, until):
    connector = connect()
    request = new_request("p", PROMPT)
    store(connector, request)
    copied = connector.stats()["store_chunks"]["cpu"]
    begin_load(connector, request, range(20, 41))
    (outcome,) = until(connector.poll)
    assert outcome.ok
    connector.after_forward(request, [range(20, 41)], PROMPT)  # the request goes on
    at_rest(connector)
    assert connector.stats()["store_chunks"]["cpu"] == copied == CHUNKS


@pytest.mark.parametrize("promote", [True, False])
def test_what_only_the_farther_tier_has_goes_to_the_nearer_one_if_wished(
    connect, new_request, stores, until, promote
):
    memory = {"type": "memory", "capacity": "1MiB"}
    connector = connect(8, memory, memory, promote=promote)
    store(connector, new_request("p", PROMPT))
    near, far = stores
    keys = list(near.inner._chunks)
    near.forget(keys)
    until(lambda: not any(map(connector._spec.tiers["memory"].holds, keys)))
    store(connector, new_request("p", PROMPT, request_id="again"))
    assert near.usage().chunks == (CHUNKS if promote else 0)
    assert far.usage().chunks == CHUNKS


def test_many_loads_at_once_share_the_slots_and_get_their_own_bytes(
    connect, new_kv_caches, new_request, until, stores
):
    caches = new_kv_caches(num_blocks=400)
    connector = connect(5, caches=caches, lookup_timeout_s=30, load_timeout_s=30)
    originals = {}
    for i in range(8):
        blocks = store(connector, new_request(f"p{i}", PROMPT), 1 + i * 20)[: 2 * CHUNKS]
        originals[f"p{i}"] = [t.tensor[blocks].clone() for t in caches.tensors]
    stores[0].plans = [Plan("delay", frozenset({"read"}), every=3, seconds=0.01)]
    waiting = [new_request(f"p{i}", PROMPT) for i in range(8)]
    blocks = {f"p{i}": range(200 + i * 20, 220 + i * 20) for i in range(8)}
    outcomes, asked_again = [], 0
    most = 0

    def step():
        nonlocal asked_again, most
        for request in list(waiting):
            tokens = begin_load(connector, request, blocks[request.request_id])
            asked_again += tokens is None
            if tokens:
                assert tokens == TOKENS
                waiting.remove(request)
        most = max(most, connector.stats()["host_chunks_busy"])
        outcomes.extend(connector.poll())
        return len(outcomes) == 8

    until(step)
    assert all(outcome.ok for outcome in outcomes)
    assert asked_again
    assert 3 <= most <= 5
    for name, original in originals.items():
        for t, bytes_of in zip(caches.tensors, original, strict=True):
            assert torch.equal(t.tensor[list(blocks[name])], bytes_of)
    at_rest(connector)


def test_stores_leave_slots_to_loads_and_what_finds_no_room_is_counted(
    connect, new_request, until, stores
):
    connector = connect()
    store(connector, new_request("p", PROMPT))
    stores[0].plans = [Plan("hang", frozenset({"write"}))]
    other = new_request("q", PROMPT)
    connector.after_forward(other, [range(5, 25)], PROMPT)
    until(lambda: connector.poll() or connector.stats()["inflight_bytes"]["memory"])
    connector.after_forward(other, [range(5, 25)], PROMPT)  # offered again, in vain
    assert connector.stats()["host_chunks_busy"] == 2
    assert begin_load(connector, new_request("p", PROMPT), range(30, 51)) == TOKENS
    (outcome,) = until(connector.poll)
    assert outcome.ok
    assert connector.stats()["stores_dropped"]["cpu"]["no_room"] == 0  # it may still be offered
    connector.request_finished(other)
    assert connector.stats()["stores_dropped"]["cpu"]["no_room"] == CHUNKS - 2
    assert "dropped" in connector.explain(other)[0]
    release(connector, stores[0])
    at_rest(connector)


def test_a_tier_that_hangs_holds_up_its_own_chunks_and_not_the_other_tier(
    connect, new_request, stores, until
):
    memory = {"type": "memory", "capacity": "1MiB"}
    connector = connect(8, memory, memory)
    good, hung = stores
    hung.plans = [Plan("hang", frozenset({"write"}))]
    request = new_request("p", PROMPT)

    def all_on_the_good_one():
        connector.after_forward(request, [range(5, 25)], PROMPT)
        connector.poll()
        return good.usage().chunks == CHUNKS

    until(all_on_the_good_one)
    assert connector.stats()["host_chunks_busy"] <= 4
    assert connector.stats()["stores_dropped"]["memory1"]["back_pressure"] > 0
    release(connector, hung)
    connector.request_finished(request)
    at_rest(connector)


@pytest.mark.parametrize("slots", [1, 3, 20])
@pytest.mark.parametrize(
    ("fault", "reason"), [("raise", "error"), ("hang", "deadline"), ("miss", "missing")]
)
def test_a_load_that_fails_frees_its_slots_and_is_not_promised_again(
    connect, new_request, until, stores, slots, fault, reason
):
    connector = connect(slots, load_timeout_s=0.2 if fault == "hang" else 5.0)
    store(connector, new_request("p", PROMPT))
    stores[0].plans = [Plan(fault, frozenset({"read"}), every=2 if slots == 3 else 1)]
    request = new_request("p", PROMPT)
    assert begin_load(connector, request, range(20, 41)) == TOKENS
    (outcome,) = until(connector.poll)
    assert not outcome.ok
    assert connector.stats()["transfer_failures"][reason] > 0
    stores[0].plans = []
    at_rest(connector)
    assert connector.get_num_new_matched_tokens(request, 0) == outcome.num_loaded_tokens


def test_without_a_free_slot_a_request_asks_again_until_the_lookup_deadline(
    connect, new_request, until, stores
):
    connector = connect(1, lookup_timeout_s=0.05)
    for name in ("p", "q"):
        store(connector, new_request(name, PROMPT))
    stores[0].plans = [Plan("hang", frozenset({"read"}))]
    begin_load(connector, new_request("p", PROMPT), range(20, 41))
    other = new_request("q", PROMPT)
    assert connector.get_num_new_matched_tokens(other, 0) is None
    until(lambda: connector.get_num_new_matched_tokens(other, 0) == 0)
    release(connector, stores[0])
    until(connector.poll)
    assert connector.get_num_new_matched_tokens(other, 0) == TOKENS
