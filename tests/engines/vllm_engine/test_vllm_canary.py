"""vLLM's blocks as our chunks, and the canary that is carried through them."""

import logging
import threading

import numpy as np
import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

import torch
from cuda_stand_in import install
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)

from kvoffload import messages
from kvoffload.backends.memory import MemoryBackend
from kvoffload.connectors import builder
from kvoffload.connectors.builder import TieredOffloadingSpec
from kvoffload.connectors.vllm.kv_caches import canonical, cut
from kvoffload.connectors.vllm.self_test import check_tiers
from kvoffload.connectors.vllm.start import read_settings
from kvoffload.errors import ConfigError
from kvoffload.testing.faults import FaultyBackend, Plan
from kvoffload.transfer.cuda.stream_copier import StreamCopier
from kvoffload.transfer.cuda.torch_device import CudaDevice
from kvoffload.transfer.layout import ChunkLayout


def chunks_of(blocks, sizes, indices, group_ids, per_chunk):
    """Return the group, the blocks and whether it is whole, of each chunk of a GPU end."""
    theirs = GPULoadStoreSpec(blocks, group_sizes=sizes, block_indices=indices)
    moves = cut(theirs, group_ids, ChunkLayout(caches(max(group_ids) + 1), per_chunk))
    whole = (moves.chunks[4] == per_chunk).tolist()
    made = [(move.group_idx, move.block_ids.tolist()) for move in moves]
    return [(*chunk, flag) for chunk, flag in zip(made, whole, strict=True)]


def caches(num_groups):
    tensor = torch.zeros(16, 64, dtype=torch.int8)
    refs = tuple((messages.CanonicalKVCacheRef(0, 64),) for _ in range(num_groups))
    return messages.CanonicalKVCaches((messages.CanonicalKVCacheTensor(tensor, 64),), refs)


def test_the_gpu_end_is_cut_into_chunks_the_first_of_a_group_may_be_a_part():
    found = chunks_of([7, 8, 9, 1, 2], [3, 2], [1, 0], [0, 2], per_chunk=2)
    assert found == [(0, [7], False), (0, [8, 9], True), (2, [1, 2], True)]


@pytest.mark.parametrize(
    ("sizes", "indices", "blocks", "whole"),
    [
        ([3, 2], [1, 0], [2, 3, 4, 5], [False, True, True]),
        ([3, 2], [0, 1], [1, 2], [True, False, False, False]),
        ([1, 4], [1, 2], [2, 3, 4, 5], [False, True, True]),
        ([1, 0], [2, 0], [], [False]),
        ([0, 1], [0, 3], [], [False]),
    ],
)
def test_the_whole_chunks_of_a_gpu_end(sizes, indices, blocks, whole):
    found = chunks_of(list(range(1, 1 + sum(sizes))), sizes, indices, [0, 2], per_chunk=2)
    assert [flag for *_, flag in found] == whole
    assert [block for _, chunk, flag in found if flag for block in chunk] == blocks


def test_block_ids_travel_as_plain_numbers():
    found = chunks_of(np.array([3, 4]).tolist(), [2], [0], [0], per_chunk=1)
    assert all(type(block) is int for _, blocks, _ in found for block in blocks)


def test_groups_that_are_not_offloaded_keep_their_place():
    tensor = torch.zeros(4, 64, dtype=torch.int8)
    theirs = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, 64)],
        [[CanonicalKVCacheRef(0, 64)], [CanonicalKVCacheRef(0, 32)]],
    )
    ours = canonical(theirs, [0, 2])
    assert [len(refs) for refs in ours.group_data_refs] == [1, 0, 1]
    assert ours.block_bytes(2) == 32


@pytest.fixture
def attached(tmp_path, faulty):
    """Make a spec over a small KV cache, with a store that can be made to lie."""
    made = []

    def make(plans=()):
        tensor = torch.zeros(8, 4096, dtype=torch.int8)
        theirs = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, 4096)], [[CanonicalKVCacheRef(0, 4096)]]
        )
        ours = canonical(theirs, [0])
        backends = faulty(plans)  # registered in this process alone
        settings = read_settings(
            {"cpu_bytes": 1 << 20, "blocks_per_chunk": 1, "io": "thread", "backends": backends}
        )
        spec = TieredOffloadingSpec(settings, 4096, {"test": "canary"})
        made.append(spec)
        return spec, spec.open_engine(ours), ours, {0: [tensor]}

    yield make
    for spec in made:
        spec.close()


