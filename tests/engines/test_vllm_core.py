"""The block manager and the hash codec against the real ones of vLLM, step by step.

The same random lives are driven through both. Compared after every step: hit lengths, block
tables (by number), the whole order of reuse, and the events, replayed. Where we chose otherwise is
in docs/explanation/block-manager.md; the walk does not go there, or the comparison says so.
"""

import random
import sys
import warnings

import pytest
import torch

from kvoffload.connectors.vllm.start import installed_version
from kvoffload.core.cache_stats import AllBlocksCleared, BlockRemoved, BlockStored
from kvoffload.core.hashing import HashChain, MultiModalItem
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
from tests.support.block_checks import check_manager, free_in_order
from tests.support.vllm_hashing import VllmBlockHasher

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what vLLM imports, which is not ours to judge
        from vllm.distributed import kv_events
        from vllm.lora.request import LoRARequest
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1 import kv_cache_interface as theirs
        from vllm.v1.core.kv_cache_manager import KVCacheManager as VllmManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request as VllmRequest
except ImportError as error:
    # A folder of examples named vllm is found in its place, so the error alone would mislead.
    if (found := installed_version()) == "not installed":
        pytest.skip("vLLM is not installed; see make test-vllm", allow_module_level=True)
    pytest.skip(f"vLLM {found} cannot be imported: {error}", allow_module_level=True)

BLOCK = 4
SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
MODELS = {
    "full": [("full", None)],
    "window": [("window", 10)],
    "chunked": [("chunked", 8)],
    "full and window": [("full", None), ("window", 9)],
    "full and two windows": [("full", None), ("window", 6), ("window", 17)],
    "two full and a window": [("full", None), ("full", None), ("window", 8)],
    "full and chunked": [("full", None), ("chunked", 8)],
}
RECURRENT = {
    "state": [("state", None)],
    "full and state": [("full", None), ("state", None)],
    "full, window and state": [("full", None), ("window", 9), ("state", None)],
}


def our_spec(kind, size):
    if kind == "state":
        return MambaSpec(BLOCK, ((8,),), (torch.float16,))
    if kind == "window":
        return SlidingWindowSpec(**SHAPE, sliding_window=size)
    if kind == "chunked":
        return ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=size)
    return FullAttentionSpec(**SHAPE)


def their_spec(kind, size):
    if kind == "state":
        return theirs.MambaSpec(
            block_size=BLOCK, shapes=((8,),), dtypes=(torch.float16,), mamba_cache_mode="align"
        )
    if kind == "window":
        return theirs.SlidingWindowSpec(**SHAPE, sliding_window=size)
    if kind == "chunked":
        return theirs.ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=size)
    return theirs.FullAttentionSpec(**SHAPE)


