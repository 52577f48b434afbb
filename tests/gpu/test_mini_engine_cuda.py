"""The mini engine on a GPU: offloading changes no token, and brings back the bytes it took."""

import pytest
import torch

pytest.importorskip("msgspec")
from kvoffload.connectors.local import LocalConnector
from kvoffload.demo import Engine, SamplingParams
from kvoffload.demo.offloading import NoOffloading
from tests.support.disk_chunks import stored_in

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

MODEL = {
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 16,
    "intermediate_size": 96,
    "vocab_size": 272,
}
BLOCK = 16
PROMPTS = [[(i * 7 + j * 3) % 256 for j in range(70 + i)] for i in range(12)]


class LoadedPages:
    """Compares loaded blocks with the blocks as they were computed."""

    def __init__(self, inner, kv_caches):
        self.inner, self.tensors = inner, [entry.tensor for entry in kv_caches.tensors]
        self.seen, self.loading, self.compared = {}, {}, 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def _page(self, block):
        return torch.cat([tensor[block] for tensor in self.tensors]).cpu()

    def after_forward(self, request, block_ids, num_computed_tokens):
        full = num_computed_tokens // BLOCK
        for name, block in zip(request.block_hashes[:full], block_ids[0][:full], strict=True):
            self.seen.setdefault(name, self._page(block))
        self.inner.after_forward(request, block_ids, num_computed_tokens)

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        first = request.num_computed_tokens // BLOCK
        self.loading[request.request_id] = (first, list(block_ids[0]), list(request.block_hashes))
        self.inner.update_state_after_alloc(request, block_ids, num_external_tokens)

    def poll(self):
        outcomes = self.inner.poll()
        for outcome in outcomes:
            first, blocks, hashes = self.loading.pop(outcome.request_id)
            for i in range(first, first + outcome.num_loaded_tokens // BLOCK):
                assert torch.equal(self._page(blocks[i]), self.seen[hashes[i]])
                self.compared += 1
        return outcomes


def serve(dtype, offloads, **settings):
    """Each prompt twice on a cache for few of them; returns tokens and blocks compared."""
    element = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    page = 2 * BLOCK * MODEL["num_kv_heads"] * MODEL["head_size"] * element * MODEL["num_layers"]
    config = {
        "model": MODEL,
        "device": "cuda",
        "dtype": dtype,
        "block_size": BLOCK,
        "max_model_len": 128,
        "kv_cache_bytes": page * 12,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 128,
        "offload": {"cpu_bytes": "16MiB", "blocks_per_chunk": 1, "backends": [], **settings},
    }
    connectors = []

    def connect(settings, kv_caches, *, block_size, **rest):
        if not offloads:
            return NoOffloading()
        inner = LocalConnector(settings, kv_caches, block_size=block_size, **rest)
        connectors.append(LoadedPages(inner, kv_caches))
        return connectors[0]

    with Engine(config, connect) as engine:
        params = [SamplingParams(max_tokens=8, temperature=0)] * len(PROMPTS)
        tokens = [result.token_ids for _ in range(2) for result in engine.generate(PROMPTS, params)]
        if offloads:
            assert engine.connector.stats()["copies"]["copier"] == "cuda"
    return tokens, sum(connector.compared for connector in connectors)


def test_tokens_in_float32_are_those_without_offloading():
    tokens, compared = serve("float32", offloads=True)
    assert compared > len(PROMPTS)
    assert tokens == serve("float32", offloads=False)[0]


def test_bytes_in_bfloat16_come_back_as_they_were():
    assert serve("bfloat16", offloads=True)[1] > len(PROMPTS)


def test_bytes_in_the_memory_that_an_io_process_maps_come_back_as_they_were(tmp_path):
    """With a tier, host memory is a memory file that the GPU and another process use at once."""
    disk = {"type": "disk", "root": str(tmp_path / "kv"), "min_free": 0}
    assert serve("bfloat16", offloads=True, io="process", backends=[disk])[1] > len(PROMPTS)
    assert stored_in(tmp_path / "kv")
