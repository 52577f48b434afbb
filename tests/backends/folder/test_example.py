"""The deployments of the example: their settings are right, and their parts fit together."""

import json
import re
from pathlib import Path

import pytest

from kvoffload.config import ByteSize, parse_config
from kvoffload.connectors.vllm.start import VllmConfigSettings
from kvoffload.registry import check_plugins, read_options

FOLDER = Path(__file__).parents[3] / "examples" / "folder"
yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")


def tier_of(settings):
    """Check an engine's settings, without the files that they name; return the tier's."""
    config = parse_config(settings, VllmConfigSettings)
    check_plugins(config)
    (tier,) = settings["backends"]
    options = {name: value for name, value in tier.items() if name != "type"}
    assert tier["type"] == "folder"
    return read_options("folder", options)


def test_the_manifest_mounts_a_shared_claim_where_its_settings_say():
    parts = list(yaml.safe_load_all((FOLDER / "vllm.yaml").read_text()))
    claim, settings, deployment, policy = parts
    tier = tier_of(json.loads(settings["data"]["kvoffload.json"]))
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    size = ByteSize.parse(claim["spec"]["resources"]["requests"]["storage"] + "B")
    assert size > tier.capacity
    pod = deployment["spec"]["template"]["spec"]
    (engine,), (check,) = pod["containers"], pod["initContainers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in engine["volumeMounts"]}
    assert set(mounts.values()) == set(volumes)
    place = volumes[mounts[str(Path(tier.root).parent)]]
    assert place["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    secret = volumes[mounts[str(Path(tier.secret_file).parent)]]["secret"]
    steps = (FOLDER / "README.md").read_text()
    assert f"secret generic {secret['secretName']} --from-file=secret" in steps
    rights = pod["securityContext"]
    assert rights["fsGroup"] == rights["runAsUser"] == 1000  # it makes its folder in the volume
    assert tier.trust_parent_folders
    assert deployment["spec"]["replicas"] > 1
    assert check["env"] == engine["env"]
    variables = {each["name"]: each["value"] for each in engine["env"]}
    assert Path(variables["KVOFFLOAD_CONFIG"]).name in settings["data"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()


def test_the_compose_file_mounts_a_server_where_its_settings_say():
    parts = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    service = parts["services"]["vllm"]
    text = re.sub(r"\$\{\w+:-(\w+)\}", r"\1", service["command"][-1])
    tier = tier_of(json.loads(text)["kv_connector_extra_config"])
    assert f"kv:{Path(tier.root).parent}" in service["volumes"]
    assert tier.secret_file == f"/run/secrets/{service['secrets'][0]}"
    mount = parts["volumes"]["kv"]["driver_opts"]
    assert mount["type"] == "nfs4"
    assert {"hard", "lookupcache=positive"} <= set(mount["o"].split(","))
    assert service["ports"] == ["127.0.0.1:8000:8000"]


def test_the_images_have_what_the_settings_need():
    recipe, compose = ((FOLDER / name).read_text() for name in ("Dockerfile", "compose.yaml"))
    for text in (recipe, compose):
        (extras,) = re.findall(r"/src/kvoffload\[(.*)\]", text)
        assert {"cli", "folder", "blake3"} == set(extras.split(","))
