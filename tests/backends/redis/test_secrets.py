"""Weak, empty and exposed secrets; passwords in URLs, which are refused; servers that want none."""

import json

import pytest
from disk_commands import kvoffload

from kvoffload import open_backend
from kvoffload.errors import ConfigError
from tests.support.redis_engine import PATIENT
from tests.support.redis_server import BINARY, MISSING, RedisServer

STRONG = "0123456789abcdef" * 4
AT_EASE = [word for name, value in PATIENT.items() for word in ("-o", f"{name}={value}")]
needs_server = pytest.mark.skipif(BINARY is None, reason=MISSING)


@pytest.fixture
def secret(tmp_path):
    """Writes a file that only its owner reads, or as its mode says."""

    def write(content, mode=0o600):
        path = tmp_path / "secret"
        path.write_text(content)
        path.chmod(mode)
        return str(path)

    return write


def refused(**options):
    with pytest.raises(ConfigError) as caught:
        open_backend("redis", {"url": "redis://h", **options}, "n")
    return caught.value


def warned(caplog, **options):
    caplog.clear()
    open_backend("redis", {"url": "redis://h", **options}, "n")
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("content", ["", "a" * 32, "ab" * 40, "short but good 1234567890!"])
def test_a_secret_that_can_be_guessed_is_refused(secret, content):
    error = refused(secret_file=secret(content))
    assert error.field == "secret_file"
    assert "openssl rand -hex 32" in error.remedy
    assert not content or content not in str(error)


@pytest.mark.parametrize("name", ["password", "sentinel_password"])
def test_an_empty_password_is_refused(secret, monkeypatch, name):
    monkeypatch.setenv("KV_EMPTY", "")
    assert "empty" in refused(**{f"{name}_file": secret("\n")}).remedy
    assert "empty" in refused(**{f"{name}_env": "KV_EMPTY"}).remedy
    assert "cannot be read" in refused(**{f"{name}_file": "/nowhere/x"}).remedy


@pytest.mark.parametrize("field", ["password_file", "sentinel_password_file", "secret_file"])
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_a_file_that_others_may_read_is_warned_of_once(secret, caplog, field, mode):
    (line,) = warned(caplog, **{field: secret(STRONG, mode)})
    assert f"{field} = " in line
    assert "chmod 600" in line
    assert STRONG not in line
    assert warned(caplog, **{field: secret(STRONG)}) == []


@pytest.mark.parametrize("password", ["hunter2", "aaaaaaaaaaaaaaaaaaaaaaaa"])
def test_a_password_that_can_be_guessed_is_warned_of(secret, caplog, password):
    (line,) = warned(caplog, password_file=secret(password))
    assert "ACL GENPASS" in line
    assert password not in line


@pytest.mark.parametrize("field", ["ca_file", "cert_file"])
@pytest.mark.parametrize("url", ["redis://h", "unix:///s", "redis+cluster://h"])
def test_settings_of_tls_are_refused_where_there_is_none(secret, field, url):
    for path in ("/nowhere/x", secret("there")):
        error = refused(url=url, **{field: path})
        assert error.field == field
        assert "rediss://" in error.remedy


@pytest.fixture
def server(tmp_path):
    server = RedisServer(tmp_path / "redis")
    server.cli("acl", "setuser", "kv", "on", f">{STRONG}", "~kvoffload:*", "+@all")
    yield server
    server.stop()


def doctor(*words):
    """Run the command; return its findings as (verdict, detail, remedy) by check."""
    done = kvoffload("doctor", *words, *AT_EASE, "--json")
    findings = json.loads(done.stdout)["findings"]
    assert done.returncode == any(finding["verdict"] == "failed" for finding in findings)
    return {f["check"]: (f["verdict"], f["detail"], f["remedy"]) for f in findings}


@needs_server
def test_a_doctor_tries_to_get_in_without_a_password(server, secret):
    words = [server.url, "-o", "username=kv", "-o", f"password_file={secret(STRONG)}"]
    verdict, detail, remedy = doctor(*words)["password"]
    assert verdict == "failed"
    assert "without a password" in detail
    assert "ACL SETUSER default off" in remedy
    server.cli("acl", "setuser", "default", "off")
    assert doctor(*words)["password"][:2] == ("ok", "introduced as kv")


@needs_server
def test_a_doctor_names_what_is_weak_about_secrets(server, secret):
    found = doctor(server.url)
    assert found["authenticity"][0] == "warning"
    assert "secret_file" in found["authenticity"][2]
    assert "secrets" not in found
    found = doctor(server.url, "-o", f"secret_file={secret(STRONG, 0o644)}")
    assert found["authenticity"][0] == "ok"
    assert found["secrets"][0] == "warning"
    assert "chmod 600" in found["secrets"][2]
    setting = json.dumps({"key_file": secret(STRONG)})
    found = doctor(server.url, "-o", f"encryption={setting}")
    assert found["authenticity"][:2] == ("ok", "encryption authenticates values")
