"""Harmless arguments are not read where KV is made, or the place was looked at."""

from pathlib import Path

import pytest

pytest.importorskip("sglang.srt.server_args")

import sglang

from kvoffload.connectors.configuration import names
from kvoffload.connectors.sglang import harmless_arguments as harmless
from tests.engines.reading_places import new_places, readings
from tests.engines.sglang_engine import known_facts
from tests.engines.sglang_engine.harmless_readings import PARTS, PLACES, REASONS

IN_ANOTHER_FORM = (
    "a fact of its own",
    "ranks and their number are facts",
    "the content of the file is a fact",
    "the model's configuration is a fact",
    "the weights are a fact",
)
"""Reasons of arguments that are facts after all: as they are resolved, or by their content."""


def owners():
    """Return what each harmless argument and variable is an attribute of."""
    arguments = {
        name
        for reason, text in harmless._ARGUMENTS.items()
        if not reason.startswith(IN_ANOTHER_FORM)
        for name in text.split()
    }
    found = {name: {"server_args"} for name in arguments}
    return found | {name: {"envs"} for name in harmless.VARIABLES | known_facts.UNSEEN}


def test_each_place_that_reads_a_harmless_argument_where_kv_is_made_was_looked_at():
    """A new version of SGLang may begin to compute KV with one: then it is harmless no longer."""
    found = readings(Path(sglang.__file__).parent / "srt", PARTS, owners())
    assert len(found) > 100
    assert not set(found) - names(REASONS), "read these, then give a reason or make them facts"
    new = new_places(found, PLACES)
    assert not new, "read these places, then add them to harmless_readings.txt:\n" + "\n".join(new)


def test_reasons_are_given_for_arguments_that_are_harmless_and_read():
    assert names(REASONS) == set(PLACES)
    assert not names(REASONS) - set(owners())
