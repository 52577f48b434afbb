"""The page of the output as JSON shows the fields that the commands print, and explains each."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from disk_commands import kvoffload, two_namespaces

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
}


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
def test_the_fields_are_those_of_the_page(command, tmp_path):
    files = {"TRACE": tmp_path / "t.jsonl", "MODEL": tmp_path / "config.json"}
    files["TRACE"].write_text('{"hash_ids": [1, 2]}\n{"hash_ids": [1, 2]}\n')
    files["MODEL"].write_text(json.dumps(MODEL))
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
    named = set(names(shown, {"facts", "used_within"})) - {"store", "backends[0] disk"}
    assert named <= explained
