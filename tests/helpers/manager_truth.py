"""What must be true of a manager after each step of a walk, and the tiers of that walk."""

from manager_parts import figures

from kvoffload.backends.base import Removal
from kvoffload.offload.base import (
    ChunksStored,
    OffloadKey,
    ReqContext,
    get_offload_group_idx,
    make_offload_key,
)
from kvoffload.offload.tiers import Presence
from tests.support.manager_check import check

PROMPTS, LENGTH = 4, 6
# Every other prompt is of a KV cache group of its own, whose chunks may be larger.
KEYS = [
    [make_offload_key(bytes([p, i]) * 16, p % 2) for i in range(LENGTH)] for p in range(PROMPTS)
]
LARGE_ROWS = 3
GARBAGE = OffloadKey(b"garbage")
ASKING = [None, {"tiers": ["t1"]}, None, {"tiers": []}]


class Full:
    """A store that loads as much as it may: what it has is promised later."""

    def __init__(self, store):
        self._store = store

    def holds(self, key):
        return False if self._store.holds(key) is False else None


class FakeTier(Presence):
    """A store below: holds keys, may be down (answers False) or slow (answers None)."""

    def __init__(self):
        self.stored, self.hidden, self.removals = set(), set(), []
        self.answer_for_stored = True

    def holds(self, key):
        return self.answer_for_stored if key in self.stored and key not in self.hidden else False

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


class IndexedTier(FakeTier):
    """A store that looks up a prompt in one call."""

    def num_leading(self, keys):
        return next((i for i, key in enumerate(keys) if not self.holds(key)), len(keys))


class ManagerTruth:
    """Checks the manager against a plain model, whose attributes a walk sets."""

    def check(self):
        check(self.manager)
        host = self.manager._host
        assert not (self.staging and host.num_ready), "a chunk stays in host memory"
        used = 0
        for key, slot in host.ready():
            assert self.holds(slot, key), "a loadable chunk's slot holds something else"
            used += host.bytes_of(key)
        assert host.resident_bytes == used
        assert 0 <= host.inflight_bytes <= host.capacity_bytes - used
        for chunks in figures(self.manager).get("waiting_chunks", {}).values():
            assert chunks <= host.num_slots
        self.checks += 1
        if self.checks % 3 == 0:
            self.replay()
            self.look_up(self.checks // 3)

    def replay(self):
        """The events so far say what is resident now."""
        for event in self.manager.take_events():
            here = self.replayed[event.medium]
            if isinstance(event, ChunksStored):
                here.update(event.keys)
            elif event.keys:
                here.difference_update(event.keys)
            else:
                here.clear()
        assert self.replayed["CPU"] == self.resident()
        for name, store in self.stores.items():
            assert self.replayed[name.upper()] == store.stored

    def look_up(self, number):
        """Every lookup answers what the walk expects from what it has seen itself."""
        hint = ASKING[number % len(ASKING)]
        context = self.context(hint)
        for keys in KEYS:
            tiers = self.tiers_to_read(hint)
            answers = [self.expected(key, tiers) for key in keys]
            promised = self.expected_prefix(keys, answers)
            for key, answer in zip(keys, answers, strict=True):
                if self.staging and answer and not self.manager._host.room_for(key):
                    answer = None  # as soon as there is a slot for it to pass through
                assert self.manager.lookup(key, context) is answer
            assert self.manager.lookup_prefix(keys, context) == promised

    def tiers_to_read(self, hint):
        wanted = hint["tiers"] if hint else self.stores
        promises = self.manager.promises
        full = {tier.name for tier in self.manager.tiers if promises.has_full([tier])}
        return [
            Full(store) if name in full else store
            for name, store in self.stores.items()
            if name in wanted
        ]

    def expected(self, key, tiers):
        if key in self.replayed["CPU"]:
            return True
        if key in self.fetching:
            return None
        # Forgotten while somebody still used its slot: it cannot come back before that ends.
        if key in self.incoming or key in self.manager._host._orphans:
            return False
        answers = [store.holds(key) for store in tiers]
        return True if True in answers else None if None in answers else False

    def expected_prefix(self, keys, answers):
        """Leading hits, as far as those from below fit beside the idle ones of the prompt.

        Early reads in flight keep room: more fit once they have ended.
        """
        host = self.manager._host
        if self.staging and answers[0] and not host.room_for(keys[0]):
            return 0, True
        below = idle = 0
        for hits, (key, answer) in enumerate(zip(keys, answers, strict=True)):
            if not answer:
                return hits, answer is None
            below += key not in self.replayed["CPU"]
            idle += host.is_ready(key) and key not in host.pinned
            if below and not self.staging and below + idle > host.room_for(key):
                return hits, bool(self.early)
        return len(keys), False

    def resident(self):
        return {key for prompt in KEYS for key in prompt if self.manager._host.is_ready(key)}

    def context(self, hint=None):
        self.requests += 1
        return ReqContext(f"r{self.requests}", {"kvoffload": hint} if hint else None)

    def holds(self, slot, key, content=None):
        rows = self.rows_of[get_offload_group_idx(key)]
        return all(self.content[row] == (content or key) for row in range(slot, slot + rows))
