"""Random walks over the manager: any order of calls, completions late, failed, partial, unsettled.

The walk plays the worker half too: it keeps what each host slot *contains*, so that a slot handed
out while something still uses it, or an evicted chunk under a load, shows as a wrong content.
"""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvoffload.backends.base import Removal
from kvoffload.offload.base import (
    CPULoadStoreSpec,
    OffloadKey,
    StagedLoadStoreSpec,
    make_offload_key,
)
from kvoffload.offload.manager import Tier, TieredOffloadingManager
from kvoffload.offload.policies.lru import LRUPolicy

PROMPTS, LENGTH = 4, 6
KEYS = [[make_offload_key(bytes([p, i]) * 16, 0) for i in range(LENGTH)] for p in range(PROMPTS)]
GARBAGE = OffloadKey(b"garbage")


class FakeTier:
    """A store below: holds keys, may be down (answers False) or slow (answers None)."""

    def __init__(self):
        self.stored, self.hidden, self.removals = set(), set(), []
        self.answer_for_stored = True

    def holds(self, key):
        return self.answer_for_stored if key in self.stored - self.hidden else False

    def forget(self, keys):
        self.hidden.update(keys)

    def take_removals(self):
        taken, self.removals = self.removals, []
        return taken

    def write(self, key):
        self.stored.add(key)
        self.hidden.discard(key)

    def evict(self, key):
        self.stored.discard(key)
        self.hidden.discard(key)
        self.removals.append(Removal(key, "evicted"))


