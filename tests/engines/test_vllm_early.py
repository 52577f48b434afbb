"""Settings of the vLLM connector, as far as they can be read without vLLM."""

import pytest

from kvoffload import registry
from kvoffload.connectors.vllm.start import read_settings
from kvoffload.errors import ConfigError


@pytest.mark.parametrize(
    ("tier", "sentence"),
    [
        (
            {"type": "disk", "root": "ROOT", "capacty": 1},
            r"capacty = .*: .*did you mean 'capacity'",
        ),
        ({"type": "disk", "root": "ROOT", "io": "fast"}, "io = 'fast': must be one of"),
        ({"type": "memory", "capacity": 0}, "capacity = 0: must be more than 0 bytes"),
        ({"type": "redis", "url": "http://host"}, "url"),
        ({"type": "disc", "root": "ROOT"}, "type = 'disc': no such plug-in"),
    ],
)
def test_options_of_every_tier_are_checked_without_opening_one(tmp_path, tier, sentence):
    root = tmp_path / "kv"
    good = {"type": "disk", "root": str(root), "capacity": "1GiB"}
    bad = {name: str(root) if value == "ROOT" else value for name, value in tier.items()}
    common = {"cpu_bytes": "1GiB", "allow_untested_vllm": True}
    with pytest.raises(ConfigError, match=rf"^backends\[1\]\.{sentence}"):
        read_settings({**common, "backends": [good, bad]})
    assert len(read_settings({**common, "backends": [good]}).backends) == 1
    assert not root.exists()


def test_a_policy_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="policy = 'lur': no such plug-in"):
        read_settings({"cpu_bytes": "1GiB", "allow_untested_vllm": True, "policy": "lur"})


def test_options_are_read_into_the_backends_own_settings(tmp_path):
    options = registry.read_options("disk", {"root": str(tmp_path / "kv"), "capacity": "2GiB"})
    assert options.capacity == 2 << 30
    assert not (tmp_path / "kv").exists()
