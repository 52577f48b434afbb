"""The console of all commands, and lines, tables and errors on it.

There are no automatic colours. Lines are whole where no terminal gives a width, and nothing of a
store reaches a terminal as a control character.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NoReturn

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvoffload.facts import escaped

_UNLIMITED = 100_000
"""Columns where no terminal gives a width."""
_FRAME = 3
"""Width of frame and padding for each column of a table."""


def console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, or unlimited without one."""
    found = Console(
        highlight=False,
        stderr=stderr,
        color_system=None if os.environ.get("NO_COLOR") else "auto",  # rich keeps bold letters
    )
    if not found.is_terminal and not os.environ.get("COLUMNS"):
        found.width = _UNLIMITED
    return found


def is_answered() -> bool:
    """Return whether a person at a terminal can answer a question; a report may go to a file."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def plain(text: object, style: str = "") -> Text:
    """Return text of a store without markup and control characters."""
    return Text(escaped(text), style)


def say(*lines: object, stderr: bool = False) -> None:
    """Print each text as one whole line, without markup; one with a style is plain already."""
    to = console(stderr=stderr)
    for line in lines:
        to.print(line if isinstance(line, Text) else plain(line), soft_wrap=True)


def fail(text: str) -> NoReturn:
    """Print what is wrong, and end the command with exit code 1."""
    say(f"kvoffload: {text}", stderr=True)
    raise typer.Exit(1) from None


def table_of(
    titles: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Sequence[str] = ()
) -> Table:
    """Return a table; the columns that ``numbers`` names are aligned to the right."""
    table = Table()
    for title in titles:
        table.add_column(title, justify="right" if title in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else plain(cell) for cell in row))
    return table


def print_numbers(
    title: str,
    first: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, Sequence[str]]],
    *,
    texts: int = 0,
) -> None:
    """Print rows of a name and numbers; in a narrow terminal, as several tables.

    The first ``texts`` columns are words, aligned to the left.
    """
    to = console()
    say(title)
    names_width = max(cell_len(first), *(cell_len(name) for name, _ in rows))
    widths = [
        max(cell_len(column), *(cell_len(cells[at]) for _, cells in rows))
        for at, column in enumerate(columns)
    ]
    room = to.width - names_width - _FRAME - 1
    for at in range(texts):  # a longer word, such as a model's path, takes several lines
        widths[at] = max(1, min(widths[at], room - _FRAME))
    for some in _that_fit(room, widths):
        table = Table()
        table.add_column(first, min_width=names_width, no_wrap=True)
        for at in some:
            side: Literal["left", "right"] = "left" if at < texts else "right"
            width = widths[at]
            table.add_column(
                columns[at],
                justify=side,
                min_width=width,
                max_width=width,
                no_wrap=at >= texts,
                overflow="fold",
            )
        for name, cells in rows:
            table.add_row(Text(name), *(Text(cells[at]) for at in some))
        to.print(table, crop=False)


def _that_fit(room: int, widths: Sequence[int]) -> Iterator[range]:
    """Yield ranges of columns that fit into a table together, at least one each."""
    begin, left = 0, room
    for at, width in enumerate(widths):
        left -= width + _FRAME
        if left < 0 and at > begin:
            yield range(begin, at)
            begin, left = at, room - width - _FRAME
    yield range(begin, len(widths))
