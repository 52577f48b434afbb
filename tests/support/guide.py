"""Follows a guide: saves the files that it names, and runs its command as printed."""

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = re.compile(
    r"[Ss]ave (?:this|it) as `([\w.]+)`:\n\n(?:<!--.*?-->\n)?```\w+\n(.*?)^```",
    re.MULTILINE | re.DOTALL,
)
SUITE = re.compile(r"^python (-m pytest .*)$", re.MULTILINE)


def follow(name: str, folder: Path, python: Sequence[str]) -> int:
    """Run the suite of a guide in a folder, with the guide's files; count what passed."""
    page = (ROOT / "docs" / "guides" / name).read_text()
    for file, text in FILE.findall(page):
        (folder / file).write_text(text)
    (words,) = SUITE.findall(page)
    done = subprocess.run(
        [*python, *shlex.split(words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    return int(passed)
