"""``kvoffload inspect``: what a folder of the disk backend, or a server, holds."""

import json
import time
from typing import Annotated, Any

import typer

from kvoffload.backends.admin import Surveys
from kvoffload.backends.disk.inspector import DiskInspector
from kvoffload.cli import namespaces, stores
from kvoffload.cli.console import console
from kvoffload.cli.output import plain
from kvoffload.config import human_bytes

AGES = (("1 min", 60), ("1 hour", 3600), ("1 day", 86400), ("1 week", 7 * 86400))


def command(
    root: Annotated[
        str | None, typer.Argument(help="The disk backend's root folder, or redis://...")
    ] = None,
    kind: Annotated[str | None, typer.Option("--type", help=stores.TYPE_HELP)] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help=stores.OPTION_HELP)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    sort: Annotated[
        namespaces.Order, typer.Option(help="Largest, longest unused, or first name first.")
    ] = namespaces.Order.size,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print every fact.")] = False,
) -> None:
    """Show namespaces, chunks, bytes, ages and how lately chunks were used. Changes nothing.

    Exit codes: 0 done, 1 the server cannot be asked, 2 no such folder, or one of another user.
    """
    if root is None or kind is not None or stores.is_url(root):
        store = stores.chosen(root, kind, Surveys)
        stores.inspect(store, option, as_json, sort, verbose)
        return
    stores.refuse_settings(option)
    report = survey(DiskInspector(root))
    if as_json:
        print(json.dumps(report))
    else:
        show(report, sort, verbose=verbose)


def survey(found: DiskInspector) -> dict[str, Any]:
    """Collect the figures that ``--json`` prints."""
    held = [_namespace(found, name, time.time()) for name in found.namespaces()]
    return {
        "root": found.root,
        "processes": found.processes(),
        "owner": found.has_owner(),
        "allocated_bytes": sum(each["allocated_bytes"] for each in held),
        "ledger_bytes": found.booked_bytes(),
        "ledger_fault": found.ledger_fault(),
        "capacity_bytes": found.capacity_bytes(),
        "quarantined": found.quarantined(),
        "namespaces": held,
    }


def _namespace(found: DiskInspector, name: str, now: float) -> dict[str, Any]:
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


def show(report: dict[str, Any], order: namespaces.Order, *, verbose: bool) -> None:
    """Print the report for people."""
    terminal = console()
    owner = "one of them evicts" if report["owner"] else "nobody evicts"
    booked, capacity = report["ledger_bytes"], report["capacity_bytes"]
    root = plain(report["root"], "bold")
    terminal.print(root + f": {report['processes']} open, {owner}", soft_wrap=True)
    terminal.print(
        f"allocated by chunks: {human_bytes(report['allocated_bytes'])}, in the ledger: "
        f"{report['ledger_fault'] if booked is None else human_bytes(booked)}, "
        f"capacity: {'not recorded' if capacity is None else human_bytes(capacity)}, "
        f"set aside as damaged: {len(report['quarantined'])} files",
        soft_wrap=True,
    )
    namespaces.show(
        terminal, [*map(_row, report["namespaces"])], "last used", order, verbose=verbose
    )


def _row(each: dict[str, Any]) -> namespaces.Row:
    name, used_s = each["namespace"], each["last_used_s"]
    # A digest of facts is told by its folder, as damaged facts and older versions leave no other.
    is_named = isinstance(name, str) and namespaces.short(name) == name != ""
    return namespaces.Row(
        name if is_named else each["folder"],
        # A namespace that was opened by its name has no facts behind it.
        each["facts"] or ({"namespace": name} if name else None),
        each["chunks"],
        each["allocated_bytes"],
        used_s,
        "" if used_s is None else f"{namespaces.duration(used_s)} ago",
        [f"folder {each['folder']}", *_details(each)],
    )


def _details(each: dict[str, Any]) -> list[str]:
    if not each["chunks"]:
        return ["0 chunks"]
    oldest, newest = (namespaces.duration(each[field]) for field in ("oldest_s", "newest_s"))
    within = ", ".join(f"{label}: {count}" for label, count in each["used_within"].items())
    return [f"stored {oldest} to {newest} ago", f"used within {within}"]
