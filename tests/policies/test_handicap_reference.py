"""The handicap policy decides as a plain implementation that compares all keys each time."""

import random
from zlib import crc32

import pytest

from kvoffload.policies.handicap import HandicapPolicy
from kvoffload.policies.history import RotatingBloomFilter

ROWS = ((0, 0, 0, 0), (1, 0.25, 0, 0), (8, 4, 1, 0), (64, 32, 16, 0))


class Entry:
    def __init__(self, times, tick, serial):
        self.times, self.tick, self.serial = times, tick, serial


class Order:
    """Names and how often each was seen; the one that counts as the oldest leaves first."""

    def __init__(self, handicaps):
        self.handicaps = handicaps
        self.entries, self.serial = {}, 0

    def put(self, name, times, tick):
        self.serial += 1
        self.entries[name] = Entry(times, tick, self.serial)

    def pop_oldest(self, handicaps):
        def age(name):
            entry = self.entries[name]
            return entry.tick - handicaps[entry.times], entry.times, entry.serial

        name = min(self.entries, key=age)
        return name, self.entries.pop(name).times


class Plain:
    """The policy in plain code, with the numbers as they are tuned."""

    def __init__(self, capacity):
        self.rate = max(4, capacity // 1024)
        self.uses_a_tick = max(1, capacity // 256)
        ticks = capacity / self.uses_a_tick
        self.rows = [tuple(round(each * ticks) for each in row) for row in ROWS]
        self.shadow_capacity = max(1, capacity // self.rate)
        self.shadows = [Order(row) for row in self.rows]
        self.hits = [0.0] * 4
        self.chosen, self.now, self.uses = 1, 0, 0
        self.order, self.pinned = Order(None), {}
        self.seen = RotatingBloomFilter(round(2.7 * capacity))
        self.fades = 1 - 1 / max(64, 2048 / (self.uses_a_tick * 16 / self.rate))

    def use(self, key, times):
        checksum = crc32(key)
        if checksum % self.rate == 0:
            for at, shadow in enumerate(self.shadows):
                entry = shadow.entries.pop(checksum, None)
                if entry is not None:
                    self.hits[at] += 1
                    shadow.put(checksum, min(3, entry.times + 1), self.now)
                    continue
                if len(shadow.entries) == self.shadow_capacity:
                    shadow.pop_oldest(shadow.handicaps)
                shadow.put(checksum, times, self.now)
        self.uses += 1
        if self.uses % self.uses_a_tick == 0:
            self.now += 1
            if self.now % 16 == 0:
                best = self.hits.index(max(self.hits))
                if self.hits[best] > self.hits[self.chosen] * 1.01:
                    self.chosen = best
                self.hits = [hits * self.fades for hits in self.hits]

    def add(self, keys):
        for key in keys:
            if key in self.pinned:
                times = self.pinned.pop(key)
            else:
                times = self.seen.recall(crc32(key))
                self.use(key, times)
            self.order.put(key, times, self.now)

    def touch(self, keys):
        for key in keys:
            entry = self.order.entries.pop(key, None)
            if entry is not None:
                times = min(3, entry.times + 1)
                self.order.put(key, times, self.now)
            elif key in self.pinned:
                times = self.pinned[key] = min(3, self.pinned[key] + 1)
            else:
                continue
            self.use(key, times)

    def remove(self, keys):
        for key in keys:
            self.pinned[key] = self.order.entries.pop(key).times

    def victims(self, count):
        taken = []
        while self.order.entries and len(taken) < count:
            key, times = self.order.pop_oldest(self.rows[self.chosen])
            self.seen.note([crc32(key)], min(3, times + 1))
            taken.append(key)
        return taken


def load(rng, keys, turn):
    """Return a key of popular prompts, of recent ones or of a scan; each teaches another row."""
    if turn % 3 == 0:
        return int(keys * rng.random() ** 4)
    if turn % 3 == 1:
        return keys + turn * 5 + rng.randrange(keys // 4)
    return rng.choice((rng.randrange(keys // 8), 10 * keys + rng.randrange(keys * 9)))


@pytest.mark.parametrize(
    ("capacity", "uses", "most"), [(1, 300, 1), (30, 12_000, 1), (30, 12_000, 4), (600, 6_000, 1)]
)
def test_every_decision_is_that_of_the_plain_implementation(capacity, uses, most):
    """Each call names up to ``most`` keys."""
    rng = random.Random(capacity)
    policy, plain = HandicapPolicy(capacity), Plain(capacity)
    both, pinned, rows = (policy, plain), [], set()
    for number in range(0, uses, most):
        turn = number * 9 // uses
        keys = [b"%d" % load(rng, max(8, 3 * capacity), turn) for _ in range(rng.randint(1, most))]
        for each in both:
            each.touch(keys)
        new = [key for key in dict.fromkeys(keys) if key not in policy and key not in pinned]
        new = new[:capacity]
        if (excess := len(policy) + len(new) - capacity) > 0:
            count = min(len(policy), rng.randrange(excess, excess + 5))
            assert list(policy.victims(count)) == plain.victims(count)
        for each in both:
            each.add(new)
        if rng.random() < 0.05 * most:
            there = [key for key in dict.fromkeys(keys) if key in policy]
            there = there[: capacity - len(pinned)]  # notes on more keys would be dropped
            pinned += there
            for each in both:
                each.remove(there)
        elif pinned and rng.random() < 0.1 * most:
            back = [pinned.pop(rng.randrange(len(pinned)))]
            for each in both:
                each.add(back)
        assert len(policy) == len(plain.order.entries)
        assert policy._chosen is policy._shadows[plain.chosen]
        rows.add(plain.chosen)
    everything = len(policy)
    assert list(policy.victims(everything + 1)) == plain.victims(everything)
    assert len(policy) == 0
    assert capacity == 1 or len(rows) > 1  # something was learnt
