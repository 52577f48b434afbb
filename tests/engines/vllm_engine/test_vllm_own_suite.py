"""vLLM's own tests of its offloading connector, with our two halves in the place of its own.

They are taken from vLLM's source distribution when the tests run; nothing of them is kept here.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from kvoffload.connectors.vllm.start import installed_version
from tests.engines.vllm_engine.own_suite_files import NOT_OURS, RUN

pytestmark = pytest.mark.timeout(900)
HERE = Path(__file__).parent
ROOT = HERE.parents[2]
FOLDER = Path("tests/v1/kv_connector/unit/offloading_connector")
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


def test_each_file_of_vllms_suite_is_run_or_listed_with_a_reason(sources):
    files = {file.name for file in sources.joinpath(FOLDER).glob("test_*.py")}
    assert files == {*RUN, *(name for name in NOT_OURS if "::" not in name)}
    for name in NOT_OURS:
        file, _, test = name.partition("::")
        text = sources.joinpath(FOLDER, file).read_text()
        only_newer = name.endswith("test_load_completion") and not newer(sources)
        assert f"def {test}(" in text or not test or only_newer, f"no test is called {name}"


@pytest.fixture(autouse=True)
def runner(record_property, monkeypatch):
    """No model runner takes part, but V2's stores may fail, which these tests do not expect."""
    record_property("runner", "V1")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)


def newer(sources):
    """Say whether the sources are those of 0.33, which has loads that a step waits for."""
    return "0.33" in sources.name


def test_vllms_own_tests_pass_with_our_halves(sources, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(OPT))
    left_out = [f"--deselect={FOLDER / name}" for name in NOT_OURS if "::" in name]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"),
            *("-p", "own_suite", *left_out, *(str(FOLDER / name) for name in RUN)),
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
    made = re.search(r"our halves were made (\d+) and (\d+) times", done.stdout)
    assert made
    assert int(made[1]) > 100
    assert int(made[2]) > 0
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 300
