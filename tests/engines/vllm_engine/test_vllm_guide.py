"""The settings in the guide are ones that vLLM and the connector take."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from vllm.config import KVTransferConfig

from kvoffload.connectors.vllm.start import read_settings

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "guides" / "vllm.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language):
    return [code for info, code in BLOCK.findall(GUIDE) if info == language]


def test_every_setting_in_the_guide_is_one_that_we_take():
    checked = 0
    for code in blocks("json"):
        told = json.loads(code)
        if told.get("kv_connector") == "MultiConnector":
            config = KVTransferConfig(**told)
            entries = config.kv_connector_extra_config["connectors"]
            (told,) = [entry for entry in entries if entry["kv_connector"] == "KVOffloadConnector"]
            KVTransferConfig(**told)
        if extra := told.get("kv_connector_extra_config"):
            read_settings(extra)
            checked += 1
    assert checked == 2
