"""Tenants from requests to stores: their chunks are told apart, and erased one tenant at a time."""

import json
import subprocess
import sys

import pytest
from disk_commands import answered, kvoffload
from local_requests import compute

from kvoffload.core.hashing import BlockHasher, HashChain
from kvoffload.core.request import Request
from kvoffload.offload.base import tenant_id

BLOCK, PROMPT = 4, 41
SALTS = {"one": "salt of A", "two": "salt of B", "three": None}


def hits(connector, request):
    """Return how many chunks of a prompt a tier has."""
    while (tokens := connector.get_num_new_matched_tokens(request, 0)) is None:
        pass
    connector.request_finished(request)
    return tokens // BLOCK // 2


@pytest.fixture
def salted(new_request):
    def make(name, request_id=None):
        request = new_request(name, PROMPT, request_id=request_id or name)
        request.cache_salt = SALTS[name]
        return request

    return make


FORMS = {
    "disk": {"type": "disk", "min_free": 0},
    "folder": {"type": "folder", "capacity": "64MiB", "trust_parent_folders": True},
}


@pytest.fixture(params=["disk", "encrypted disk", "folder"])
def tier(request, tmp_path):
    """The settings of a tier, and the words with which a command opens it."""
    *encrypted, form = request.param.split()
    settings = {**FORMS[form], "root": str(tmp_path / "kv")}
    words = [settings["root"]]
    if encrypted:
        keys = tmp_path / "keys"
        keys.touch(0o600)
        keys.write_text("0123456789abcdef" * 4)
        settings["encryption"] = {"key_file": str(keys)}
        words += ["-o", f"encryption={json.dumps(settings['encryption'])}"]
    return settings, words


def test_the_chunks_of_one_tenant_are_erased_and_no_other(connect, salted, tier, until):
    settings, words = tier
    connector = connect(settings, tenants=True, tenant_share=0.5)
    for name in SALTS:
        compute(connector, salted(name), range(5, 15))
    connector.close()
    dry = answered("gc", *words, "--tenant", "salt of A", "--dry-run")
    assert (dry["removed"], dry["unknown"]) == (5, 5)
    assert answered("gc", *words, "--tenant", "salt of nobody")["removed"] == 0
    report = answered("gc", *words, "--tenant", "salt of A")
    assert (report["removed"], report["kept"], report["unknown"]) == (5, 10, 5)
    connector = connect(settings, tenants=True, lookup_timeout_s=60)
    # A snapshot of the root names its chunks until the start's scan has ended.
    assert until(lambda: hits(connector, salted("one", "again one")) == 0)
    assert [hits(connector, salted(name, f"again {name}")) for name in ("two", "three")] == [5, 5]
    text = kvoffload("gc", *words, "--tenant", "salt of B", "--older-than", "1h").stdout
    assert text.startswith("removed 0 chunks")


def test_a_request_of_the_core_has_the_tenant_of_its_hashes(connect, tmp_path):
    tier = {"type": "disk", "root": str(tmp_path / "kv"), "min_free": 0}
    connector = connect(tier, tenants=True)
    chain = HashChain(BlockHasher(BLOCK), range(PROMPT), cache_salt="salt of A")
    compute(connector, Request("r", chain), range(5, 15))
    connector.close()
    assert answered("gc", tier["root"], "--tenant", "salt of A")["removed"] == PROMPT // BLOCK // 2


def test_without_the_setting_no_chunk_tells_its_tenant(connect, salted, tier):
    settings, words = tier
    connector = connect(settings)
    compute(connector, salted("one"), range(5, 15))
    connector.close()
    report = answered("gc", *words, "--tenant", "salt of A")
    assert (report["removed"], report["unknown"]) == (0, 5)


def test_no_salt_is_in_the_store(connect, salted, tier, tmp_path):
    connector = connect(tier[0], tenants=True)
    compute(connector, salted("one"), range(5, 15))
    connector.close()
    content = b"".join(path.read_bytes() for path in (tmp_path / "kv").rglob("*") if path.is_file())
    assert b"salt of A" not in content
    assert tenant_id("salt of A") not in content


@pytest.mark.parametrize("tier", ["disk"], indirect=True)
def test_a_salt_is_read_from_the_input_and_an_empty_one_refused(tmp_path, connect, salted, tier):
    settings, words = tier
    connector = connect(settings, tenants=True)
    compute(connector, salted("one"), range(5, 15))
    connector.close()
    command = [sys.executable, "-m", "kvoffload", "gc", *words, "--json", "--tenant", "-"]
    for salt, code in (("", 2), ("salt of A\n", 0)):
        done = subprocess.run(command, input=salt, text=True, capture_output=True, check=False)
        assert done.returncode == code, done.stderr
    assert json.loads(done.stdout)["removed"] == 5


def test_a_store_that_cannot_tell_tenants_apart_says_so():
    done = kvoffload("gc", "--type", "memory", "--tenant", "x")
    assert done.returncode == 2
    assert "gc" in done.stderr
