"""What all commands print with: no colours of rich's choice, no text that a terminal refuses."""

import io
import sys

from rich.console import Console


def console(*, stderr: bool = False) -> Console:
    """A console for people; characters that the terminal's encoding lacks are spelled out."""
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return Console(highlight=False, stderr=stderr)
