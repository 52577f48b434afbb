"""A manager under test, and a worker half played by hand.

The walk keeps what each host slot *contains*, so that a slot handed out while something still uses
it, or an evicted chunk under a load, shows as a wrong content. What lookups must answer follows
from what was done, the events and the tiers, never from the manager's own tables.
"""

from dataclasses import replace

from manager_truth import (
    GARBAGE,
    KEYS,
    LARGE_ROWS,
    LENGTH,
    PROMPTS,
    FakeTier,
    IndexedTier,
    ManagerTruth,
)

from kvoffload.config import KNOWN_HINTS
from kvoffload.offload.base import CPULoadStoreSpec, EarlyRead, get_offload_group_idx, tenant_id
from kvoffload.offload.extents import ExtentCache
from kvoffload.offload.geometry import HostGeometry
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.manager import Tier, TieredOffloadingManager
from kvoffload.policies.lru import LRUPolicy

__all__ = ["KEYS", "LENGTH", "PROMPTS", "Walk"]


class Walk(ManagerTruth):
    """The manager under test, and a worker half played by hand."""

    def __init__(
        self,
        host_slots,
        num_tiers,
        max_persisting=None,
        threshold=1,
        sized=False,
        new_policy=LRUPolicy,
        staging=False,
        waiting_share=0.0,
    ):
        self.rows_of = (1, LARGE_ROWS) if sized else (1, 1)
        if sized:
            rows = 2 * LARGE_ROWS + 3 * host_slots
            geometry = HostGeometry.plan(rows * 4096, [4096 * n for n in self.rows_of])
            host = ExtentCache(geometry, new_policy)
        else:
            rows = host_slots
            host = HostCache(host_slots, new_policy(host_slots))
        self.num_tiers = num_tiers
        self.stores = self.new_stores()
        self.staging = staging
        self.manager = TieredOffloadingManager(
            host,
            self.tiers(),
            max_persisting,
            caching=not staging,
            store_threshold=threshold,
            client_hints=KNOWN_HINTS,
            load_timeout_s=30.0,
            waiting_share=waiting_share,
        )
        self.queued, self.early = [], []
        self.now_s = 0.0
        host.now_s = lambda: self.now_s
        self.used = {}
        self.manager._early._limit_bytes = 4 * host.slot_bytes  # or it is less than a chunk
        self.threshold = threshold
        self.seen = {key: set() for prompt in KEYS for key in prompt}
        self.requests = self.checks = 0
        self.content = dict.fromkeys(range(rows), GARBAGE)
        self.loads, self.saves, self.transfers, self.unsettled = [], [], [], []
        self.answered = []
        # What lookups must answer follows from these, the events and the tiers: see `expected`.
        self.incoming, self.fetching = set(), set()
        # Jobs that a reset crossed: their chunks may be in flight anew, and arrive.
        self.forgotten = set()
        self.replayed = {medium: set() for medium in ("CPU", *map(str.upper, self.stores))}

    def new_stores(self):
        return {f"t{i}": (FakeTier if i else IndexedTier)() for i in range(self.num_tiers)}

    def tiers(self):
        return [Tier(name, store) for name, store in self.stores.items()]

    def fill(self, slot, key, content):
        for row in range(slot, slot + self.rows_of[get_offload_group_idx(key)]):
            self.content[row] = content

    # What an engine does

    def load(self, prompt, start, hint=None, context=None):
        keys = KEYS[prompt][start:]
        context = context or self.context(hint)
        hint = (context.kv_transfer_params or {}).get("kvoffload")
        hits, pending = self.manager.lookup_prefix(keys, context)
        assert [self.manager.lookup(key, context) for key in keys[:hits]] == [True] * hits
        if hits < len(keys) and pending and self.manager.lookup(keys[hits], context) is not None:
            assert self.early, "nothing in flight keeps room that the load lacks"
            assert self.manager.is_fetching(keys)
        while hits and not self.manager.promises.is_worth_loading(keys[:hits], hits, context):
            assert self.manager.promises.declined(self.manager.tiers, context.req_id)
            hits, pending = self.manager.lookup_prefix(keys, context)
        if not hits:
            return
        declined = self.manager.promises.declined(self.manager.tiers, context.req_id)
        declined = [tier.name for tier in declined]
        job = self.manager.begin_load(keys[:hits], context)
        spec = job.spec
        slots = spec.host_slots.tolist()
        assert len(slots) == hits  # the lookup promised no more than host memory can receive
        fetched = {}
        for fetch in spec.fetches:
            assert fetch.keys == tuple(keys[i] for i in fetch.positions)
            assert not hint or fetch.tier in hint.get("tiers", fetch.tier)
            assert fetch.tier not in declined
            fetched.update(dict.fromkeys(fetch.positions, self.stores[fetch.tier]))
        for i, slot in enumerate(slots):
            if i not in fetched:
                assert self.holds(slot, keys[i]), "a hit's slot holds another chunk"
        for i in fetched:
            self.fill(slots[i], keys[i], context.req_id)
        self.loads.append((keys[:hits], slots, fetched, context, job))
        self.fetching.update(keys[i] for i in fetched)

    def end_load(self, which, good, settled):
        if not self.loads:
            return
        keys, slots, fetched, context, job = self.loads.pop(which % len(self.loads))
        ok = [(good >> i) & 1 for i in range(len(keys))]
        for i in fetched:
            assert self.holds(slots[i], keys[i], context.req_id), "a slot of a load was given away"
        for i, slot in enumerate(slots):
            if i not in fetched:
                assert self.holds(slot, keys[i]), "a pinned chunk was overwritten"
            self.fill(slot, keys[i], keys[i] if ok[i] or i not in fetched else GARBAGE)
        was_forgotten = job.id in self.forgotten
        if not was_forgotten:
            self.fetching.difference_update(keys)
        bad = [key for key, fine in zip(keys, ok, strict=True) if not fine]
        by_job = self.requests % 2
        if by_job:
            self.now_s += which
            job.ok, job.seconds, job.reason = ok, which, "missing"
            self.answer(self.manager.complete, job, ok, settled, "missing")
        else:
            self.answer(self.manager.complete_load, bad, context, False, settled, "missing")
        # Of a load by its keys, a second call answers the good ones.
        answered = [i for i in range(len(keys)) if by_job or not ok[i]]
        if not settled:
            late = [(slots[i], keys[i], i in fetched and not ok[i]) for i in answered]
            self.leave(job, late)
        for i, key in enumerate(keys):
            if key in bad:
                assert was_forgotten or key not in self.resident(), "a failed key is still promised"
                assert i not in fetched or not fetched[i].holds(key)
        if not by_job:
            fine = [key for key, fine in zip(keys, ok, strict=True) if fine]
            self.answer(self.manager.complete_load, fine, context)

    def answer(self, complete, *args):
        complete(*args)
        self.answered = [*self.answered[-20:], (complete, args)]

    def answer_again(self, which):
        """A second completion changes nothing but a counter, however late and whoever moves it."""
        if not self.answered:
            return
        complete, args = self.answered[-1 - which % len(self.answered)]
        count = 1 if complete == self.manager.complete else len(args[0])
        before, now = self.manager.counters["unexpected_completion"], self.known()
        complete(*args)
        assert self.manager.counters["unexpected_completion"] == before + count
        assert self.known() == now

    def known(self):
        """All that the manager knows of host memory."""
        host = self.manager._host
        places = (
            host.evictable,
            host.pinned,
            host._more_uses,
            host.incoming,
            host.fetching,
            host._orphans,
        )
        return [*map(dict, places), dict(host._abandoned), host.busy_slots]

    def store(self, prompt, count, hint=None):
        hint, context = hint or {}, self.context(hint)
        keys = KEYS[prompt][:count]
        missing = [k for k in keys if k not in self.resident() and not self.manager._host.moving(k)]
        if hint.get("offload", True):
            for key in missing:
                self.seen[key].add(context.req_id)
        free, idle, claimed = self.what_may_leave(keys)
        output = self.manager.prepare_store(keys, context)
        if output is None or not output.keys_to_store:
            return
        if claimed.intersection(output.evicted_keys) and free is not None:
            gone = len(output.evicted_keys)
            assert gone > len(idle), "what a queued request needs left before other chunks"
        assert hint.get("offload", True)
        assert all(len(self.seen[key]) >= self.threshold for key in output.keys_to_store)
        assert not set(output.evicted_keys) & set(keys), "evicted what it was given"
        slots = output.store_spec.host_slots.tolist()
        for key in output.keys_to_store:
            assert self.manager.lookup(key) is False, "a chunk being stored is visible"
        self.saves.append((output.keys_to_store, slots, context, output.job))
        self.incoming.update(output.keys_to_store)

    def what_may_leave(self, protected):
        """Free slots (None where slots differ), idle chunks without a claim, and with one."""
        host = self.manager._host
        idle = set(host.evictable).difference(protected)
        claimed = idle.intersection(host.claims)
        free = None if isinstance(host, ExtentCache) else len(host._free)
        return free, idle - claimed, claimed

    # What an engine's queue does

    def queue(self, prompt, tenant, hint=None):
        context = replace(self.context(hint), tenant=tenant_id(tenant))
        self.manager.request_queued(lambda: KEYS[prompt], context)
        self.queued.append((prompt, context))

    def serve_queue(self):
        """A step: nothing that a request keeps leaves for one that comes later."""
        kept, requests = {}, sorted(self.manager.waiting.requests.values())
        counts = [request.num_kept for request in requests]
        for request in requests:
            for key in request.keys[: request.num_kept]:
                kept.setdefault(key, request)
        resident = self.resident()
        self.manager.serve_queue()
        gone = resident - self.resident()
        losers = [kept[key] for key in gone if key in kept]
        reads = [job.request for job in self.manager._jobs.begun if isinstance(job, EarlyRead)]
        # What gave way to a request of the same tenant may leave for a read of another one.
        gainers = [r for r, count in zip(requests, counts, strict=True) if r.num_kept > count]
        assert not losers or (reads and min(gainers) < min(losers))
        self.take_transfers()

    def admit(self, which):
        """The engine looks a queued request up, begins its load, and lets it run."""
        if not self.queued:
            return
        prompt, context = self.queued.pop(which % len(self.queued))
        self.load(prompt, 0, context=context)
        self.manager.request_admitted(context)
        assert self.manager.waiting.requests.get(context.req_id) is None

    def ask(self, which):
        """The engine looks a queued request up, and has no room for it."""
        if self.queued:
            prompt, context = self.queued[which % len(self.queued)]
            _, is_pending = self.manager.lookup_prefix(KEYS[prompt], context)
            self.manager.request_answered(context, is_pending)

    def preempt(self, which):
        """A queued request runs without a load, is preempted, and queues before the others."""
        if not self.queued:
            return
        prompt, context = self.queued[which % len(self.queued)]
        self.manager.request_admitted(context)
        self.manager.request_queued(lambda: KEYS[prompt], context, was_preempted=True)
        waiting = self.manager.waiting
        queued = waiting.requests.get(context.req_id)
        assert queued is None or queued is min(waiting.requests.values())

    def abort(self, which):
        if self.queued:
            prompt, context = self.queued.pop(which % len(self.queued))
            self.manager.retire(KEYS[prompt], context)

    def end_store(self, which, good, settled):
        if not self.saves:
            return
        keys, slots, context, job = self.saves.pop(which % len(self.saves))
        ok = [(good >> i) & 1 for i in range(len(keys))]
        for key, slot, fine in zip(keys, slots, ok, strict=True):
            self.fill(slot, key, key if fine else GARBAGE)
        if job.id not in self.forgotten:
            self.incoming.difference_update(keys)
        bad = [key for key, fine in zip(keys, ok, strict=True) if not fine]
        by_job = self.requests % 2
        if by_job:
            self.answer(self.manager.complete, job, ok, settled)
        else:
            self.answer(self.manager.complete_store, bad, context, False, settled)
        if not settled:
            answered = [i for i in range(len(keys)) if by_job or not ok[i]]
            self.leave(job, [(slots[i], keys[i], not ok[i]) for i in answered])
        if not by_job:
            fine = [key for key, fine in zip(keys, ok, strict=True) if fine]
            self.answer(self.manager.complete_store, fine, context)

    def take_transfers(self):
        for job in self.manager.take_transfers():
            store = self.stores[job.tier.name]
            if isinstance(job, EarlyRead):
                self.begin_early_read(job, store)
            else:
                self.transfers.append((job, store))

    def begin_early_read(self, job, store):
        hint = (job.request.context.kv_transfer_params or {}).get("kvoffload", {})
        assert job.tier.name in hint.get("tiers", [job.tier.name])
        for key, slot in zip(job.keys, job.spec.host_slots.tolist(), strict=True):
            self.fill(slot, key, f"early {job.id}")
        self.fetching.update(job.keys)
        self.early.append((job, store))

    def end_early_read(self, which, good, settled):
        if not self.early:
            return
        job, store = self.early.pop(which % len(self.early))
        slots = job.spec.host_slots.tolist()
        ok = [bool((good >> i) & 1) for i in range(len(slots))]
        for key, slot, fine in zip(job.keys, slots, ok, strict=True):
            assert self.holds(slot, key, f"early {job.id}"), "a slot of a read was given away"
            self.fill(slot, key, key if fine else GARBAGE)
        was_forgotten = job.id in self.forgotten
        if not was_forgotten:
            self.fetching.difference_update(job.keys)
        self.answer(self.manager.complete, job, ok, settled, "missing")
        if not settled:
            late = [(slots[i], key, not ok[i]) for i, key in enumerate(job.keys)]
            self.leave(job, late)
        for key, fine in zip(job.keys, ok, strict=True):
            assert fine or was_forgotten or key not in self.resident(), (
                "a failed key is still promised"
            )
            assert fine or not store.holds(key)

    def end_transfer(self, which, good, settled):
        if not self.transfers:
            return
        transfer, store = self.transfers.pop(which % len(self.transfers))
        assert isinstance(transfer.spec, CPULoadStoreSpec)
        slots = transfer.spec.host_slots.tolist()
        up = store.answer_for_stored is not False
        ok = [up and bool((good >> i) & 1) for i in range(len(slots))]
        for key, slot, fine in zip(transfer.keys, slots, ok, strict=True):
            assert self.holds(slot, key), "write-through read another chunk's bytes"
            if fine:
                store.write(key)
        self.answer(self.manager.complete, transfer, ok, settled)
        if not settled:
            late = zip(slots, transfer.keys, [False] * len(slots), strict=True)
            self.leave(transfer, list(late))

    def leave(self, job, late):
        """A call goes on to use slots after its answer."""
        self.unsettled.append((job, late, {slot: self.content[slot] for slot, _, _ in late}))

    def settle(self, which):
        """A late call lets go: until now it may have written to slots it was filling."""
        if not self.unsettled:
            return
        job, late, content = self.unsettled.pop(which % len(self.unsettled))
        for slot, _, _ in late:
            assert self.content[slot] == content[slot], "a slot in late use was given away"
        for slot, key, writes in late:
            if writes:
                self.fill(slot, key, GARBAGE)
        self.manager.release_slots([slot for slot, _, _ in late], job)

    def evict_below(self, tier, prompt, i):
        store = list(self.stores.values())[tier % len(self.stores)] if self.stores else None
        if store and KEYS[prompt][i] in store.stored:
            store.evict(KEYS[prompt][i])

    def others_write(self, tier, prompt):
        """Another engine stores a prompt in a tier that both use."""
        if self.stores:
            self.replay()
            name, store = list(self.stores.items())[tier % len(self.stores)]
            for key in KEYS[prompt]:
                store.write(key)
            self.replayed[name.upper()].update(KEYS[prompt])

    def tier_answers(self, tier, answer):
        if self.stores:
            list(self.stores.values())[tier % len(self.stores)].answer_for_stored = answer

    def touch(self, prompt, told=None):
        context = self.used[prompt] = self.context(told)
        for key in KEYS[prompt]:
            self.seen[key].add(context.req_id)
        self.manager.touch(KEYS[prompt], context)

    def retire(self, prompt, told=None):
        """End the request that used a prompt last; it may say when its session returns."""
        self.manager.retire(KEYS[prompt], self.used.pop(prompt, None) or self.context(told))

    def compute(self, tokens):
        """The engine turns out to be so fast."""
        self.now_s += 1
        for _ in range(4):
            self.manager.promises.prefilled(tokens, 10.0)

    def replace_tiers(self):
        self.stores = self.new_stores()
        self.manager.replace_tiers(self.tiers())
        self.take_transfers()

    def explain(self, prompt):
        for key, where in zip(KEYS[prompt], self.manager.explain(KEYS[prompt]), strict=True):
            answer = self.manager.lookup(key)
            if self.staging and not self.manager._host.room_for(key):
                assert answer is not True
                continue
            assert (answer is True) == (where == "CPU" or where.startswith("T"))
            assert (answer is None) == (where in ("pending", "fetching"))

    def reset(self):
        for sightings in self.seen.values():
            sightings.clear()
        self.manager.reset_cache()
        assert not self.manager._host.claims
        self.forgotten.update(job.id for *_, job in (*self.saves, *self.loads))
        self.forgotten.update(job.id for job, _ in self.early)
        self.incoming.clear()
        self.fetching.clear()
        for prompt in KEYS:
            for key in prompt:
                assert key not in self.resident()

    def drain(self):
        """End everything: no slot may be lost, and nothing stay that was kept."""
        while self.queued:
            self.abort(0)
        self.now_s += 1e6  # sessions that were to return are late
        self.manager.serve_queue()
        while self.manager.waiting.claims.leaving:
            self.manager.serve_queue()
        assert not self.manager._host.claims
        assert not self.manager.waiting.requests
        self.take_transfers()
        while self.loads:
            self.end_load(0, -1, True)
        while self.saves:
            self.end_store(0, -1, True)
        self.take_transfers()
        while self.transfers or self.unsettled or self.early:
            self.end_transfer(0, -1, True)
            self.end_early_read(0, -1, True)
            self.settle(0)
            self.take_transfers()
        self.check()
        self.replay()
        assert self.manager.busy_slots == 0
        assert not len(self.manager._jobs)
        assert not any(loads.late_bytes for loads in self.manager.promises._loads.values())
        assert not any(self.manager._write_through._kept_bytes.values())
        assert not any(loads.early_bytes for loads in self.manager.promises._loads.values())
        assert not any(loads.flying_bytes for loads in self.manager.promises._loads.values())
