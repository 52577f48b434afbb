"""Ten prompts that queue, with chunks on a tier alone: when the tenth has its first token.

An engine of one request at a time, played by hand with the real manager: its steps, a tier that
reads one chunk after the other, and copies have fixed times. So the figures are the same wherever
the test runs, and early reads can be held against what is possible.
"""

import pytest
from manager_parts import Store, keys, new_manager

from kvoffload.offload.base import ReqContext
from kvoffload.offload.host_cache import HostCache
from tests.support.manager_check import check

PROMPTS, CHUNKS = 10, 46
IDLE_STEP_S, STEP_S, COPY_S = 0.001, 0.012, 0.0005
"""A step that computes nothing, one that makes a token, and the copy of a chunk to the GPU."""


class Engine:
    """Runs the requests one after the other; host memory has room for seven prompts."""

    def __init__(self, clock, share, read_s, num_tokens):
        self.now_s = clock
        self.prompts = [keys(f"{i}.", CHUNKS) for i in range(PROMPTS)]
        self.contexts = [ReqContext(f"{i}") for i in range(PROMPTS)]
        on_tier = Store([key for prompt in self.prompts for key in prompt])
        settings = {"max_persisting_slots": 0, "waiting_share": share}
        self.manager = new_manager(7 * CHUNKS, [on_tier], **settings)
        self.read_s, self.num_tokens = read_s, num_tokens
        self.in_flight, self.tier_free_s = [], 0.0
        for prompt, context in zip(self.prompts, self.contexts, strict=True):
            self.manager.request_queued(lambda prompt=prompt: prompt, context)

    def read(self, count):
        """Return when the tier has read so many more chunks."""
        self.tier_free_s = max(self.tier_free_s, self.now_s[0]) + self.read_s * count
        return self.tier_free_s

    def step(self, seconds):
        """End what has arrived by now, and let the queue and some time pass."""
        self.manager.serve_queue()
        for job in self.manager.take_transfers():
            self.in_flight.append((self.read(len(job.keys)), job))
        self.now_s[0] += seconds
        for item in [item for item in self.in_flight if item[0] <= self.now_s[0]]:
            self.in_flight.remove(item)
            self.manager.complete(item[1], [True] * len(item[1].keys))

    def may_load(self, number):
        """Ask what a request can load, as engines do before they look for room."""
        prompt, context = self.prompts[number], self.contexts[number]
        found, is_pending = self.manager.lookup_prefix(prompt, context)
        self.manager.request_answered(context, is_pending)
        return found == CHUNKS and not is_pending

    def load(self, number):
        prompt, context = self.prompts[number], self.contexts[number]
        while not self.may_load(number):
            self.step(IDLE_STEP_S)
        self.manager.touch(prompt, context)
        job = self.manager.begin_load(prompt, context)
        self.manager.request_admitted(context)
        # Chunks are copied as they arrive.
        ready_s = self.now_s[0] + COPY_S * (CHUNKS - len(job.sources))
        if job.sources:
            ready_s = max(ready_s, self.read(len(job.sources))) + COPY_S
        self.in_flight.append((ready_s, job))
        while any(each is job for _, each in self.in_flight):
            if number + 1 < PROMPTS:
                self.may_load(number + 1)
            self.step(IDLE_STEP_S)

    def run(self):
        """Return when the last request has its first token."""
        for number, (prompt, context) in enumerate(zip(self.prompts, self.contexts, strict=True)):
            self.load(number)
            self.step(STEP_S)
            first_s = self.now_s[0]
            for _ in range(self.num_tokens - 1):
                self.step(STEP_S)
            self.manager.retire(prompt, context)
            check(self.manager)
        return first_s


@pytest.mark.parametrize("num_tokens", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("read_ms", [0.5, 2, 8])
def test_the_tenth_of_a_queue_has_its_first_token_about_as_early_as_is_possible(
    num_tokens, read_ms, monkeypatch
):
    clock = [0.0]
    monkeypatch.setattr(HostCache, "now_s", staticmethod(lambda: clock[0]))
    tenth_s = []
    for share in (0.0, 0.9):
        clock[0] = 0.0
        tenth_s.append(Engine(clock, share, read_ms / 1000, num_tokens).run())
    from_tier_s, from_memory_s = CHUNKS * read_ms / 1000, CHUNKS * COPY_S
    computed_s = STEP_S * num_tokens
    # The first request waits for none: nothing of it is read early.
    possible_s = from_tier_s + 9 * max(from_tier_s, from_memory_s + computed_s) + STEP_S
    print(f"{tenth_s[1] / tenth_s[0]:.2f}; possible {possible_s / tenth_s[0]:.2f}")
    assert tenth_s[1] <= 1.03 * possible_s
