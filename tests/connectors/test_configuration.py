"""Facts of a configuration: each field counts unless it is listed, spelled alike everywhere."""

import dataclasses
import enum
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvoffload.connectors.configuration import fact, facts_of, names
from kvoffload.connectors.hf_config import hf_facts
from kvoffload.identity import namespace


class Kind(enum.Enum):
    SMALL = 1


@dataclasses.dataclass
class Inner:
    size: int = 1
    seed: int = 0


@dataclasses.dataclass
class Config:
    dtype: object = torch.bfloat16
    kind: Kind = Kind.SMALL
    inner: Inner | None = dataclasses.field(default_factory=Inner)
    options: dict = dataclasses.field(default_factory=dict)
    path: Path = Path("/x")
    rate: float = 0.5


def test_each_field_is_a_fact_and_those_of_a_configuration_in_it():
    facts = facts_of(Config(), prefix="engine.")
    assert facts["engine.dtype"] == "torch.bfloat16"
    assert facts["engine.inner"] == "Inner"
    assert facts["engine.inner.size"] == 1
    assert set(facts) == {
        *(f"engine.{field.name}" for field in dataclasses.fields(Config)),
        "engine.inner.size",
        "engine.inner.seed",
    }


def test_only_listed_fields_are_left_out_whole_configurations_among_them():
    facts = facts_of(Config(), {"inner.seed", "path"})
    assert "inner.seed" not in facts
    assert "path" not in facts
    assert not any(name.startswith("inner") for name in facts_of(Config(), {"inner"}))


def test_names_come_with_their_reasons():
    assert names({"a reason": "x y", "another": "z"}) == {"x", "y", "z"}
    assert names({"fronts": "a b. c d e.f. g", "": "h"}) == {"a", "b.c", "b.d", "e.f.g", "h"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": [1, 2]}, {"b": (1, 2), "a": 1}),
        ({"x", "y", "z"}, {"z", "y", "x"}),
        (Inner(2), Inner(2)),
        (SimpleNamespace(a=1), SimpleNamespace(a=1)),
        ([names, Inner], [names, Inner]),
    ],
)
def test_equal_values_are_one_fact_however_they_are_built(one, other):
    assert fact("x", one) == fact("x", other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, "1"),
        (True, 1),
        ([1], ["1"]),
        ({"1": 0}, {1: 0}),
        (None, "None"),
        (0.5, 0.25),
        (Kind.SMALL, 1),
        ([Inner(1)], [Inner(2)]),
        (torch.float16, torch.bfloat16),
        ([[1], 2], [1, [2]]),
    ],
)
def test_different_values_are_different_facts(one, other):
    assert namespace(x=fact("x", one)) != namespace(x=fact("x", other))


def test_what_has_no_spelling_is_shared_with_no_other_process_and_the_field_is_named(caplog):
    class Endless:
        def __init__(self):
            self.me = self

    endless = Endless()
    for value in (lambda: 1, object(), endless, SimpleNamespace(x=object())):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert fact("model.hook", value) != fact("model.hook", value)
        assert "model.hook" in caplog.text


def test_a_class_whose_properties_raise_ends_no_start(caplog):
    class Strange:
        def __str__(self):
            raise RuntimeError("no")

    assert fact("x", Strange()) != fact("x", Strange())


def test_a_secret_is_not_kept_readable_with_the_data():
    nested = {"store": [{"password": "hunter2"}]}
    told = facts_of({"S3_SECRET": "hunter2", "api_key": "hunter2", "monkey": "x", "more": nested})
    assert "hunter2" not in str(told)
    assert told["monkey"] == "x"
    assert fact("api_key", "a") != fact("api_key", "b")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "hunter2"),
        ("api_keys", ["hunter2"]),
        ("auth", {"token": "hunter2"}),
        ("url", "redis://me:hunter2@host/0"),
        ("urls", ["https://hunter2@host"]),
    ],
)
def test_a_secret_in_any_form_is_told_apart_and_not_shown(name, value):
    told = facts_of({name: value})
    assert "hunter2" not in str(told)
    changed = json.loads(json.dumps(value).replace("hunter2", "hunter3"))
    assert told != facts_of({name: changed})


def test_names_that_only_look_like_secrets_are_shown():
    plain = {"max_num_batched_tokens": 512, "eos_token_id": 2, "is_token": True, "at": "a@b"}
    assert facts_of(plain) == dict(plain)


@dataclasses.dataclass
class Ring:
    """A configuration that contains itself."""

    size: int = 1
    me: "Ring | None" = None


def test_odd_configurations_end_no_start():
    ring = Ring()
    ring.me = ring

    class Raising:
        def __getattr__(self, name):
            raise RuntimeError(name)

    told = facts_of({"ring": ring, "raising": Raising(), "huge": 10**5000, "odd": "\ud800"})
    assert told["ring.size"] == 1
    assert "known to this process alone" in str(told["huge"])
    assert len(namespace(**told)) == 64


def test_an_unstable_order_in_another_process_changes_nothing():
    code = (
        "from kvoffload.connectors.configuration import fact;"
        "print(fact('x', [{'b', 'a', 'c'}, {'k': frozenset(['z', 'y'])}]))"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(told) == 1


def test_of_a_model_only_what_no_layer_reads_is_left_out():
    class HfConfig:
        def __init__(self, **more):
            self.plain = {"rope_theta": 1.0, "vision_config": {"depth": 2, "id2label": {}}, **more}

        def to_dict(self):
            return self.plain

    assert hf_facts(HfConfig()) == hf_facts(HfConfig(_name_or_path="/m", transformers_version="5"))
    assert hf_facts(HfConfig()) == hf_facts(
        HfConfig(vision_config={"depth": 2, "_name_or_path": "/elsewhere"})
    )
    assert hf_facts(HfConfig()) != hf_facts(HfConfig(vision_config={"depth": 3}))
    assert hf_facts(HfConfig()) != hf_facts(HfConfig(an_option_of_tomorrow=1))


@pytest.mark.parametrize("make", [torch.tensor, np.array])
def test_an_array_counts_whole_though_its_text_leaves_the_middle_out(make):
    one, other = [0.0] * 4000, [0.0] * 4000
    other[2000] = 1.0
    assert str(make(one)) == str(make(other))
    assert fact("scales", make(one)) == fact("scales", make(one)) != fact("scales", make(other))


def test_a_long_pattern_counts_whole():
    one, other = (re.compile("a" * 300 + end) for end in "bc")
    assert str(one) == str(other)
    assert fact("skipped", one) != fact("skipped", other)
