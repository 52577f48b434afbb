"""SGLang's own kits of HiCache, from its wheel, against a server with our storage.

They compare the log-probabilities of turns that hit the caches with those of whole prompts, and ask
for a full hit from storage after a flush. Those that measure a trained model are left out.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import unittest
import urllib.request

import pytest

pytest.importorskip("sglang.test.kits.unified_radix_cache_kit")
from sglang.test.kits.unified_radix_cache_kit import (
    AccuracyTwoPassMixin,
    UnifiedRadixTreeTestMixin,
)

pytestmark = [pytest.mark.timeout(1200), pytest.mark.long]
VOCABULARY = 32000


@pytest.fixture(scope="module")
def server(tmp_path_factory, tiers, disk):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("kits")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, max_position_embeddings=8192,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    extra = json.dumps(tiers(disk(folder / "kv"), staging_bytes="16MiB"))
    command = [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder / "model")),
        *("--device", "cpu", "--attention-backend", "torch_native", "--skip-tokenizer-init"),
        *("--disable-overlap-schedule", "--grammar-backend", "none", "--dtype", "bfloat16"),
        *("--max-total-tokens", "16384", "--max-running-requests", "4", "--page-size", "64"),
        *("--mem-fraction-static", "0.9", "--random-seed", "1", "--skip-server-warmup"),
        *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--enable-cache-report"),
        *("--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"),
        *("--hicache-write-policy", "write_through"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend", "dynamic"),
        *("--hicache-storage-backend-extra-config", extra),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]
    log = folder / "server.log"
    with open(log, "w") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"},
        )
    url = f"http://127.0.0.1:{port}"
    until = time.monotonic() + 300
    while True:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < until, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"{url}/health", timeout=1).close()
            break
        except OSError:
            time.sleep(0.5)
    yield url
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_the_kits_pass(server):
    rng = random.Random(5)

    class Kits(UnifiedRadixTreeTestMixin, AccuracyTwoPassMixin, unittest.TestCase):
        base_url = server
        model = "model"
        max_new_tokens = 16
        num_groups = branches_per_group = 2
        input_ids = tuple(rng.choices(range(1, 30000), k=1024) for _ in range(8))
        test_gsm8k = test_gsm8k_two_passes = None  # for a trained model

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Kits).run(result)
    assert result.testsRun == 4
    assert result.failures + result.errors == []