@pytest.fixture(autouse=True)
def _whole_hashes_in_events(monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


class Pair:
    """One cache in each implementation, and the requests that live in both."""

    def __init__(self, model, num_blocks, events=True):
        init_none_hash(sha256_cbor)
        kinds = (MODELS | RECURRENT)[model]
        self.ours = KVCacheManager(
            KVCacheConfig(
                num_blocks,
                [],
                [KVCacheGroupSpec([f"l{i}"], our_spec(*k)) for i, k in enumerate(kinds)],
            ),
            max_model_len=200,
            enable_kv_cache_events=events,
        )
        groups = [theirs.KVCacheGroupSpec([f"l{i}"], their_spec(*k)) for i, k in enumerate(kinds)]
        self.theirs = VllmManager(
            theirs.KVCacheConfig(num_blocks, [], groups),
            max_model_len=200,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            enable_kv_cache_events=events,
        )
        self.hasher = VllmBlockHasher(BLOCK)
        self.their_hasher = get_request_block_hasher(BLOCK, sha256_cbor)
        self.count = 0
        self.seen = [set() for _ in kinds]
        self.their_seen = [{} for _ in kinds]

    def request(self, tokens):
        self.count += 1
        name = f"r{self.count}"
        mine = Request(name, HashChain(self.hasher, tokens))
        other = VllmRequest(
            name, tokens, SamplingParams(max_tokens=1000), None, block_hasher=self.their_hasher
        )
        assert mine.block_hashes == other.block_hashes
        return mine, other

    def admit(self, pair, chunk, external):
        mine, other = pair
        found, hit = self.ours.get_computed_blocks(mine)
        their_found, their_hit, _ = self.theirs.get_computed_blocks(other)
        assert hit == their_hit
        assert list(map(list, found.blocks)) == list(map(list, their_found.get_block_ids()))
        external = min(external, (mine.num_tokens - 1 - hit) // BLOCK) * BLOCK
        count = 0 if external else min(chunk, mine.num_tokens - hit)
        options = {
            "num_new_computed_tokens": hit,
            "num_external_computed_tokens": external,
            "delay_cache_blocks": bool(external),
        }
        new = self.ours.allocate_slots(mine, count, new_computed_blocks=found, **options)
        their_new = self.theirs.allocate_slots(
            other, count, new_computed_blocks=their_found, **options
        )
        assert (new is None) == (their_new is None)
        if new is None:
            return None
        self.advance(pair, hit if external else hit + count)
        return hit + external

    def advance(self, pair, computed):
        for request in pair:
            request.num_computed_tokens = computed

    def step(self, pair, count, lookahead):
        mine, other = pair
        new = self.ours.allocate_slots(mine, count, num_lookahead_tokens=lookahead)
        their_new = self.theirs.allocate_slots(other, count, num_lookahead_tokens=lookahead)
        assert (new is None) == (their_new is None)
        if new is None:
            return False
        assert list(map(list, new.blocks)) == list(map(list, their_new.get_block_ids()))
        self.advance(pair, mine.num_computed_tokens + count)
        return True

    def free(self, pair):
        self.ours.free(pair[0])
        self.theirs.free(pair[1])

    def compare(self, running):
        check_manager(self.ours)
        queue = self.theirs.block_pool.free_block_queue.get_all_free_blocks()
        assert free_in_order(self.ours.pool.free_queue) == [block.block_id for block in queue]
        assert self.ours.usage == pytest.approx(self.theirs.usage)
        for mine, _ in running:
            assert self.ours.get_block_ids(mine.request_id) == self.theirs.get_block_ids(
                mine.request_id
            )
        self.compare_events()

    def compare_events(self):
        """Ours say what can be found; theirs count copies too, so only whether any is left."""
        for event in self.ours.take_events():
            if isinstance(event, AllBlocksCleared):
                self.seen = [set() for _ in self.seen]
            elif isinstance(event, BlockRemoved):
                self.seen[event.group_idx] -= set(event.block_hashes)
            elif isinstance(event, BlockStored):
                self.seen[event.group_idx] |= set(event.block_hashes)
        for event in self.theirs.take_events():
            if isinstance(event, kv_events.AllBlocksCleared):
                self.their_seen = [{} for _ in self.their_seen]
                continue
            counts = self.their_seen[event.group_idx]
            change = 1 if isinstance(event, kv_events.BlockStored) else -1
            for block_hash in event.block_hashes:
                counts[block_hash] = counts.get(block_hash, 0) + change
        assert self.seen == [{h for h, n in counts.items() if n} for counts in self.their_seen]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(25))
def test_random_lives_are_the_same(model, seed):
    rng = random.Random(f"{model}{seed}")
    pair = Pair(model, rng.choice([12, 20, 40, 80]))
    running, loading = [], []
    for _ in range(120):
        act = rng.choice(
            ["admit", "admit", "step", "step", "step", "free", "load", "evict", "reset"]
        )
        if act == "admit":
            tokens = [rng.choice([0, 0, 1])] * rng.randrange(1, 60)
            request = pair.request(tokens)
            covered = pair.admit(request, rng.randrange(1, 60), rng.choice([0, 0, 0, 2, 5]))
            if covered is not None and covered > request[0].num_computed_tokens:
                loading.append((request, covered))
            elif covered is not None:
                running.append(request)
        elif act == "step" and running:
            request = rng.choice(running)
            mine = request[0]
            count = rng.randrange(1, 9)
            if mine.num_computed_tokens == mine.num_tokens:
                token = rng.choice([0, 1])
                mine.append_token_ids([token])
                request[1].append_output_token_ids(token)
                count = 1
            count = min(count, mine.num_tokens - mine.num_computed_tokens)
            if not pair.step(request, count, rng.choice([0, 0, 3])):  # preempted
                running.remove(request)
                pair.free(request)
        elif act == "load" and loading:
            request, covered = loading.pop(rng.randrange(len(loading)))
            if rng.random() < 0.3:  # failed: nothing of it is valid
                pair.free(request)
            else:
                if model == "full" and rng.random() < 0.3:  # only a part of it came
                    start = request[0].num_computed_tokens
                    covered = start + (covered - start) // 2 // BLOCK * BLOCK
                pair.ours.cache_blocks(request[0], covered)
                pair.theirs.cache_blocks(request[1], covered)
                pair.advance(request, covered)
                running.append(request)
        elif act == "free" and running:
            pair.free(running.pop(rng.randrange(len(running))))
        elif act == "evict" and running:
            blocks = {
                b for t in pair.ours.get_block_ids(rng.choice(running)[0].request_id) for b in t
            }
            some = {b for b in blocks if b and rng.random() < 0.2}
            pair.ours.evict_blocks(some)
            pair.theirs.evict_blocks(some)
        elif act == "reset" and rng.random() < 0.2:
            assert pair.ours.reset_prefix_cache() == pair.theirs.reset_prefix_cache()
        pair.compare([*running, *(request for request, _ in loading)])


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("salt", [None, "tenant"])
@pytest.mark.parametrize("lora", [None, "poet"])
def test_hashes_of_the_vllm_codec_are_vllms_byte_for_byte(block_size, salt, lora):
    init_none_hash(sha256_cbor)
    rng = random.Random(block_size)
    bounds = [0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1, -1, -24, -25, -257]
    tokens = bounds + [rng.randrange(200_000) for _ in range(60)]
    items = [("cat", 3, 4), ("a longer name " * 20, 9, 20), ("cat", 40, 1), ("dog", 41, 30)]
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=name,
            mm_position=PlaceholderRange(offset, length),
        )
        for name, offset, length in items
    ]
    other = VllmRequest(
        "r", tokens, SamplingParams(max_tokens=5), None,
        mm_features=features,
        lora_request=LoRARequest(lora, 1, "/adapters/poet") if lora else None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(block_size, sha256_cbor),
    )  # fmt: skip
    mine = HashChain(
        VllmBlockHasher(block_size, lora_paths={"poet": "/adapters/poet"}),
        tokens,
        lora=lora,
        cache_salt=salt,
        mm_items=[MultiModalItem(*item) for item in items],
    )
    assert mine.hashes == other.block_hashes


