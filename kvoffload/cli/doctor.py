"""``kvoffload doctor``: is this store fit to be a tier, and what should be changed?"""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvoffload.backends.upkeep import Diagnoses, Finding
from kvoffload.errors import ConfigError
from kvoffload.registry import open_backend

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red"}


def command(
    target: Annotated[str, typer.Argument(help="redis://..., rediss+cluster://..., or a folder.")],
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="A setting of the backend: -o ca_file=/etc/ca.pem"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Examine a store: reachability, settings, rights, speed; each with a verdict and a remedy.

    Exit codes: 0 fit, perhaps with warnings; 1 something failed; 2 wrong usage or settings.
    """
    kind, options = backend_of(target)
    findings = asyncio.run(_diagnose(kind, options | _parsed(option or [])))
    if as_json:
        print(json.dumps({"findings": [finding._asdict() for finding in findings]}))
    else:
        _show(findings)
    if any(finding.verdict == "failed" for finding in findings):
        raise typer.Exit(1)


def backend_of(target: str) -> tuple[str, dict[str, Any]]:
    """The backend a target on the command line means, and the option that names the target.

    Raises:
        ConfigError: it is neither a URL known nor a folder.
    """
    scheme = target.partition("://")[0].partition("+")[0]
    if "://" in target and scheme in ("redis", "rediss", "unix"):
        return "redis", {"url": target}
    if "://" not in target and Path(target).is_dir():
        return "disk", {"root": target}
    raise ConfigError("target", target, "must be a redis:// URL (see docs/redis.md) or a folder")


def _parsed(assignments: list[str]) -> dict[str, Any]:
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


async def _diagnose(kind: str, options: dict[str, Any]) -> list[Finding]:
    backend = open_backend(kind, options, "kvoffload-doctor")
    try:
        if not isinstance(backend, Diagnoses):
            raise ConfigError("target", kind, "this backend offers no examination")
        return await backend.diagnose()
    finally:
        await backend.close()


def _show(findings: list[Finding]) -> None:
    table = Table()
    for title in ("check", "verdict", "found", "what to do"):
        table.add_column(title)
    for finding in findings:
        verdict = f"[{_COLOURS[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(finding.check, verdict, finding.detail, finding.remedy)
    Console().print(table)
