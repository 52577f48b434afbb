"""What all commands print with: no colours of rich's choice, and whole lines for scripts."""

import os

from rich.console import Console

_UNLIMITED = 100_000
"""Columns where no terminal says how many there are, and a script reads lines."""


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or without a limit where there is none."""
    found = Console(highlight=False, stderr=stderr)
    if not found.is_terminal and not os.environ.get("COLUMNS"):
        found.width = _UNLIMITED
    return found
