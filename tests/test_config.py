"""Settings: what is right is read, what is wrong is named."""

import json
import math

import msgspec
import pytest

from kvoffload.config import ByteSize, OffloadConfig, convert, human_bytes, parse_config
from kvoffload.errors import ConfigError
from kvoffload.registry import BACKENDS, POLICIES, load, open_backend


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (5, 5),
        ("5", 5),
        ("8GiB", 8 << 30),
        ("1.5 MiB", 3 << 19),
        ("200 GB", 200 * 10**9),
        ("0", 0),
        ("1PiB", 1 << 50),
        ("2 pb", 2 * 10**15),
        ("7 EiB", 7 << 60),
        ("1.5eb", 15 * 10**17),
        (2**63 - 1, 2**63 - 1),
        (f"{2**63 - 1}", 2**63 - 1),
    ],
)
def test_sizes_are_numbers_or_human_text(text, count):
    assert ByteSize.parse(text) == count


TOO_MUCH = [
    2**63,
    f"{2**63}",
    "8EiB",
    "7.99999999999999999999EiB",
    "999999999999TiB",
    "9" * 5000,
    "9" * 400 + ".5",
    "0" * 5000,
]


@pytest.mark.parametrize(
    "text", ["", "GiB", "8 potatoes", "0 potatoes", "-5", -5, True, 1.5, None, "1e9", *TOO_MUCH]
)
def test_other_sizes_are_refused_with_the_field(text):
    with pytest.raises(ConfigError, match="cpu_bytes"):
        ByteSize.parse(text, "cpu_bytes")


def test_a_whole_configuration():
    config = parse_config(
        {"cpu_bytes": "1GiB", "backends": [{"type": "disk", "root": "/kv", "capacity": "2GiB"}]}
    )
    assert config.cpu_bytes == 1 << 30
    assert config.backends[0].type == "disk"
    assert config.backends[0].options == {"root": "/kv", "capacity": "2GiB"}


@pytest.mark.parametrize(
    ("raw", "field", "hint"),
    [
        ({}, "cpu_bytes", "required"),
        ({"cpu_byte": 1}, "cpu_byte", "did you mean 'cpu_bytes'"),
        ({"cpu_bytes": "x"}, "cpu_bytes", "512MiB"),
        (
            {"cpu_bytes": 1, "load_timeout_s": "5s"},
            "load_timeout_s",
            "a number of seconds, such as 5.0",
        ),
        ({"cpu_bytes": 1, "blocks_per_chunk": "4"}, "blocks_per_chunk", 'whole number, or "auto"'),
        ({"cpu_bytes": 1, "blocks_per_chunk": 4.5}, "blocks_per_chunk", 'whole number, or "auto"'),
        ({"cpu_bytes": 1, "promote": "yes"}, "promote", "true or false"),
        ({"cpu_bytes": 1, "batched_copies": "no"}, "batched_copies", "true or false"),
        ({"cpu_bytes": 1, "record": 3}, "record", "text"),
        ({"cpu_bytes": 1, "load_timeout_s": math.inf}, "load_timeout_s", "finite"),
        ({"cpu_bytes": 1, "store_timeout_s": math.nan}, "store_timeout_s", "finite"),
        ({"cpu_bytes": 1, "load_timeout_s": 1e10}, "load_timeout_s", "at most 1e+09"),
        ({"cpu_bytes": 1, "max_inflight_bytes": 2}, "max_inflight_bytes", "cpu_bytes, 1 B"),
        ({"cpu_bytes": 1, "backends": {}}, "backends", "list"),
        ({"cpu_bytes": 1, "backends": ["disk"]}, "backends[0]", "type"),
    ],
)
def test_an_error_names_field_value_and_remedy(raw, field, hint):
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    assert caught.value.field == field
    assert hint in caught.value.remedy


@pytest.mark.parametrize(
    ("raw", "field", "value"),
    [
        ({"client_hints": ["offload", [3]]}, "client_hints[1]", [3]),
        ({"client_hints": ["offload", 3]}, "client_hints[1]", 3),
        ({"client_hints": 3}, "client_hints", 3),
    ],
)
def test_an_error_in_a_list_shows_the_item(raw, field, value):
    with pytest.raises(ConfigError) as caught:
        parse_config({"cpu_bytes": 1, **raw})
    assert (caught.value.field, caught.value.value) == (field, value)


