"""``kvoffload gc``: make room in a folder of the disk backend, or on a server."""

import json
import re
import time
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Console

from kvoffload.backends.disk_survey import ChunkFile, Survey
from kvoffload.cli import stores
from kvoffload.config import ByteSize, human_bytes
from kvoffload.errors import ConfigError

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d|w)")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def command(
    root: Annotated[str, typer.Argument(help="The disk backend's root folder, or redis://...")],
    capacity: Annotated[
        str | None, typer.Option(help="Remove the least recently used chunks above this size.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Remove chunks not used for this long: 90min, 36h, 14d.")
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(help="Only this namespace; without other options, all of it goes."),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help=stores.OPTION_HELP)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Remove chunks, leftovers of dead processes and damaged files; safe while engines run.

    Exit codes: 0 done, 1 something could not be removed, 2 no such folder or wrong options.
    """
    if stores.is_url(root):
        if capacity is not None or older_than is not None:
            remedy = "a server evicts by its own maxmemory-policy, and by ttl_s"
            raise ConfigError("capacity / older-than", capacity or older_than, remedy)
        stores.gc(root, option, namespace, dry_run, as_json)
        return
    limit = None if capacity is None else ByteSize.parse(capacity, "capacity")
    age_s = None if older_than is None else parse_age(older_than)
    report = collect(Survey(root), limit=limit, age_s=age_s, namespace=namespace, dry_run=dry_run)
    if as_json:
        print(json.dumps(report))
    else:
        Console().print(
            f"{'would remove' if dry_run else 'removed'} {report['removed']} chunks, "
            f"{human_bytes(report['freed_bytes'])}; {report['kept']} chunks stay, "
            f"{human_bytes(report['kept_bytes'])}; {report['undeletable']} could not be removed"
        )
    if report["undeletable"]:
        raise typer.Exit(1)


def parse_age(text: str) -> float:
    """Read ``90min``, ``36h``, ``14d`` as seconds."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise ConfigError("older-than", text, "an age is a number with s, min, h, d or w")
    return float(match[1]) * _SECONDS[match[2]]


def collect(
    found: Survey,
    *,
    limit: int | None,
    age_s: float | None,
    namespace: str | None,
    dry_run: bool,
) -> dict[str, Any]:
    """Remove what the limits name; without any, only what is of no use to anyone."""
    folder = None if namespace is None else _folder(found, namespace)
    chunks = sorted(found.chunks(folder), key=lambda chunk: chunk.used_ns)
    everything = folder is not None and limit is None and age_s is None
    removed = freed = undeletable = 0
    left = sum(chunk.allocated_bytes for chunk in chunks)
    for chunk in _going(chunks, limit=limit, age_s=age_s, everything=everything):
        gone = chunk.allocated_bytes if dry_run else found.remove(chunk)
        if gone is None:
            undeletable += 1
        else:
            removed += 1
            freed += gone
            left -= chunk.allocated_bytes
    if not dry_run:
        freed += found.remove_quarantined()
        freed += found.remove_leftovers()
        if everything and folder is not None:
            found.remove_namespace_folder(folder)
    return {
        "root": found.root,
        "dry_run": dry_run,
        "removed": removed,
        "freed_bytes": freed,
        "kept": len(chunks) - removed,
        "kept_bytes": left,
        "undeletable": undeletable,
    }


def _folder(found: Survey, wanted: str) -> str:
    """The folder of the namespace meant by its own name, its folder's, or the beginning of that."""
    folders = found.namespaces()
    own = [folder for folder in folders if found.manifest(folder).get("namespace") == wanted]
    return own[0] if len(own) == 1 else stores.named(wanted, folders)


def _going(
    chunks: list[ChunkFile], *, limit: int | None, age_s: float | None, everything: bool
) -> Iterable[ChunkFile]:
    """Those that have to go, of chunks in order of their last use."""
    total = sum(chunk.allocated_bytes for chunk in chunks)
    now_ns = time.time_ns()
    for chunk in chunks:
        too_old = age_s is not None and now_ns - chunk.used_ns > age_s * 1e9
        too_much = limit is not None and total > limit
        if everything or too_old or too_much:
            total -= chunk.allocated_bytes
            yield chunk
