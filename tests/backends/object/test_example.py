"""The example of an object store: its server, its manifest and its rights fit together."""

import json
import re
import shlex
from pathlib import Path

import pytest

from kvoffload.cli.main import main
from kvoffload.config import parse_config
from kvoffload.connectors.vllm.start import VllmConfigSettings
from kvoffload.registry import check_plugins, read_options

EXAMPLE = Path(__file__).parents[3] / "examples" / "object"
GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "object.md"
README = (EXAMPLE / "README.md").read_text()


def test_the_steps_try_the_tier_on_the_server_of_the_compose_file(s3, monkeypatch, capsys):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    server = yaml.safe_load((EXAMPLE / "compose.yaml").read_text())["services"]["s3"]
    assert server["image"].startswith("motoserver/moto:5")  # the server that runs here
    assert server["ports"] == ["127.0.0.1:5000:5000"]
    steps = re.search(r"```text\n(.*?)```", README, re.DOTALL)[1].splitlines()
    url = next(line for line in steps if line.startswith("curl")).split()[-1]
    assert url == "http://127.0.0.1:5000/bucket"
    s3.make_bucket("bucket")
    for assignment in next(line for line in steps if line.startswith("export")).split()[1:]:
        monkeypatch.setenv(*assignment.split("="))
    words = shlex.split(steps[-1].replace("http://127.0.0.1:5000", s3.endpoint))
    monkeypatch.setattr("sys.argv", words)
    for _ in range(5):  # on a busy machine the server may answer later than timeout_s
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        if ended.value.code == 0:
            break
    assert ended.value.code == 0, printed


def test_the_manifest_the_rights_and_the_rule_belong_together():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    account, settings, deployment, _ = yaml.safe_load_all((EXAMPLE / "vllm.yaml").read_text())
    config = json.loads(settings["data"]["kvoffload.json"])
    check_plugins(parse_config(config, VllmConfigSettings))
    disk, bucket = config["backends"]
    pod = deployment["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    assert not [name for name in bucket if name.endswith(("_env", "_file"))]
    root, check = pod["initContainers"]
    assert disk["root"] in root["command"]
    region = f"region={bucket['region']}"
    assert check["command"] == ["kvoffload", "doctor", bucket["url"], "-o", region]
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    name, _, prefix = bucket["url"].removeprefix("s3://").partition("/")
    (rule,) = json.loads((EXAMPLE / "lifecycle.json").read_text())["Rules"]
    assert rule["Filter"]["Prefix"] == f"{prefix}/"
    ttl_s = read_options("object", {k: v for k, v in bucket.items() if k != "type"}).ttl_s
    assert rule["Expiration"]["Days"] * 86400 == ttl_s + 86400
    objects, names = json.loads((EXAMPLE / "engine-policy.json").read_text())["Statement"]
    assert objects["Resource"] == f"arn:aws:s3:::{name}/{prefix}/*"
    assert names == {
        "Effect": "Allow",
        "Action": "s3:ListBucket",
        "Resource": f"arn:aws:s3:::{name}",
    }
    given = next(arg for arg in pod["containers"][0]["args"] if "kv-transfer" in arg)
    assert json.loads(given.partition("=")[2])["kv_connector"] == "KVOffloadConnector"


@pytest.mark.parametrize("name", ["lifecycle.json", "engine-policy.json"])
def test_the_guide_shows_the_files_of_the_example(name):
    blocks = re.findall(r"```json\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert (EXAMPLE / name).read_text() in blocks
