"""A real vLLM on the CPU, with tiny models made on the spot; ``make test-vllm`` runs these.

Each engine is a process of its own, so that it can be killed: a fork of one that has imported vLLM,
because an import takes eight seconds of a core. API servers begin as their users' do. An engine's
frontend, scheduler and worker share its process. vLLM's own processes, one for each, are asked for
with ``distributed_executor_backend="mp"``; those of a fork are forks as well.
"""

import importlib.util
import json
import logging
import os
import random
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from benchmarks.vllm_parts.engine import ours
from tests.engines.vllm_engine.outcomes import pytest_runtest_logreport, pytest_sessionfinish
from tests.engines.vllm_engine.traffic import Traffic
from tests.support.engine_process import EngineProcess
from tests.support.preloaded import Preloaded

__all__ = ["pytest_runtest_logreport", "pytest_sessionfinish"]

ROOT = Path(__file__).parents[3]
CHILD = Path(__file__).parent / "child.py"
BLOCK = 32
OF_KIND = {"mla": {"block_size": 16, "compilation_config": {"custom_ops": ["-rotary_embedding"]}}}
"""Options that models of a kind need. vLLM's operator for CPU, which is off here, rotates queries
of MLA by the positions of other tokens. Outputs would depend on a token's place in its batch."""
ONE_BLOCK = {"blocks_per_chunk": 1}
"""What tests count chunks by, unless they ask for another number, or for the default."""
INTERPRETER = Path(__file__).parent / "interpreter"
"""On the path of engines, so that ``TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1`` in the
environment of the tests runs them with Model Runner V2."""


ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",  # more of them wait for each other most of the time, and take a core
}
OF_ENGINES = (
    "vllm.entrypoints.llm",
    "vllm.lora.request",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "kvoffload.connectors.vllm.scheduler",
    "kvoffload.connectors.vllm.worker",
    "kvoffload.cli.main",
    "tests.engines.vllm_engine.inspected",
)
"""Modules that every engine imports."""


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("vllm") and importlib.util.find_spec("vllm.version"):
        importlib.import_module("tests.engines.vllm_engine.inspected")
        return
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed; see make test-vllm"))


@pytest.fixture(autouse=True)
def _own_logger():
    """Give the logger back as it was, where a test let it follow vLLM's in this process."""
    logger = logging.getLogger("kvoffload")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], level, logger.propagate = before
    logger.setLevel(level)


def joined(env):
    """Say where the child finds modules: those of the test beside those of this process."""
    paths = [env.get("PYTHONPATH"), str(INTERPRETER), os.environ.get("PYTHONPATH")]
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


class Engine(EngineProcess):
    """A vLLM in another process; every call waits for its answer."""

    def __init__(
        self, model, log_file, extra=None, env=None, policy="recompute", python=None, **options
    ):
        settings = {
            "model": model,
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK,
            "enable_prefix_caching": True,
            "max_model_len": 4096,
            "seed": 0,
            "disable_log_stats": False,
            "distributed_executor_backend": "uni",
            **options,
        }
        if extra is not None:
            extra = ONE_BLOCK | extra
            settings["kv_transfer_config"] = ours(extra) | {"kv_load_failure_policy": policy}
        settings.update(options)
        is_apart = settings["distributed_executor_backend"] == "mp"
        given = {
            **os.environ,
            **ENVIRONMENT,
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(is_apart)),
            **joined(env or {}),
        }
        super().__init__(CHILD, settings, log_file, given, python)

    def generate(self, prompts, max_tokens=16, **more):
        answer = self.ask("generate", prompts=prompts, max_tokens=max_tokens, **more)
        assert "tokens" in answer, answer
        return answer


@pytest.fixture(scope="session")
def vllm_sources():
    """Return a folder with the top folder ``part`` of the source distribution of a version of vLLM.

    Parts are apart, so that the package there is not imported by its tests in place of the one that
    is installed. Downloaded once into a cache folder; skips the test where it cannot be had.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvoffload-tests"

    def unpacked(number, part):
        folder = cache / f"vllm-{number}-{part}"
        if not folder.exists():
            cache.mkdir(parents=True, exist_ok=True)
            _download(number, cache)
            with (
                tarfile.open(cache / f"vllm-{number}.tar.gz") as archive,
                tempfile.TemporaryDirectory(dir=cache) as partial,
            ):
                wanted = [m for m in archive if _is_wanted(m.name.partition("/")[2], part)]
                archive.extractall(partial, wanted, filter="data")
                Path(partial, f"vllm-{number}").rename(folder)
        return folder

    return unpacked


def _is_wanted(name, part):
    # Not the conftest of all tests, which needs more packages than the tests used here do.
    needed = ("tests/__init__.py", "tests/utils.py", "tests/v1/__init__.py")
    chosen = name in needed or name.startswith(("tests/v1/kv_connector/", "vllm/"))
    return chosen and name.startswith(part + "/") and name.endswith(".py")


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


@pytest.fixture(scope="session")
def traffic():
    """Keep requests running in the background: ``with traffic(engine, prompts, answers) as t``."""
    return Traffic


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Make a tiny model of a kind; returns its folder."""
    spec = importlib.util.spec_from_file_location(
        "tiny_model", ROOT / "examples/vllm/tiny_model.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = {}

    def make(kind="llama"):
        if kind not in made:
            folder = tmp_path_factory.mktemp("models") / kind
            made[kind] = module.make_model(folder, kind)
            add_weights(folder)
        return made[kind]

    return make


def add_weights(folder):
    """Write weights with which every token of a model's outputs depends on the whole prompt.

    With the dummy weights of vLLM, which are small, a model repeats the last token, whatever its
    KV cache holds. In 32 bits, outputs do not depend on which requests were computed together.
    """
    import torch
    import transformers

    file = folder / "config.json"
    sizes = json.loads(file.read_text())
    for part in (sizes, sizes.get("text_config", {})):
        part["torch_dtype"] = "float32"
        if "kv_lora_rank" not in part and "head_dim" in part:
            part["head_dim"] = 32  # the bytes of a block stay those of 64 values of 16 bits
    file.write_text(json.dumps(sizes))
    config = transformers.AutoConfig.from_pretrained(folder)
    (architecture,) = config.architectures
    model = getattr(transformers, architecture)(config).float()
    torch.manual_seed(0)
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.15)
    model.save_pretrained(folder)


