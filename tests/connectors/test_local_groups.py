"""The local connector with several KV cache groups, under the real block manager and real bytes.

A small engine writes into every token's slot what can only be computed from the whole prefix, and
looks at all that attention reads before each step: a wrong byte anywhere shows.
"""

import hashlib
import random
import time

import pytest
import torch

from benchmarks.harness import caches_of
from kvoffload.backends.base import ReadResult
from kvoffload.backends.memory import MemoryBackend
from kvoffload.connectors.local import LocalConnector
from kvoffload.connectors.local.request_states import LoadBackoff
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
from kvoffload.errors import ConfigError
from kvoffload.offload.base import make_offload_key
from kvoffload.testing import Plan
from tests.support.block_checks import needed_tokens
from tests.support.manager_check import check

DIGEST = 8
STATE = 5000  # states take larger slots than the blocks of attention here


def attention(kind, block_size, **extra):
    return kind(
        block_size=block_size, num_kv_heads=1, head_size=DIGEST // 2, dtype=torch.int8, **extra
    )


def full(block_size=4):
    return attention(FullAttentionSpec, block_size)


def window(size, block_size=4):
    return attention(SlidingWindowSpec, block_size, sliding_window=size)


def local(size, block_size=4):
    return attention(ChunkedLocalAttentionSpec, block_size, attention_chunk_size=size)


def mamba(block_size=4):
    return MambaSpec(block_size=block_size, shapes=((STATE,),), dtypes=(torch.int8,))


MODELS = {
    "full": [full()],
    "full and window": [full(), window(7)],
    "full and wide window": [full(), window(17)],
    "full and state": [full(), mamba(8)],
    "small, large and window": [full(2), full(8), window(9, 4)],
    "all kinds": [mamba(8), window(6), full(), local(12)],
    "window only": [window(6)],
    "state only": [mamba()],
}


