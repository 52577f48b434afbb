"""The examples work, and so does every code block of the documents."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvoffload.config import ByteSize, parse_config

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/*/*.md", "kvoffload/**/*.md")
    for path in ROOT.glob(pattern)
)
FENCE = re.compile(
    r"^(?:<!-- (not run: [^\n]+) -->\n)?```([^\n`]*)\n(.*?)^```", re.MULTILINE | re.DOTALL
)


def blocks(language):
    found = []
    for document in DOCUMENTS:
        for i, (not_run, info, code) in enumerate(FENCE.findall(document.read_text())):
            if info == language and not not_run:
                found.append(pytest.param(code, id=f"{document.relative_to(ROOT)}-{i}"))
    return found


NO_OLD_WAYS = "import warnings; warnings.simplefilter('error', DeprecationWarning)\n"


@pytest.fixture
def run_python(python, tmp_path):
    """Run code in a folder of its own; returns what it prints."""

    def run_python(code):
        result = subprocess.run(
            [*python, "-c", NO_OLD_WAYS + code],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run_python


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_of_the_documents_run(code, run_python):
    run_python(code)


@pytest.mark.parametrize("code", blocks("sh"))
def test_commands_in_the_documents_exist(code):
    from kvoffload.cli.main import COMMANDS

    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in code.splitlines():
        if match := re.match(r"\s*kvoffload ([a-z]+)", line):
            assert match[1] in COMMANDS, line
        if match := re.match(r"\s*make ([a-z-]+)", line):
            assert match[1] in targets, line


@pytest.mark.parametrize("code", blocks("json"))
def test_json_blocks_are_json(code):
    json.loads(code)


def test_a_fence_names_a_language_and_nothing_else():
    """GitHub shows other fences too; the site shows them as text, and what follows as code."""
    for document in DOCUMENTS:
        for line in re.findall(r"^\s*(```+.*)$", document.read_text(), re.MULTILINE):
            assert re.fullmatch(r"```\w*", line), f"{document.relative_to(ROOT)}: {line}"


def test_no_document_has_a_placeholder_left():
    for document in DOCUMENTS:
        assert not re.search(r"^[A-Z_]{5,}$|TODO|TBD", document.read_text(), re.MULTILINE), document


def test_every_relative_link_leads_somewhere():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#\s]+)", document.read_text()):
            if "://" not in target and not target.startswith("mailto:"):
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def anchors(document):
    """Return the anchors of a document's headings, as GitHub makes them."""
    text = FENCE.sub("", document.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}


def test_every_link_to_a_section_leads_to_a_heading():
    for document in DOCUMENTS:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", document.read_text()):
            if "://" not in target:
                page = document.parent / target if target else document
                assert anchor in anchors(page), f"{document.name}: {target}#{anchor}"


