"""Prints numbers so that none is cut: a narrow terminal gets several tables."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

_FRAME = 3
"""Columns that a table's frame and padding take for each of its own."""


def print_numbers(
    to: Console,
    title: str,
    first: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, Sequence[str]]],
) -> None:
    """Print rows of a name and numbers; in a narrow terminal, as several tables.

    Args:
        to: where to.
        title: printed above.
        first: heading of the names.
        columns: headings of the numbers.
        rows: names, each with its numbers as text.
    """
    to.print(title, soft_wrap=True, highlight=False, markup=False)
    names_width = max(len(first), *(len(name) for name, _ in rows))
    widths = [
        max(len(column), *(len(cells[at]) for _, cells in rows))
        for at, column in enumerate(columns)
    ]
    for some in _that_fit(to.width - names_width - _FRAME - 1, widths):
        table = Table()
        table.add_column(first, min_width=names_width, no_wrap=True)
        for at in some:
            table.add_column(columns[at], justify="right", min_width=widths[at], no_wrap=True)
        for name, cells in rows:
            table.add_row(name, *(cells[at] for at in some))
        to.print(table, crop=False)


def _that_fit(room: int, widths: Sequence[int]) -> Iterator[range]:
    """Yield the places of columns that fit into a table together, at least one at a time."""
    begin, left = 0, room
    for at, width in enumerate(widths):
        left -= width + _FRAME
        if left < 0 and at > begin:
            yield range(begin, at)
            begin, left = at, room - width - _FRAME
    yield range(begin, len(widths))