class Walk:
    """The manager under test, a worker half played by hand, and what must be true."""

    def __init__(self, host_slots, num_tiers, max_persisting=None):
        self.stores = {f"t{i}": FakeTier() for i in range(num_tiers)}
        self.manager = TieredOffloadingManager(
            host_slots,
            LRUPolicy(host_slots),
            [Tier(name, store, store) for name, store in self.stores.items()],
            max_persisting,
        )
        self.content = dict.fromkeys(range(host_slots), GARBAGE)
        self.loads, self.saves, self.transfers, self.unsettled = [], [], [], []
        self.replayed = {medium: set() for medium in ("CPU", *map(str.upper, self.stores))}

    # What an engine does

    def load(self, prompt, start):
        keys = KEYS[prompt][start:]
        hits, pending = self.manager.lookup_prefix(keys)
        assert [self.manager.lookup(key) for key in keys[:hits]] == [True] * hits
        if hits < len(keys) and pending:
            assert self.manager.lookup(keys[hits]) is None
        if not hits:
            return
        spec = self.manager.prepare_load(keys[:hits])
        slots = spec.host_slots.tolist()
        assert len(slots) == hits  # the lookup promised no more than host memory can receive
        fetched = {}
        for fetch in spec.fetches if isinstance(spec, StagedLoadStoreSpec) else ():
            assert fetch.keys == tuple(keys[i] for i in fetch.positions)
            fetched.update(dict.fromkeys(fetch.positions, fetch.tier))
        for i, slot in enumerate(slots):
            if i not in fetched:
                assert self.content[slot] == keys[i], "a hit's slot holds another chunk"
        self.loads.append((keys[:hits], slots, fetched))

    def end_load(self, which, good, settled):
        if not self.loads:
            return
        keys, slots, fetched = self.loads.pop(which % len(self.loads))
        ok = [(good >> i) & 1 for i in range(len(keys))]
        for i, slot in enumerate(slots):
            if i not in fetched:
                assert self.content[slot] == keys[i], "a pinned chunk was overwritten"
            self.content[slot] = keys[i] if ok[i] or i not in fetched else GARBAGE
        bad = [key for key, fine in zip(keys, ok, strict=True) if not fine]
        self.manager.complete_load(bad, success=False, settled=settled)
        if not settled:
            late = [(slots[i], i in fetched) for i in range(len(keys)) if not ok[i]]
            self.unsettled.append(late)
        for i, key in enumerate(keys):
            if key in bad:
                assert key not in self.resident(), "a failed key is still promised"
                assert i not in fetched or not self.stores[fetched[i]].holds(key)
        self.manager.complete_load([key for key, fine in zip(keys, ok, strict=True) if fine])

    def store(self, prompt, count):
        output = self.manager.prepare_store(KEYS[prompt][:count])
        if output is None or not output.keys_to_store:
            return
        assert not set(output.evicted_keys) & set(KEYS[prompt][:count]), "evicted what it was given"
        slots = output.store_spec.host_slots.tolist()
        for key in output.keys_to_store:
            assert self.manager.lookup(key) is False, "a chunk being stored is visible"
        self.saves.append((output.keys_to_store, slots))

    def end_store(self, which, good, settled):
        if not self.saves:
            return
        keys, slots = self.saves.pop(which % len(self.saves))
        ok = [(good >> i) & 1 for i in range(len(keys))]
        for key, slot, fine in zip(keys, slots, ok, strict=True):
            self.content[slot] = key if fine else GARBAGE
        bad = [key for key, fine in zip(keys, ok, strict=True) if not fine]
        self.manager.complete_store(bad, success=False, settled=settled)
        if not settled:
            self.unsettled.append([(slots[i], True) for i in range(len(keys)) if not ok[i]])
        self.manager.complete_store([key for key, fine in zip(keys, ok, strict=True) if fine])

    def take_transfers(self):
        self.transfers.extend(self.manager.take_transfers())

    def end_transfer(self, which, good, settled):
        if not self.transfers:
            return
        transfer = self.transfers.pop(which % len(self.transfers))
        assert isinstance(transfer.src, CPULoadStoreSpec)
        slots = transfer.src.host_slots.tolist()
        ok = [bool((good >> i) & 1) for i in range(len(slots))]
        for key, slot, fine in zip(transfer.keys, slots, ok, strict=True):
            assert self.content[slot] == key, "write-through read another chunk's bytes"
            if fine:
                self.stores[transfer.tier].write(key)
        self.manager.complete_transfer(transfer, ok, settled)
        if not settled:
            self.unsettled.append([(slot, False) for slot in slots])

    def settle(self, which):
        """A late call lets go: until now it may have written to slots it was filling."""
        if not self.unsettled:
            return
        late = self.unsettled.pop(which % len(self.unsettled))
        for slot, writes in late:
            if writes:
                self.content[slot] = GARBAGE
        self.manager.release_slots([slot for slot, _ in late])

    def evict_below(self, tier, prompt, i):
        store = list(self.stores.values())[tier % len(self.stores)] if self.stores else None
        if store and KEYS[prompt][i] in store.stored:
            store.evict(KEYS[prompt][i])

    def tier_answers(self, tier, answer):
        if self.stores:
            list(self.stores.values())[tier % len(self.stores)].answer_for_stored = answer

    def reset(self):
        self.manager.reset_cache()
        for prompt in KEYS:
            for key in prompt:
                assert key not in self.resident()

    def resident(self):
        return {
            key for prompt in KEYS for key in prompt if self.manager._host.ready.get(key, -1) >= 0
        }

    # What must be true after every step

    def check(self):
        self.manager.check()
        for key, slot in self.manager._host.ready.items():
            assert self.content[slot] == key, "a loadable chunk's slot holds something else"
        for event in self.manager.take_events():
            here = self.replayed[event.medium]
            if event.removed:
                here.difference_update(event.keys)
            else:
                here.update(event.keys)
        assert self.replayed["CPU"] == self.resident()
        for name, store in self.stores.items():
            assert self.replayed[name.upper()] == store.stored

    def drain(self):
        """End everything: no slot may be lost."""
        self.take_transfers()
        while self.loads:
            self.end_load(0, -1, True)
        while self.saves:
            self.end_store(0, -1, True)
        self.take_transfers()
        while self.transfers:
            self.end_transfer(0, -1, True)
            self.take_transfers()
        while self.unsettled:
            self.settle(0)
        self.check()
        assert self.manager.busy_slots == 0