@pytest.fixture
def faulty(plug_in):
    def configure(plans):
        class Factory:
            Options = MemoryBackend.Options

            def __new__(cls, options, namespace):
                return FaultyBackend(MemoryBackend(options, namespace), *plans)

        plug_in("faulty", Factory)
        return [{"type": "faulty"}]

    return configure


def test_the_canary_is_content_and_leaves_no_trace(attached):
    spec, transfers, ours, layers = attached()
    assert check_tiers(spec, transfers, ours, layers, 1) == 0
    assert not layers[0][0].any()


def test_the_canary_makes_its_pattern_on_the_cpu_whatever_torchs_default_device_is(attached):
    spec, transfers, ours, layers = attached()
    with torch.device("meta"):
        assert check_tiers(spec, transfers, ours, layers, 1) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_the_canary_passes_through_layers_of_any_type_in_any_order(attached, dtype):
    """Heads, tokens and contents of a block may lie in any order inside of it."""
    spec, transfers, ours, layers = attached()
    blocks = layers[0][0].view(dtype).unflatten(1, (4, 8, -1)).permute(0, 2, 1, 3)
    assert check_tiers(spec, transfers, ours, {0: [blocks]}, 1) == 0
    assert not layers[0][0].any()


def test_the_canary_finds_layers_whose_blocks_are_not_rows(attached):
    """As with a layout that has all blocks of one head before those of the next."""
    spec, transfers, ours, layers = attached()
    heads_first = layers[0][0].view(torch.bfloat16).flatten().unflatten(0, (4, 8, 16, -1))
    with pytest.raises(ConfigError, match="other bytes"):
        check_tiers(spec, transfers, ours, {0: [heads_first.transpose(0, 1)]}, 1)
    assert not layers[0][0].any()


def test_the_canary_does_not_wait_until_all_host_memory_is_pinned(attached, monkeypatch, request):
    """200 GiB take a minute: the engine starts meanwhile."""
    cuda = install(monkeypatch.setattr, 4096)
    register, goes_on = cuda.register, threading.Event()
    request.addfinalizer(goes_on.set)  # before the spec is closed

    def first_alone(address, *given):
        assert not cuda.registered or goes_on.wait(60)
        return register(address, *given)

    monkeypatch.setattr(cuda, "register", first_alone)
    monkeypatch.setattr(
        builder,
        "make_copier",
        lambda caches, slab, layout, **how: StreamCopier(
            caches, slab, layout, CudaDevice(caches, slab, **how)
        ),
    )
    spec, transfers, ours, layers = attached()
    assert check_tiers(spec, transfers, ours, layers, 1) == 0
    assert len(cuda.registered) == 1


def test_the_canary_uses_the_slot_that_is_pinned_first(attached, monkeypatch):
    """The last slot of a large slab is pinned after a minute; the engine's start would wait."""
    spec, transfers, ours, layers = attached()
    assert spec.num_slots > 1
    moves, slots = transfers._layout.moves, set()

    def seen(gpu, host_slots):
        slots.update(np.asarray(host_slots).tolist())
        return moves(gpu, host_slots)

    monkeypatch.setattr(transfers._layout, "moves", seen)
    check_tiers(spec, transfers, ours, layers, 1)
    assert slots == {0}


def test_the_canary_refuses_a_store_that_returns_other_bytes(attached):
    spec, transfers, ours, layers = attached([Plan("flip", frozenset({"read"}))])
    with pytest.raises(ConfigError, match="other bytes"):
        check_tiers(spec, transfers, ours, layers, 1)


def test_a_store_that_is_down_at_the_start_is_only_warned_about(attached, caplog):
    caplog.set_level(logging.WARNING)
    spec, transfers, ours, layers = attached([Plan("raise")])
    check_tiers(spec, transfers, ours, layers, 1)
    assert "took no chunk" in caplog.text
