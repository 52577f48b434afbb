"""The page of the output as JSON shows the fields that the commands print, and explains each."""

import asyncio
import json
import re
import threading
import time
from pathlib import Path

import pytest
from disk_commands import kvoffload, two_namespaces

from kvoffload.connectors.local import LocalConnector
from kvoffload.core.hashing import BlockHasher

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "json.md").read_text()
MODEL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
TIERS = '{"cpu_bytes": "64MiB", "backends": [{"type": "disk", "root": "ROOT", "capacity": "1GiB"}]}'
WORDS = {
    "inspect": ["ROOT"],
    "verify": ["ROOT"],
    "gc": ["ROOT"],
    "doctor": ["ROOT", "-o", "capacity=1GiB"],
    "top": ["ROOT"],
    "replay": ["TRACE", "--sizes", "1"],
    "size": ["--model", "MODEL", "--context", "1000", "--sessions", "4"],
    "config check": [TIERS, "--engine", "local", "--probe"],
    "cache list": [],
    "cache lookup": ["--token-ids", "TOKENS"],
    "cache clear": ["--yes"],
}


@pytest.fixture
def engine(kv_caches, tmp_path, monkeypatch):
    """An engine that only answers operators."""
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("KVOFFLOAD_RUNTIME_DIR", str(tmp_path / "run"))
    disk = {"type": "disk", "root": str(tmp_path / "tier"), "capacity": "64MiB"}
    settings = {"cpu_bytes": "64KiB", "blocks_per_chunk": 2, "backends": [disk]}
    more = {"block_size": 4, "facts": {"model": "m"}, "hasher": BlockHasher(4)}
    connector, is_over = LocalConnector(settings, kv_caches, **more), threading.Event()

    def step():
        while not is_over.is_set():
            connector.poll()
            time.sleep(0.001)

    stepping = threading.Thread(target=step)
    stepping.start()
    yield
    is_over.set()
    stepping.join()
    connector.close()


def fields(value):
    """Return the fields of an output, with those of the first entry of each list."""
    if isinstance(value, dict):
        return {name: fields(each) for name, each in value.items()}
    return fields(value[0]) if isinstance(value, list) and value else None


def names(value, apart):
    """Yield the names of fields, but for those inside what an operator names."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield name
            inner = each if name not in apart else None
            yield from names(inner, apart)


def test_each_section_is_of_a_command():
    assert re.findall(r"^## (.+)$", PAGE, re.MULTILINE) == list(WORDS)


@pytest.mark.parametrize("command", WORDS)
def test_the_fields_are_those_of_the_page(command, tmp_path, request):
    if command.startswith("cache "):
        request.getfixturevalue("engine")
    files = {"TRACE": tmp_path / "t.jsonl", "MODEL": tmp_path / "config.json"}
    files["TRACE"].write_text('{"hash_ids": [1, 2]}\n{"hash_ids": [1, 2]}\n')
    files["MODEL"].write_text(json.dumps(MODEL))
    files["TOKENS"] = tmp_path / "tokens.json"
    files["TOKENS"].write_text(json.dumps(list(range(41))))
    files["ROOT"] = asyncio.run(two_namespaces(tmp_path / "kv"))
    words = [*command.split(), *WORDS[command]]
    for name, path in files.items():
        words = [word.replace(name, str(path)) for word in words]
    done = kvoffload(*words, "--json")
    assert done.returncode == 0, done.stderr
    section = PAGE.partition(f"\n## {command}\n")[2].partition("\n## ")[0]
    example = json.loads(re.search(r"```json\n(.*?)```", section, re.DOTALL)[1])
    shown = fields(json.loads(done.stdout))
    assert fields(example) == shown
    explained = {
        name
        for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    tiers = {"store", "backends[0] disk", "cpu", "disk"}
    named = set(names(shown, {"facts", "used_within"})) - tiers
    assert named <= explained
