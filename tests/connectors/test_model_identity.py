"""Which weights an engine computes with, as the namespace of its stores tells them apart."""

import os
import sys
import types

import pytest

from kvoffload.connectors.model_identity import commit_of, weights_identity

COMMIT, OTHER = "a" * 40, "b" * 40


def identity(weights_id=None, commit=None, model="hub/name", dummy_seed=None, engine="e"):
    return weights_identity(
        weights_id, commit, model, dummy_seed=dummy_seed, source=model, engine=engine
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def test_the_setting_precedes_all_else(folder):
    assert identity("v7", "main", str(folder), dummy_seed=1) == "v7"


def test_other_files_are_other_weights(folder):
    first = identity(model=str(folder))
    assert first == identity(model=str(folder))
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert identity(model=str(folder)) != first


def test_random_weights_are_told_by_their_seed(folder):
    assert identity(model=str(folder), dummy_seed=0) == "dummy, seed 0"


def test_a_commit_is_enough(caplog):
    assert identity(commit=COMMIT) is None
    assert caplog.text == ""


def test_a_revision_is_told_by_its_commit_not_by_its_name(monkeypatch, tmp_path):
    """A branch means other weights after an upload, and hubs resolve it to a string of its name."""

    class Resolved(str):
        resolved = COMMIT

    assert commit_of("hub/name", Resolved("main")) == COMMIT
    assert commit_of("hub/name", COMMIT) == COMMIT
    assert commit_of(str(tmp_path), "main") is None

    def cached(model, file, revision):
        return f"/cache/{model}/{revision}/snapshots/{OTHER}/{file}" if revision else None

    hub = types.SimpleNamespace(try_to_load_from_cache=cached)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert commit_of("hub/name", "v1") == OTHER
    assert commit_of("hub/name", None) is None
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert commit_of("hub/name", "v1") is None


@pytest.mark.parametrize("weights_id", [None, ""])
def test_weights_that_nothing_tells_apart_are_shared_with_no_other_engine(weights_id, caplog):
    """A folder of a streamed model has its configuration only."""
    assert identity(weights_id, engine="a") != identity(weights_id, engine="b")
    assert "Set weights_id" in caplog.text
