"""The units and manifests of the examples: their settings are right, and their forms are."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from kvoffload.config import ByteSize, parse_config
from kvoffload.config_sources import read_file
from kvoffload.connectors.vllm.start import VllmConfigSettings
from kvoffload.io.service.settings import read_serve_config
from kvoffload.registry import check_plugins

EXAMPLES = Path(__file__).parents[1] / "examples"
VERIFY, SERVER = "kvoffload-verify.service", "kvoffload-serve.service"
UNITS = ["vllm.service", "mnt-kvoffload.mount"]
UNITS += sorted(
    path.name for path in (EXAMPLES / "systemd").glob("kvoffload-*") if path.suffix != ".toml"
)


def is_right(settings):
    check_plugins(parse_config(settings, VllmConfigSettings))
    return True


@pytest.mark.parametrize("name", ["kvoffload.toml", "host-memory.toml"])
def test_the_settings_of_the_units_are_right(name):
    assert is_right(read_file(str(EXAMPLES / "systemd" / name)))


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


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing")
@pytest.mark.parametrize(("unit", "at_most"), [("vllm.service", 89), (VERIFY, 20), (SERVER, 30)])
def test_the_units_may_do_little(unit, at_most):
    """The exposure that systemd computes, of 100; a unit without any setting has 92 to 96."""
    path = EXAMPLES / "systemd" / unit
    words = ["systemd-analyze", "security", "--offline=true", f"--threshold={at_most}", str(path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_steps_for_systemd_make_what_the_units_and_the_settings_need():
    text = (EXAMPLES / "systemd" / "README.md").read_text()
    steps = re.search(r"```sh\n(.*?)```", text, re.DOTALL)[1]
    settings = read_file(str(EXAMPLES / "systemd" / "kvoffload.toml"))
    assert steps.index("useradd") < steps.index(f"vllm {settings['backends'][0]['root']}\n")
    assert "sudo -u vllm /opt/vllm/bin/kvoffload config check" in steps
    assert "[cli,metrics]" in steps
    assert "metrics_port" in settings
    for unit in ("vllm.service", VERIFY):
        service = (EXAMPLES / "systemd" / unit).read_text()
        assert "User=vllm\n" in service
        assert f"ReadWritePaths={settings['backends'][0]['root']}\n" in service


def test_the_steps_for_systemd_copy_each_unit_before_it_is_enabled():
    """And systemd reads what was copied before it enables it."""
    text = (EXAMPLES / "systemd" / "README.md").read_text()
    copied, known = set(), set()
    for line in re.findall(r"^sudo (.*)$", text, re.MULTILINE):
        match line.split():
            case ["cp", *patterns, "/etc/systemd/system/"]:
                copied |= {name for name in UNITS for each in patterns if Path(name).match(each)}
            case ["systemctl", "daemon-reload"]:
                known = set(copied)
            case ["systemctl", "enable", "--now", *units]:
                assert set(units) <= known, line


def test_an_operator_finds_the_engine_of_the_unit_whose_tmp_is_its_own():
    unit = (EXAMPLES / "systemd" / "vllm.service").read_text()
    assert "PrivateTmp=yes" in unit
    (folder,) = re.findall(r"^RuntimeDirectory=(\S+)$", unit, re.MULTILINE)
    assert "RuntimeDirectoryMode=0700" in unit
    variable = f"KVOFFLOAD_RUNTIME_DIR=/run/{folder}"
    assert f"Environment={variable}\n" in unit
    text = (EXAMPLES / "systemd" / "README.md").read_text()
    assert f"sudo -u vllm env {variable} /opt/vllm/bin/kvoffload cache list" in text


def test_the_socket_of_the_unit_is_that_of_the_servers_settings():
    settings = read_serve_config(read_file(str(EXAMPLES / "systemd" / "kvoffload-serve.toml")))
    socket, service = (
        (EXAMPLES / "systemd" / f"kvoffload-serve.{kind}").read_text()
        for kind in ("socket", "service")
    )
    assert f"ListenStream={settings.socket}\n" in socket
    assert "SocketUser=vllm\nSocketMode=0600\n" in socket
    assert "User=vllm\n" in service
    assert f"ReadWritePaths={settings.backends[0].options['root']}\n" in service
    text = (EXAMPLES / "systemd" / "README.md").read_text()
    assert f'serve = "{settings.socket}"' in text
    assert is_right({"cpu_bytes": "1GiB", "serve": settings.socket})


def test_the_server_of_the_manifest_is_where_its_settings_say():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    parts = list(yaml.safe_load_all((EXAMPLES / "kubernetes" / "serve.yaml").read_text()))
    settings = read_serve_config(tomllib.loads(parts[0]["data"]["serve.toml"]))
    pod = parts[1]["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in server["volumeMounts"]}
    assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
    root = settings.backends[0].options["root"]
    folder = str(Path(settings.socket).parent)
    assert folder in mounts
    assert str(Path(root).parent) in mounts
    assert {root, folder} < set(pod["initContainers"][0]["command"])
    assert Path(server["command"][-1]).name in parts[0]["data"]
    limit = ByteSize.parse(server["resources"]["limits"]["memory"])
    assert settings.memory < limit
    vllm = list(yaml.safe_load_all((EXAMPLES / "kubernetes" / "vllm.yaml").read_text()))
    assert pod["securityContext"] == vllm[1]["spec"]["template"]["spec"]["securityContext"]


def test_the_engines_of_the_compose_file_find_the_server_where_its_settings_say():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    folder = EXAMPLES / "serve"
    text = (folder / "compose.yaml").read_text()
    filled = re.sub(r"\$\{\w+:[-?]([^}]*)\}", r"\1", text)
    services = yaml.safe_load(filled)["services"]
    server = services.pop("serve")
    settings = read_serve_config(read_file(str(folder / "serve.toml")))
    assert server["entrypoint"][:2] == ["kvoffload", "serve"]
    assert f"./serve.toml:{server['entrypoint'][-1]}:ro" in server["volumes"]
    assert f"./kv:{settings.backends[0].options['root']}" in server["volumes"]
    place = f"./run:{Path(settings.socket).parent}"
    assert len(services) == 2
    for engine in services.values():
        extra = json.loads(engine["command"][-1])["kv_connector_extra_config"]
        assert extra["serve"] == settings.socket
        assert is_right(extra)
        assert place in engine["volumes"]
        assert place in server["volumes"]
        assert (engine["user"], engine["image"]) == (server["user"], server["image"])
        assert engine["depends_on"] == ["serve"]
    ports = [engine["ports"] for engine in services.values()]
    assert ports == [["127.0.0.1:8001:8000"], ["127.0.0.1:8002:8000"]]
    reserved = [engine["deploy"]["resources"]["reservations"] for engine in services.values()]
    assert [each["devices"][0]["device_ids"] for each in reserved] == [["0"], ["1"]]


def lost(given, read, path):
    """Yield the fields of a manifest that are not in what a program has made of it."""
    if isinstance(given, dict):
        for name, value in given.items():
            yield from lost(value, read.get(name), f"{path}.{name}") if read else [path]
    elif isinstance(given, list):
        for i, value in enumerate(given):
            yield from lost(value, read[i], f"{path}[{i}]") if read else [path]
    elif given != read:
        yield path


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is missing")
@pytest.mark.parametrize(
    "name", ["kubernetes/serve", "kubernetes/vllm", "folder/vllm", "object/vllm"]
)
def test_kubectl_knows_each_field_of_the_pods(name):
    """It drops what it does not know, and needs no cluster for an object that it only changes."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    words = ["kubectl", "set", "env", "--local", "-f", "-", "LAST=1", "-o", "json"]
    parts = yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text())
    pods = [part for part in parts if "template" in part.get("spec", {})]
    assert pods
    for part in pods:
        done = subprocess.run(words, input=json.dumps(part), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert list(lost(part, json.loads(done.stdout), part["kind"])) == []


def pod_labels(deployment):
    return deployment["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize(
    "name", ["kubernetes/serve", "kubernetes/vllm", "folder/vllm", "object/vllm"]
)
def test_no_other_pod_reaches_a_port_of_the_pods(name):
    """Neither vLLM's API nor a page of metrics has a password."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    parts = list(yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text()))
    (pods,) = (part for part in parts if "template" in part.get("spec", {}))
    (policy,) = (part["spec"] for part in parts if part["kind"] == "NetworkPolicy")
    assert policy["podSelector"]["matchLabels"].items() <= pod_labels(pods).items()
    assert policy["policyTypes"] == ["Ingress"]
    assert all(each["from"] and each["ports"] for each in policy["ingress"])


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
    variables = {each["name"]: each["value"] for each in engine["env"]}
    assert Path(variables["KVOFFLOAD_CONFIG"]).name in parts[0]["data"]
    assert variables["HF_HOME"] in mounts
    assert {"HOME", "USER"} <= set(variables)  # the image does not know user 1000
    root, check = pod["initContainers"]
    assert {disk["root"], variables["HF_HOME"]} < set(root["command"])  # theirs before the start
    assert check["env"] == engine["env"]
    recipe = (EXAMPLES / "kubernetes" / "Dockerfile").read_text()
    (extras,) = re.findall(r"/src/kvoffload\[(.*)\]", recipe)
    assert check["command"][0] == "kvoffload"
    assert {"cli", "blake3"} <= set(extras.split(","))
    files = {Path(value).name for name, value in redis.items() if name.endswith("_file")}
    assert files == {"password", "secret", "ca.pem"}
    create = (EXAMPLES / "kubernetes" / "README.md").read_text()
    assert files == set(re.findall(r"--from-file=(\S+)", create))
    assert (redis["url"].partition("://")[0], redis["username"]) == ("rediss", "kvoffload")
    policy = parts[2]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= pod_labels(parts[1]).items()
    assert policy["ingress"][0]["ports"] == [{"port": engine["ports"][0]["containerPort"]}]
    assert "fsGroup" not in pod["securityContext"]  # a root that its group may write is refused
    given = next(arg for arg in engine["args"] if arg.startswith("--kv-transfer-config="))
    assert json.loads(given.partition("=")[2])["kv_connector"] == "KVOffloadConnector"


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.glob("*/compose.yaml")), ids=lambda path: path.parent.name
)
def test_a_compose_file_names_each_network_that_it_uses(path):
    """Docker makes the network `default` by itself; podman-compose refuses one without a name."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    parts = yaml.safe_load(path.read_text())
    used = {name for each in parts["services"].values() for name in each.get("networks", [])}
    assert used <= set(parts.get("networks", {}))


def test_prometheus_sends_its_alerts_to_the_alertmanager_beside_it():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    folder = EXAMPLES / "observability"
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    manager = services["alertmanager"]
    (place,) = [volume.split(":")[1] for volume in manager["volumes"]]
    assert manager["volumes"] == [f"./alertmanager.yml:{place}:ro"]
    assert f"--config.file={place}" in manager["command"]
    assert "--web.listen-address=127.0.0.1:9093" in manager["command"]
    assert "--cluster.listen-address=" in manager["command"]  # else a port for all the network
    told = yaml.safe_load((folder / "prometheus.yml").read_text())["alerting"]["alertmanagers"]
    assert told == [{"static_configs": [{"targets": ["localhost:9093"]}]}]


def test_grafana_has_no_user_with_a_password_that_everyone_knows():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    parts = yaml.safe_load((EXAMPLES / "observability" / "compose.yaml").read_text())
    given = parts["services"]["grafana"]["environment"]
    assert given["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert given["GF_AUTH_BASIC_ENABLED"] == "false"
    assert given["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