@pytest.fixture(scope="session")
def weigh():
    """Write weights into the folder of a model that a test has made; see :func:`add_weights`."""
    return add_weights


@pytest.fixture
def halves(models, tmp_path):
    """Make halves that have met, with a disk tier if wanted; vLLM's scheduler drives them."""
    from benchmarks.vllm_parts.halves import Halves

    made = []

    def begin(*, disk=False, num_blocks=2048, max_num_seqs=256, **settings):
        tier = {"type": "disk", "root": str(tmp_path / "kv"), "min_free": 0}
        more = {"backends": [tier]} if disk else {}
        extra = {"cpu_bytes": "16MiB", "weights_id": "w", **ONE_BLOCK, **more, **settings}
        rig = Halves(models("llama"), ours(extra), num_blocks, max_num_seqs)
        made.append(rig.__enter__())
        rig.quiet()
        return rig

    yield begin
    for rig in made:
        rig.__exit__()


@pytest.fixture(scope="session")
def preload():
    """Start a Python that has imported what engines do, which is most of the time of their start.

    Variables that matter at an import are given here; those of one engine may be its own.
    """
    return lambda **env: Preloaded(OF_ENGINES, {**ENVIRONMENT, **env, **joined({})})


@pytest.fixture(scope="session")
def imported(preload):
    """The one whose forks engines are."""
    return preload()


@pytest.fixture(scope="module")
def start(models, imported, tmp_path_factory):
    """Start an engine; all are killed at the end of the module."""
    running = []

    def begin(extra=None, *, kind="llama", ready=True, ranks=1, env=None, **options):
        if ranks > 1:
            options |= {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}
            env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **(env or {})}
        log = tmp_path_factory.mktemp("log") / "engine.log"
        options = {"model": models(kind), **OF_KIND.get(kind, {}), **options}
        engine = Engine(log_file=log, extra=extra, env=env, python=imported, **options)
        running.append(engine)
        return engine.wait_ready() if ready else engine

    yield begin
    for engine in running:
        engine.kill()


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """Make ``install`` of a module in this folder a plug-in of vLLM; returns the environment."""

    def register(name):
        site = tmp_path_factory.mktemp("site")
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {name}:install\n")
        return {"PYTHONPATH": f"{site}:{Path(__file__).parent}"}

    return register


@pytest.fixture(scope="module")
def faulty_tier(tmp_path_factory):
    """Register the backends of ``faulty_tier.py`` for child processes.

    Returns the environment to start engines with, the plan's file, and a function that sets it:
    ``set_plan({"fault": "raise"}, ..., copy={"fault": "fail"})``; without arguments, all is well.
    """
    site = tmp_path_factory.mktemp("site")
    info = site / "faulty_tier-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-tier\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kvoffload.backends]\nfaulty = faulty_tier:FaultyTier\nshy = faulty_tier:ShyTier\n"
        "[vllm.general_plugins]\nfaulty_copies = faulty_tier:strike_copies\n"
    )
    plan = site / "plan.json"

    def set_plan(*tier, **more):
        partial = site / "plan.tmp"
        partial.write_text(json.dumps({"tier": tier, **more}))
        partial.replace(plan)

    set_plan()
    paths = os.pathsep.join([str(site), str(Path(__file__).parent)])
    return {"PYTHONPATH": paths, "FAULTY_COPIES": str(plan)}, str(plan), set_plan


@pytest.fixture(scope="module")
def set_plan(faulty_tier):
    return faulty_tier[2]


@pytest.fixture(scope="module")
def prompts():
    """Make prompts of random tokens; equal arguments make equal prompts."""

    def make(count, length, seed=0, shared=0):
        rng = random.Random(seed)
        head = [rng.randrange(3, 512) for _ in range(shared)]
        return [
            head + [rng.randrange(3, 512) for _ in range(length - shared)] for _ in range(count)
        ]

    return make
