"""``gc`` on a terminal: it says what would go, and asks."""

import os
import pty
import select
import subprocess
import sys
import time

import pytest
from disk_commands import files_of, kvoffload, two_namespaces

PROGRAM = "import sys; sys.argv[0] = 'kvoffload'\nfrom kvoffload.cli.main import main; main()"


@pytest.fixture
async def root(tmp_path):
    return await two_namespaces(tmp_path / "kv")


def on_terminal(*words, answer=b""):
    """Run a command on a terminal and answer its question; return exit code and output."""
    here, there = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        stdin=there,
        stdout=there,
        stderr=there,
        env={**os.environ, "TERM": "dumb", "COLUMNS": "100"},
    )
    os.close(there)
    shown, until_s = b"", time.monotonic() + 40
    while time.monotonic() < until_s:
        if select.select([here], [], [], 0.2)[0]:
            try:
                shown += os.read(here, 1 << 16)
            except OSError:  # the other end is closed
                break
        elif process.poll() is not None:
            break
        if answer and b"[y/N]" in shown:
            os.write(here, answer)
            answer = b""
    code = process.wait(10)
    os.close(here)
    return code, shown.decode()


def test_no_leaves_everything(root):
    before = files_of(root)
    code, shown = on_terminal("gc", str(root), "--namespace", "qwen", answer=b"n\n")
    assert code == 0
    assert "would remove 3 chunks" in shown
    assert "\nremoved" not in shown
    assert files_of(root) == before


def test_yes_removes_what_was_shown(root):
    code, shown = on_terminal("gc", str(root), "--namespace", "qwen", answer=b"y\n")
    assert code == 0
    assert "removed 3 chunks" in shown
    assert len(files_of(root)) == 6


@pytest.mark.parametrize("words", [("--yes",), ("--dry-run",), ("--json",)])
def test_it_does_not_ask_where_it_is_told(root, words):
    code, shown = on_terminal("gc", str(root), "--namespace", "qwen", *words)
    assert code == 0
    assert "[y/N]" not in shown


def test_a_script_is_not_asked(root):
    done = kvoffload("gc", str(root), "--namespace", "qwen")
    assert done.returncode == 0
    assert "removed 3 chunks" in done.stdout
