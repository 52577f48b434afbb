"""The line that says why a store is cold: what it names, what it leaves out, and what it costs."""

import asyncio
import logging
import time

import pytest
from msgspec.structs import replace

from kvoffload.backends.base import Described
from kvoffload.backends.memory import MemoryBackend, MemoryOptions
from kvoffload.io import cold_start
from kvoffload.io.client import IOClient
from kvoffload.io.cold_start import explain_cold_start, explanation
from kvoffload.io.open_stores import OpenStore
from tests.support.io_rig import opening

OWN, OTHER, THIRD = "0" * 64, "f95c0123456789abcdef" + "1" * 44, "2" * 64
FACTS = {"label.model": "Qwen/Qwen3-8B", "kv_dtype": "fp8", "rank": "0"}


def held(namespace=OTHER, chunks=6, used_s=60.0, stored_bytes=12 << 30, **facts):
    facts = {**FACTS, "kv_dtype": "auto", **facts}
    return Described(namespace, facts, chunks, stored_bytes, used_s)


def explained(*found, **facts):
    return explanation(OWN, {**FACTS, **facts}, found)


def test_the_line_names_size_model_namespace_and_each_fact_that_differs():
    assert explained(held()) == (
        "namespace 0000000000000000 has no chunks; about 12.0 GiB of 'Qwen3-8B' are in namespace "
        "f95c0123456789ab, which differs in kv_dtype: auto -> fp8; kvoffload inspect shows all "
        "with --diff f95c0123456789ab 0000000000000000"
    )
    assert "; 1,234 chunks of 'Qwen3-8B' are" in explained(held(chunks=1234, stored_bytes=None))


def test_a_namespace_with_chunks_is_not_cold():
    assert explained(held(), held(OWN, chunks=1)) == ""
    assert explained(held(), held(OWN, chunks=0)) != ""


def test_an_empty_a_private_and_an_own_namespace_explain_nothing():
    assert explained() == ""
    assert explained(held(chunks=0)) == ""
    assert explained(held(generation="ab12")) == ""
    assert explained(held(OWN, chunks=0)) == ""


@pytest.mark.parametrize(
    ("ours", "theirs", "is_same"),
    [
        ({"label.model": "Qwen/Qwen3-8B"}, {"model": "/models/Qwen3-8B/"}, True),
        ({"label.model": "Qwen3-8B"}, {"model_path": "Qwen/Qwen3-8B"}, True),
        (
            {"label.model": "/hub/models--Qwen--Qwen3-8B/snapshots/0123abcd"},
            {"model": "Qwen/Qwen3-8B"},
            True,
        ),
        ({"label.model": "Qwen3-8B"}, {"model": "Qwen3-8B-FP8"}, False),
        ({"label.model": "a"}, {}, False),
        ({"weights": "1"}, {"weights": "2"}, False),
        ({"model": ""}, {"model": ""}, False),
    ],
)
def test_models_are_equal_by_the_last_part_of_their_names(ours, theirs, is_same):
    other = Described(OTHER, {**theirs, "dtype": "a"}, 1)
    assert bool(explanation(OWN, {**ours, "dtype": "b"}, [other])) is is_same


def test_labels_are_no_differences():
    line = explained(held(**{"label.model": "/m/Qwen3-8B", "label.host": "a"}))
    assert "differs in kv_dtype: auto -> fp8;" in line


def test_another_rank_of_the_same_engine_explains_nothing():
    assert explained(held(kv_dtype="fp8", rank="1")) == ""
    assert explained(held(kv_dtype="fp8", rank="1"), held(THIRD)).count(THIRD[:16]) == 2


def test_the_nearest_namespace_is_named_and_of_equally_near_ones_the_last_used():
    near, late = held(used_s=900.0), held(THIRD, used_s=9.0, lora="on")
    assert OTHER[:16] in explained(late, near)
    late = held(THIRD, used_s=9.0)
    assert THIRD[:16] in explained(near, late)
    assert THIRD[:16] in explained(near._replace(used_s=None), late)


def test_five_facts_are_shown_those_of_both_first_and_the_rest_are_counted():
    theirs = {f"a{i}": "x" for i in range(9)}
    line = explained(held(zz="1", **theirs), zz="2")
    assert "differs in kv_dtype: auto -> fp8, zz: 1 -> 2, a0: x -> (none), a1" in line
    assert "a2: x -> (none) and 6 more;" in line
    assert "a3" not in line


def test_texts_of_a_store_are_cut_and_escaped():
    hostile = "\x1b[2J\nERROR [bold] \u202e" + "x" * 100_000
    line = explained(
        held(namespace=hostile, kv_dtype=hostile, **{hostile: "1", "label.model": "Qwen3-8B"})
    )
    assert line.isprintable()
    assert "kv_dtype: \\x1b[2J\\x0aERROR [bold] \\x202e" in line
    assert len(line) < 1000


def test_long_values_are_shown_from_where_they_differ():
    front = "x" * 5000
    line = explained(held(hf_config=f"{front}rope: 1"), hf_config=f"{front}rope: 2")
    assert "hf_config: …xxxxrope: 1 -> …xxxxrope: 2, kv_dtype: auto -> fp8;" in line


class Store(MemoryBackend):
    """A store whose ``described`` is the test's."""

    def __init__(self, described):
        super().__init__(MemoryOptions(), OWN)
        self.described = described


async def lines_of(described, caplog, **facts):
    wanted = opening([("t", "memory", {})], namespace=OWN)
    wanted.facts = {**FACTS, **facts}
    with caplog.at_level(logging.DEBUG, "kvoffload"):
        await explain_cold_start(OpenStore("t", Store(described)), wanted)
    return [each.getMessage() for each in caplog.records if each.levelno > logging.DEBUG]


async def test_a_store_that_fails_hangs_or_answers_nonsense_costs_the_line_alone(
    caplog, monkeypatch
):
    monkeypatch.setattr(cold_start, "LONGEST_S", 0.05)

    async def fails():
        raise RuntimeError

    async def hangs():
        await asyncio.sleep(60)

    async def nonsense():
        return [("n", {1: 2}, "many")]

    async def nothing():
        return None

    began = time.monotonic()
    for described in (fails, hangs, nonsense, nothing):
        assert await lines_of(described, caplog) == []
    assert time.monotonic() - began < 5


async def test_a_private_namespace_is_not_compared(caplog):
    async def described():
        return [held()]

    assert await lines_of(described, caplog, generation="ab12") == []
    (line,) = await lines_of(described, caplog)
    assert line.startswith("t: namespace 0000000000000000 has no chunks; about 12.0 GiB")


def test_a_renewal_is_no_cold_start(process_rig, tmp_path, until, caplog):
    disk = ("disk", "disk", {"root": str(tmp_path), "min_free": 0})
    caplog.set_level(logging.INFO, "kvoffload")

    def start(namespace, facts):
        wanted = replace(opening([disk], namespace=namespace), facts=facts)
        process_rig.clients.append(IOClient(process_rig.start, wanted, 60.0, 60.0))
        return process_rig.clients[-1]

    process_rig.store(start(OTHER, {**FACTS, "kv_dtype": "auto"}), "disk", [b"a" * 36], until)
    client = start(OWN, {"of": "another model"})
    client.renew(OWN, FACTS, [OWN])
    time.sleep(0.5)
    assert "has no chunks" not in caplog.text
    start(OWN, FACTS)
    until(lambda: caplog.text.count("has no chunks") == 1)
