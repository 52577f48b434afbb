"""``kvoffload verify ROOT``: read everything, and say what is damaged."""

import json
import mmap
import time
from collections import Counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kvoffload.backends.disk_survey import Survey
from kvoffload.cli.stores import plain
from kvoffload.config import human_bytes

_PIECE_BYTES = 4 << 20


def command(
    root: Annotated[str, typer.Argument(help="The disk backend's root folder.")],
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is damaged.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Read and check every chunk; safe while engines use the folder.

    Exit codes: 0 all is well, 1 something is or was damaged, 2 no such folder.
    """
    report = verify(Survey(root), repair=repair, quiet=as_json)
    if as_json:
        print(json.dumps(report))
    else:
        show(report)
    if report["damaged"]:
        raise typer.Exit(1)


def verify(found: Survey, *, repair: bool, quiet: bool) -> dict[str, Any]:
    """Check every chunk; with ``repair`` remove the damaged ones."""
    chunks = list(found.chunks())
    buffer = memoryview(mmap.mmap(-1, _PIECE_BYTES))
    damaged: list[dict[str, Any]] = []
    reasons: Counter[str] = Counter()
    for folder, why in found.unreadable:
        reasons[why] += 1
        damaged.append({"path": folder, "reason": why, "removed": False})
    done = gone = 0
    began = time.monotonic()
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("", total=sum(chunk.allocated_bytes for chunk in chunks))
        for chunk in chunks:
            reason, read = found.verify(chunk, buffer)
            done += read
            bar.advance(task, chunk.allocated_bytes)
            if reason == "missing":
                gone += 1  # evicted since it was listed
            elif reason is not None:
                reasons[reason] += 1
                removed = repair and found.remove(chunk) is not None
                damaged.append({"path": chunk.path, "reason": reason, "removed": removed})
    seconds = time.monotonic() - began
    return {
        "root": found.root,
        "chunks": len(chunks) - gone,
        "bytes": done,
        "seconds": seconds,
        "bytes_per_second": done / seconds if seconds else 0.0,
        "reasons": dict(reasons),
        "damaged": damaged,
    }


def show(report: dict[str, Any]) -> None:
    """Print the report for people."""
    console = Console()
    console.print(
        f"{report['chunks']} chunks, {human_bytes(report['bytes'])} read in "
        f"{report['seconds']:.1f} s ({human_bytes(report['bytes_per_second'])}/s), "
        f"{len(report['damaged'])} damaged"
    )
    for each in report["damaged"]:
        state = "removed" if each["removed"] else "left in place"
        console.print(plain(f"{each['reason']}: {each['path']} ({state})"))
