"""Harmless fields are not read where KV is made, or the place was looked at."""

from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

import vllm

from kvoffload.connectors.configuration import names
from kvoffload.connectors.vllm import harmless_fields as harmless
from tests.engines.reading_places import new_places, readings
from tests.engines.vllm_engine.harmless_readings import PARTS, PLACES, REASONS

IN_ANOTHER_FORM = ("a fact of its own", "facts of their own", "the target's, which has facts")
"""Reasons of fields that are facts after all: as they are resolved, or by a file's content."""


def owners():
    """Return the names of the configurations that have each harmless field."""
    found = {}
    for listed, default in (
        (harmless._FIELDS, "vllm_config"),
        (harmless._OF_LORA, "lora_config"),
        (harmless._OF_SPECULATION, "speculative_config"),
    ):
        for reason, text in listed.items():
            for full in names({reason: text}) if not reason.startswith(IN_ANOTHER_FORM) else ():
                owner, _, name = full.rpartition(".")
                found.setdefault(name, set()).add((owner or default).rpartition(".")[2])
    return found | {name: {"envs"} for name in harmless.VARIABLES}


def test_each_place_that_reads_a_harmless_field_where_kv_is_made_was_looked_at():
    """A new version of vLLM may begin to compute KV with one: then it is harmless no longer."""
    found = readings(Path(vllm.__file__).parent, PARTS, owners())
    assert len(found) > 100
    assert not set(found) - names(REASONS), "read these, then give a reason or make them facts"
    new = new_places(found, PLACES)
    assert not new, "read these places, then add them to harmless_readings.txt:\n" + "\n".join(new)


def test_reasons_are_given_for_fields_that_are_harmless_and_read():
    assert names(REASONS) == set(PLACES)
    assert not names(REASONS) - set(owners())
