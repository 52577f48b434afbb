"""The model's engine: its own block pool, prefix hashes, prefix cache, scheduler and requests."""

import hashlib
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from functools import partial
from itertools import count, groupby
from pathlib import Path

from kvoffload.connectors.local import LocalConnector
from tests.support.random_model.cache import UNIT

LOAD_S, PAUSE_S = 20.0, 1.0
"""A load that takes longer hangs, but for times in which nothing polls."""
TTL_S = 4.0
"""So long that a chunk is loaded before, and so short that many expire in a run."""
MOST_GROWTH = 2
"""By how much a start may multiply the first capacity of a tier."""
VOCABULARY = 50
PLAIN = ".plain"
"""A file of that name beside the keys of a tier: some start did not encrypt."""
MODELS = ("random", "other")


def changeable(draw, keeps, most_blocks):
    """Settings that an engine may have others of at its next start, over the same tiers.

    Chunks of fewer blocks are smaller: host memory and the tiers have room for more of them.
    """
    has_tenants = draw.random() < 0.75
    return {
        "tenants": has_tenants,
        "tenant_share": draw.choice((0.3, 0.6, 1.0)) if has_tenants else 1.0,
        "blocks_per_chunk": draw.choice([n for n in (1, 2, 4) if n <= most_blocks]),
        "policy": draw.choice(("lru", "handicap", "arc")),
        "store_threshold": draw.choice((1, 1, 2)) if keeps else 1,
        "promote": draw.random() < 0.7,
        "waiting_share": draw.choice((0, 0.3, 0.9, 0.9, 1)),
    }


def rough(draw):
    """Settings of a disk tier, but for those that decide its size and the number of its threads."""
    return {
        "stall_s": draw.choice((0.3, 2.0)),
        "form": draw.choice(("slots", "files")),
        "durability": draw.choice(("none", "none", "fsync")),
        "policy": draw.choice(("moody", "lru", "handicap")),
        "ttl_s": draw.choice((None, TTL_S)),
    }


def others(draw, tiers):
    """Return the same tiers in another order, with settings that may change at a start."""
    changed = [dict(tier) for tier in draw.sample(tiers, len(tiers))]
    for tier in changed:
        if "capacity" in tier:
            tier["capacity"] = int(tier["capacity"] * draw.choice((0.5, 1, 1, MOST_GROWTH)))
        if "tenant_share" in tier:
            tier["tenant_share"] = draw.choice((0.4, 1.0))
        if tier["type"] == "rough":
            tier |= rough(draw)
        if "encryption" in tier and draw.random() < 0.3:
            Path(tier.pop("encryption")["key_file"]).with_suffix(PLAIN).touch()
    return changed


