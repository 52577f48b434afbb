"""vLLM's own tests of its offloading scheduler, with our scheduler half in the place of its own.

They are taken from vLLM's source distribution when the tests run; nothing of them is kept here.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload.connectors.vllm.versions import installed_version

pytestmark = pytest.mark.timeout(900)
HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SUITE = "tests/v1/kv_connector/unit/offloading_connector/test_scheduler.py"
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "torch_dtype": "float16",
}


@pytest.fixture(scope="module")
def sources(vllm_sources):
    """Sources of the installed version, with its tests."""
    return vllm_sources(re.match(r"[\d.]+", installed_version())[0], "tests")


def test_vllms_own_scheduler_tests_pass_with_our_half(sources, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(OPT))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"),
            *("-p", "own_suite", SUITE),
        ],
        cwd=sources,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "KVOFFLOAD_TINY_MODEL": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE, sources))),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    made = re.search(r"our scheduler half was made (\d+) times", done.stdout)
    assert made
    assert int(made[1]) > 100
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 300