@pytest.mark.timeout(300)
def test_the_guide_to_begin_with_runs_from_its_settings_to_a_hit(tmp_path, python):
    texts = FENCE.findall((ROOT / "docs/guides/quickstart.md").read_text())
    by_language = {info: code for _, info, code in texts}
    (tmp_path / "settings.json").write_text(by_language["json"])
    (tmp_path / "first.py").write_text(by_language["python"])
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, words in (("python", []), ("kvoffload", ["-m", "kvoffload"])):
        (commands / name).write_text(f'#!/bin/sh\nexec {shlex.join([*python, *words])} "$@"\n')
        (commands / name).chmod(0o755)
    done = subprocess.run(
        ["bash", "-e", "-c", "".join(code for *flags, code in texts if flags == ["", "sh"])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    computed, loaded = re.findall(r"^loaded: (\{.*?\})", done.stdout, re.MULTILINE)
    assert computed == "{'GPU': 0}"
    assert re.fullmatch(r"\{'GPU': 0, 'DISK': [1-9]\d+\}", loaded)
    assert "│ demo-8x512 │" in done.stdout  # not a whole configuration, which fills a terminal
    assert " 0 damaged" in done.stdout


def test_the_quickstart_runs(run_python):
    out = run_python((ROOT / "examples/quickstart.py").read_text())
    assert "restored bytes are identical: True" in out


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The environment of programs that find both plug-ins, installed as their READMEs say."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    here = ["--no-deps", "--no-build-isolation", "--target", str(folder)]
    examples = [str(ROOT / "examples" / name) for name in ("backend_plugin", "policies")]
    done = subprocess.run([*pip, *here, *examples], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


OPENED = """
import asyncio
from kvoffload import open_backend

async def stored():
    backend = open_backend("files", {"root": "kv"}, "namespace")
    assert await backend.write([b"key"], [memoryview(b"chunk")]) == [True]
    await backend.close()

asyncio.run(stored())
"""


def test_a_third_party_backend_is_installed_and_passes_the_suite_it_inherits(
    tmp_path, installed, python
):
    plugin = ROOT / "examples/backend_plugin"
    for words in (["-c", OPENED], ["-m", "pytest", "-q", "-c", "/dev/null", plugin / "tests"]):
        command = [*python, *words]
        result = subprocess.run(
            command, cwd=tmp_path, env=installed, capture_output=True, text=True, timeout=240
        )
        assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
    assert len(list((tmp_path / "kv").glob("ns-namespace/*"))) == 1


def test_replay_finds_the_policies_of_an_installed_package_by_their_names(
    tmp_path, installed, python
):
    example = ROOT / "examples/policies"
    replay = "import sys; from kvoffload.cli.main import main; sys.argv[0] = 'kvoffload'; main()"
    asked = "replay --synthetic loop:seed=1,requests=200 --policies lru,lru2,s3fifo,fifo --sizes 50"
    for words in (
        ["-c", replay, *asked.split(), "--json"],
        ["-m", "pytest", "-q", "-c", "/dev/null", example / "tests"],
    ):
        command = [*python, *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=installed, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stdout + done.stderr
        if "--json" in words:
            names = {row["policy"] for row in json.loads(done.stdout)["rows"]}
            assert names >= {"lru", "lru2", "s3fifo", "fifo"}
    assert " passed" in done.stdout


def test_no_example_imports_what_only_a_checkout_has():
    """The plug-ins have tests of their own, which import what an installation has, too."""
    for path in (ROOT / "examples").rglob("*.py"):
        found = re.findall(r"^\s*(?:from|import) (?:tests|benchmarks)\b", path.read_text(), re.M)
        assert not found, path


def test_the_packages_of_a_machine_that_looks_at_stores_are_the_requirements_but_torch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["cli"]
    names = {re.match(r"[\w-]+", text)[0] for text in wanted}
    (line,) = re.findall(
        r"^pip install (msgspec .*)$", (ROOT / "docs/guides/operate.md").read_text(), re.M
    )
    assert set(line.split()) == names - {"torch"}


def test_images_of_the_examples_have_the_package_and_no_secret_or_chunk_of_the_checkout():
    """Examples make keys, passwords and stores in their own folders, inside of the context."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert patterns[0] == "*"
    added = {pattern[1:] for pattern in patterns if pattern.startswith("!")}
    assert added == {"LICENSE", "README.md", "kvoffload", "pyproject.toml"}


def test_the_script_for_a_vllm_server_leaves_room_on_a_shared_file_system():
    script = ROOT / "examples/vllm/serve.sh"
    env = {**os.environ, "PYTHON": "echo"}
    done = subprocess.run(
        ["sh", str(script), "MODEL"], env=env, capture_output=True, text=True, check=True
    )
    settings = json.loads(done.stdout[done.stdout.index("{") :])["kv_connector_extra_config"]
    (disk,) = parse_config(settings).backends
    assert ByteSize.parse(disk.options["capacity"]) <= 20 << 30
    assert ByteSize.parse(disk.options["min_free"]) >= 10 << 30
