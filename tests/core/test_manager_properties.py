"""Random lives of many requests on models of many kinds; all invariants after every step.

Hits are compared with a search that tries every length from the definition of each kind; what a
request reads must be what was written for exactly its tokens; and the events of the walk, replayed,
must give what can be found.
"""

import itertools
import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvoffload.core.block_pool import NULL_BLOCK
from kvoffload.core.cache_stats import AllBlocksCleared, BlockRemoved, BlockStored
from kvoffload.core.hashing import BlockHasher, HashChain
from kvoffload.core.interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kvoffload.core.manager import KVCacheManager
from kvoffload.core.request import Request
from kvoffload.errors import UsageError
from tests.support.block_checks import check_manager, free_in_order, needed_tokens

SHAPE = {"num_kv_heads": 1, "head_size": 2, "dtype": torch.float16}


def full(block_size=2):
    return FullAttentionSpec(block_size, **SHAPE)


def window(size, block_size=2):
    return SlidingWindowSpec(block_size, **SHAPE, sliding_window=size)


def chunked(size, block_size=2):
    return ChunkedLocalAttentionSpec(block_size, **SHAPE, attention_chunk_size=size)


def mamba(block_size=2, extra=0):
    return MambaSpec(block_size, ((3,),), (torch.float32,), num_speculative_blocks=extra)


WHICH = st.integers(0, 99)
"""Of the requests in a list, one; taken modulo its length."""

MODELS = {
    "full": [full()],
    "window": [window(5)],
    "window of one block": [window(3)],
    "window of one token": [window(1)],
    "chunked": [chunked(6)],
    "chunk that begins inside a block": [chunked(5)],
    "mamba": [mamba()],
    "mamba with speculation": [mamba(extra=2)],
    "full and window": [full(), window(4), window(7)],
    "full, chunked and mamba": [full(), chunked(6), mamba()],
    "different block sizes": [full(4), window(5, 2)],
    "block sizes without common multiple": [full(4), window(5, 6), mamba(2)],
    "window and mamba": [window(6), mamba(4)],
}