@dataclass(eq=False)
class ModelRequest:
    """A request as the connector sees it, and what the engine knows of it."""

    request_id: str
    tokens: list[int]
    end: int
    """Tokens at which it is finished."""
    generation: int | str
    """That its next tokens are computed in."""
    block_hashes: list[bytes] = field(default_factory=list)
    names: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Group and number of a block → what it must hold."""
    computed_in: list[int | str] = field(default_factory=list)
    """The generation of each token that has KV."""
    kv_transfer_params: dict = field(default_factory=dict)
    cache_salt: str | None = None
    tables: list[list[int]] = field(default_factory=list)
    num_computed: int = 0
    num_promised: int = 0
    begun_s: float = 0.0
    """When its load began."""
    state: str = "waiting"
    is_told: bool = False
    """Whether the connector knows that it waits."""
    is_mixed: bool = False
    """Whether it has KV of a generation before a reset."""

    def __post_init__(self):
        self.hash()

    @property
    def num_tokens(self):
        return len(self.tokens)

    def hash(self):
        """Add the hashes of units that have become full."""
        for i in range(len(self.block_hashes), len(self.tokens) // UNIT):
            parent = self.block_hashes[-1] if i else b"root"
            unit = bytes(self.tokens[i * UNIT : (i + 1) * UNIT])
            self.block_hashes.append(hashlib.sha256(parent + unit).digest())


def _with_reasons(get_finished):
    """Return the results of transfers; each chunk that failed has a reason."""
    results = get_finished()
    for result in results:
        assert result.reason or all(result.ok), f"job {result.job_id} failed without a reason"
    return results


class ModelEngine:
    """Serves requests over a connector, and compares every byte that it loads or goes on with.

    Args:
        draw: the only source of chance.
        memory: the KV cache.
        settings: of the connector.
        model: what it serves: engines of one model have chunks of each other.
    """

    generations = count(1)
    """Of all engines: a reset's is of one engine alone."""

    def __init__(self, draw, memory, settings, model="random"):
        self.draw = draw
        self.model = model
        self.memory = memory
        self.kind = memory.kind
        self.settings = settings
        self._most_blocks, self._tiers = settings["blocks_per_chunk"], settings.get("backends")
        self.counts = Counter()
        self._free = list(range(1, memory.num_blocks))  # block 0 stands for none
        self._cached = OrderedDict()
        """The prefix cache: hash → blocks of all groups that nothing uses, oldest first."""
        self._doomed = {}
        """Name of an ended request that a load still writes for → its blocks."""
        self.waiting, self.running, self.loading = [], [], {}
        self._names = 0
        self._polled_s = time.monotonic()
        self.start()

    # ---- the life of the connector ----

    def start(self):
        """Connect: of what the tiers have, what was stored under the plain facts is of use."""
        self.generation = self.model
        self.connector = LocalConnector(
            self.settings,
            self.memory.caches,
            block_size=UNIT,
            facts={"model": self.model},
            kv_cache_config=self.memory.config,
        )
        self.told = 0
        """Tokens that this connector said it has loaded."""
        worker = self.connector._worker
        worker.get_finished = partial(_with_reasons, worker.get_finished)

    def restart(self, timeout_s, heal):
        """Close with whatever is in flight; nothing is written any more then. Begin again.

        It may be with other weights or settings, and with the tiers in another order. ``heal`` ends
        what goes wrong: calls that hang go on.
        """
        for request in [*self.waiting, *self.running, *self.loading.values()]:
            request.state = "gone"
        self.connector.close(timeout_s)
        before = self.memory.snapshot()
        heal()
        time.sleep(0.05)
        for old, new in zip(before, self.memory.snapshot(), strict=True):
            assert old.equal(new), "bytes were written after the connector was closed"
        self.waiting, self.running, self.loading = [], [], {}
        self._doomed.clear()
        self._cached.clear()
        self._free = list(range(1, self.memory.num_blocks))
        if self.draw.random() < 0.5:
            keeps = bool(self.settings["cpu_bytes"])
            self.settings |= changeable(self.draw, keeps, self._most_blocks)
            self.model = self.draw.choice(MODELS)
            if self._tiers:
                self.settings["backends"] = others(self.draw, self._tiers)
        self.start()

    def reset(self, waits):
        """Change the weights: what was computed before means nothing any more.

        Without waiting, as under vLLM, jobs in flight cross the reset.
        """
        if not waits:
            self.connector.flush = lambda: False
        self.connector.reset_cache()
        self.connector.__dict__.pop("flush", None)
        self.generation = next(self.generations)
        for blocks in self._cached.values():
            self._put_back(blocks)
        self._cached.clear()
        for request in [*self.running, *self.loading.values()]:
            request.is_mixed = True
        for request in [*self.waiting, *self.running, *self.loading.values()]:
            request.generation = self.generation

    # ---- requests ----

    def add(self, tokens, decoded=0, **hints):
        self._names += 1
        end = len(tokens) + decoded
        request = ModelRequest(f"r{self._names}", list(tokens), end, self.generation)
        request.kv_transfer_params = {"kvoffload": hints} if hints else {}
        request.cache_salt = self.draw.choice((None, None, "a", "b"))
        self._queue(request)
        self.counts["requests"] += 1
        return request

    def _queue(self, request):
        self.waiting.append(request)
        request.is_told = self.draw.random() < 0.8  # an engine need not tell
        if request.is_told:
            self.connector.request_queued(request)

    def step(self):
        """Take in ended loads, admit, and compute a part of each running request."""
        self._end_loads()
        for request in list(self.waiting):
            if self.draw.random() < 0.9 and len(self.running) < 6:
                self._admit(request)
        for request in list(self.running):
            if request.state == "running":
                self._compute(request)
        self._check_one()

    def abort(self, request):
        """End a request wherever it is."""
        self.counts["aborts"] += 1
        self._leave(request, self.connector.request_finished(request))
        request.state = "gone"

    def preempt(self, request, will_return=True):
        """Take a request's blocks; it is admitted again."""
        self.counts["preemptions"] += 1
        self._leave(request, self.connector.request_preempted(request))
        request.state, request.num_computed, request.is_mixed = "waiting", 0, False
        request.names.clear()
        self._queue(request)

    def _leave(self, request, will_be_named):
        """Free a request's blocks, now or once the connector has named it."""
        was_loading = request.state == "loading"
        blocks = [block for table in request.tables for block in table if block]
        request.tables = []
        for place in (self.waiting, self.running):
            if request in place:
                place.remove(request)
        self.loading.pop(request.request_id, None)
        is_doomed = request.request_id in self._doomed
        assert was_loading or will_be_named == is_doomed, "poll names what it said, once"
        if will_be_named and was_loading:
            self._doomed[request.request_id] = blocks
        elif blocks:
            self._put_back(blocks)

    def _end_loads(self):
        now_s, since_s = time.monotonic(), self._polled_s
        self._polled_s = now_s
        for request in self.loading.values():
            if now_s > since_s + PAUSE_S:  # another engine started again meanwhile
                request.begun_s += now_s - since_s
            assert now_s - request.begun_s < LOAD_S, f"the load of {request.request_id} hangs"
        for outcome in self.connector.poll():
            name = outcome.request_id
            self.told += outcome.num_loaded_tokens
            if name in self._doomed:
                assert name not in self.loading, "one name for two loads"
                self._put_back(self._doomed.pop(name))
                continue
            assert name in self.loading, f"poll names {name}, which waits for nothing"
            self._loaded(self.loading.pop(name), outcome)

    def _loaded(self, request, outcome):
        self.counts["loads"] += 1
        self.counts["tokens"] += outcome.num_loaded_tokens
        start, got = request.num_computed, outcome.num_loaded_tokens
        assert got <= request.num_promised
        request.state = "running"
        self.running.append(request)
        if not outcome.ok and not self.kind.keeps_prefixes:
            # Its tables were laid out for all that was promised.
            self.preempt(request)
            return
        self._name(request, start, start + got)
        request.num_computed = start + got
        request.is_mixed = request.is_mixed and start > 0
        self._check(request)

    def _admit(self, request):
        cached, start = self._find_cached(request)
        promised = self.connector.get_num_new_matched_tokens(request, start)
        if promised is None:
            self.counts["asked again"] += 1
            return
        if self.draw.random() < 0.02:
            return  # the engine changes its mind
        end = start + promised
        tables = self._lay_out(cached, start, end)
        if tables is None:
            if not self.running and not self.loading and not self._doomed:
                self._drop_cached(len(self._cached))
            return
        self.waiting.remove(request)
        request.tables, request.num_computed, request.num_promised = tables, start, promised
        request.generation, request.is_mixed = self.generation, False
        self._name(request, 0, start)
        self.connector.update_state_after_alloc(request, tables, promised)
        request.state = "loading" if promised else "running"
        if promised:
            self.loading[request.request_id] = request
            request.begun_s = time.monotonic()
        else:
            self.running.append(request)

    def _compute(self, request):
        """Compute some tokens of the prompt, or one after it; end the request at its end."""
        start = request.num_computed
        if start >= len(request.tokens):
            request.tokens.append(self.draw.randrange(VOCABULARY))
            request.hash()
        count = self.draw.choice((1, UNIT, 3 * UNIT, 64))
        end = min(start + count, len(request.tokens))
        while not self._grow(request, end):  # the last one may have no block yet
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return
        written = [
            (group, i)
            for group, spec in enumerate(self.kind.groups)
            for i in range(start // spec.block_size, -(-end // spec.block_size))
        ]
        self.connector.before_forward([request.tables[group][i] for group, i in written])
        for group, i in written:
            self.memory.scribble(group, request.tables[group][i])
        self._name(request, start, end)
        for group, i in written:
            if name := request.names.get((group, i)):
                self.memory.write(group, request.tables[group][i], name)
        request.num_computed = end
        self.connector.after_forward(request, request.tables, end)
        if end >= request.end:
            self._finish(request)

    def _finish(self, request):
        self.counts["finished"] += 1
        self._check(request)
        assert not self.connector.request_finished(request), "a running request loads nothing"
        self.running.remove(request)
        request.state = "done"
        tables, request.tables = request.tables, []
        if len(self.kind.groups) > 1 or request.is_mixed:
            self._put_back([block for table in tables for block in table if block])
            return
        (table,) = tables
        for i, block in enumerate(table):
            name = request.block_hashes[i] if i < request.num_computed // UNIT else None
            if name is None or name in self._cached:
                self._put_back([block])
            else:
                self._cached[name] = [block]

    # ---- blocks ----

    def _find_cached(self, request):
        """Return blocks of the prompt's start that are in the prefix cache, and their tokens."""
        found = []
        for name in request.block_hashes[: (len(request.tokens) - 1) // UNIT]:
            if name not in self._cached:
                break
            found.append(name)
        return found, len(found) * UNIT

    def _lay_out(self, cached, start, end):
        """Allocate blocks for a load up to ``end``; of windows those that they still read."""
        blocks = [self._cached.pop(name)[0] for name in cached]
        tables, taken = [], []
        for spec in self.kind.groups:
            window = getattr(spec, "sliding_window", None)
            first = max(0, end - window + 1) // spec.block_size if window else 0
            table = list(blocks)
            for i in range(len(table), end // spec.block_size):
                block = 0 if i < first else self._take()
                if block is None:
                    self._put_back(taken)
                    self._cached.update(zip(cached, ([each] for each in blocks), strict=True))
                    return None
                table.append(block)
                taken += [block] if block else []
            tables.append(table)
        return tables

    def _grow(self, request, end):
        for table, spec in zip(request.tables, self.kind.groups, strict=True):
            while len(table) * spec.block_size < end:
                block = self._take()
                if block is None:
                    return False
                table.append(block)
        return True

    def _take(self):
        if not self._free and self._cached:
            self._drop_cached(1)
        return self._free.pop(0 if self.draw.random() < 0.3 else -1) if self._free else None

    def forget_kept(self):
        """Let the next requests load what they read from tiers."""
        self._drop_cached(len(self._cached))
        self.connector._manager.reset_cache()

    def _drop_cached(self, count):
        for _ in range(count):
            _, blocks = self._cached.popitem(last=False)
            self._put_back(blocks)

    def _put_back(self, blocks):
        self._free += blocks

    @property
    def chunk_tokens(self):
        """Tokens after which each group has whole chunks alone."""
        return self.kind.alignment * self.settings["blocks_per_chunk"]

    @property
    def lost_blocks(self):
        """Blocks that are nowhere, while no request has any."""
        return self.memory.num_blocks - 1 - len(self._free) - len(self._cached)

    # ---- contents ----

    def _name(self, request, start, end):
        """Say what the blocks that become full between two tokens must hold.

        That follows from the generations of the whole prefix: attention has read all of it.
        """
        request.computed_in[start:] = [request.generation] * (end - start)
        for group, spec in enumerate(self.kind.groups):
            units = spec.block_size // UNIT
            for i in range(start // spec.block_size, end // spec.block_size):
                unit_hash = request.block_hashes[(i + 1) * units - 1]
                runs = groupby(request.computed_in[: (i + 1) * spec.block_size])
                generations = [(each, len(list(run))) for each, run in runs]
                if len(generations) == 1:
                    generations = generations[0][0]
                request.names[group, i] = unit_hash + str(generations).encode()

    def _check(self, request):
        """Compare all that attention reads at the request's next token."""
        for group, spec in enumerate(self.kind.groups):
            window = getattr(spec, "sliding_window", None)
            first = max(0, request.num_computed - window + 1) if window else 0
            for i in range(first // spec.block_size, request.num_computed // spec.block_size):
                block = request.tables[group][i]
                assert block, f"group {group} lacks block {i}"
                name = request.names[group, i]
                what = f"{request.request_id}: wrong bytes in block {i} of group {group}"
                assert self.memory.holds(group, block, name), what
                self.counts["compared"] += 1

    def _check_one(self):
        if self.running and self.draw.random() < 0.3:
            self._check(self.draw.choice(self.running))
