"""The guide to writing a policy: its class passes the suite, and its commands run."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

from tests.support.guide import follow

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "write-a-policy.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def of(language):
    return [code for name, code in BLOCKS if name == language]


def test_the_policy_of_the_guide_passes_the_suite_as_printed(tmp_path, python):
    assert follow("write-a-policy.md", tmp_path, python) >= 9


def test_the_documented_command_replays_the_registered_policy(tmp_path, python):
    (tmp_path / "my_policy.py").write_text(of("python")[0])
    info = tmp_path / "my_policy-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-policy\nVersion: 1\n")
    section, entry = of("toml")[0].splitlines()
    assert section == '[project.entry-points."kvoffload.policies"]'
    entry = entry.replace('"', "")
    (info / "entry_points.txt").write_text(f"[kvoffload.policies]\n{entry}\n")
    program, verb, option, trace, *words = shlex.split(of("sh")[1])
    assert (program, verb, option, trace) == ("kvoffload", "replay", "--synthetic", "agent:seed=1")
    words = [verb, option, f"{trace},requests=300", *words, "--json"]  # a twentieth of them
    done = subprocess.run(
        [*python, "-m", "kvoffload", *words],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "second-chance" in json.dumps(json.loads(done.stdout))
