"""What an installation brings, and what it needs: torch for the CPU, and commands without torch."""

import asyncio
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from disk_commands import two_namespaces

from kvoffload.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
BUILDS = ("2.13.0", "2.13.0+cpu")


@pytest.mark.parametrize("page", ["README.md", "docs/guides/quickstart.md"])
def test_the_variable_of_the_pages_makes_pip_take_torch_for_the_cpu(page, tmp_path):
    """Beside an index that has the build with CUDA, as PyPI does."""
    text = (ROOT / page).read_text()
    (variable,) = re.findall(r"^export (PIP_\w+)=https://\S+/cpu\b", text, re.MULTILINE)
    plain, cpu = (an_index(tmp_path / build, build) for build in BUILDS)
    assert downloaded(tmp_path, plain) == ["torch-2.13.0-py3-none-any.whl"]
    found = downloaded(tmp_path, plain, **{variable: cpu})
    assert found == ["torch-2.13.0+cpu-py3-none-any.whl"]


def an_index(folder, version):
    """Write an index with one wheel of torch; return its address."""
    name = f"torch-{version}-py3-none-any.whl"
    simple = folder / "simple" / "torch"
    simple.mkdir(parents=True)
    about = f"torch-{version}.dist-info"
    with zipfile.ZipFile(simple / name, "w") as wheel:
        said = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        wheel.writestr(f"{about}/METADATA", said)
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    (simple / "index.html").write_text(f'<a href="{name.replace("+", "%2B")}">{name}</a>')
    return simple.parent.as_uri()


def downloaded(folder, index, **variables):
    """Download torch as the Makefile installs it, from indexes alone; return the files."""
    into = folder / f"into-{len(variables)}"
    bare = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    words = ["download", "--quiet", "--no-deps", "--index-url", index, "-d", into]
    subprocess.run(
        [sys.executable, "-m", "pip", *words, "-c", ROOT / "constraints.txt", "torch"],
        env={**bare, "PIP_CONFIG_FILE": os.devnull, **variables},
        check=True,
    )
    return [path.name for path in into.iterdir()]


MODEL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
TRACE = '{"hash_ids": [1, 2, 1, 2]}\n'
DISK = '{"cpu_bytes": "64MiB", "backends": [{"type": "disk", "root": "ROOT", "capacity": "1GiB"}]}'
WITHOUT_TORCH = {
    "replay": ["TRACE", "--sizes", "1"],
    "top": ["ROOT", "--once"],
    "config": ["check", DISK, "--engine", "local", "--probe"],
    "doctor": ["ROOT", "-o", "capacity=1GiB"],
    "inspect": ["ROOT"],
    "verify": ["ROOT"],
    "gc": ["ROOT", "--yes"],
    "size": ["--model", "MODEL"],
}


RUN_EACH = """
import json, runpy, sys

sys.modules["torch"] = None
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        runpy.run_module("kvoffload", run_name="__main__")
    except SystemExit as end:
        assert not end.code, words
"""


def test_the_commands_of_an_operator_need_no_torch(tmp_path):
    page = (ROOT / "docs/guides/operate.md").read_text()
    (listed,) = re.findall(r"^need no torch: (.*)\.$", page, re.MULTILINE)
    assert [name for name in sorted(COMMANDS) if f"`{name}`" in listed] == sorted(WITHOUT_TORCH)
    files = {"TRACE": tmp_path / "trace.jsonl", "MODEL": tmp_path / "config.json"}
    files["TRACE"].write_text(TRACE)
    files["MODEL"].write_text(json.dumps(MODEL))
    files["ROOT"] = asyncio.run(two_namespaces(tmp_path / "kv"))
    lines = json.dumps([[command, *words] for command, words in WITHOUT_TORCH.items()])
    for name, path in files.items():
        lines = lines.replace(name, str(path))
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH, lines], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
