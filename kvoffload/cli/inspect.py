"""``kvoffload inspect``: what a folder of the disk backend, or a server, holds."""

import json
import time
from typing import Annotated, Any

import typer

from kvoffload.backends.disk_survey import Survey
from kvoffload.cli import stores
from kvoffload.cli.console import console
from kvoffload.config import human_bytes

AGES = (("1 min", 60), ("1 hour", 3600), ("1 day", 86400), ("1 week", 7 * 86400))


def command(
    root: Annotated[str, typer.Argument(help="The disk backend's root folder, or redis://...")],
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help=stores.OPTION_HELP)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show namespaces, chunks, bytes, ages and how lately chunks were used. Changes nothing.

    Exit codes: 0 done, 1 the server cannot be asked, 2 no such folder, or one of another user.
    """
    if stores.is_url(root):
        stores.inspect(root, option, as_json)
        return
    stores.refuse_settings(option)
    report = survey(Survey(root))
    if as_json:
        print(json.dumps(report))
    else:
        show(report)


def survey(found: Survey) -> dict[str, Any]:
    """Collect the figures that ``--json`` prints."""
    namespaces = [_namespace(found, name, time.time()) for name in found.namespaces()]
    return {
        "root": found.root,
        "processes": found.processes(),
        "owner": found.has_owner(),
        "allocated_bytes": sum(each["allocated_bytes"] for each in namespaces),
        "ledger_bytes": found.booked_bytes(),
        "ledger_fault": found.ledger_fault(),
        "capacity_bytes": found.capacity_bytes(),
        "quarantined": found.quarantined(),
        "namespaces": namespaces,
    }


def _namespace(found: Survey, name: str, now: float) -> dict[str, Any]:
    manifest = found.manifest(name)
    count = allocated = 0
    oldest = newest = last_used = None
    used = dict.fromkeys([label for label, _ in AGES], 0)
    for chunk in found.chunks(name):
        count += 1
        allocated += chunk.allocated_bytes
        stored_s, used_s = now - chunk.stored_ns / 1e9, now - chunk.used_ns / 1e9
        oldest = stored_s if oldest is None else max(oldest, stored_s)
        newest = stored_s if newest is None else min(newest, stored_s)
        last_used = used_s if last_used is None else min(last_used, used_s)
        for label, seconds in AGES:
            used[label] += used_s <= seconds
    return {
        "folder": name,
        "namespace": manifest.get("namespace"),
        "facts": manifest.get("facts", {}),
        "chunks": count,
        "allocated_bytes": allocated,
        "oldest_s": oldest,
        "newest_s": newest,
        "last_used_s": last_used,
        "used_within": used,
    }


def show(report: dict[str, Any]) -> None:
    """Print the report for people."""
    terminal = console()
    owner = "one of them evicts" if report["owner"] else "nobody evicts"
    booked, capacity = report["ledger_bytes"], report["capacity_bytes"]
    root = stores.plain(report["root"], "bold")
    terminal.print(root + f": {report['processes']} open, {owner}", soft_wrap=True)
    terminal.print(
        f"allocated by chunks: {human_bytes(report['allocated_bytes'])}, in the ledger: "
        f"{report['ledger_fault'] if booked is None else human_bytes(booked)}, "
        f"capacity: {'not recorded' if capacity is None else human_bytes(capacity)}, "
        f"set aside as damaged: {len(report['quarantined'])} files",
        soft_wrap=True,
    )
    for each in report["namespaces"]:
        terminal.print()
        # A namespace that was opened by its name has no facts behind it.
        named = {"namespace": each["namespace"]} if each["namespace"] else None
        stores.show_name(terminal, each["folder"], each["facts"] or named)
        for line in _chunk_lines(each):
            terminal.print(f"  {line}", soft_wrap=True)


def _chunk_lines(each: dict[str, Any]) -> list[str]:
    if not each["chunks"]:
        return ["0 chunks"]
    oldest, newest, used = (_age(each[field]) for field in ("oldest_s", "newest_s", "last_used_s"))
    within = ", ".join(f"{label}: {count}" for label, count in each["used_within"].items())
    return [
        f"{each['chunks']} chunks, {human_bytes(each['allocated_bytes'])}, "
        f"stored {oldest} to {newest} ago, last used {used} ago",
        f"used within {within}",
    ]


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
