"""Calls that may change weights begin a new generation of the tiers, before the next step."""

import functools
import types

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from bare_half import bare_half
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.model_executor.model_loader import utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerBase

from kvoffload.connectors.vllm.connector import KVOffloadConnector
from kvoffload.connectors.vllm.engine_weights import (
    HARMLESS_CALLS,
    Updates,
    our_connectors,
    watch_weights,
)
from kvoffload.connectors.vllm.scheduler import OffloadingConnectorScheduler
from kvoffload.connectors.vllm.start import read_settings
from kvoffload.connectors.vllm.step_messages import WorkerInfo, WorkerReport


@pytest.fixture(autouse=True)
def watching(monkeypatch):
    monkeypatch.setattr(EngineCore, "collective_rpc", EngineCore.collective_rpc)
    monkeypatch.setattr(Scheduler, "reset_prefix_cache", Scheduler.reset_prefix_cache)
    watch_weights()


@pytest.fixture
def half(tmp_path, monkeypatch):
    """A half that has met its workers, with a disk tier."""
    vllms = OffloadingConnectorScheduler
    monkeypatch.setattr(vllms, "reset_cache", lambda half: half.adapter.reset_cache())
    disk = {"type": "disk", "root": str(tmp_path / "kv"), "min_free": 0}
    half = bare_half(cpu_bytes=16384)
    half.settings = read_settings({"cpu_bytes": 1 << 20, "io": "thread", "backends": [disk]})
    return half


def meet(half):
    half.meet_workers([WorkerInfo(4, 4096, {"rank": 0})])
    return half


def engine(*halves, answer=None):
    """An engine core with our connectors, as far as a call to its workers goes."""

    def connector(half):
        made = object.__new__(KVOffloadConnector)
        made.connector_scheduler = half
        return made

    made = [connector(half) for half in halves]
    of_all = made[0] if len(made) == 1 else types.SimpleNamespace(_connectors=made)
    core = object.__new__(EngineCore)
    core.scheduler = types.SimpleNamespace(connector=of_all)

    def call(method, timeout, args, kwargs):
        if isinstance(answer, Exception):
            raise answer
        return answer

    core.model_executor = types.SimpleNamespace(collective_rpc=call)
    return core


def test_an_update_begins_a_generation_and_a_call_that_reads_does_not(half):
    core = engine(meet(half), answer=["done"])
    for name in HARMLESS_CALLS:
        assert core.collective_rpc(name) == ["done"]
    assert half.generations.order is None
    assert core.collective_rpc("a_method_of_a_plug_in") == ["done"]
    assert half.generations.order
    assert half.generations.has_new_weights


def test_a_call_that_another_plug_in_has_wrapped_is_watched_too_and_once(monkeypatch, half):
    plain, begun = EngineCore.collective_rpc.__wrapped__, []

    @functools.wraps(plain)
    def traced(*args, **kwargs):
        begun.append(args[1])
        return plain(*args, **kwargs)

    monkeypatch.setattr(EngineCore, "collective_rpc", traced)
    watch_weights()
    watched = EngineCore.collective_rpc
    watch_weights()
    assert EngineCore.collective_rpc is watched
    engine(meet(half)).collective_rpc("update_weights")
    assert half.generations.order
    assert begun == ["update_weights"]


def test_code_without_a_known_name_counts_as_an_update(half):
    def check_health(worker):
        """The name is that of a harmless call; the code is not."""

    core = engine(meet(half))
    core.collective_rpc(check_health)
    assert half.generations.order


def test_a_call_that_fails_may_have_changed_some_weights(half):
    core = engine(meet(half), answer=RuntimeError("half of it"))
    with pytest.raises(RuntimeError, match="half of it"):
        core.collective_rpc("update_weights")
    assert half.generations.order


def test_connectors_in_a_multi_connector_are_told(half):
    core = engine(meet(half), bare_half(cpu_bytes=16384))
    core.collective_rpc("update_weights")
    assert half.generations.order


def test_weights_that_are_fixed_are_not_watched(half):
    half.settings = read_settings({"cpu_bytes": 1 << 20, "fixed_weights": True})
    core = engine(meet(half))
    core.collective_rpc("update_weights")
    assert half.generations.order is None
    assert not half.generations.has_new_weights


def test_an_update_before_the_workers_are_known_is_not_forgotten(half):
    """Otherwise the namespace of the start would get chunks of other weights."""
    core = engine(half)
    core.collective_rpc("update_weights")
    order = half.generations.order
    assert order
    meet(half)
    assert half.tiers.generation == order


def test_a_generation_without_chunks_needs_no_other_name(half):
    """An update in many parts opens the stores again once."""
    core = engine(meet(half))
    core.collective_rpc("start_weight_update")
    first = half.generations.take_order(stores=False)
    for _ in range(3):
        core.collective_rpc("update_weights")
    assert half.generations.take_order(stores=True) is None
    core.collective_rpc("update_weights")
    assert half.generations.take_order(stores=False) not in (None, first)


def test_a_reset_after_an_update_includes_the_connector(half, monkeypatch):
    """Code that was written for vLLM alone does not name it."""
    core = engine(meet(half))
    scheduler = object.__new__(Scheduler)
    scheduler.connector, asked = core.scheduler.connector, []
    answers = iter([False, True, True])
    scheduler.kv_cache_manager = types.SimpleNamespace(reset_prefix_cache=lambda: next(answers))
    scheduler.aux_output_connector = None
    scheduler.reset_connector_cache = lambda: asked.append(True) or True
    core.collective_rpc("update_weights")
    assert not scheduler.reset_prefix_cache()  # blocks are in use: it must be repeated
    assert scheduler.reset_prefix_cache()
    assert asked == [True, True]
    assert scheduler.reset_prefix_cache()
    assert asked == [True, True], "a reset without an update leaves the tiers alone"


def test_a_model_that_loads_weights_past_the_engine_core_is_counted_once_a_call(monkeypatch):
    class Model:
        def load_weights(self, weights):
            return set(weights)

    monkeypatch.setattr(utils, "get_model_cls", lambda config: Model)
    updates, model = Updates(), Model()
    updates.watch(None)
    updates.watch(None)
    assert model.load_weights(["a"]) == {"a"}
    assert updates.count == 1


def test_an_update_that_a_worker_tells_of_begins_a_generation_also_without_chunks(
    half, monkeypatch
):
    """The worker loads nothing until an order comes."""
    (connector,) = our_connectors(engine(meet(half)).scheduler)
    half.generations.begin()
    half.generations.take_order(stores=False)
    half._take_in(WorkerReport(has_new_weights=True))
    assert half.generations.order is None  # in the middle of a step
    monkeypatch.setattr(OffloadingConnector, "get_kv_connector_stats", lambda connector: None)
    connector._has_stats = False
    connector.get_kv_connector_stats()
    assert half.generations.order
    assert half.generations.has_new_weights


def test_harmless_calls_are_methods_of_vllms_workers():
    methods = {*dir(Worker), *dir(WorkerBase)}
    assert len(HARMLESS_CALLS & methods) > 20
    assert not {name for name in HARMLESS_CALLS if "load" in name or "update_weights" in name}
