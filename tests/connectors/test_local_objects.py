"""Other objects for one request: an engine may make one for each call, or one that has the name."""

import sys
from dataclasses import dataclass, field

import pytest

BLOCK, CHUNK = 4, 8
PROMPT = 2 * CHUNK + 1
STORED, LOADED, OTHERS = ([list(range(first, first + 9))] for first in (1, 10, 20))


@dataclass(slots=True)
class Slotted:
    """A request that no weak reference can be to."""

    request_id: str
    num_tokens: int
    block_hashes: list[bytes]


@dataclass
class Unhashable:
    """A request that is equal to another one, and has no hash."""

    request_id: str
    num_tokens: int
    block_hashes: list[bytes] = field(default_factory=list)


def stored(connector, request):
    connector.after_forward(request, STORED, request.num_tokens)
    assert connector.flush()
    connector.request_finished(request)


@pytest.mark.parametrize("are_kept", [False, True])
@pytest.mark.parametrize("kind", [Slotted, Unhashable])
def test_a_request_with_an_object_for_each_call_loads_however_often_it_was_looked_up(
    connect, new_request, kind, are_kept
):
    connector = connect()
    prompt = new_request("a", PROMPT)
    stored(connector, prompt)
    kept = []

    def request():
        made = kind("x", PROMPT, list(prompt.block_hashes))
        if are_kept:
            kept.append(made)
        return made

    for _ in range(20):  # GPU memory has no room for it yet
        assert connector.get_num_new_matched_tokens(request(), 0) == 2 * CHUNK
    connector.update_state_after_alloc(request(), LOADED, 2 * CHUNK)
    assert connector.flush()
    assert [outcome.num_loaded_tokens for outcome in connector.poll()] == [2 * CHUNK]
    assert connector.request_finished(request()) is False
    assert len(connector._requests) == 0


@pytest.mark.parametrize("num_hashes", [0, 2])
def test_an_abort_that_knows_little_more_than_the_name_ends_the_load_of_the_request(
    connect, new_request, num_hashes
):
    connector = connect()
    stored(connector, new_request("a", PROMPT))
    request = new_request("a", PROMPT, request_id="x")
    assert connector.get_num_new_matched_tokens(request, 0) == 2 * CHUNK
    connector.update_state_after_alloc(request, LOADED, 2 * CHUNK)
    aborted = Unhashable("x", PROMPT, request.block_hashes[:num_hashes])
    assert connector.request_finished(aborted) is True
    assert connector.flush()
    assert [outcome.request_id for outcome in connector.poll()] == ["x"]
    assert connector.request_finished(aborted) is False
    assert len(connector._requests) == 0


def test_a_request_whose_namesake_had_its_prefix_stores_nothing_older_than_a_reset(
    connect, new_request
):
    connector = connect()
    whole = new_request("a", PROMPT).block_hashes
    older, other = (Unhashable("x", PROMPT, whole[:2]) for _ in range(2))
    for request in (older, other, older):  # while their chunks are equal, they are one
        connector.after_forward(request, OTHERS, CHUNK)
    other.block_hashes += new_request("b", PROMPT).block_hashes[2:]
    connector.after_forward(other, STORED, PROMPT)
    connector.reset_cache()
    older.block_hashes += whole[2:]
    connector.after_forward(older, OTHERS, PROMPT)
    assert connector.flush()
    assert connector.get_num_new_matched_tokens(new_request("a", PROMPT), 0) == 0
    for request in (older, other, new_request("a", PROMPT)):
        connector.request_finished(request)


@pytest.mark.parametrize("kind", [Slotted, Unhashable])
def test_a_request_whose_hashes_change_after_a_reset_stores_nothing(connect, new_request, kind):
    connector = connect()
    hashes, other = (new_request(name, PROMPT).block_hashes for name in "ab")
    before = kind("x", PROMPT, hashes)
    after = kind("x", PROMPT, [*hashes[:3], other[3]])  # as where its last token is replaced
    connector.after_forward(before, STORED, PROMPT)
    connector.reset_cache()
    connector.after_forward(after, STORED, PROMPT)
    assert connector.flush()
    looked_up = kind("y", PROMPT, after.block_hashes)
    assert connector.get_num_new_matched_tokens(looked_up, 0) == 0
    for request in (after, before, looked_up):
        connector.request_finished(request)


def test_a_lookup_takes_as_many_calls_however_many_requests_have_ended_in_a_load(
    connect, new_request
):
    connector = connect({"type": "memory", "capacity": "1MiB"})
    stored(connector, new_request("a", PROMPT))

    def calls():
        number = 0

        def count(frame, event, argument):
            nonlocal number
            number += event == "call"

        request = new_request("b", PROMPT)
        connector.get_num_new_matched_tokens(request, 0)
        sys.setprofile(count)
        try:
            connector.get_num_new_matched_tokens(request, 0)
        finally:
            sys.setprofile(None)
        connector.request_finished(request)
        return number

    numbers = []
    for i in range(50):
        request = new_request("a", PROMPT, request_id=f"{i}")
        assert connector.get_num_new_matched_tokens(request, 0) == 2 * CHUNK
        connector.update_state_after_alloc(request, LOADED, 2 * CHUNK)
        assert connector.request_finished(request) is True
        numbers.append(calls())
    assert numbers[-1] == numbers[0]
    assert connector.flush()
    assert len(connector.poll()) == 50