class Engine:
    """Admits one request at a time; computes by hashing."""

    def __init__(self, specs, settings, num_blocks=40, seed=0, facts=None):
        config = KVCacheConfig(
            num_blocks,
            [],
            [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)],
        )
        self.specs = specs
        self.manager = KVCacheManager(config, max_model_len=100)
        self.hasher = BlockHasher(self.manager.hash_block_size)
        generator = torch.Generator().manual_seed(seed)
        pages = [
            STATE if isinstance(spec, MambaSpec) else spec.block_size * DIGEST for spec in specs
        ]
        self.memory = [
            torch.randint(-128, 127, (num_blocks, page), dtype=torch.int8, generator=generator)
            for page in pages
        ]
        self.connector = LocalConnector(
            settings,
            caches_of(*([memory] for memory in self.memory)),
            block_size=self.manager.hash_block_size,
            facts={"model": "hashes"} if facts is None else facts,
            kv_cache_config=config,
        )
        self.count = 0
        self.loaded = 0

    def run(self, tokens, steps):
        """Serve a prompt in so many steps and free it."""
        self.count += 1
        request = Request(f"r{self.count}", HashChain(self.hasher, tokens))
        loaded = self.admit(request, tokens[0])
        total = len(request.token_ids)
        for i in range(steps):
            done = request.num_computed_tokens
            until = total
            if i < steps - 1:  # states are kept where a step ends with a block
                half = done + (total - done) // 2
                until = max(half - half % 8, min(done + 1, total))
            if until <= done:
                break
            if done or i or loaded:
                assert self.manager.allocate_slots(request, until - done) is not None
            else:
                assert self.manager.allocate_slots(request, until) is not None
            self.forward(request, until)
        for token in range(3):  # generated, one by one
            request.append_token_ids([token])
            assert self.manager.allocate_slots(request, 1) is not None
            self.forward(request, len(request.token_ids))
        self.connector.request_finished(request)
        self.manager.free(request)
        return loaded

    def admit(self, request, salt):
        found, hits = self.manager.get_computed_blocks(request)
        while (external := self.connector.get_num_new_matched_tokens(request, hits)) is None:
            self.connector.poll()
            time.sleep(0.001)
        if not hits and not external:
            return 0
        assert (
            self.manager.allocate_slots(
                request,
                0,
                num_new_computed_tokens=hits,
                new_computed_blocks=found,
                num_external_computed_tokens=external,
                delay_cache_blocks=True,
            )
            is not None
        )
        tables = self.manager.get_block_ids(request.request_id)
        self.connector.before_forward([b for table in tables for b in table])
        self.connector.update_state_after_alloc(request, tables, external)
        outcomes = []
        while external and not outcomes:
            outcomes = self.connector.poll()
            time.sleep(0.0005)
        got = outcomes[0].num_loaded_tokens if external else 0
        if external:
            assert sum(outcomes[0].tokens_by_medium.values()) == got
        if (
            external
            and not got
            and not all(isinstance(spec, FullAttentionSpec) for spec in self.specs)
        ):
            # A shorter prefix needs other blocks: admitted anew. One that is told has them.
            self.connector.request_finished(request)
            self.manager.free(request)
            return self.admit(request, salt)
        request.num_computed_tokens = hits + got
        self.manager.cache_blocks(request, hits + got)
        self.check_reads(request, tables)
        self.loaded += got
        return hits + got

    def forward(self, request, until):
        tables = self.manager.get_block_ids(request.request_id)
        done = request.num_computed_tokens
        self.check_reads(request, tables)
        self.connector.before_forward(
            [b for table, spec in zip(tables, self.specs, strict=True)
             for b in table[max(done - 1, 0) // spec.block_size :]]
        )  # fmt: skip
        for spec, table, memory in zip(self.specs, tables, self.memory, strict=True):
            if isinstance(spec, MambaSpec):
                memory[table[(until - 1) // spec.block_size]] = self.content(request, until, STATE)
                continue
            for position in range(done, until):
                block, offset = divmod(position, spec.block_size)
                assert table[block]
                page = memory[table[block]]
                page[offset * DIGEST : (offset + 1) * DIGEST] = self.content(
                    request, position + 1, DIGEST
                )
        request.num_computed_tokens = until
        self.connector.after_forward(request, tables, until)
        self.connector.poll()

    def check_reads(self, request, tables):
        for spec, table, memory in zip(self.specs, tables, self.memory, strict=True):
            for position in needed_tokens(spec, request.num_computed_tokens):
                block, offset = divmod(position, spec.block_size)
                assert table[block], "a null block is read"
                page = memory[table[block]]
                if isinstance(spec, MambaSpec):
                    assert torch.equal(page, self.content(request, position + 1, STATE))
                else:
                    here = page[offset * DIGEST : (offset + 1) * DIGEST]
                    assert torch.equal(here, self.content(request, position + 1, DIGEST))

    @staticmethod
    def content(request, length, size):
        text = ",".join(map(str, request.token_ids[:length])).encode()
        digest = hashlib.blake2b(text, digest_size=min(size, 32)).digest()
        whole = bytearray(digest * -(-size // len(digest)))
        return torch.frombuffer(whole, dtype=torch.int8)[:size]


def settings(per_chunk=2, **more):
    return {"cpu_bytes": "256KiB", "blocks_per_chunk": per_chunk, **more}


@pytest.fixture
def engine():
    made = []

    def make(*args, **kwargs):
        made.append(Engine(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.connector.close()
        check(each.connector)


@pytest.mark.parametrize("per_chunk", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_what_comes_back_is_what_was_computed(engine, model, per_chunk):
    served = engine(MODELS[model], settings(per_chunk))
    prompt = list(range(100, 133))
    assert served.run(prompt, 2) == 0
    assert served.connector.flush()
    served.manager.reset_prefix_cache()
    assert served.run(prompt, 1) >= 16
    assert served.loaded >= 16


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", MODELS)
def test_random_prompts_over_a_small_host_memory_and_a_faulty_tier(engine, model, seed, faults):
    rng = random.Random(f"{model} {seed}")
    per_chunk, memory = rng.choice([1, 2, 3]), rng.choice(["64KiB", "96KiB", "160KiB"])
    served = engine(
        MODELS[model],
        settings(
            per_chunk,
            cpu_bytes=0 if seed == 2 else memory,  # then chunks only pass through host memory
            staging_bytes=memory,
            backends=[{"type": "memory", "capacity": "512KiB"}] if seed else [],
            lookup_timeout_s=0.05,
        ),
    )
    for _ in range(30):
        prompt = [rng.randrange(2)] * rng.randrange(1, 20) + [rng.randrange(2)] * 14
        served.run(prompt, rng.randrange(1, 4))
        if rng.random() < 0.5:
            served.manager.reset_prefix_cache()
        if rng.random() < 0.3:
            served.connector.flush()
        fault = rng.choice(["miss", "short", "raise", None, None, None, None])
        faults[:] = [Plan(fault, frozenset({"read"}))] if fault else []
        check(served.connector)
    assert served.loaded, "nothing was ever loaded"


def test_memory_that_cannot_hold_a_chunk_of_each_size_is_refused_at_start():
    with pytest.raises(ConfigError, match="one chunk of each size"):
        Engine([full(512), mamba(512)], settings(64, cpu_bytes="200KiB"))


def test_groups_of_the_same_layout_but_another_window_share_no_chunks(engine, tmp_path):
    backends = [{"type": "disk", "root": str(tmp_path), "capacity": "1MiB", "min_free": 0}]
    names = [
        engine([window(size)], settings(1, backends=backends)).connector.stats()["namespace"]
        for size in (6, 6, 7)
    ]
    assert names[0] == names[1] != names[2]


def test_a_request_that_can_use_no_part_of_its_load_is_promised_nothing_until_it_computes(
    engine, faults
):
    backends = [{"type": "memory", "capacity": "1MiB"}]
    served = engine([full(), window(7)], settings(1, cpu_bytes="64KiB", backends=backends))
    prompt = list(range(100, 125))
    for first in (prompt[0], 1, 2, 3):  # the others push it out of host memory
        served.run([first, *prompt[1:]], 1)
        served.connector.flush()
    served.manager.reset_prefix_cache()
    faults[:] = [Plan("short", frozenset({"read"}))]
    assert served.run(prompt, 1) == 0
    assert served.connector.stats()["events"]["declined_after_short_load"] == 1
    faults.clear()
    served.connector.flush()
    served.manager.reset_prefix_cache()
    assert served.run(prompt, 1) > 0


def test_a_short_load_tells_no_prefix_whose_window_lacks_a_block_found_on_the_gpu(engine, plug_in):
    """To take in 40 tokens is to give up a block of the window that 36 tokens read."""
    lost = set()

    class Lossy(MemoryBackend):
        def load(self, key, into):
            return ReadResult.MISSING if key in lost else super().load(key, into)

    plug_in("lossy", Lossy)
    config = settings(1, io="thread", backends=[{"type": "lossy", "capacity": "1MiB"}])
    served = engine([full(), window(17)], config)
    prompt = list(range(100, 141))
    served.run(prompt, 1)
    assert served.connector.flush()
    served.manager.reset_prefix_cache()
    assert served.run(prompt[:33], 1) == 32
    assert served.connector.flush()
    served.connector._manager.reset_cache()  # of host memory alone
    hashes = Request("r", HashChain(served.hasher, prompt)).block_hashes
    lost.update(make_offload_key(hashes[9], group) for group in (0, 1))
    served.run(prompt, 1)


@pytest.mark.parametrize("tolerated", [0, 1])
def test_short_loads_of_requests_that_never_come_back_are_forgotten(tolerated):
    loads = LoadBackoff(tolerated)
    for i in range(5000):
        for _ in range(tolerated + 1):
            loads.note(f"r{i}")
    assert loads.declined("r4999")
    assert not loads.declined("r0")
    loads.gave_up("r4999")
    assert loads.declined("r4999")  # to be admitted anew
    loads.gave_up("r4999")
    assert not loads.declined("r4999")  # aborted while it waited
