"""The units and manifests of the examples: their settings are right, and their forms are."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvoffload.config import parse_config
from kvoffload.config_sources import read_file
from kvoffload.connectors.vllm.settings import VllmConfigSettings
from kvoffload.registry import check_plugins

EXAMPLES = Path(__file__).parents[1] / "examples"
UNITS = ["vllm.service"]
UNITS += sorted(path.name for path in (EXAMPLES / "systemd").glob("kvoffload-*.*"))


def is_right(settings):
    check_plugins(parse_config(settings, VllmConfigSettings))
    return True


def test_the_settings_of_the_units_are_right():
    assert is_right(read_file(str(EXAMPLES / "systemd" / "kvoffload.toml")))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing")
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_accepts_the_units(unit, tmp_path):
    for name in UNITS:
        text = (EXAMPLES / "systemd" / name).read_text()
        text = re.sub(r"/opt/vllm/bin/\w+", shutil.which("true"), text)
        (tmp_path / name).write_text(text)
    words = ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit)]
    done = subprocess.run(words, capture_output=True, text=True)
    mine = [line for line in done.stderr.splitlines() if unit in line]
    assert done.returncode == 0, done.stderr
    assert mine == []


def test_the_manifest_mounts_what_its_settings_name():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    parts = list(yaml.safe_load_all((EXAMPLES / "kubernetes" / "vllm.yaml").read_text()))
    settings = json.loads(parts[0]["data"]["kvoffload.json"])
    assert is_right(settings)
    pod = parts[1]["spec"]["template"]["spec"]
    engine = pod["containers"][0]
    mounts = {mount["mountPath"] for mount in engine["volumeMounts"]}
    named = {mount["name"] for mount in engine["volumeMounts"]}
    assert named == {volume["name"] for volume in pod["volumes"]}
    disk, redis = settings["backends"]
    assert str(Path(disk["root"]).parent) in mounts
    assert str(Path(redis["password_file"]).parent) in mounts
    assert Path(engine["env"][0]["value"]).name in parts[0]["data"]
    assert "fsGroup" not in pod["securityContext"]  # a root that its group may write is refused
    given = next(arg for arg in engine["args"] if arg.startswith("--kv-transfer-config="))
    assert json.loads(given.partition("=")[2])["kv_connector"] == "KVOffloadConnector"
