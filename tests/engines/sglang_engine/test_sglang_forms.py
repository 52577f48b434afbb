"""Flat copies of pages, and a storage that is detached, attached and cleared while serving."""

import json

import pytest

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


def test_flat_pages_and_storage_attached_while_serving(start, prompt, tiers, disk, tmp_path):
    extra = tiers(disk(tmp_path / "kv"), interface_v1=0, allow_clear=True)
    engine = start("dynamic", extra)
    asked = prompt(1)
    told = engine.generate(asked)["tokens"]
    engine.wait_stored(asked, told)
    assert engine.ask("storage", action="detach") is True
    engine.forget()
    answer = engine.generate(asked)
    assert answer["tokens"] == told
    assert answer["storage"] == [0]
    attach = {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config_json": json.dumps(extra),
    }
    assert engine.ask("storage", action="attach", **attach) is True
    engine.wait_stored(asked, told)
    assert engine.ask("storage", action="clear") is True
    other = prompt(2)
    told = engine.generate(other)["tokens"]
    engine.wait_stored(other, told)
