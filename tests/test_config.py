"""Settings: what is right is read, what is wrong is named."""

import pytest

from kvoffload.config import ByteSize, human_bytes, parse_config
from kvoffload.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (5, 5),
        ("5", 5),
        ("8GiB", 8 << 30),
        ("1.5 MiB", 3 << 19),
        ("200 GB", 200 * 10**9),
        ("0", 0),
        (2**63 - 1, 2**63 - 1),
        (f"{2**63 - 1}", 2**63 - 1),
    ],
)
def test_sizes_are_numbers_or_human_text(text, count):
    assert ByteSize.parse(text) == count


TOO_MUCH = [2**63, f"{2**63}", "999999999999TiB", "9" * 5000, "9" * 400 + ".5", "0" * 5000]


@pytest.mark.parametrize(
    "text", ["", "GiB", "8 potatoes", "-5", -5, True, 1.5, None, "1e9", *TOO_MUCH]
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
        ({"cpu_bytes": 1, "load_timeout_s": "soon"}, "load_timeout_s", "float"),
        ({"cpu_bytes": 1, "backends": {}}, "backends", "list"),
        ({"cpu_bytes": 1, "backends": ["disk"]}, "backends[0]", "type"),
    ],
)
def test_an_error_names_field_value_and_remedy(raw, field, hint):
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    assert caught.value.field == field
    assert hint in caught.value.remedy


def test_bytes_for_people():
    assert [human_bytes(n) for n in (5, 2048, 3 << 30, 5 << 40)] == [
        "5 B",
        "2.0 KiB",
        "3.0 GiB",
        "5.0 TiB",
    ]
