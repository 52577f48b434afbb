"""Stores named by a URL on the command line: opening, looking into, and emptying one."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import typer

from kvoffload.backends.admin import (
    Aged,
    Holding,
    Purges,
    PurgesByAge,
    ServerTotal,
    Surveys,
    TellsTotals,
)
from kvoffload.backends.base import Backend
from kvoffload.cli.console import console
from kvoffload.cli.namespaces import Order, Row, duration, show
from kvoffload.cli.output import counted, plain
from kvoffload.config import human_bytes
from kvoffload.errors import ConfigError
from kvoffload.registry import BACKENDS, load, open_backend

OPTION_HELP = "A setting of the backend: -o ca_file=/etc/ca.pem"
TYPE_HELP = "Instead of URL or folder: the store of a plug-in, by its name, with settings as -o."
LEAST_DIGITS = 8
"""Of a namespace's name: so many does ``gc`` want at least."""
_SCHEMES = ("redis", "rediss", "unix")
_T = TypeVar("_T")


def refuse_settings(settings: list[str] | None) -> None:
    """Refuse ``-o`` where a folder is looked at as it is; raises ConfigError."""
    if settings:
        remedy = "a folder is looked at as it is; settings are for redis:// stores"
        raise ConfigError("--option", settings[0], remedy)


def is_url(target: str) -> bool:
    """Whether a target is a URL rather than a folder."""
    return "://" in target


def backend_of(target: str) -> tuple[str, dict[str, Any]]:
    """The backend a target means, and the option that names the target to it.

    Raises:
        ConfigError: it is neither a URL known nor a folder.
    """
    if is_url(target) and target.partition("://")[0].partition("+")[0] in _SCHEMES:
        return "redis", {"url": target}
    if not is_url(target) and Path(target).is_dir():
        return "disk", {"root": target}
    raise ConfigError("target", target, "must be a redis:// URL (see docs/redis.md) or a folder")


def chosen(target: str | None, kind: str | None, protocol: type) -> tuple[str, dict[str, Any]]:
    """The backend that a target or else ``--type`` means; nothing is opened.

    Raises:
        ConfigError: neither or both are given, or the backend lacks the protocol.
    """
    if target is not None and kind is None:
        return backend_of(target)
    if target is not None or kind is None:
        raise ConfigError("target", target, "give a URL or a folder, or --type NAME with -o")
    if kind == "disk":
        raise ConfigError("--type", kind, "give the folder itself, which is not opened then")
    factory = load(BACKENDS, kind, "--type")
    if isinstance(factory, type) and not issubclass(factory, protocol):
        remedy = f"this backend does not offer kvoffload.backends.admin.{protocol.__name__}"
        raise ConfigError("--type", kind, remedy)
    return kind, {}


def run_on(
    store: tuple[str, dict[str, Any]],
    settings: list[str] | None,
    work: Callable[[Backend], Awaitable[_T]],
) -> _T:
    """Open a backend, do something with it, and close it.

    Args:
        store: its name, and the options that the target stands for.
        settings: ``name=value`` texts, as given with ``-o``.
        work: what to do.

    Raises:
        ConfigError: the target or a setting is wrong.
        typer.Exit: with code 1 when the store cannot be reached; it says why.
    """
    kind, given = store
    options = given | parsed(settings or [])

    async def whole() -> _T:
        backend = open_backend(kind, options, "kvoffload-command-line")
        try:
            return await work(backend)
        finally:
            await backend.close()

    try:
        return asyncio.run(whole())
    except OSError as error:
        console(stderr=True).print(plain(f"kvoffload: {error}"), soft_wrap=True)
        raise typer.Exit(1) from None


