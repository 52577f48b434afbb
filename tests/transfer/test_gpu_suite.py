"""``tests/gpu`` runs here too, on a stand-in for ``torch.cuda``: what it needs is all there."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_for_a_gpu_passes_on_a_stand_in_with_its_own_settings():
    """A skip hides a fixture that is missing, and an assertion that correct code fails."""
    command = [sys.executable, "-m", "pytest", "-c", "tests/gpu/pytest.ini", "--rootdir", "."]
    command += ["-p", "gpu_on_cpu", "-p", "no:cacheprovider", "-q", "--tb=short", "tests/gpu"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": ".:examples:tests/helpers", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"\d+ passed, 1 deselected in .*", last), done.stdout + done.stderr
