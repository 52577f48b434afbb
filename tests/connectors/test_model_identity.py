"""Which weights an engine computes with, as the namespace of its stores tells them apart."""

import os

import pytest

from kvoffload.connectors.model_identity import weights_identity


def identity(weights_id=None, revision=None, model="hub/name", dummy_seed=None, engine="e"):
    return weights_identity(
        weights_id, revision, model, dummy_seed=dummy_seed, source=model, engine=engine
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


def test_a_revision_is_enough(caplog):
    assert identity(revision="main") is None
    assert caplog.text == ""


@pytest.mark.parametrize("weights_id", [None, ""])
def test_weights_that_nothing_tells_apart_are_shared_with_no_other_engine(weights_id, caplog):
    """A folder of a streamed model has its configuration only."""
    assert identity(weights_id, engine="a") != identity(weights_id, engine="b")
    assert "Set weights_id" in caplog.text
