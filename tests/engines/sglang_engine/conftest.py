"""A real SGLang on the CPU, with a tiny model made on the spot; ``make test-sglang`` runs these.

Each engine is a process group of its own, so that it can be killed. Its three processes are forks
of one that has imported SGLang, because each import takes ten seconds of a core.
"""

import importlib.util
import json
import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.engine_process import EngineProcess
from tests.support.preloaded import Preloaded

ROOT = Path(__file__).parents[3]
CHILD = Path(__file__).parent / "child.py"
PAGE = 16
VOCABULARY = 2000
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # more of them wait for each other most of the time, and take a core
}
OF_ENGINES = (
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
    "kvoffload.connectors.sglang",
)
"""Modules that every engine imports."""


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("sglang"):
        return
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.skip(reason="SGLang is not installed: make test-sglang"))


class Engine(EngineProcess):
    """A SGLang in another process; every call waits for its answer."""

    def __init__(self, model, log_file, storage=None, extra=None, env=None, python=None, **options):
        settings = {
            "model_path": model,
            "device": "cpu",
            "attention_backend": "torch_native",
            "skip_tokenizer_init": True,
            "disable_overlap_schedule": True,
            "grammar_backend": "none",
            "max_total_tokens": 2048,
            "max_running_requests": 4,
            "dtype": "bfloat16",
            "page_size": PAGE,
            "mem_fraction_static": 0.9,  # others may take memory meanwhile; the pool has few tokens
            "random_seed": 1,
            "log_level": "warning",
            "sleep_on_idle": True,  # else each idle engine takes a core from the others
        }
        if storage is not None:
            settings |= {
                "enable_hierarchical_cache": True,
                "hicache_ratio": 2.0,
                "hicache_io_backend": "direct",
                "hicache_mem_layout": "page_first_direct",
                "hicache_write_policy": "write_through",
                "hicache_storage_prefetch_policy": "wait_complete",
                "hicache_storage_backend": storage,
                "hicache_storage_backend_extra_config": json.dumps(extra or {}),
                "enable_cache_report": True,
            }
        self.page = options.get("page_size", PAGE)
        given = {**os.environ, **ENVIRONMENT, **(env or {})}
        super().__init__(CHILD, settings | options, log_file, given, python)

    def generate(self, *prompts, **more):
        answer = self.ask("generate", prompts=prompts, **more)
        assert "tokens" in answer, answer
        return answer

    def wait_stored(self, prompt, told):
        """Ask until all whole pages of a prompt come from storage; each answer must be right."""
        hit = (len(prompt) - 1) // self.page * self.page
        until = time.monotonic() + 120
        while True:
            self.forget()
            answer = self.generate(prompt)
            assert answer["tokens"] == told
            if answer["storage"] == [hit]:
                return answer
            assert time.monotonic() < until, (answer, self.log[-3000:])
            time.sleep(0.2)

    def forget(self):
        """Empty the device and the host: what a prompt finds after this comes from storage."""
        until = time.monotonic() + 60
        while self.ask("flush") is not True:  # not while it still backs up
            assert time.monotonic() < until, "the caches cannot be emptied"
            time.sleep(0.1)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory):
    """Make the folder of a tiny Llama, whose outputs depend on the whole prompt."""

    def make(seed):
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=4, head_dim=32,
            max_position_embeddings=4096, initializer_range=0.15,
        )  # fmt: skip
        folder = tmp_path_factory.mktemp("model")
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        return str(folder)

    return make


@pytest.fixture(scope="session")
def model(make_model):
    """The folder of a tiny Llama."""
    return make_model(0)


def our_storage(*backends, **more):
    return {
        "backend_name": "kvoffload",
        "module_path": "kvoffload.connectors.sglang",
        "class_name": "KVOffloadHiCache",
        "interface_v1": 1,
        "staging_bytes": "4MiB",
        "load_timeout_s": 2.0,
        "lookup_timeout_s": 5.0,
        "backends": backends,
        **more,
    }


@pytest.fixture(scope="session")
def tiers():
    """The extra config with these backends."""
    return our_storage


@pytest.fixture(scope="session")
def disk():
    """A disk tier in a folder."""
    return lambda root: {"type": "disk", "root": str(root), "capacity": "256MiB", "min_free": 0}


@pytest.fixture(scope="session")
def imported():
    """A Python that has imported what engines do, which is most of the time of their start."""
    return Preloaded(OF_ENGINES, ENVIRONMENT)


@pytest.fixture(scope="module")
def start(model, imported, tmp_path_factory):
    """Start an engine; all are killed at the end of the module.

    One ``anew`` is no fork: each of its processes imports SGLang.
    """
    running = []

    def begin(storage=None, extra=None, model=model, env=None, anew=False, **options):
        log = tmp_path_factory.mktemp("log") / "engine.log"
        python = None if anew else imported
        running.append(Engine(model, log, storage, extra, env, python, **options))
        return running[-1].wait_ready()

    yield begin
    for engine in running:
        engine.kill()


def make_prompt(seed, length=600):
    """Return a prompt of random tokens; the same for the same seed."""
    return random.Random(seed).choices(range(10, VOCABULARY - 10), k=length)


@pytest.fixture(scope="session")
def prompt():
    return make_prompt


@pytest.fixture(scope="session")
def io_process():
    """Find the number of an engine's I/O process."""

    def find(engine):
        listed = subprocess.run(
            ["ps", "-eo", "pid,pgid,args"], capture_output=True, text=True, check=True
        ).stdout
        (found,) = [
            int(line.split()[0])
            for line in listed.splitlines()
            if "kvoffload.io.process" in line and line.split()[1] == str(engine.process.pid)
        ]
        return found

    return find


@pytest.fixture
def attach(tmp_path, monkeypatch):
    """Attach our storage to host pools, without an engine."""
    from tests.engines.sglang_engine import host_pools

    made = []
    yield host_pools.attached(made, tmp_path, monkeypatch)
    for each in made:
        each.close()
