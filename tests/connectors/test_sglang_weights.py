"""Weights that change in a running SGLang: its storage is barred, until SGLang has no old page."""

import types

import pytest

from kvoffload.connectors.sglang import weight_hooks
from kvoffload.connectors.sglang.weight_generations import WeightGenerations


class Storage:
    def __init__(self):
        self.calls = []

    def bar(self):
        self.calls.append("bar")

    def begin_generation(self, name):
        self.calls.append(name)


class Engine:
    """What the hooks see of SGLang: a scheduler, and its manager of weights."""

    def __init__(self, **args):
        self.forward_ct = 0
        self.server_args = types.SimpleNamespace(**args)
        self.weight_updater = types.SimpleNamespace(
            _session=None, offload_tags=set(), scheduler=self
        )

    def flush(self, emptied=True):
        weight_hooks.after_flush(emptied, self, empty_cache=True)

    def update(self):
        weight_hooks.before_update(self.weight_updater, "request")

    def end(self):
        weight_hooks.after_end("answer", self.weight_updater, "request")

    def release(self, *tags):
        request = types.SimpleNamespace(tags=tags)
        weight_hooks.before_release(self.weight_updater, request)
        self.weight_updater.offload_tags |= set(tags or ("weights", "kv_cache"))


@pytest.fixture
def weights(monkeypatch):
    made = WeightGenerations()
    monkeypatch.setattr(weight_hooks, "WEIGHTS", made)
    return made


@pytest.fixture
def storage(weights):
    storage = Storage()
    weights.attach(storage)
    return storage


def test_a_flush_alone_changes_nothing(weights, storage):
    Engine().flush()
    assert storage.calls == []
    assert weights.name is None


def test_an_update_that_empties_the_caches_begins_a_generation(weights, storage, caplog):
    engine = Engine()
    engine.update()
    assert storage.calls == ["bar"]
    assert "nothing is loaded or stored" in caplog.text
    engine.flush()
    assert storage.calls == ["bar", weights.name]
    assert weights.name is not None
    assert "new weights: pages of earlier weights are not loaded" in caplog.text


def test_each_update_has_a_generation_of_its_own(weights, storage):
    engine = Engine()
    for _ in range(2):
        engine.update()
        engine.flush()
    assert len({*storage.calls}) == 3
    assert WeightGenerations().name is None


def test_an_update_without_a_flush_bars_the_storage_until_there_is_one(weights, storage):
    engine = Engine()
    engine.update()
    engine.flush(emptied=False)  # requests run
    engine.forward_ct += 1
    assert storage.calls == ["bar"]
    engine.flush()
    assert storage.calls == ["bar", weights.name]


def test_a_session_of_updates_ends_the_bar_at_its_end(weights, storage):
    engine = Engine()
    engine.update()
    engine.weight_updater._session = "open"
    engine.update()
    engine.flush()  # with the last part
    assert set(storage.calls) == {"bar"}
    engine.weight_updater._session = None
    engine.end()
    assert storage.calls[-1] == weights.name


def test_pages_computed_between_a_flush_and_the_end_of_an_update_are_not_stored(weights, storage):
    engine = Engine()
    engine.update()
    engine.weight_updater._session = "open"
    engine.flush()
    engine.forward_ct += 1
    engine.weight_updater._session = None
    engine.end()
    assert set(storage.calls) == {"bar"}
    engine.flush()
    assert storage.calls[-1] == weights.name


def test_a_flush_before_an_update_does_not_count(weights, storage):
    engine = Engine()
    engine.flush()  # a page may have been loaded since
    engine.update()
    engine.end()
    assert storage.calls == ["bar"]


def test_weights_that_left_the_device_are_other_weights(weights, storage):
    engine = Engine()
    engine.release()
    engine.flush()
    assert storage.calls == ["bar"]
    engine.weight_updater.offload_tags.clear()
    engine.end()
    assert storage.calls == ["bar", weights.name]


@pytest.mark.parametrize(
    ("args", "tags"), [({}, ("kv_cache",)), ({"enable_weights_cpu_backup": True}, ())]
)
def test_weights_that_stay_or_come_back_are_the_same(weights, storage, args, tags):
    engine = Engine(**args)
    engine.release(*tags)
    engine.flush()
    assert storage.calls == []


@pytest.mark.parametrize(
    ("action", "bars"), [("checksum", 0), ("snapshot", 0), ("reset_tensors", 1), ("unheard-of", 1)]
)
def test_a_check_that_overwrites_weights_is_a_change(weights, storage, action, bars):
    engine = Engine()
    weight_hooks.before_check(engine.weight_updater, types.SimpleNamespace(action=action))
    assert storage.calls == ["bar"] * bars


def test_a_storage_that_is_attached_after_an_update_is_barred_until_a_flush(weights):
    engine, storage = Engine(), Storage()
    engine.update()
    weights.attach(storage)
    assert storage.calls == ["bar"]
    engine.flush()
    late = Storage()
    weights.attach(late)
    assert late.calls == []
    assert storage.calls == ["bar", weights.name]


def test_a_detached_storage_hears_nothing(weights, storage):
    weights.detach(storage)
    Engine().update()
    assert storage.calls == []
