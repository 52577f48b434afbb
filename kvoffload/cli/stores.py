"""The store that a command works on: named by a URL, a folder, or its type and settings."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from kvoffload.backends.admin import COMMANDS, answered
from kvoffload.cli.output import fail
from kvoffload.errors import ConfigError
from kvoffload.registry import offers, open_admin

Target = Annotated[
    str | None, typer.Argument(help="A folder, or redis://..., rediss+cluster://..., s3://...")
]
Kind = Annotated[
    str | None,
    typer.Option("--type", help="Instead of URL or folder: a backend by its name, with -o."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", help="A setting of the backend: -o ca_file=/etc/ca.pem"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_SCHEMES = ("redis", "rediss", "unix")
_BUCKETS = ("s3", "gs", "az")
_T = TypeVar("_T")


def run_on(
    command: str,
    target: str | None,
    kind: str | None,
    settings: list[str] | None,
    work: Callable[[Any], Awaitable[_T]],
) -> _T:
    """Do a command's work on the store that its arguments name.

    Raises:
        ConfigError: the target or a setting is wrong; nothing was opened.
        typer.Exit: with code 1 when the store cannot be reached; the reason is printed.
    """
    given = _parsed(settings or [])
    path = given.get("root") if target is None else target
    try:
        if path is not None and command != "doctor":  # which finds it itself, and says more
            look_at(str(path))
        kind, options = _chosen(target, kind)
        for name, value in given.items():
            if name in options:
                raise ConfigError(name, value, "the target is given already")
            options[name] = value
        return asyncio.run(opened(command, kind, options, work))
    except OSError as error:
        fail(str(error))


def look_at(target: str) -> None:
    """Look at a path before this thread does, which a mount that hangs would keep.

    Raises:
        TimeoutError: it has not answered.
    """
    asyncio.run(answered(target, os.path.exists, f"{target}/.store.json"))


async def opened(
    command: str, kind: str, options: dict[str, Any], work: Callable[[Any], Awaitable[_T]]
) -> _T:
    """Open a store for a command, do the command's work on it, and close it.

    Raises:
        ConfigError: there is no such backend, an option is wrong, or the command is not offered.
        OSError: the store cannot be reached.
    """
    missing = ConfigError("type", kind, f"this backend does not offer {command}")
    if not offers(kind, command):
        raise missing
    store = open_admin(kind, options)
    try:
        if not isinstance(store, COMMANDS[command]):
            raise missing
        return await work(store)
    finally:
        await store.close()


def _chosen(target: str | None, kind: str | None) -> tuple[str, dict[str, Any]]:
    """Return the backend that a target or else ``--type`` means, and the options of the target."""
    if (target is None) == (kind is None):
        raise ConfigError("target", target, "give a URL or a folder, or --type NAME with -o")
    if kind is not None:
        return kind, {}
    if os.path.exists(str(target)) and Path(str(target)).is_socket():
        remedy = "is a server's socket: kvoffload top http://HOST:PORT, of its metrics_port, has it"
        raise ConfigError("target", target, remedy)
    scheme, mark, _ = str(target).partition("://")
    if not mark:
        is_shared = os.path.exists(f"{target}/.store.json")  # as the folder backend marks its roots
        return "folder" if is_shared else "disk", {"root": target}
    if scheme.partition("+")[0] in _SCHEMES:
        return "redis", {"url": target}
    if scheme in _BUCKETS:
        return "object", {"url": target}
    remedy = "must be a redis:// URL (see docs/guides/redis.md), s3://, gs://, az:// or a folder"
    raise ConfigError("target", target, remedy)


def _parsed(assignments: list[str]) -> dict[str, Any]:
    """Read ``name=value`` texts; values are JSON, or else plain text."""
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