class ManagerMachine(RuleBasedStateMachine):
    @initialize(slots=st.integers(1, 12), tiers=st.integers(0, 2), persisting=st.integers(0, 8))
    def start(self, slots, tiers, persisting):
        self.walk = Walk(slots, tiers, persisting)

    @rule(prompt=st.integers(0, PROMPTS - 1), start=st.integers(0, LENGTH - 1))
    def load(self, prompt, start):
        self.walk.load(prompt, start)

    @rule(which=st.integers(0, 9), good=st.sampled_from([-1, 0, 1, 2, 5]), settled=st.booleans())
    def end_load(self, which, good, settled):
        self.walk.end_load(which, good, settled)

    @rule(prompt=st.integers(0, PROMPTS - 1), count=st.integers(1, LENGTH))
    def store(self, prompt, count):
        self.walk.store(prompt, count)

    @rule(which=st.integers(0, 9), good=st.sampled_from([-1, 0, 1, 2, 5]), settled=st.booleans())
    def end_store(self, which, good, settled):
        self.walk.end_store(which, good, settled)

    @rule()
    def take_transfers(self):
        self.walk.take_transfers()

    @rule(which=st.integers(0, 9), good=st.sampled_from([-1, 0, 1, 2, 5]), settled=st.booleans())
    def end_transfer(self, which, good, settled):
        self.walk.end_transfer(which, good, settled)

    @rule(which=st.integers(0, 9))
    def settle(self, which):
        self.walk.settle(which)

    @rule(t=st.integers(0, 1), p=st.integers(0, PROMPTS - 1), i=st.integers(0, LENGTH - 1))
    def evict_below(self, t, p, i):
        self.walk.evict_below(t, p, i)

    @rule(t=st.integers(0, 1), answer=st.sampled_from([True, True, False, None]))
    def tier_answers(self, t, answer):
        self.walk.tier_answers(t, answer)

    @rule(prompt=st.integers(0, PROMPTS - 1))
    def touch(self, prompt):
        self.walk.manager.touch(KEYS[prompt])

    @rule()
    def reset(self):
        self.walk.reset()

    @invariant()
    def consistent(self):
        if hasattr(self, "walk"):
            self.walk.check()

    def teardown(self):
        if hasattr(self, "walk"):
            self.walk.drain()


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def random_steps(walk, rng, steps):
    good = [-1, -1, -1, 0, 1, 2, 5]
    for _ in range(steps):
        a, b, settled = rng.randrange(100), rng.choice(good), rng.random() < 0.9
        prompt, i = rng.randrange(PROMPTS), rng.randrange(LENGTH)
        match rng.randrange(20):
            case 0 | 1 | 2 | 3:
                walk.load(prompt, i)
            case 4 | 5 | 6:
                walk.end_load(a, b, settled)
            case 7 | 8 | 9:
                walk.store(prompt, i + 1)
            case 10 | 11 | 12:
                walk.end_store(a, b, settled)
            case 13 | 14:
                walk.take_transfers()
            case 15 | 16:
                walk.end_transfer(a, b, settled)
            case 17:
                walk.settle(a)
            case 18:
                walk.evict_below(a, prompt, i)
            case _:
                if a < 10:
                    walk.reset()
                elif a < 40:
                    walk.tier_answers(a, rng.choice([True, True, False, None]))
                elif a < 70:
                    walk.manager.touch(KEYS[prompt])
                else:
                    walk.manager.retire(KEYS[prompt])
        walk.check()


@pytest.mark.parametrize("seed", range(50))
def test_no_order_of_calls_breaks_the_ledger(seed):
    rng = random.Random(seed)
    walk = Walk(rng.randrange(1, 14), rng.randrange(3), rng.choice([None, 0, 2, 8]))
    random_steps(walk, rng, 1000)
    walk.drain()


@pytest.mark.chaos
def test_a_million_steps():
    rng = random.Random()
    for _ in range(500):
        walk = Walk(rng.randrange(1, 14), rng.randrange(3), rng.choice([None, 0, 2, 8]))
        random_steps(walk, rng, 2000)
        walk.drain()
