"""Two requests with one name, in every order of their calls: right bytes, and no request waits."""

import threading
import time
from itertools import combinations

import pytest
import torch
from local_requests import compute

from tests.support.manager_check import check

BLOCK, CHUNK = 4, 8
PROMPT = 4 * CHUNK + 1
STORED, TABLES = range(1, 10), (list(range(10, 19)), list(range(20, 29)))
CALLS = ("look", "allocate", "finish")


class Gate:
    """Copies into the engine's blocks wait for it while it is shut."""

    error = None

    def __init__(self, connector):
        self.opened = threading.Event()
        self.opened.set()
        copier = connector._worker._copier
        launch = copier.launch
        copier.launch = lambda moves, to_host, after, lent=None: launch(moves, to_host, self)

    def done(self):
        return self.opened.is_set()

    def wait(self):
        assert self.opened.wait(60)


class Sharers:
    """An engine with two requests of one name, each with blocks of its own."""

    def __init__(self, connector, gate, kv_caches, requests, truths, starts):
        self.connector, self.gate = connector, gate
        self.tensors = [each.tensor for each in kv_caches.tensors]
        self.requests, self.truths, self.starts = requests, truths, starts
        self.promised = [0, 0]
        self.ends = [0, 0]
        self.loading, self.ended = [], set()
        self.foreign = {}

    def look(self, who):
        start = self.starts[who]
        until_s = time.monotonic() + 60
        while (found := self.ask(who, start)) is None:
            self.gate.opened.set()  # it waits until a load of its name was named
            self.poll()
            assert time.monotonic() < until_s, "a lookup has no answer"
        self.promised[who] = found
        for tensor, truth in zip(self.tensors, self.truths[who], strict=True):
            tensor[TABLES[who]] = 99
            tensor[TABLES[who][: start // BLOCK]] = truth[: start // BLOCK]

    def ask(self, who, start):
        return self.connector.get_num_new_matched_tokens(self.requests[who], start)

    def allocate(self, who):
        tokens = self.promised[who]
        self.connector.update_state_after_alloc(self.requests[who], [TABLES[who]], tokens)
        if tokens:
            self.loading.append(who)

    def finish(self, who):
        goes_on = self.connector.request_finished(self.requests[who])
        self.ended.add(who)
        if not goes_on:
            self.loading = [each for each in self.loading if each != who]
            self.free(who)

    def free(self, who):
        """Let another request have the blocks."""
        for i, tensor in enumerate(self.tensors):
            tensor[TABLES[who]] = 55
            self.foreign[who, i] = tensor[TABLES[who]].clone()

    def poll(self):
        for outcome in self.connector.poll():
            assert outcome.request_id == "x"
            who = self.loading.pop(0)
            self.ends[who] = self.starts[who] + outcome.num_loaded_tokens
            if who in self.ended:
                self.free(who)
            else:
                self.check_bytes(who)

    def check_bytes(self, who):
        num_blocks = self.ends[who] // BLOCK
        for tensor, truth in zip(self.tensors, self.truths[who], strict=True):
            assert torch.equal(tensor[TABLES[who][:num_blocks]], truth[:num_blocks])

    def rest(self):
        self.gate.opened.set()
        until_s = time.monotonic() + 60
        while self.loading:
            self.poll()
            assert time.monotonic() < until_s, "a load is not named"
        assert self.connector.flush()
        assert self.connector.poll() == []
        for (who, i), foreign in self.foreign.items():
            assert torch.equal(self.tensors[i][TABLES[who]], foreign), "written after it was freed"
        check(self.connector)


def stored(connector, kv_caches, request, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = [each.tensor for each in kv_caches.tensors]
    for tensor in tensors:
        shape = tensor[STORED].shape
        tensor[STORED] = torch.randint(-128, 98, shape, dtype=torch.int8, generator=generator)
    compute(connector, request, STORED)
    return [tensor[STORED].clone() for tensor in tensors]


@pytest.mark.parametrize("loads", ["hang", "have ended", "are named"])
@pytest.mark.parametrize("starts", [(0, 0), (0, 16), (16, 0), (0, 32)])
def test_requests_that_share_a_name_get_their_own_bytes_in_every_order(
    connect, new_request, kv_caches, starts, loads
):
    connector = connect()
    truths = [
        stored(connector, kv_caches, new_request(name, PROMPT), seed)
        for seed, name in enumerate("ab")
    ]
    gate = Gate(connector)
    for of_first in combinations(range(6), 3):
        calls = [iter(CALLS), iter(CALLS)]
        requests = [new_request(name, PROMPT, request_id="x") for name in "ab"]
        engine = Sharers(connector, gate, kv_caches, requests, truths, starts)
        for i in range(6):
            who = 0 if i in of_first else 1
            call = next(calls[who])
            if call == "allocate" and loads == "hang":
                gate.opened.clear()
            getattr(engine, call)(who)
            if call == "allocate" and loads != "hang":
                assert connector.flush()
                if loads == "are named":
                    engine.poll()
        engine.rest()


def test_of_requests_that_share_name_and_prompt_the_last_lookup_counts(
    connect, new_request, kv_caches
):
    connector = connect()
    truth = stored(connector, kv_caches, new_request("a", PROMPT), 1)
    requests = [new_request("a", PROMPT, request_id="x") for _ in range(2)]
    engine = Sharers(connector, Gate(connector), kv_caches, requests, [truth, truth], (16, 0))
    engine.look(0)
    engine.look(1)
    engine.allocate(0)
    engine.poll()
    assert engine.ends == [16, 0]
    engine.allocate(1)
    engine.rest()
    assert engine.ends == [16, 32]
    for who in (0, 1):
        engine.finish(who)


def test_a_request_older_than_a_reset_stores_nothing_after_its_namesake_has_ended(
    connect, new_request, kv_caches
):
    connector = connect()
    older, other = (new_request(name, PROMPT, request_id="x") for name in "ab")
    for request in (older, other):
        connector.after_forward(request, [STORED], CHUNK)
    connector.reset_cache()
    connector.request_finished(other)
    connector.after_forward(older, [STORED], PROMPT)
    assert connector.flush()
    assert connector.get_num_new_matched_tokens(new_request("a", PROMPT), 0) == 0
    connector.request_finished(older)
    connector.request_finished(new_request("a", PROMPT))