def inspect(
    store: tuple[str, dict[str, Any]],
    settings: list[str] | None,
    as_json: bool,
    order: Order,
    verbose: bool,
) -> None:
    """Show what a store holds of each namespace."""
    found, totals = run_on(store, settings, _look)
    if as_json:
        held = [holding._asdict() for holding in found]
        print(json.dumps({"servers": [each._asdict() for each in totals], "namespaces": held}))
        return
    terminal = console()
    for each in totals:
        limit = "no limit" if each.limit_bytes is None else human_bytes(each.limit_bytes)
        told = f": {human_bytes(each.used_bytes)} used by all data, limit: {limit}"
        terminal.print(plain(each.server, "bold") + told, soft_wrap=True)
    show(terminal, [*map(_row, found)], "expires in", order, verbose=verbose)
    if not found:
        terminal.print("nothing of kvoffload's is stored here")


def _row(each: Holding) -> Row:
    left_s = each.expires_s
    unused_s, time = (None, "") if left_s is None else (-left_s, duration(left_s))
    return Row(each.namespace, each.facts, each.chunks, each.stored_bytes, unused_s, time)


def named(wanted: str, names: Iterable[str]) -> str:
    """The namespace meant by a name or its beginning, such as the digits that ``inspect`` shows.

    Raises:
        ConfigError: there is none, or more than one, or the beginning is too short.
    """
    known = set(names)
    if wanted in known:
        return wanted
    fits = [name for name in known if name.startswith(wanted)]
    if len(fits) == 1 and len(wanted) >= LEAST_DIGITS:
        return fits[0]
    if len(fits) > 1:
        problem = f"{len(fits)} namespaces begin like that; inspect --json has their whole names"
    elif fits:
        problem = f"the beginning of a name must have {LEAST_DIGITS} digits or more"
    else:
        problem = "there is no such namespace here; inspect lists them"
    raise ConfigError("namespace", wanted, problem)


def gc(
    target: str,
    settings: list[str] | None,
    namespace: str | None,
    age_s: float | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove one namespace from a store, or what was not used for so long; or say what would go.

    Raises:
        ConfigError: neither is named (what is not used expires by itself), or no namespace that is
            there, or an age that the store cannot tell.
    """
    if namespace is None and age_s is None:
        remedy = "name one, or give --older-than; what is not used expires by itself"
        raise ConfigError("namespace", None, remedy)
    found = run_on(backend_of(target), settings, partial(_collect, namespace, age_s, dry_run))
    report = {"dry_run": dry_run, "removed": found.chunks, "freed_bytes": found.stored_bytes}
    if as_json:
        print(json.dumps(report | {"undated": found.undated}))
        return
    verb = "would remove" if dry_run else "removed"
    told = f"{verb} {counted(found.chunks, 'chunk')}, {human_bytes(found.stored_bytes)}"
    if found.undated:
        told += (
            f"; {found.undated} chunks stay: they live longer than ttl_s, so their age is unknown; "
            "give the ttl_s of the engines with -o"
        )
    console().print(told, soft_wrap=True)


async def _collect(
    namespace: str | None, age_s: float | None, dry_run: bool, backend: Backend
) -> Aged:
    found = [] if namespace is None else await _survey(backend)
    meant = None if namespace is None else named(namespace, (each.namespace for each in found))
    if age_s is not None:
        if not isinstance(backend, PurgesByAge):
            raise ConfigError("older-than", age_s, "this backend removes nothing by age")
        return await backend.purge_unused(age_s, meant, dry_run=dry_run)
    held = [each for each in found if each.namespace == meant]
    if not dry_run and meant is not None and isinstance(backend, Purges):
        await backend.purge([meant])
    return Aged(sum(each.chunks for each in held), sum(each.stored_bytes for each in held), 0)


async def _look(backend: Backend) -> tuple[list[Holding], list[ServerTotal]]:
    found = await _survey(backend)
    return found, await backend.totals() if isinstance(backend, TellsTotals) else []


async def _survey(backend: Backend) -> list[Holding]:
    if not isinstance(backend, Surveys):
        raise ConfigError("target", type(backend).__name__, "this backend cannot be looked into")
    return await backend.survey()


def parsed(assignments: list[str]) -> dict[str, Any]:
    """Settings given with ``-o name=value``; values are JSON, or else plain text."""
    options: dict[str, Any] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError("--option", text, "must be name=value")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options
