"""A reset while stores cannot be opened anew: the engine goes on, and nothing stale is served."""

import itertools
import types

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from bare_half import bare_half

from kvoffload import registry
from kvoffload.backends.base import Removal
from kvoffload.connectors.builder import TieredOffloadingSpec
from kvoffload.connectors.vllm.scheduler import OffloadingConnectorScheduler
from kvoffload.connectors.vllm.settings import read_settings
from kvoffload.connectors.vllm.step_messages import StepMetadata, WorkerInfo, WorkerReport
from kvoffload.connectors.vllm.worker import KVOffloadWorker
from kvoffload.errors import ConfigError
from kvoffload.messages import TransferResult, make_offload_key
from kvoffload.offload.base import ReqContext

KEYS = [make_offload_key(bytes([i]) * 32, 0) for i in range(2)]


@pytest.fixture
def settings(tmp_path):
    disk = {"type": "disk", "root": str(tmp_path / "kv"), "min_free": 0}
    # In a thread, where `break_storage` takes effect.
    return read_settings({"cpu_bytes": 1 << 20, "io": "thread", "backends": [disk]})


@pytest.fixture
def break_storage(monkeypatch):
    """Return what makes it impossible to open a store from then on; those that are open go on."""

    def refuse(*args, **kwargs):
        raise ConfigError("root", "kv", "must be a folder this process can write (EROFS)")

    return lambda: monkeypatch.setattr(registry, "open_backend", refuse)


def test_the_scheduler_goes_on_without_tiers(settings, break_storage, monkeypatch):
    vllms = OffloadingConnectorScheduler
    monkeypatch.setattr(vllms, "reset_cache", lambda half: half.adapter.reset_cache())
    monkeypatch.setattr(vllms, "update_connector_output", lambda half, output: None)
    half = bare_half(cpu_bytes=16384)
    half.settings, half._transfer_ids = settings, itertools.count(-2, -1)
    half.meet_workers([WorkerInfo(4, 4096, {"rank": 0})])
    ledger, old = half.adapter.ledger, half.tiers.presences["disk"]
    old.written(KEYS)
    assert ledger.lookup(KEYS[0])
    break_storage()
    half.reset_cache()
    assert half._generation, "the workers must let go of the old generation as well"
    assert not ledger.lookup(KEYS[0]), "computed before the reset, and promised after it"
    # What the workers' stores still say of themselves, and chunks stored from now on.
    report = WorkerReport()
    report.removals["disk"] = [Removal(KEYS[0], "evicted")]
    half.update_connector_output(types.SimpleNamespace(kv_connector_worker_meta=report))
    ledger.prepare_store(KEYS[:1], ReqContext("r"))
    ledger.complete_store(KEYS[:1], ReqContext("r"))
    orders = StepMetadata({}, {}, set())
    half._order_write_through(orders)
    for job_id in orders.write_through:
        report = WorkerReport()
        report.add(TransferResult(job_id, (True,)))
        half.update_connector_output(types.SimpleNamespace(kv_connector_worker_meta=report))
    assert ledger.lookup(KEYS[0])


class Answer:
    """Notes the answer of a job."""

    def __init__(self):
        self.told = []

    def arrived(self, numbers):
        pass

    def ended(self, ok, reason, settled, io_time_s):
        self.told.append((list(map(bool, ok)), reason))


def test_a_worker_goes_on_with_stores_that_miss(settings, break_storage, until):
    half = object.__new__(KVOffloadWorker)
    half._unsubmitted_store_jobs, half._loads, half._device_type = [], {}, "cpu"
    half._presence = None
    half._spec = TieredOffloadingSpec(settings, 4096, {"rank": 0})
    io, tier = half._spec.io, half._spec.tiers["disk"]
    stored, loaded = Answer(), Answer()
    io.store("disk", KEYS[:1], [0], 4096, stored)
    assert until(lambda: stored.told) == [([True], "")]
    until(lambda: tier.holds(KEYS[0]))
    break_storage()
    orders = StepMetadata({}, {}, set())
    orders.generation = "next"
    half.handle_preemptions(orders)
    assert tier.holds(KEYS[0]) is False
    io.load("disk", KEYS[:1], [0], 4096, loaded)
    assert until(lambda: loaded.told) == [([False], "no_store")]
    half._spec.close()
