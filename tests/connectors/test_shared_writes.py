"""Ranks that have the same bytes write one copy to a tier, and each loads all of it."""

import os
from collections import Counter

import pytest
import torch

from benchmarks.harness import caches_of
from kvoffload.config import BackendConfig, OffloadConfig
from kvoffload.connectors.builder import TieredOffloadingSpec
from kvoffload.connectors.vllm.kv_caches import SharedWrites
from kvoffload.messages import (
    BackendLoadStoreSpec,
    CPULoadStoreSpec,
    Fetch,
    GPULoadStoreSpec,
    TransferResult,
    make_offload_key,
)
from tests.support.disk_chunks import stored_in
from tests.support.redis_engine import PATIENT

PAGE = 4096
NUM = 24
KEYS = tuple(make_offload_key(os.urandom(32), 0) for _ in range(NUM))
SLOTS = list(range(NUM))


class Rank:
    """One rank: its KV cache, its host memory, and its I/O server."""

    def __init__(self, number, num_ranks, config):
        self.blocks = torch.arange(NUM, dtype=torch.int8).repeat_interleave(PAGE).view(NUM, PAGE)
        self.spec = TieredOffloadingSpec(config, PAGE, {"rank": 0})
        self.transfers = self.spec.open_engine(caches_of([self.blocks]))
        shared = [name for name, tier in self.spec.tiers.items() if tier.is_shared]
        self.writes = SharedWrites(number, num_ranks, shared)

    def carry(self, ends, num_chunks):
        self.transfers.submit(1, ends, num_chunks)
        self.transfers.wait([1])
        (result,) = self.transfers.get_finished()
        return result

    def store(self, tier):
        """Store all blocks to host memory and write them through; return the answers."""
        host = CPULoadStoreSpec(SLOTS)
        assert self.carry((GPULoadStoreSpec(SLOTS), host), NUM).success
        ends = host, BackendLoadStoreSpec(tier, KEYS)
        result = self.writes.end(self.carry(*self.writes.begin(1, ends)))
        return list(result.ok)

    def load(self, tier):
        """Load all chunks from a tier; return whether they are what was stored."""
        before = self.blocks.clone()
        self.blocks.zero_()
        self.spec._slab.flat[:] = 0
        source = CPULoadStoreSpec(SLOTS, [Fetch(tier, tuple(SLOTS), KEYS)])
        ok = self.carry((source, GPULoadStoreSpec(SLOTS)), NUM).success
        return ok and torch.equal(self.blocks, before)


@pytest.fixture
def ranks(closing):
    """Make ranks that share a host and their tiers' options."""

    def make(number, backend):
        config = OffloadConfig(
            cpu_bytes=NUM * PAGE,
            blocks_per_chunk=1,
            io="thread",
            backends=(BackendConfig(**backend),),
        )
        made = [Rank(i, number, config) for i in range(number)]
        for rank in made:
            closing(rank.spec)
        return made

    return make


@pytest.mark.parametrize("number", [2, 3, 8])
def test_a_disk_has_one_copy_and_every_rank_loads_it_at_once(ranks, tmp_path, number):
    options = {"root": str(tmp_path), "min_free": 0}
    mine = ranks(number, {"type": "disk", "options": options})
    writers = Counter(sum(rank.writes.writes(key) for rank in mine) for key in KEYS)
    assert writers == {1: NUM}
    for rank in mine:
        assert rank.store("disk") == [True] * NUM
    found = stored_in(tmp_path)
    assert sorted(chunk.key for chunk in found) == sorted(KEYS)
    assert len({chunk.namespace for chunk in found}) == 1
    # No rank waits until a scan of the folder has shown it what the other ranks wrote.
    assert all(rank.load("disk") for rank in mine)


def test_a_server_has_one_copy_and_every_rank_loads_it_at_once(ranks, own_redis):
    mine = ranks(2, {"type": "redis", "options": {"url": own_redis.url, **PATIENT}})
    for rank in mine:
        assert rank.store("redis") == [True] * NUM
    written = [rank.spec.tiers["redis"].counters for rank in mine]
    assert sum(each["write_ok"] for each in written) == NUM
    assert not any(each.get("write_present") for each in written)
    assert all(rank.load("redis") for rank in mine)


def test_a_store_that_only_its_process_sees_gets_every_ranks_copy(ranks):
    mine = ranks(2, {"type": "memory", "options": {"capacity": 1 << 20}})
    for rank in mine:
        assert rank.store("memory") == [True] * NUM
    assert all(rank.load("memory") for rank in mine)


def test_a_chunk_that_its_writer_could_not_store_is_stored_on_no_rank():
    first, second = (SharedWrites(i, 2, ("disk",)) for i in range(2))
    ends = CPULoadStoreSpec(SLOTS), BackendLoadStoreSpec("disk", KEYS)
    (_, target), num_chunks = first.begin(7, ends)
    assert list(target.keys) == [key for key in KEYS if first.writes(key)]
    answers = first.end(TransferResult(7, (False,) + (True,) * (num_chunks - 1))).ok
    second.begin(7, ends)
    others = second.end(TransferResult(7, (True,) * (NUM - num_chunks))).ok
    assert others == (True,) * NUM
    assert [key for key, ok in zip(KEYS, answers, strict=True) if not ok] == [target.keys[0]]


def test_a_rank_without_a_part_in_a_job_answers_it():
    writes = SharedWrites(0, 2, ("disk",))
    keys = tuple(key for key in KEYS if not writes.writes(key))
    spec = CPULoadStoreSpec(range(len(keys)))
    (source, _), num_chunks = writes.begin(7, (spec, BackendLoadStoreSpec("disk", tuple(keys))))
    assert (len(source.host_slots), num_chunks) == (0, 0)
    assert writes.end(TransferResult(7, ())).ok == (True,) * len(keys)