def test_a_chain_may_start_where_pythonhashseed_says(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "42")
    init_none_hash(sha256_cbor)
    other = VllmRequest(
        "r", list(range(8)), SamplingParams(max_tokens=5), None,
        block_hasher=get_request_block_hasher(4, sha256_cbor),
    )  # fmt: skip
    monkeypatch.undo()
    assert HashChain(VllmBlockHasher(4, seed="42"), range(8)).hashes == other.block_hashes


@pytest.mark.parametrize("model", RECURRENT)
@pytest.mark.parametrize("seed", range(5))
def test_recurrent_models_find_the_same_prefixes(model, seed):
    """Chunks end with blocks, as vLLM's scheduler cuts them; the cache never evicts.

    Only hits are compared: the two keep different numbers of states while a request runs.
    """
    rng = random.Random(f"{model}{seed}")
    pair = Pair(model, 5000, events=False)
    running, hits = [], 0
    for _ in range(120):
        pair.theirs.new_step_starts()
        if running and rng.random() < 0.6:
            position = rng.randrange(len(running))
            request, done = running[position][0], running[position][0][0].num_computed_tokens
            if rng.random() < 0.2:
                pair.free(running.pop(position)[0])
                continue
            found, hit, options, their_options = None, 0, {}, {}
            if done == request[0].num_tokens:
                token = rng.choice([0, 1])
                request[0].append_token_ids([token])
                request[1].append_output_token_ids(token)
        else:
            request = pair.request([rng.choice([0, 0, 1])] * rng.randrange(1, 40) + [2] * 5)
            found, hit = pair.ours.get_computed_blocks(request[0])
            their_found, their_hit, _ = pair.theirs.get_computed_blocks(request[1])
            assert hit == their_hit
            assert [[bool(block) for block in table] for table in found.blocks] == [
                [bool(block) for block in table] for table in their_found.get_block_ids()
            ]
            hits += bool(hit)
            done = hit
            options = {"num_new_computed_tokens": hit, "new_computed_blocks": found}
            their_options = options | {"new_computed_blocks": their_found}
            running.append((request,))
        last = request[0].num_tokens // BLOCK * BLOCK
        end = request[0].num_tokens
        if last > done:
            end = min(done // BLOCK * BLOCK + BLOCK * rng.randrange(1, 8), last)
        assert pair.ours.allocate_slots(request[0], end - done, **options)
        assert pair.theirs.allocate_slots(request[1], end - done, **their_options)
        pair.advance(request, end)
    check_manager(pair.ours)
    assert hits > 5


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
