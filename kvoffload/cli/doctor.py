"""``kvoffload doctor``: is this store fit to be a tier, and what should be changed?"""

import asyncio
import json
from typing import Annotated

import typer
from rich.table import Table

from kvoffload.backends.admin import Diagnoses, Finding
from kvoffload.backends.base import Backend
from kvoffload.backends.disk import doctor as disk_doctor
from kvoffload.cli.console import console
from kvoffload.cli.output import plain
from kvoffload.cli.stores import OPTION_HELP, TYPE_HELP, chosen, is_url, parsed, run_on
from kvoffload.errors import ConfigError

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red"}


def command(
    target: Annotated[
        str | None, typer.Argument(help="redis://..., rediss+cluster://..., or a folder.")
    ] = None,
    kind: Annotated[str | None, typer.Option("--type", help=TYPE_HELP)] = None,
    option: Annotated[list[str] | None, typer.Option("--option", "-o", help=OPTION_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Examine a store: reachability, settings, rights, speed; each with a verdict and a remedy.

    Nothing that is stored is changed, evicted or repaired. Run it as the user of the engines.

    Exit codes: 0 fit, perhaps with warnings; 1 something failed; 2 wrong usage or settings.
    """
    if target is None or kind is not None or is_url(target):
        findings = run_on(chosen(target, kind, Diagnoses), option, _diagnose)
    else:
        findings = asyncio.run(disk_doctor.diagnose(target, parsed(option or [])))
    if as_json:
        print(json.dumps({"findings": [finding._asdict() for finding in findings]}))
    else:
        _show(findings)
    if any(finding.verdict == "failed" for finding in findings):
        raise typer.Exit(1)


async def _diagnose(backend: Backend) -> list[Finding]:
    if not isinstance(backend, Diagnoses):
        raise ConfigError("target", type(backend).__name__, "this backend offers no examination")
    return await backend.diagnose()


def _show(findings: list[Finding]) -> None:
    table = Table()
    for title in ("check", "verdict", "found", "what to do"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        verdict = plain(finding.verdict, _COLOURS[finding.verdict])
        table.add_row(plain(finding.check), verdict, plain(finding.detail), plain(finding.remedy))
    console().print(table)
