"""``kvoffload gc``: remove chunks from a store."""

import json
import re
import sys
from functools import partial
from typing import Annotated, Any

import typer

from kvoffload.backends.admin import Collected, Erases, Garbage
from kvoffload.cli.output import is_answered, say
from kvoffload.cli.stores import AsJson, Kind, Settings, Target, run_on
from kvoffload.errors import HIDDEN, ConfigError
from kvoffload.offload.base import tenant_id

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d|w)")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def command(
    root: Target = None,
    kind: Kind = None,
    older_than: Annotated[
        str | None, typer.Option(help="Remove chunks not used for this long: 90min, 36h, 14d.")
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(help="Only this namespace; without other options, all of it goes."),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(
            metavar="SALT",
            help="Only chunks of the tenant with this cache_salt; - reads it from the input. All "
            "of them go without other options.",
        ),
    ] = None,
    option: Settings = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask nothing; on a terminal gc asks otherwise.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove chunks, leftovers of dead processes and damaged files; safe while engines run.

    --dry-run changes nothing, and lists every path of a folder that would go. On a terminal gc
    first says how much would go, and asks; in a script it does not ask.

    Exit codes: 0 done, or the answer was no; 1 something could not be removed, 2 no such store, one
    of another user, or wrong options.
    """
    unused_s = None if older_than is None else parse_age(older_than)
    wanted = Garbage(namespace, unused_s, dry_run)
    whose = None if tenant is None else tenant_id(_salt(tenant))
    if not (dry_run or yes or as_json) and is_answered():
        work = partial(_collect, wanted._replace(dry_run=True), whose)
        planned = run_on("gc", root, kind, option, work)
        say(f"would remove {planned.summary}", stderr=True)
        if not typer.confirm("Remove it?", err=True):
            return
    found = run_on("gc", root, kind, option, partial(_collect, wanted, whose))
    if as_json:
        print(json.dumps(found.figures))
    else:
        verb = "would remove" if dry_run else "removed"
        failures = (f"cannot be removed: {each}" for each in found.failures)
        say(*found.going, f"{verb} {found.summary}", *failures)
    if found.failures:
        raise typer.Exit(1)


async def _collect(wanted: Garbage, tenant: bytes | None, store: Any) -> Collected:
    if tenant is None:
        return await store.collect(wanted)  # type: ignore[no-any-return]
    if not isinstance(store, Erases):
        raise ConfigError("tenant", HIDDEN, "this backend does not tell tenants apart")
    return await store.erase(tenant, wanted)


def _salt(given: str) -> str:
    salt = sys.stdin.readline().rstrip("\r\n") if given == "-" else given
    if not salt:
        raise ConfigError("tenant", "", "must be a cache_salt, which is not empty")
    return salt


def parse_age(text: str) -> float:
    """Read ``90min``, ``36h``, ``14d`` as seconds."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise ConfigError("older-than", text, "an age is a number with s, min, h, d or w")
    return float(match[1]) * _SECONDS[match[2]]
