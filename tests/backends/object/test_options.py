"""Settings of the object tier: what is refused, with field and remedy, and secrets never shown."""

import subprocess
import sys

import pytest

from kvoffload import open_backend
from kvoffload.errors import ConfigError
from kvoffload.registry import read_options

pytest.importorskip("obstore", reason="obstore is not installed: the extra object has it")
SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"


def refused(**options):
    with pytest.raises(ConfigError) as caught:
        open_backend("object", {"url": "s3://bucket/kv", **options}, "n")
    assert SECRET not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("bucket", "s3://BUCKET/PREFIX"),
        ("http://bucket", "s3://BUCKET/PREFIX"),
        ("s3://", "no name of a bucket"),
        ("s3://b", "no name of a bucket"),
        ("s3:///kv", "no name of a bucket"),
        (f"s3://user:{SECRET}@bucket/kv", "credentials"),
        (f"s3://bucket/kv?secret={SECRET}", "credentials"),
        (f"az://account/container/x?sig={SECRET}", "credentials"),
        ("s3://bucket/kv#x", "credentials"),
        ("s3://bucket//kv", "single slashes"),
        ("s3://bucket/../kv", "single slashes"),
        ("s3://bucket/k v", "single slashes"),
        ("s3://bucket/\x1b[2J", "single slashes"),
        ("s3://bucket/" + "/".join(["x" * 150] * 4), "500"),
        ("az://container", "no name of a bucket"),
        ("az://Account_1/container", "account"),
    ],
)
def test_a_wrong_url_is_refused_and_not_shown(url, remedy):
    error = refused(url=url)
    assert error.field == "url"
    assert remedy in error.remedy


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("endpoint", "s3.internal:9000", "https://HOST:PORT"),
        ("endpoint", "ftp://s3.internal", "https://HOST:PORT"),
        ("endpoint", "https://s3.internal:99999", "https://HOST:PORT"),
        ("endpoint", "https://s3.internal/some/path", "without a path"),
        ("endpoint", f"https://user:{SECRET}@s3.internal", "credentials"),
        ("endpoint", f"https://s3.internal?token={SECRET}", "credentials"),
        ("threads", 0, "1 to 256"),
        ("threads", 1000, "1 to 256"),
        ("timeout_s", 0, "600"),
        ("timeout_s", float("nan"), "600"),
        ("ttl_s", 0, "ten years"),
        ("ttl_s", 1e12, "ten years"),
        ("max_inflight_bytes", "1KiB", "1 MiB"),
        ("ca_file", "/nowhere/ca.pem", "cannot be read"),
        ("secret_key_env", "KV_UNSET", "must be set"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_name(field, value, remedy):
    error = refused(**{field: value})
    assert remedy in error.remedy
    assert error.field == field or remedy == "must be set"


def test_settings_of_another_provider_are_refused():
    google = {"url": "gs://bucket/kv"}
    assert refused(**google, region="us-east-1").field == "region"
    assert refused(**google, access_key_env="KV_A").field == "access_key_env"
    azure = {"url": "az://account/container"}
    assert "leave it out" in refused(**azure, secret_key_env="KV_A", token_env="KV_B").remedy
    assert "one source" in refused(secret_key_env="KV_A", secret_key_file="/x").remedy


def test_secrets_that_are_missing_or_empty_are_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("KV_EMPTY", "")
    file = tmp_path / "secret"
    given = {"access_key_env": "KV_ID"}
    assert "not set" in refused(access_key_env="KV_UNSET", secret_key_env="KV_UNSET").remedy
    monkeypatch.setenv("KV_ID", "id")
    assert "empty" in refused(**given, secret_key_env="KV_EMPTY").remedy
    assert "cannot be read" in refused(**given, secret_key_file="/nowhere/x").remedy
    for content, remedy in ((b" \n", "is empty"), (b"\xff" * 40 + SECRET.encode(), "UTF-8")):
        file.write_bytes(content)
        assert remedy in refused(**given, secret_key_file=str(file)).remedy


async def test_no_secret_is_shown_and_a_file_of_others_is_warned_of(monkeypatch, tmp_path, caplog):
    file = tmp_path / "secret"
    file.write_text(SECRET)
    file.chmod(0o644)
    monkeypatch.setenv("KV_ID", "AKIAEXAMPLE")
    options = {"url": "s3://bucket/kv", "access_key_env": "KV_ID", "secret_key_file": str(file)}
    backend = open_backend("object", options | {"endpoint": "http://s3.internal:9000"}, "n")
    await backend.close()
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if "mode 0644" in line and "chmod 600" in line]
    assert [line for line in said if "in the clear" in line]
    for text in (repr(backend), repr(read_options("object", options)), *said):
        assert SECRET not in text
        assert "AKIAEXAMPLE" not in text


async def test_small_chunks_are_warned_of(caplog):
    backend = open_backend("object", {"url": "s3://bucket/kv"}, "n")
    backend.check_fit(8 << 20)
    assert not caplog.records
    backend.check_fit(512 << 10)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "512.0 KiB" in line
    assert "blocks_per_chunk" in line
    other = open_backend("object", {"url": "s3://bucket/kv"}, "m")
    assert backend.place == other.place, "a second tier there would store each chunk twice"
    await backend.close()
    await other.close()


WITHOUT = """
import sys
sys.modules["obstore"] = None
from kvoffload.cli.config_command import SETTINGS, Engine, json_schema
from kvoffload.errors import ConfigError
from kvoffload.registry import read_options
assert "ObjectOptions" in json_schema(SETTINGS[Engine.VLLM])["$defs"]
try:
    read_options("object", {"url": "s3://bucket/kv"})
except ConfigError as error:
    print(error.remedy)
"""


def test_without_its_extra_settings_are_described_and_the_tier_names_it():
    words = [sys.executable, "-c", WITHOUT]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "kvoffload[object]" in done.stdout


@pytest.mark.parametrize(
    "options",
    [
        {"url": "gs://bucket/kv"},
        {"url": "az://account/container/kv", "secret_key_env": "KV_KEY"},
        {"url": "az://account/container", "token_env": "KV_SAS"},
    ],
)
async def test_buckets_of_other_providers_are_opened(options, monkeypatch):
    monkeypatch.setenv("KV_KEY", "c2VjcmV0")
    monkeypatch.setenv("KV_SAS", "sv=2024-08-04&sig=abc")
    backend = open_backend("object", options, "n")
    assert options["url"] in repr(backend)
    await backend.close()
