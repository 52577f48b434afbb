"""On a machine where the package is not installed: its plug-ins are found all the same."""

import sys
import tempfile
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from time_limit import pytest_addoption, time_limit  # noqa: F401
from until import until  # noqa: F401  # pytest reads no conftest.py above that of pytest.ini

_keep = tempfile.TemporaryDirectory()


def _pretend_installed() -> None:
    """Write the entry points of an installation, from the project's own table of entry points."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    info = Path(_keep.name) / f"kvoffload-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: kvoffload\nVersion: {project['version']}\n")
    lines = []
    for group, plug_ins in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {where}" for name, where in plug_ins.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    sys.path.append(_keep.name)


try:
    distribution("kvoffload")
except PackageNotFoundError:
    _pretend_installed()
