"""The plug-in that runs failed tests of engines again forgives no test that fails twice."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("fails_in", "code", "options"),
    [({1}, 0, ["-p", "xdist", "-n", "2"]), ({1, 2}, 1, []), ({1, 4}, 1, [])],
)
def test_only_a_test_that_fails_once_is_forgiven(tmp_path, fails_in, code, options):
    (tmp_path / "test_it.py").write_text(
        "from pathlib import Path\n"
        "def test_it():\n"
        "    runs = Path('runs')\n"
        "    runs.write_text(('x' + runs.read_text()) if runs.exists() else 'x')\n"
        f"    assert len(runs.read_text()) not in {fails_in}\n"
    )
    plugin = ["-p", "tests.support.repeat_failed", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--rootdir", tmp_path, *plugin, "test_it.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert ("UNSTEADY" in done.stdout) is (code == 0)
    assert "1 failed" in done.stdout
