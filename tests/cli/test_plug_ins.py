"""``inspect``, ``verify`` and ``doctor`` on stores of plug-ins, opened by their names."""

import json
import os
import subprocess
from functools import partial
from pathlib import Path

import pytest
from disk_commands import PYTHON, kvoffload, process

EXAMPLE = Path(__file__).parents[2] / "examples" / "backend_plugin"
PLUG_INS = """[kvoffload.backends]
files = kvoffload_files:FilesBackend
examined = examined:Examined
bare = examined:Bare
"""
EXAMINED = """
from kvoffload.backends.admin import Finding, Holding, Survey
from kvoffload_files import FilesBackend

class Examined(FilesBackend):
    async def diagnose(self):
        return [Finding("journal", "failed", "no [b]log[/b]", "turn it on")]

    async def survey(self):
        other = Holding("other", {"dtype": "[b]fp8\\x1b"}, 1, 1)
        held = [Holding("n", {}, 1, 1, details=["in [/kv]\\x1b"]), other]
        return Survey(held, {}, [("journal", "[red]off\\x1b")])

class Bare:
    def __init__(self, options, namespace):
        pass
"""
FILLED = """
import asyncio, sys
from kvoffload import open_backend
from kvoffload.testing.backends import filled, keys_of

async def fill():
    for namespace, count in (("alpha", 1), ("beta", 3)):
        backend = open_backend("files", {"root": sys.argv[1]}, namespace)
        assert all(await backend.write(keys_of(count), filled(keys_of(count), 1024)))
        await backend.close()

asyncio.run(fill())
"""


@pytest.fixture
def installed(tmp_path):
    """The environment of a process in which the plug-ins are installed."""
    metadata = tmp_path / "plug_ins-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plug-ins\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(PLUG_INS)
    (tmp_path / "examined.py").write_text(EXAMINED)
    repository = Path(__file__).parents[2]
    return {"PYTHONPATH": f"{tmp_path}:{EXAMPLE}:{repository}"}


@pytest.mark.parametrize("at_first", [True, False])
def test_two_plug_ins_of_one_name_are_an_error_that_names_both(tmp_path, at_first):
    """By the order of folders the one or the other would be opened without a word."""
    info = tmp_path / "squatter-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: squatter\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[kvoffload.backends]\ndisk = squatter:Disk\n")
    (tmp_path / "squatter.py").write_text("raise SystemExit('the code of another package ran')")
    add = "insert(0, " if at_first else "append("
    program = f"import sys; sys.path.{add}{str(tmp_path)!r})\n"
    program += "from kvoffload import open_backend; open_backend('disk', {}, 'ns')"
    done = run_python(program, "", {"PYTHONPATH": str(Path(__file__).parents[2])})
    assert "type = 'disk': is registered twice" in done.stderr
    assert "squatter:Disk of squatter" in done.stderr
    assert "DiskBackend of kvoffload" in done.stderr
    assert "another package ran" not in done.stderr


def test_a_plug_in_without_a_struct_of_settings_is_named(installed):
    done = process("inspect", "--type", "bare", **installed)
    assert done.returncode == 2
    assert "type = 'bare': the plug-in examined:Bare has no Options" in done.stderr


def test_inspect_and_doctor_open_a_store_by_its_name(tmp_path, installed):
    setting = ("-o", f"root={tmp_path / 'kv'}")
    done = run_python(FILLED, str(tmp_path / "kv"), installed)
    assert done.returncode == 0, done.stderr
    done = process("inspect", "--type", "files", *setting, "--json", **installed)
    assert done.returncode == 0, done.stderr
    held = json.loads(done.stdout)["namespaces"]
    assert [(n["namespace"], n["chunks"], n["stored_bytes"]) for n in held] == [
        ("alpha", 1, 1280),
        ("beta", 3, 3840),
    ]
    text = process("inspect", "--type", "files", *setting, **installed).stdout
    assert text.index("beta") < text.index("alpha")
    assert "3.8 KiB" in text
    done = process("doctor", "--type", "examined", *setting, **installed)
    assert (done.returncode, "no [b]log[/b]" in done.stdout) == (1, True), done.stderr


def test_inspect_shows_what_a_store_tells_without_markup_and_control_characters(
    tmp_path, installed
):
    words = ("--type", "examined", "-o", f"root={tmp_path / 'kv'}", "-v")
    done = process("inspect", *words, **installed)
    assert done.returncode == 0, done.stderr
    assert "  in [/kv]\\x1b\n" in done.stdout
    assert "journal: [red]off\\x1b\n" in done.stdout
    done = process("inspect", *words, "--diff", "n", "other", **installed)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "dtype\n  n  (none)\n  other  [b]fp8\\x1b\n"


def test_verify_reads_the_store_of_a_plug_in_and_repairs_it(tmp_path, installed):
    verify = ("verify", "--type", "files", "-o", f"root={tmp_path}", "--json")
    run_python(FILLED, str(tmp_path), installed)
    done = process(*verify, "--sample", "50%", "--rate", "1GB/s", **installed)
    assert (done.returncode, json.loads(done.stdout)["chunks"]) == (0, 2), done.stderr
    (path,) = (tmp_path / "ns-alpha").iterdir()
    path.write_bytes(path.read_bytes()[:256] + bytes(1024))
    done = process(*verify, "--repair", **installed)
    assert (done.returncode, json.loads(done.stdout)["reasons"]) == (1, {"corrupt_payload": 1})
    done = process(*verify, **installed)
    assert (done.returncode, json.loads(done.stdout)["chunks"]) == (0, 3), done.stderr


def test_what_cannot_be_opened_is_a_sentence_and_nothing_is_made(tmp_path, installed):
    setting = ("-o", f"root={tmp_path / 'kv'}")
    here = kvoffload
    for words, said, run in (
        (("doctor", "--type", "files", *setting), "does not offer", partial(process, **installed)),
        (("gc", "--type", "files", *setting), "does not offer", partial(process, **installed)),
        (("inspect", "--type", "memry"), "did you mean 'memory'?", here),
        (("inspect", "--type", "memory"), "does not offer", here),
        (("verify", "--type", "memory"), "does not offer", here),
        (("inspect", "--type", "disk"), "is required", here),
        (("inspect", str(tmp_path), "-o", f"root={tmp_path}"), "given already", here),
        (("doctor", "redis://localhost", "--type", "files"), "or --type NAME", here),
        (("inspect",), "give a URL or a folder", here),
    ):
        done = run(*words)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
        assert done.stderr.startswith("kvoffload: ")
    assert not (tmp_path / "kv").exists()


def run_python(program, argument, environment):
    return subprocess.run(
        [*PYTHON, "-c", program, argument],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
