"""Local connectors, and the stores below them that fail as a test plans.

The tests run again, in ``make chaos``, with the I/O server as a process.
"""

import pytest

import kvoffload
from kvoffload import registry
from kvoffload.config import parse_config
from kvoffload.connectors.local import LocalConnector
from kvoffload.connectors.sglang.page_store import PageStore
from kvoffload.testing import FaultyBackend
from tests.support.host_pages import PAGE
from tests.support.manager_check import check

BOTH = (
    "test_local",
    "test_local_groups",
    "test_local_life",
    "test_local_settings",
    "test_staging",
    "test_eviction",
    "test_tiers",
)
REACH_IN = {"faulty", "stores", "faults", "registry", "plug_in", "DiskBackend"}
"""What changes stores in this process; ``test_io_forms.py`` plans faults for both forms."""


def pytest_generate_tests(metafunc):
    if metafunc.module.__name__.rpartition(".")[2] in BOTH:
        names = {*metafunc.fixturenames, *metafunc.function.__code__.co_names}
        process = [pytest.param("process", marks=pytest.mark.chaos)] * (not names & REACH_IN)
        metafunc.parametrize("default_form", ["thread", *process], indirect=True)


@pytest.fixture(autouse=True)
def default_form(request):
    form = getattr(request, "param", "thread")
    with pytest.MonkeyPatch.context() as patched:  # one of its own, which ends last
        patched.setenv("KVOFFLOAD_SETTING_IO", form)
        yield


@pytest.fixture
def connect(kv_caches):
    """Make connectors, by default over a store in memory. At the end, each is at rest."""
    made = []

    def make(*backends, caches=kv_caches, facts=None, **settings):
        config = {
            "cpu_bytes": "64KiB",
            "blocks_per_chunk": 2,
            "backends": backends or [{"type": "memory", "capacity": "1MiB"}],
            **settings,
        }
        made.append(LocalConnector(config, caches, block_size=4, facts=facts or {"model": "m"}))
        return made[-1]

    yield make
    for connector in made:
        connector.close()
        check(connector)


@pytest.fixture
def opened(closing):
    """Open stores of pages over tiers; they are closed after the test."""

    def begin(*backends, slots=8, facts=None, tokens=0, asks=False, **settings):
        config = {"cpu_bytes": 0, "staging_bytes": slots * 4096, "backends": backends, **settings}
        facts = facts or {"model": "m"}
        return closing(PageStore(parse_config(config), PAGE, facts, lambda key: tokens, asks=asks))

    return begin


@pytest.fixture
def opened_and_plans(monkeypatch):
    opened, plans = [], []
    real = kvoffload.open_backend

    def open_faulty(*args, **kwargs):
        opened.append(FaultyBackend(real(*args, **kwargs)))
        opened[-1].plans = plans
        return opened[-1]

    monkeypatch.setattr(registry, "open_backend", open_faulty)
    return opened, plans


@pytest.fixture
def stores(opened_and_plans):
    """The stores opened from now on, in order; each may get plans of its own."""
    return opened_and_plans[0]


@pytest.fixture
def faults(opened_and_plans):
    """Plan the faults of all stores that are opened from now on."""
    return opened_and_plans[1]
