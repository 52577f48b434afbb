"""The console of all commands: no automatic colours, and whole lines for scripts."""

import os

from rich.console import Console

_UNLIMITED = 100_000
"""Columns where no terminal gives a width."""


def console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, or unlimited without one."""
    found = Console(highlight=False, stderr=stderr)
    if not found.is_terminal and not os.environ.get("COLUMNS"):
        found.width = _UNLIMITED
    return found
