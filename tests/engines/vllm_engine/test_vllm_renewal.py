"""A reset while stores cannot be opened anew: the engine goes on, and nothing stale is served."""

import itertools
import threading
import types
from pathlib import Path

import pytest

from kvoffload.io.protocol import Load, Store

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from bare_half import bare_half

from kvoffload import registry
from kvoffload.backends.base import Removal
from kvoffload.connectors.builder import TieredOffloadingSpec
from kvoffload.connectors.vllm.engine_weights import UPDATES
from kvoffload.connectors.vllm.scheduler import OffloadingConnectorScheduler
from kvoffload.connectors.vllm.start import read_settings
from kvoffload.connectors.vllm.step_messages import StepMetadata, WorkerInfo, WorkerReport
from kvoffload.connectors.vllm.worker import KVOffloadWorker
from kvoffload.errors import ConfigError
from kvoffload.messages import TransferResult, make_offload_key
from kvoffload.offload.base import ReqContext
from tests.support.disk_chunks import stored_in

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
    manager, old = half.adapter.manager, half.tiers.presences["disk"]
    old.written(KEYS)
    assert manager.lookup(KEYS[0])
    break_storage()
    half.reset_cache()
    assert half.generations.order, "the workers must let go of the old generation as well"
    assert not manager.lookup(KEYS[0]), "computed before the reset, and promised after it"
    # What the workers' stores still say of themselves, and chunks stored from now on.
    report = WorkerReport()
    report.removals.append(("disk", [Removal(KEYS[0], "evicted")]))
    half.update_connector_output(types.SimpleNamespace(kv_connector_worker_meta=report))
    manager.prepare_store(KEYS[:1], ReqContext("r"))
    manager.complete_store(KEYS[:1], ReqContext("r"))
    orders = StepMetadata({}, {}, set())
    half._order_tier_jobs(orders)
    for job_id in orders.write_through:
        report = WorkerReport()
        report.ended.append(TransferResult(job_id, (True,)))
        half.update_connector_output(types.SimpleNamespace(kv_connector_worker_meta=report))
    assert manager.lookup(KEYS[0])


class Answer:
    """Notes the answer of a job."""

    def __init__(self):
        self.told = []

    def arrived(self, numbers):
        pass

    def ended(self, ok, reason, settled, io_time_s):
        self.told.append((list(map(bool, ok)), reason))


def a_worker(settings):
    half = object.__new__(KVOffloadWorker)
    half._unsubmitted_store_jobs, half._loads, half._device_type = [], {}, "cpu"
    half._presence, half._updates, half._has_old_chunks = None, UPDATES.count, False
    half._spec = TieredOffloadingSpec(settings, 4096, {"rank": 0})
    return half


def a_reset():
    orders = StepMetadata({}, {}, set())
    orders.generation = "next"
    return orders


def test_a_worker_goes_on_with_stores_that_miss(settings, break_storage, until, caplog):
    half = a_worker(settings)
    io, tier = half._spec.io, half._spec.tiers["disk"]
    stored, loaded = Answer(), Answer()
    io.begin(Store(0, "disk", KEYS[:1], [0], 4096), stored)
    assert until(lambda: stored.told) == [([True], "")]
    until(lambda: tier.holds(KEYS[0]))
    break_storage()
    half.handle_preemptions(a_reset())
    assert not tier.holds(KEYS[0])
    assert until(lambda: tier.holds(KEYS[0]) is False)
    assert until(lambda: "a tier cannot be opened again yet" in caplog.text)
    io.begin(Load(0, "disk", KEYS[:1], [0], 4096), loaded)
    assert until(lambda: loaded.told) == [([False], "no_store")]
    half._spec.close()


def test_a_step_does_not_wait_until_stores_are_open_again(settings, monkeypatch, until):
    """A store may take long to open, and a new I/O process to start."""
    half = a_worker(settings)
    io, tier = half._spec.io, half._spec.tiers["disk"]
    may_open, open_backend = threading.Event(), registry.open_backend

    def open_late(*args, **kwargs):
        assert may_open.wait(60)
        return open_backend(*args, **kwargs)

    monkeypatch.setattr(registry, "open_backend", open_late)
    step = threading.Thread(target=half.handle_preemptions, args=(a_reset(),), daemon=True)
    step.start()
    step.join(20)
    is_over = not step.is_alive()
    early = Answer()
    if is_over:  # a store of the next step: it is carried out when the new stores are open
        io.begin(Store(0, "disk", KEYS[:1], [0], 4096), early)
        assert not tier.holds(KEYS[0])
    may_open.set()
    assert is_over, "the step waits for the stores"
    assert until(lambda: early.told) == [([True], "")]
    assert until(lambda: tier.holds(KEYS[0]))
    half._spec.close()


def test_a_reset_right_after_an_operators_clear_leaves_nothing(settings, monkeypatch, until):
    """Both orders are in one step's message: what was stored before is gone, and not found."""
    monkeypatch.setattr(
        OffloadingConnectorScheduler, "reset_cache", lambda half: half.adapter.reset_cache()
    )
    worker, half = a_worker(settings), bare_half(cpu_bytes=16384)
    half.settings = settings
    half.meet_workers([WorkerInfo(4, 4096, {"rank": 0})])
    io, root = worker._spec.io, Path(settings.backends[0].options["root"])
    stored = Answer()
    io.begin(Store(0, "disk", KEYS, [0, 1], 4096), stored)
    until(lambda: stored.told)
    assert len(stored_in(root)) == 2
    clear = half.operators.clear("")
    assert next(clear) is None
    half.reset_cache()
    orders = StepMetadata({}, {}, set())
    orders.emptied = half.operators.take_emptied()
    orders.generation = half.generations.take_order(False)
    assert orders.emptied
    assert orders.generation == half.tiers.generation
    worker.handle_preemptions(orders)
    until(lambda: io.outcome == "")
    assert not worker._spec.tiers["disk"].holds(KEYS[0])
    until(lambda: not stored_in(root))
    half.operators.take_answers({0: ("an order of before", "wrong")})
    assert next(clear) is None
    half.operators.take_answers({0: (orders.emptied[0], "")})
    assert next(clear) == ""
    worker._spec.close()


def test_a_clear_waits_for_a_reset_that_workers_have_yet_to_hear_of(settings, monkeypatch):
    monkeypatch.setattr(
        OffloadingConnectorScheduler, "reset_cache", lambda half: half.adapter.reset_cache()
    )
    half = bare_half(cpu_bytes=16384)
    half.settings = settings
    half.meet_workers([WorkerInfo(4, 4096, {"rank": 0})])
    half.reset_cache()
    clear = half.operators.clear("disk")
    assert next(clear) is None
    assert half.operators.emptied is None
    assert half.generations.take_order(False)
    assert next(clear) is None
    assert half.operators.emptied[0] == half.tiers.generation
