"""``kvoffload verify ROOT``: read everything, and say what is damaged."""

import json
import mmap
import random
import re
import time
from collections import Counter
from typing import Annotated, Any

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

from kvoffload.backends.disk.inspector import ChunkFile, DiskInspector
from kvoffload.cli.console import console
from kvoffload.cli.gc import size_with_unit
from kvoffload.cli.output import counted, plain
from kvoffload.cli.stores import is_url
from kvoffload.config import human_bytes
from kvoffload.errors import ConfigError

_PIECE_BYTES = 4 << 20
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)\s*%")


def command(
    root: Annotated[str, typer.Argument(help="The disk backend's root folder.")],
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is damaged.")] = False,
    sample: Annotated[
        str | None, typer.Option(help="Read only this part of the chunks, at random: 5%.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Read no faster than this on average: 100MB/s.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Read and check every chunk; safe while engines use the folder.

    Reports files that are not the store's and leftovers of dead processes as well.

    Exit codes: 0 all is well, 1 something is or was damaged, 2 no such folder, one of another
    user, or wrong options.
    """
    if is_url(root):
        raise ConfigError("root", root, "verify reads folders; a server verifies what it serves")
    share = None if sample is None else parse_share(sample)
    limit = None if rate is None else parse_rate(rate)
    found = DiskInspector(root)
    if repair:
        found.require_write()
    report = verify(found, repair=repair, quiet=as_json, share=share, bytes_per_s=limit)
    if as_json:
        print(json.dumps(report))
    else:
        show(report)
    if report["damaged"] or report["ledger_fault"] or report["limits_fault"]:
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
    """Read ``100MB/s`` as bytes a second; raises ConfigError."""
    limit = size_with_unit(text.strip().removesuffix("/s"), "rate")
    if not limit:
        raise ConfigError("rate", text, "must be more than 0 bytes a second")
    return limit


def verify(
    found: DiskInspector,
    *,
    repair: bool,
    quiet: bool,
    share: float | None = None,
    bytes_per_s: int | None = None,
) -> dict[str, Any]:
    """Check every chunk, or a part; with ``repair`` remove the damaged ones."""
    everything = list(found.chunks())
    chunks = everything
    if share is not None and everything:
        chunks = random.sample(everything, max(1, round(len(everything) * share)))
    buffer = memoryview(mmap.mmap(-1, _PIECE_BYTES))
    damaged: list[dict[str, Any]] = [
        {"path": folder, "reason": why, "removed": False, "why": "cannot be listed"}
        for folder, why in found.unreadable
    ]
    done = gone = 0
    began = time.monotonic()
    terminal = console(stderr=True)
    columns = (
        BarColumn(),
        DownloadColumn(binary_units=True),
        _SpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=terminal, disable=quiet or not terminal.is_terminal) as bar:
        task = bar.add_task("", total=sum(chunk.allocated_bytes for chunk in chunks))
        for chunk in chunks:
            reason, read = found.verify(chunk, buffer)
            done += read
            bar.advance(task, chunk.allocated_bytes)
            if reason == "missing":
                gone += 1  # evicted since it was listed
            elif reason is not None:
                damaged.append(
                    {"path": chunk.path, "reason": reason, **_repaired(found, chunk, repair)}
                )
            if bytes_per_s is not None:
                time.sleep(max(0.0, done / bytes_per_s - (time.monotonic() - began)))
    seconds = time.monotonic() - began
    leftovers = found.leftovers()
    return {
        "root": found.root,
        "chunks": len(chunks) - gone,
        "of_chunks": len(everything),
        "bytes": done,
        "seconds": seconds,
        "bytes_per_second": done / seconds if seconds else 0.0,
        "reasons": dict(Counter(each["reason"] for each in damaged)),
        "damaged": damaged,
        "ledger_fault": found.ledger_fault(),
        "limits_fault": found.limits_fault(),
        "strays": found.strays(),
        "leftovers": [each._asdict() for each in leftovers],
    }


def _repaired(found: DiskInspector, chunk: ChunkFile, repair: bool) -> dict[str, Any]:
    """Whether a damaged chunk was removed, and why not."""
    if not repair:
        return {"removed": False, "why": "left in place"}
    try:
        found.remove(chunk)
    except IsADirectoryError:
        return {"removed": False, "why": "left in place: a folder, remove it by hand"}
    except OSError as error:
        return {"removed": False, "why": f"left in place: {error.strerror}"}
    return {"removed": True, "why": "removed"}


def show(report: dict[str, Any]) -> None:
    """Print the report for people, each path on a line of its own."""
    lines = [
        f"{counted(report['chunks'], 'chunk')}, {human_bytes(report['bytes'])} read in "
        f"{report['seconds']:.1f} s ({human_bytes(report['bytes_per_second'])}/s), "
        f"{len(report['damaged'])} damaged"
    ]
    if report["chunks"] < report["of_chunks"]:
        lines.append(f"a part of {report['of_chunks']} chunks")
    lines += [f"{each['reason']}: {each['path']} ({each['why']})" for each in report["damaged"]]
    if report["ledger_fault"]:
        lines.append(
            f"ledger {report['ledger_fault']}: an engine counts everything and sets it right"
        )
    if report["limits_fault"]:
        lines.append(f"limits unusable: {report['limits_fault']}; an engine replaces them")
    lines += [f"not of this store: {path}" for path in report["strays"]]
    lines += [
        f"leftover of a dead process: {each['path']} ({human_bytes(each['allocated_bytes'])})"
        for each in report["leftovers"]
    ]
    terminal = console()
    for line in lines:
        terminal.print(plain(line), soft_wrap=True)