def longest_hit_by_trial(manager, specs, chain):
    for length in range((len(chain) - 1) // manager.block_size * manager.block_size, 0, -1):
        if length % manager.block_size:
            continue
        found = all(
            manager.pool.index.get(
                g,
                chain.hashes[(p // spec.block_size + 1) * spec.block_size // chain.block_size - 1],
            )
            for g, spec in enumerate(specs)
            for p in needed_tokens(spec, length)
        )
        if found:
            return length
    return 0


class Life(RuleBasedStateMachine):
    """One cache and its requests; tokens are few, so that prefixes are shared often."""

    @initialize(model=st.sampled_from(sorted(MODELS)), blocks=st.integers(8, 30))
    def begin(self, model, blocks):
        self.specs = MODELS[model]
        groups = [KVCacheGroupSpec([f"l{i}"], spec) for i, spec in enumerate(self.specs)]
        self.manager = KVCacheManager(
            KVCacheConfig(blocks, [], groups),
            max_model_len=60,
            enable_kv_cache_events=True,
            log_stats=True,
        )
        self.hasher = BlockHasher(self.manager.hash_block_size)
        self.running, self.loading, self.held, self.planned = [], [], [], []
        self.findable = [set() for _ in groups]
        self.count = 0
        # What a forward pass would have written: (block, offset) -> all tokens up to that position.
        self.memory = {}

    def forward(self, request, until):
        """Read what the next tokens attend to, see that it is theirs, and write their own."""
        done = request.num_computed_tokens
        for spec, table in zip(
            self.specs, self.manager.get_block_ids(request.request_id), strict=True
        ):
            for position in needed_tokens(spec, done):
                assert (
                    self.memory[self.place(spec, table, position)]
                    == request.token_ids[: position + 1]
                )
            self.write(request, spec, table, done, until)
        request.num_computed_tokens = until

    def write(self, request, spec, table, start, until):
        for position in [until - 1] if isinstance(spec, MambaSpec) else range(start, until):
            place = self.place(spec, table, position)
            assert place[0] != NULL_BLOCK
            self.memory[place] = request.token_ids[: position + 1]

    @staticmethod
    def place(spec, table, position):
        offset = 0 if isinstance(spec, MambaSpec) else position % spec.block_size
        return table[position // spec.block_size], offset

    def new_request(self, tokens):
        self.count += 1
        return Request(f"r{self.count}", HashChain(self.hasher, tokens))

    @rule(
        prompt=st.sampled_from([0, 0, 0, 1]),
        length=st.integers(1, 40),
        chunk=st.integers(1, 40),
        external=st.integers(0, 6),
        lookahead=st.integers(0, 3),
    )
    def admit(self, prompt, length, chunk, external, lookahead):
        request = self.new_request([prompt] * length)
        found, hit = self.manager.get_computed_blocks(request)
        assert hit == longest_hit_by_trial(self.manager, self.specs, request.chain)
        again = self.manager.get_computed_blocks(request)
        assert (again[0].blocks, again[1]) == (found.blocks, hit)
        self.allocate(request, found, hit, chunk, external, lookahead)

    @rule(prompt=st.sampled_from([0, 0, 0, 1]), length=st.integers(1, 40))
    def plan(self, prompt, length):
        request = self.new_request([prompt] * length)
        self.planned.append((request, *self.manager.get_computed_blocks(request)))

    @precondition(lambda self: self.planned)
    @rule(which=WHICH, chunk=st.integers(1, 40), external=st.integers(0, 6))
    def admit_planned(self, which, chunk, external):
        """Allocate long after the lookup: refused only if a block found lost the prefix."""
        request, found, hit = self.planned.pop(which % len(self.planned))
        before = self.manager.num_free_blocks, free_in_order(self.manager.pool.free_queue)
        refusal = ""
        try:
            self.allocate(request, found, hit, chunk, external, 0)
        except UsageError as error:
            refusal = str(error)
        if refusal:
            assert "do not contain its prefix" in refusal
            assert not self.contain_prefix(request, found)
            after = self.manager.num_free_blocks, free_in_order(self.manager.pool.free_queue)
            assert after == before

    def contain_prefix(self, request, found):
        """Whether each block found is registered, for its group, and was written for the prefix."""
        pool = self.manager.pool
        return all(
            pool._cached[block]
            and pool.index.group_of(block) == group
            and self.memory[self.place(spec, table, end - 1)] == request.token_ids[:end]
            for group, (spec, table) in enumerate(zip(self.specs, found.blocks, strict=True))
            for block, end in zip(table, itertools.count(spec.block_size, spec.block_size))
            if block
        )

    def allocate(self, request, found, hit, chunk, external, lookahead):
        length = request.num_tokens
        external = min(
            external * self.manager.block_size, (length - 1 - hit) // self.manager.block_size
            * self.manager.block_size,
        )  # fmt: skip
        before = self.manager.num_free_blocks
        new = self.manager.allocate_slots(
            request,
            0 if external else min(chunk, length - hit),
            num_new_computed_tokens=hit,
            new_computed_blocks=found,
            num_external_computed_tokens=external,
            num_lookahead_tokens=lookahead,
            delay_cache_blocks=bool(external),
        )
        if new is None:
            assert self.manager.num_free_blocks == before
            return
        if external:
            self.loading.append((request, hit, external))
        else:
            request.num_computed_tokens = hit
            self.forward(request, hit + min(chunk, length - hit))
            self.running.append(request)

    @precondition(lambda self: self.loading)
    @rule(which=WHICH, worked=st.booleans())
    def finish_load(self, which, worked):
        request, hit, external = self.loading.pop(which % len(self.loading))
        if worked:
            tables = self.manager.get_block_ids(request.request_id)
            for spec, table in zip(self.specs, tables, strict=True):
                needed = needed_tokens(spec, hit + external)
                start = needed.start // spec.block_size * spec.block_size  # whole blocks come
                self.write(request, spec, table, max(hit, start), hit + external)
            request.num_computed_tokens = hit + external
            self.manager.cache_blocks(request, hit + external)
            self.running.append(request)
        else:
            self.manager.free(request)

    @precondition(lambda self: self.running)
    @rule(which=WHICH, tokens=st.integers(1, 5), lookahead=st.integers(0, 3))
    def step(self, which, tokens, lookahead):
        request = self.running[which % len(self.running)]
        if request.num_computed_tokens == request.num_tokens:
            if request.num_tokens >= 55:
                return
            request.append_token_ids([7])
            tokens = 1
        tokens = min(tokens, request.num_tokens - request.num_computed_tokens)
        new = self.manager.allocate_slots(request, tokens, num_lookahead_tokens=lookahead)
        if new is not None:
            self.forward(request, request.num_computed_tokens + tokens)

    @precondition(lambda self: self.running)
    @rule(which=WHICH, deferred=st.booleans())
    def finish(self, which, deferred):
        request = self.running.pop(which % len(self.running))
        if deferred:
            self.held.append(self.manager.pop_blocks_for_free(request))
        else:
            self.manager.free(request)

    @precondition(lambda self: self.held)
    @rule()
    def give_back(self):
        self.manager.free_blocks(self.held.pop())

    @rule(blocks=st.sets(st.integers(0, 7), max_size=3))
    def evict(self, blocks):
        self.manager.evict_blocks(blocks)

    @rule()
    def reset(self):
        assert self.manager.reset_prefix_cache() == (
            self.manager.num_free_blocks == self.manager.config.num_blocks - 1
        )

    @invariant()
    def everything_is_consistent(self):
        if not hasattr(self, "manager"):
            return
        check_manager(self.manager)
        for event in self.manager.take_events():
            if isinstance(event, AllBlocksCleared):
                self.findable = [set() for _ in self.specs]
            elif isinstance(event, BlockRemoved):
                removed = set(event.block_hashes)
                assert removed <= self.findable[event.group_idx]
                self.findable[event.group_idx] -= removed
            elif isinstance(event, BlockStored):
                assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                assert not self.findable[event.group_idx] & set(event.block_hashes)
                self.findable[event.group_idx] |= set(event.block_hashes)
        assert sum(map(len, self.findable)) == len(self.manager.pool.index)
        for group, hashes in enumerate(self.findable):
            assert all(self.manager.pool.index.get(group, h) for h in hashes)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=150, stateful_step_count=40)


@pytest.mark.chaos
class TestLongLife(Life.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=100)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(10))
def test_long_random_lives_on_every_model(model, seed):
    """Hypothesis shrinks well but dwells on few rules; an even walk meets what needs many steps."""
    rng = random.Random(f"{model}{seed}")
    life = Life()
    life.begin(model=model, blocks=rng.choice([10, 20, 40]))
    for _ in range(150):
        act = rng.choice(
            ["admit", "admit", "plan", "planned", "step", "step", "step", "step", "end", "load",
             "rare"]
        )  # fmt: skip
        if act == "admit":
            life.admit(
                prompt=rng.choice([0, 0, 0, 1]),
                length=rng.randint(1, 40),
                chunk=rng.randint(1, 40),
                external=rng.choice([0, 0, 0, 1, 4]),
                lookahead=rng.choice([0, 0, 2]),
            )
        elif act == "plan":
            life.plan(prompt=rng.choice([0, 0, 0, 1]), length=rng.randint(1, 40))
        elif act == "planned" and life.planned:
            which, chunk = rng.randrange(100), rng.randint(1, 40)
            life.admit_planned(which=which, chunk=chunk, external=rng.choice([0, 0, 0, 1, 4]))
        elif act == "step" and life.running:
            life.step(
                which=rng.randrange(100), tokens=rng.randint(1, 5), lookahead=rng.choice([0, 0, 2])
            )
        elif act == "end" and life.running:
            life.finish(which=rng.randrange(100), deferred=rng.random() < 0.2)
        elif act == "load" and life.loading:
            life.finish_load(which=rng.randrange(100), worked=rng.random() < 0.8)
        elif act == "rare":
            if life.held and rng.random() < 0.5:
                life.give_back()
            elif rng.random() < 0.2:
                life.evict(blocks={rng.randint(0, 7)})
            elif rng.random() < 0.05:
                life.reset()
        life.everything_is_consistent()