def test_bytes_for_people():
    assert [human_bytes(n) for n in (5, 2048, 3 << 30, 5 << 40)] == [
        "5 B",
        "2.0 KiB",
        "3.0 GiB",
        "5.0 TiB",
    ]


def options_of(backend):
    return load(BACKENDS, backend).Options


@pytest.mark.parametrize(
    ("backend", "options", "field", "hint"),
    [
        ("redis", {"url": "redis://h", "ttl_s": "1d"}, "ttl_s", "seconds, such as 86400.0"),
        ("disk", {"root": "kv", "write_threads": "2"}, "write_threads", "whole number, or null"),
        ("disk", {"root": "kv", "read_threads": "2"}, "read_threads", "whole number, or null"),
        ("disk", {"root": "kv", "high_watermark": "9"}, "high_watermark", "number, such as 0.95"),
        ("disk", {"root": "kv", "high_watermark": 95}, "high_watermark", "at most 1"),
        ("disk", {"root": "kv", "low_watermark": 0.99}, "low_watermark", "at most high_watermark"),
        ("disk", {"root": "kv", "low_watermark": 0}, "low_watermark", "more than 0"),
        ("disk", {"root": 3}, "root", "text"),
    ],
)
def test_a_wrong_option_of_a_tier_is_told_with_an_example(backend, options, field, hint):
    with pytest.raises(ConfigError) as caught:
        convert(options, options_of(backend))
    assert caught.value.field == field
    assert hint in caught.value.remedy


@pytest.mark.parametrize(
    ("group", "name", "meant"), [(POLICIES, "LRU", "lru"), (BACKENDS, "Disk", "disk")]
)
def test_a_plug_in_s_name_in_capitals_is_recognised(group, name, meant):
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
        load(group, name)


fastjsonschema = pytest.importorskip("fastjsonschema", reason="needs the extra 'dev'")
SCHEMA = json.loads(json.dumps(msgspec.json.schema(OffloadConfig)))
"""As it is written into a file."""

GOOD = [
    {"cpu_bytes": "8GiB"},
    {"cpu_bytes": " 1.5 gb "},
    {"cpu_bytes": 0, "backends": [{"type": "disk", "root": "/kv", "capacity": "200GiB"}]},
    {"cpu_bytes": 1 << 30, "max_inflight_bytes": None, "policy": "arc", "promote": False},
    {"cpu_bytes": "1EiB"},
    {"cpu_bytes": "1PiB", "blocks_per_chunk": 4, "load_timeout_s": 1, "record": "trace.jsonl"},
]
BAD = [
    {},
    {"cpu_bytes": "8 potatoes"},
    {"cpu_bytes": -1},
    {"cpu_bytes": 1.5},
    {"cpu_bytes": True},
    {"cpu_bytes": 2**63},
    {"cpu_bytes": 1, "cpu_byte": 1},
    {"cpu_bytes": 1, "blocks_per_chunk": 0},
    {"cpu_bytes": 1, "store_threshold": 0},
    {"cpu_bytes": 1, "load_timeout_s": 0},
    {"cpu_bytes": 1, "load_timeout_s": "soon"},
    {"cpu_bytes": 1, "store_timeout_s": 1e10},
    {"cpu_bytes": 1, "promote": "yes"},
    {"cpu_bytes": 1, "backends": {}},
    {"cpu_bytes": 1, "backends": ["disk"]},
    {"cpu_bytes": 1, "backends": [{"root": "/kv"}]},
    {"cpu_bytes": 1, "backends": [{"type": 3}]},
]


@pytest.mark.parametrize("document", GOOD, ids=str)
def test_the_schema_takes_what_is_right(document):
    fastjsonschema.validate(SCHEMA, document)
    parse_config(document)


@pytest.mark.parametrize("document", BAD, ids=str)
def test_the_schema_refuses_what_is_wrong(document):
    with pytest.raises(fastjsonschema.JsonSchemaValueException):
        fastjsonschema.validate(SCHEMA, document)
    with pytest.raises(ConfigError):
        parse_config(document)


def test_the_schema_has_options_where_people_write_them():
    nested = {"cpu_bytes": 1, "backends": [{"type": "disk", "options": {"root": "/kv"}}]}
    with pytest.raises(fastjsonschema.JsonSchemaValueException):
        fastjsonschema.validate(SCHEMA, nested)
    tier = parse_config(nested).backends[0]
    with pytest.raises(ConfigError, match="options"):
        open_backend(tier.type, tier.options, "namespace")
