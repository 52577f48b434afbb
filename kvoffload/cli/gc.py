"""``kvoffload gc``: make room in a folder of the disk backend, or on a server."""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any

import typer

from kvoffload.backends.disk.inspector import ChunkFile, DiskInspector
from kvoffload.cli import stores
from kvoffload.cli.console import console
from kvoffload.cli.output import counted, plain
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

    --dry-run lists every path that would go, and changes nothing.

    Exit codes: 0 done, 1 something could not be removed, 2 no such folder, one of another user, or
    wrong options.
    """
    age_s = None if older_than is None else parse_age(older_than)
    if stores.is_url(root):
        if capacity is not None:
            raise ConfigError("capacity", capacity, "a server evicts by its own maxmemory-policy")
        stores.gc(root, option, namespace, age_s, dry_run, as_json)
        return
    stores.refuse_settings(option)
    limit = None if capacity is None else size_with_unit(capacity, "capacity")
    report = collect(
        DiskInspector(root), limit=limit, age_s=age_s, namespace=namespace, dry_run=dry_run
    )
    if as_json:
        print(json.dumps(report))
    else:
        show(report)
    if report["undeletable"]:
        raise typer.Exit(1)


def size_with_unit(text: str, field: str) -> int:
    """Read ``100GiB``; refuse a bare number, which might mean any unit.

    Raises:
        ConfigError: it is no size, or has no unit.
    """
    size = ByteSize.parse(text, field)
    if not text.strip()[-1].isalpha():
        raise ConfigError(field, text, "needs a unit: 100GiB, 500MB, 4096B")
    return size


def show(report: dict[str, Any]) -> None:
    """Print the report for people: a dry run with every path, one a line."""
    terminal = console()
    for each in report["going"] if report["dry_run"] else []:
        line = f"{each['kind']} {human_bytes(each['bytes'])} {each['path']}"
        terminal.print(plain(line), soft_wrap=True)
    verb = "would remove" if report["dry_run"] else "removed"
    terminal.print(
        f"{verb} {counted(report['removed'], 'chunk')}, "
        f"{report['quarantined']} damaged files set aside, {report['leftovers']} leftovers of dead "
        f"processes: {human_bytes(report['freed_bytes'])}; {report['kept']} chunks stay, "
        f"{human_bytes(report['kept_bytes'])}",
        soft_wrap=True,
    )
    for each in report["not_removed"]:
        line = f"cannot be removed: {each['path']} ({each['why']})"
        terminal.print(plain(line), soft_wrap=True)


def parse_age(text: str) -> float:
    """Read ``90min``, ``36h``, ``14d`` as seconds."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise ConfigError("older-than", text, "an age is a number with s, min, h, d or w")
    return float(match[1]) * _SECONDS[match[2]]


def collect(
    found: DiskInspector,
    *,
    limit: int | None,
    age_s: float | None,
    namespace: str | None,
    dry_run: bool,
) -> dict[str, Any]:
    """Remove what the limits name; without any, only what is of no use to anyone."""
    folder = None if namespace is None else _folder(found, namespace)
    if not dry_run:
        found.require_write()
    chunks = sorted(found.chunks(folder), key=lambda chunk: chunk.used_ns)
    everything = folder is not None and limit is None and age_s is None
    removal = _Removal(dry_run)
    for chunk in _going(chunks, limit=limit, age_s=age_s, everything=everything):
        removal.take("chunk", chunk.path, chunk.allocated_bytes, partial(found.remove, chunk))
    for path in found.quarantined():
        size = found.allocated_bytes(path)
        removal.take("damaged", path, size, partial(found.remove_quarantined, path))
    for each in found.leftovers():
        size = each.allocated_bytes
        removal.take("leftover", each.path, size, partial(found.remove_leftover, each))
    if everything and folder is not None and not dry_run:
        found.remove_namespace_folder(folder)
    removed = removal.counts["chunk"]
    left = sum(chunk.allocated_bytes for chunk in chunks) - removal.bytes["chunk"]
    return {
        "root": found.root,
        "dry_run": dry_run,
        "removed": removed,
        "quarantined": removal.counts["damaged"],
        "leftovers": removal.counts["leftover"],
        "freed_bytes": removal.bytes.total(),
        "kept": len(chunks) - removed,
        "kept_bytes": left,
        "going": removal.going if dry_run else [],
        "undeletable": len(removal.undeletable),
        "not_removed": removal.undeletable,
    }


class _Removal:
    """What goes, counted alike whether it is removed or only named."""

    def __init__(self, dry_run: bool) -> None:
        self._dry_run = dry_run
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.going: list[dict[str, Any]] = []
        self.undeletable: list[dict[str, str]] = []

    def take(self, kind: str, path: str, allocated_bytes: int, remove: Callable[[], int]) -> None:
        """Remove one thing, or name it; ``remove`` returns the bytes freed or raises OSError."""
        try:
            freed = allocated_bytes if self._dry_run else remove()
        except OSError as error:
            self.undeletable.append({"path": path, "why": error.strerror or str(error)})
            return
        self.counts[kind] += 1
        self.bytes[kind] += freed
        self.going.append({"kind": kind, "path": path, "bytes": allocated_bytes})


def _folder(found: DiskInspector, wanted: str) -> str:
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
