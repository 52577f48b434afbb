"""Fixtures shared by all tests: small KV caches, requests with real hashes, a waiting loop."""

import contextlib
import gc
import hashlib
from dataclasses import dataclass, field

import pytest
from until import until  # noqa: F401

from benchmarks.harness import caches_of
from kvoffload import memory_limits, registry
from tests.support import redis_server
from tests.support.kernel_files import KernelFiles
from tests.support.planned_store import installed
from tests.support.preloaded import Preloaded

with contextlib.suppress(ImportError):  # an engine's environment may lack it
    import hypothesis

    # On a busy machine any example may be slow; that is no failure.
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=slow)
    hypothesis.settings.load_profile("patient")


@dataclass
class FakeRequest:
    """A request as connectors see it; equal names have equal prefixes."""

    name: str
    num_tokens: int
    block_size: int = 4
    request_id: str = ""
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self):
        self.request_id = self.request_id or self.name
        for i in range(self.num_tokens // self.block_size):
            parent = self.block_hashes[-1] if i else b"root"
            self.block_hashes.append(hashlib.sha256(parent + self.name.encode()).digest())


def make_kv_caches(num_blocks=64, page_bytes=(256, 256, 64), padding=0, seed=0):
    """Int8 caches of several tensors, filled with noise, rows ``padding`` bytes apart."""
    import torch  # not above: the process that only hands tests to others would import it

    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_blocks, page + padding) for page in page_bytes]
    raw = [torch.randint(-128, 127, each, dtype=torch.int8, generator=generator) for each in shapes]
    return caches_of([rows[:, :page] for rows, page in zip(raw, page_bytes, strict=True)])


@pytest.fixture
def kernel_files(tmp_path_factory, monkeypatch):
    """What the kernel tells of memory, as the test wants it."""
    root = tmp_path_factory.mktemp("kernel")
    monkeypatch.setattr(memory_limits, "ROOT", root)
    return KernelFiles(root)


@pytest.fixture
def kv_caches():
    return make_kv_caches()


@pytest.fixture
def new_kv_caches():
    return make_kv_caches


@pytest.fixture
def new_request():
    return FakeRequest


@pytest.fixture
def closing():
    """Returns what it is given, and closes it at the end of the test, the last first."""
    with contextlib.ExitStack() as stack:
        yield lambda thing: stack.enter_context(contextlib.closing(thing))


OF_PROGRAMS = (
    "torch", "kvoffload.connectors.local", "kvoffload.io.server", "kvoffload.backends.disk.backend",
    "kvoffload.policies.handicap", "kvoffload.demo", "kvoffload.cli.main", "kvoffload.cli.serve",
    "tests.conftest", "tests.support.small_engine",
)  # fmt: skip
"""What most programs of tests import."""


@pytest.fixture(scope="session")
def preloaded():
    """A Python that has imported torch already; programs are forks of it."""
    paths = {"PYTHONPATH": ".:examples:tests/helpers", "OMP_NUM_THREADS": "1"}
    return Preloaded(OF_PROGRAMS, paths)


@pytest.fixture(scope="session")
def python(preloaded):
    """A command like ``python``, which has imported torch already, and frees nothing at its end."""
    return preloaded.quick


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """A store whose faults a file plans, registered as ``planned``."""
    planned = installed(tmp_path, monkeypatch)
    yield planned
    planned.set()
    monkeypatch.undo()
    registry._named.cache_clear()


@pytest.fixture
def plug_in(monkeypatch):
    """Install a backend under a name, in this process alone."""

    def install(name, backend):
        real = registry.load
        monkeypatch.setattr(
            registry, "load", lambda group, it, *a: backend if it == name else real(group, it, *a)
        )

    return install


@pytest.fixture
def own_redis(tmp_path):
    """A redis-server of the test's own."""
    if redis_server.BINARY is None:
        pytest.skip(redis_server.MISSING)
    server = redis_server.RedisServer(tmp_path / "redis")
    yield server
    server.stop()


LONG_FIRST = (
    "test_first_run.py", "test_examples.py", "test_exit.py", "test_demo.py",
    "test_mini_engine_offloading.py", "test_bench.py", "test_crash.py", "test_random_model.py",
)  # fmt: skip
"""Files of the longest tests: begun last, one of them would keep the other cores waiting."""


@pytest.hookimpl(hookwrapper=True)
def pytest_collection():
    """Keep what is imported and collected out of each garbage collection: it took 0.3 s of it."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONG_FIRST)


def pytest_terminal_summary(terminalreporter):
    """Say in one line what was not tested here, so that no green run hides a hole."""
    skipped = terminalreporter.stats.get("skipped", [])
    terminalreporter.write_line(
        f"{len(skipped)} skipped; each reason is listed above" if skipped else "nothing was skipped"
    )
