"""``kvoffload verify``: read every chunk of a store, and report damage."""

import json
import re
from typing import Annotated

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TimeRemainingColumn,
)
from rich.text import Text

from kvoffload.backends.admin import Check
from kvoffload.cli.output import console, say
from kvoffload.cli.stores import AsJson, Kind, Settings, Target, run_on
from kvoffload.config import ByteSize, human_bytes
from kvoffload.errors import ConfigError

_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)\s*%")


def command(
    root: Target = None,
    kind: Kind = None,
    option: Settings = None,
    repair: Annotated[bool, typer.Option("--repair", help="Remove damaged chunks.")] = False,
    sample: Annotated[
        str | None, typer.Option(help="Read only this part of the chunks, at random: 5%.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Read no faster than this on average: 100MB/s.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read and check every chunk; safe while engines use the store.

    Of a folder it reports files that are not the store's, and leftovers of dead processes, as well.
    Of a Redis it reads values one by one, and prolongs the life of none.

    Exit codes: 0 all is well, 1 something is or was damaged, 2 no such store, one of another
    user, or wrong options.
    """
    share = None if sample is None else parse_share(sample)
    limit = None if rate is None else parse_rate(rate)
    terminal = console(stderr=True)
    columns = BarColumn(), DownloadColumn(binary_units=True), _SpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=terminal, disable=as_json or not terminal.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        wanted = Check(repair, share, limit, progress)
        found = run_on("verify", root, kind, option, lambda store: store.verify(wanted))
    if as_json:
        print(json.dumps(found.figures))
    else:
        say(*found.lines)
    if not found.is_sound:
        raise typer.Exit(1)


class _SpeedColumn(ProgressColumn):
    """Bytes a second in the units of the results; rich's own column knows multiples of 1000."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{human_bytes(speed)}/s")


def parse_share(text: str) -> float:
    """Read ``5%`` as a part of one; raises ConfigError."""
    match = _SHARE.fullmatch(text.strip())
    if match is None or not 0 < float(match[1]) <= 100:
        raise ConfigError("sample", text, "a part is a number above 0 and up to 100, with %: 5%")
    return float(match[1]) / 100


def parse_rate(text: str) -> int:
    """Read ``100MB/s`` as bytes a second; raises ConfigError, also for a number without unit."""
    size = text.strip().removesuffix("/s").strip()
    limit = ByteSize.parse(size, "rate")
    if not size[-1].isalpha():
        raise ConfigError("rate", text, "needs a unit: 100MB/s, 1GiB/s")
    if not limit:
        raise ConfigError("rate", text, "must be more than 0 bytes a second")
    return limit
